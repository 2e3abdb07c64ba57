"""Data sets and the one training loop of the experiments with networks."""
