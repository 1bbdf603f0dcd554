"""What a trial's process computes with: device, precision, random numbers, where it ran, and how torch fails.

`faults` has the points at which any of our processes, not a trial's alone, can be made to fail; everything may use it.

No other room but hardware, checks and errors may be imported.
"""
