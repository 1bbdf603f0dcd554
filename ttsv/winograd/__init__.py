"""What makes float32 training on a CPU faster, and nothing else: Winograd's convolutions, by machine code of our own.

Only the training loop enters, at `convolution`. Without this room and the loop's one import of it networks are trained
by torch's convolutions. Nothing of the other rooms is imported but errors.
"""
