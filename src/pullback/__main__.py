"""`python -m pullback` is the command `pullback`."""

from .experiments.cli import main

main()
