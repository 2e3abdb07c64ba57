"""The natural gradient formed the slow, obvious way, as the answer every fast path must give.

J comes row by row from autograd on the plain module, M as one explicit matrix, and the solve is
dense. Nothing of the library's maps, Grams or solvers is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..metrics import Metric

Matrices = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Oracle:
    """J (n, p), M (n, n) with the mean over samples taken, and ∇L where a loss was given."""

    value: Tensor
    jacobian: Tensor
    metric: Tensor
    gradient: Tensor | None = None

    @property
    def gram(self) -> Tensor:
        """G = JᵀMJ, (p, p)."""
        return self.jacobian.T @ self.metric @ self.jacobian

    @property
    def rows(self) -> Tensor:
        """M^½ J, one factor A of G = AᵀA; the library's differs by an orthogonal matrix."""
        values, vectors = torch.linalg.eigh(self.metric)
        floor = len(values) * torch.finfo(values.dtype).eps * values[-1]
        root = torch.where(values > floor, values, 0.0).sqrt()
        return (vectors * root) @ vectors.T @ self.jacobian

    def solve(self, damping: float = 0.0, rhs: Tensor | None = None, rcond: float = 1e-9) -> Tensor:
        """Return (G + damping)⁻¹g; undamped G⁺g, with the cut-off on singular values of A."""
        g = self.gradient if rhs is None else rhs
        if g is None:
            raise ValueError("the oracle was built without a loss: pass rhs")
        if damping > 0:
            eye = torch.eye(len(g), dtype=g.dtype, device=g.device)
            return torch.linalg.solve(self.gram + damping * eye, g)
        inverse = torch.linalg.pinv(self.rows, rtol=rcond)
        return inverse @ (inverse.T @ g)


def jacobian(z: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return dz/dparams as a matrix (z.numel(), p), by one reverse pass per entry."""
    rows = [_flat_gradient(entry, params, retain_graph=True) for entry in z.flatten()]
    return torch.stack(rows)


def oracle(
    model: nn.Module,
    x: Any,
    metric: Metric | Matrices,
    loss: Callable[[Tensor], Tensor] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    params: Sequence[Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    batch_dim: int = 0,
    count: int | None = None,
) -> Oracle:
    """Return the dense answer for one batch; use it in float64.

    Args:
        model: any module.
        x: its input, or a tuple of positional arguments.
        metric: a `Metric`, whose M is then formed column by column, or (better, since it is
            independent of any factor) a function of z, samples first, that gives M as (n, n) or
            as one matrix per sample (N, |event|, |event|).
        loss: a function of z, samples first, for the gradient.
        kwargs: keyword arguments of the model.
        params: the parameters, in order; by default all that require gradients.
        output: picks z from a structured output.
        batch_dim: the output's axis of samples.
        count: what G is divided by; by default the metric's own number of samples, for a
            function N. Use 1 for sums.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> oracle(model, x, lambda z: torch.eye(2, dtype=z.dtype)).gram
    tensor([[0.5000, 0.0000],
            [0.0000, 2.0000]], dtype=torch.float64)
    """
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad]
    args = _as_tuple(x)
    with torch.enable_grad():
        z = _select(model(*args, **dict(kwargs or {})), output, batch_dim)
        j = jacobian(z, params)
        gradient = None
        if loss is not None:
            gradient = _flat_gradient(loss(z), params)
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    inputs = tensors[0].movedim(batch_dim, 0) if tensors else None
    m = _matrix(metric, z.detach(), inputs)
    samples = z.shape[0]
    if count is not None:
        samples = count
    elif isinstance(metric, Metric):
        samples = metric.samples(z)
    return Oracle(z.detach(), j, m / samples, gradient)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    if isinstance(x, tuple):
        return x
    return (x,)


def _select(output: Any, selector: Callable[[Any], Tensor] | None, batch_dim: int) -> Tensor:
    """Return z from the model's output: samples first, at least one event axis."""
    if selector is not None:
        output = selector(output)
    z = output.movedim(batch_dim, 0)
    if z.ndim == 1:
        return z.unsqueeze(-1)
    return z


def _flat_gradient(y: Tensor, params: Sequence[Tensor], *, retain_graph: bool = False) -> Tensor:
    """Return dy/dparams of one number as a vector (p,), zero where y does not depend on p."""
    pieces = torch.autograd.grad(y, list(params), retain_graph=retain_graph, allow_unused=True)
    flat = []
    for piece, p in zip(pieces, params, strict=True):
        flat.append(torch.zeros_like(p).flatten() if piece is None else piece.flatten())
    return torch.cat(flat).detach()


def _matrix(metric: Metric | Matrices, z: Tensor, inputs: Tensor | None) -> Tensor:
    """Return M as one (n, n) matrix."""
    n = z.numel()
    if isinstance(metric, Metric):
        factor = metric.factor(z, inputs=inputs)
        eye = torch.eye(n, dtype=z.dtype, device=z.device)
        return torch.stack([factor.matvec(e.view(z.shape)).flatten() for e in eye], 1)
    m = metric(z).detach()
    if m.ndim == 2:
        return m
    return torch.block_diag(*m)
