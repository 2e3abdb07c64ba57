"""Laplace posteriors beside laplace-torch, on the same trained networks."""
