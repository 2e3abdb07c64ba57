"""Natural gradients for models that were written for other packages."""

from .autograd_map import AutogradMap
from .deepxde import deepxde_objective, train_deepxde
from .pina import pina_objective, train_pina

__all__ = ["AutogradMap", "deepxde_objective", "pina_objective", "train_deepxde", "train_pina"]
