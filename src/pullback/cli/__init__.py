"""The command `pullback`: `solve` and `doctor`, and what other packages add to it."""
