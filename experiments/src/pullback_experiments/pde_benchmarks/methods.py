"""The methods: each is a few options of `pde.solve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pullback.solvers import OrthogonalGreedy, PseudoInverse
from pullback.steps import GridLineSearch

_GRID = 30  # step sizes 1, ½, …
_VECTORS = 50
_SCALE = 1e3


@dataclass(frozen=True)
class Method:
    """Something to compare.

    Attributes:
        name, about: in tables and figures.
        options: of `pde.solve`, made anew for every run; they replace the set-up's own.
        rates: learning rates, of which the best is used; then `options` takes one.
    """

    name: str
    about: str
    options: Callable[..., dict[str, Any]] = field(default=dict)
    rates: Sequence[float] = ()

    def described(self) -> dict[str, Any]:
        """Everything a run depends on."""
        return {"about": self.about, "rates": list(self.rates)}


def _natural(greedy: int | None = None) -> dict[str, Any]:
    solver = PseudoInverse() if greedy is None else OrthogonalGreedy(greedy)
    return {"solver": solver, "step": GridLineSearch(_GRID), "gram": "dense"}


def _torch(build: Callable[..., Optimizer], **settings: Any) -> dict[str, Any]:
    """Without solver, step and patience: a loss that rises for a while is no reason to stop."""

    def optimizer(module: nn.Module) -> Optimizer:
        return build(module.parameters(), **settings)

    return {"optimizer": optimizer, "patience": None, "solver": None, "step": None}


def _adam(rate: float) -> dict[str, Any]:
    return _torch(torch.optim.Adam, lr=rate)


class _ScaledLBFGS(torch.optim.LBFGS):
    """L-BFGS on a multiple of the loss: torch drops curvature pairs below 1e-10."""

    def step(self, closure: Callable[[], Any]) -> Any:
        params: list[Tensor] = self.param_groups[0]["params"]

        def scaled() -> Any:
            value = closure()
            for p in params:
                if p.grad is not None:
                    p.grad.mul_(_SCALE)
            return _SCALE * value

        return super().step(scaled) / _SCALE


def _lbfgs() -> dict[str, Any]:
    """One iteration per step, strong Wolfe, no early stopping."""
    return _torch(
        _ScaledLBFGS, max_iter=1, max_eval=25, history_size=100, tolerance_grad=0.0,
        tolerance_change=0.0, line_search_fn="strong_wolfe",
    )  # fmt: skip


GAUSS_NEWTON, ENGD, GREEDY, LBFGS, ADAM = "Gauss–Newton", "E-NGD", "E-NGD-OGA", "L-BFGS", "Adam"

METHODS = (
    Method(GAUSS_NEWTON, "the set-up's own, by default a trust radius on the SVD of A"),
    Method(ENGD, "dense Gram, minimum norm, grid of 30 step sizes", _natural),
    Method(GREEDY, f"{_VECTORS} greedy vectors, grid of 30", partial(_natural, _VECTORS)),
    Method(LBFGS, "strong Wolfe, 100 pairs", _lbfgs),
    Method(ADAM, "constant rate, the best of three", _adam, (1e-3, 3e-3, 1e-2)),
)
