"""What makes float32 training on a CPU faster, and nothing else: Winograd's convolutions, by machine code of our own.

The training loop enters here, by one line, and nothing else does. Without this room and that line networks are trained
by torch's convolutions. Nothing of the other rooms is imported but errors.
"""

from ttsv.winograd.convolution import faster_convolutions

__all__ = ["faster_convolutions"]
