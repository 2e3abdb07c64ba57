"""How much room a minimum has, measured in function space."""

from .flatness import Flatness, flatness

__all__ = ["Flatness", "flatness"]
