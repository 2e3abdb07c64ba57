"""Groups that act on parameters: scalings, invertible matrices, shifts."""
