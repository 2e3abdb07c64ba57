"""The optimizers of the audit's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from pullback import solvers
from pullback.geometry import Contender
from pullback.optim import KFAC, NaturalGradient
from pullback.optim.kfac import Damping, Invariant, Tikhonov

from ..learning.natural import natural_kfac


def _kfac(damping: float | Damping, **options: Any) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        return natural_kfac(
            model, 0.05, fisher="exact", damping=damping, statistics_every=1, invert_every=1,
            **options,
        )  # fmt: skip

    return make


def _muon(model: nn.Module) -> list[Optimizer]:
    """Return Muon for matrices, and plain gradient steps for all other parameters."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizers: list[Optimizer] = [
        torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.02, weight_decay=0.0)
    ]
    vectors = [p for p in params if p.ndim != 2]
    if vectors:
        optimizers.append(torch.optim.SGD(vectors, lr=0.02))
    return optimizers


def optimizers() -> list[Contender]:
    """Return the optimizers of the table, for the loss ½‖z − y‖²."""
    return [
        Contender(
            "SGD",
            lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9),
            "steepest descent in the Euclidean length of the coordinates: orthogonal changes only",
        ),
        Contender(
            "Adam",
            lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
            "acts entry by entry: their order does not matter, their scale does",
        ),
        Contender(
            "L-BFGS",
            lambda m: torch.optim.LBFGS(m.parameters(), lr=0.05, max_iter=4),
            "its first step is steepest descent, so it inherits the same coordinates",
        ),
        Contender(
            "Muon",
            _muon,
            "orthogonalizes a matrix: rows and columns may be permuted, entries not",
            resolution=5 * torch.finfo(torch.bfloat16).eps,
        ),
        Contender(
            "NGD, pseudo-inverse",
            lambda m: NaturalGradient(m, solver=solvers.PseudoInverse(), lr=0.05),
            "the update of the function is coordinate-free; a finite step is, if f is affine and "
            "no parameter is superfluous",
        ),
        Contender(
            "NGD, damped",
            lambda m: NaturalGradient(m, solver=solvers.Cholesky(damping=1e-2), lr=0.05),
            "λ|Δθ|² measures lengths in the coordinates: orthogonal changes only",
        ),
        Contender(
            "K-FAC, undamped",
            _kfac(0.0, kl_clip=1e-2),
            "the natural gradient of a metric that affine changes of layers carry along, as long "
            "as no factor is singular (units that are dead on the batch)",
        ),
        Contender(
            "K-FAC, invariant",
            _kfac(Invariant(1e-2)),
            "damped by second moments, which are carried along too",
        ),
        Contender(
            "K-FAC, Tikhonov",
            _kfac(Tikhonov(1e-2)),
            "damped by the identity, which is not",
        ),
        Contender(
            "K-FAC, eigenbasis",
            lambda m: KFAC(m, 0.01, statistics_every=1, invert_every=1),
            "Adam in bases that turn with inputs and outputs; biases, which are Adam's, do not",
        ),
        Contender(
            "K-FAC, spectral",
            lambda m: KFAC(m, 0.02, rule="spectral", statistics_every=1, invert_every=1),
            "a polar factor turns with the inputs; rows are scaled one by one, and the output "
            "layer is Adam's",
        ),
    ]
