"""Metrics of a trained network; each works alone on any module that takes pixels in [0, 1]."""
