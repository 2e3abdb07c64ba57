"""Measurements against named peers, as ratios within one run."""
