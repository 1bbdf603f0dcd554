"""Numerics and training of one trial: a network whose convolutions have controlled singular values."""
