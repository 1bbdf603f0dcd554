"""Experiments over REST: specs in, leaderboards out. Imports neither torch nor ray."""
