"""The CIFAR-10 speed recipe: 200 steps to 94 %, and which parts of K-FAC's rules pay there."""

from .experiment import EXPERIMENTS

__all__ = ["EXPERIMENTS"]
