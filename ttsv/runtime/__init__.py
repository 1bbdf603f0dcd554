"""What a trial's process computes with: device, precision, random numbers, where it ran, and how torch fails.

No other room but hardware, checks and errors may be imported.
"""
