"""The energy natural gradient as its reference script computes it, written anew in torch.

What is taken over, for Poisson's equation with a boundary penalty:

1. the model is a function of one point; the Laplacian is the trace of its full Hessian, and all
   of it is mapped over the points (`vmap`);
2. the Gram is the mean over points of outer products of the parameter gradients of Δu (inside) plus
   those of u (boundary); all N × p × p products are held at once;
3. the direction solves that p × p system in the least-squares sense by an SVD with the default
   cutoff ε·p of its largest singular value (`gelsd`): the minimum-norm solution;
4. the step size is the one of 2⁰, 2⁻¹, …, 2⁻³⁰ with the smallest loss, taken even where that loss
   is higher than the present one.

`products=False` forms the same Gram as one matrix product, to see what point 2 costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

from pullback.pde import Points

Params = dict[str, Tensor]


class Reference:
    """u ← u − η·G⁺∇L for ½ mean |Δu + f|² + ½ mean |u|² on the boundary."""

    def __init__(
        self,
        network: nn.Module,
        inside: Points,
        boundary: Points,
        source: Callable[[Tensor], Tensor],
        *,
        products: bool = True,
    ) -> None:
        self.network = network
        self.products = products
        self._inside = inside
        self._boundary = boundary
        self._source = source(inside.x)
        # step sizes 1, ½, …, 2⁻³⁰
        self._sizes = 0.5 ** torch.linspace(0, 30, 31, dtype=inside.x.dtype)

    def _u(self, params: Params, x: Tensor) -> Tensor:
        return functional_call(self.network, params, (x[None],))[0, 0]

    def _laplacian(self, params: Params, x: Tensor) -> Tensor:
        return torch.trace(hessian(self._u, argnums=1)(params, x))

    def loss(self, params: Params) -> Tensor:
        laplacian = vmap(self._laplacian, (None, 0))(params, self._inside.x)
        walls = vmap(self._u, (None, 0))(params, self._boundary.x)
        inside = _shares(self._inside) @ (laplacian + self._source).square()
        return 0.5 * inside + 0.5 * _shares(self._boundary) @ walls.square()

    def gram(self, params: Params) -> Tensor:
        inside = self._integrate_gram(self._laplacian, params, self._inside)
        return inside + self._integrate_gram(self._u, params, self._boundary)

    def _integrate_gram(self, model: Callable[..., Any], params: Params, at: Points) -> Tensor:
        rows = _flat(vmap(grad(model), (None, 0))(params, at.x), len(at))
        weighted = _shares(at)[:, None] * rows
        if not self.products:
            return weighted.T @ rows
        return vmap(torch.outer)(weighted, rows).sum(0)

    @torch.no_grad()
    def step(self) -> float:
        """One step; the loss after it."""
        params = {n: p.detach() for n, p in self.network.named_parameters()}
        gradient = _flat(grad(self.loss)(params), 0)
        direction = torch.linalg.lstsq(
            self.gram(params), gradient[:, None], driver="gelsd"
        ).solution
        pieces = _split(direction[:, 0], params)

        def step_along(size: Tensor) -> Params:
            return {n: p - size * pieces[n] for n, p in params.items()}

        losses = vmap(lambda size: self.loss(step_along(size)))(self._sizes)
        best = int(losses.nan_to_num(torch.inf).argmin())
        for name, value in step_along(self._sizes[best]).items():
            self.network.get_parameter(name).copy_(value)
        return float(losses[best])


def _shares(points: Points) -> Tensor:
    """Quadrature weights of a mean."""
    return points.weights / points.weights.sum()


def _flat(params: Params, n: int) -> Tensor:
    """All parameters in one vector, or in n rows."""
    if n:
        return torch.cat([p.reshape(n, -1) for p in params.values()], -1)
    return torch.cat([p.reshape(-1) for p in params.values()], -1)


def _split(vector: Tensor, shapes: Params) -> Params:
    pieces = vector.split([p.numel() for p in shapes.values()])
    return {n: piece.view_as(p) for piece, (n, p) in zip(pieces, shapes.items(), strict=True)}
