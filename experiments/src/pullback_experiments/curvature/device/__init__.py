"""The long parts of the influence experiments, on one GPU; `__main__` runs them."""
