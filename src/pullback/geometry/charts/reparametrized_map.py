"""A map of the pipeline in other parameters: J_θ = J_w F with F = df_θ, never formed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from ..._core.space import ParameterSpace
from ...maps import Linearization, Map, Pulled
from ...maps.layers import RowsBlock
from .diffeomorphism import Diffeomorphism


class ReparametrizedMap(Map):
    """θ ↦ φ(f(θ)).

    Attributes:
        start: θ₀ = f⁻¹(w₀).
    """

    def __init__(self, inner: Map, f: Diffeomorphism, params: Mapping[str, Tensor]) -> None:
        self.inner, self.diffeomorphism = inner, f
        self.start = f.pulled_back({n: p.detach() for n, p in params.items()})

    def linearize(self, params: Mapping[str, Tensor]) -> ReparametrizedLinearization:
        """φ(f(θ)) and its tangent."""
        return ReparametrizedLinearization(self.inner, self.diffeomorphism, params)


class ReparametrizedLinearization(Linearization):
    """Products with J_w F, by those of the inner map and of f."""

    def __init__(self, inner: Map, f: Diffeomorphism, params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self._theta = self.space.flatten(dict(params))
        self._dtypes = {n: p.dtype for n, p in params.items()}
        self._f = f
        with torch.no_grad():
            w = f.forward({n: p.detach() for n, p in params.items()})
        self._inner = inner.linearize(w)
        self.value = self._inner.value

    def _flat(self, theta: Tensor) -> Tensor:
        point = {n: t.to(self._dtypes[n]) for n, t in self.space.split(theta).items()}
        return self.space.flatten(self._f.forward(point))

    def jvp(self, v: Tensor) -> Tensor:
        pushed: Tensor = jvp(self._flat, (self._theta,), (v,))[1]
        return self._inner.jvp(pushed)

    def vjp(self, u: Tensor) -> Tensor:
        return vjp(self._flat, self._theta)[1](self._inner.vjp(u))[0]

    def pullback(self, covectors: Tensor) -> Pulled:
        """The inner rows times F, one product with Fᵀ each."""
        pulled = self._inner.pullback(covectors)
        back = vjp(self._flat, self._theta)[1]
        rows = vmap(lambda row: back(row)[0])(pulled.rows()).unflatten(0, pulled.shape)
        block = RowsBlock({n: rows[..., at] for n, at in self.space.index().items()})
        return Pulled(self.space, pulled.shape, [block])
