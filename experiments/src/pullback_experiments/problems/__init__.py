"""Benchmark problems whose solution another solver computes, and their set-ups.

`AllenCahn`, `KdV`, `KuramotoSivashinsky`, `GrayScott` and `Cavity` have no closed form to compare
with. `references` solves them to many digits and keeps the result on disk. Importing this package
adds their set-ups to `pullback.pde.SETUPS`; the command `pullback` does so by itself.

    from pullback_experiments.problems import KdV, setup

    setup("kdv").solve(seed=0)
"""

from pullback.pde import SETUPS, setup

from . import references
from .cavity import Cavity
from .periodic import AllenCahn, GrayScott, KdV, KuramotoSivashinsky
from .setups import OURS

SETUPS.update(OURS)

__all__ = [
    "AllenCahn",
    "KdV",
    "KuramotoSivashinsky",
    "GrayScott",
    "Cavity",
    "references",
    "SETUPS",
    "setup",
]
