"""Natural gradients for models that were written for other packages."""

from .autograd_map import AutogradMap
from .deepxde import deepxde_objective, train_deepxde

__all__ = ["AutogradMap", "deepxde_objective", "train_deepxde"]
