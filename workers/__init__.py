"""Runs experiments at scale: the queue's consumer and Ray Tune. Ray lives here and nowhere else."""
