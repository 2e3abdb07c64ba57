"""Diffeomorphisms w = f(θ) of parameters, as dicts of tensors by name.

Shapes are kept: w has the names and shapes of θ. A function of one's own joins with its inverse, of
the dict as `Diffeomorphism(f, inverse)`, of each tensor as `Elementwise(f, inverse)`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jvp

from ..._core.errors import PullbackError, reraise_fatal

Params = dict[str, Tensor]


class Diffeomorphism:
    """A function of the dict with a smooth inverse."""

    def __init__(
        self, function: Callable[[Params], Params], inverse: Callable[[Params], Params]
    ) -> None:
        self._function, self._inverse = function, inverse

    def forward(self, theta: Params) -> Params:
        """w = f(θ)."""
        return self._function(dict(theta))

    def inverse(self, w: Params) -> Params:
        """θ = f⁻¹(w)."""
        return self._inverse(dict(w))

    def regular(self, theta: Params) -> bool:
        """Whether df is invertible at θ: d(f⁻¹)(df v) = v for a random v.

        Where f or its inverse has no forward-mode derivative, nothing is known against it.
        """
        generator = torch.Generator().manual_seed(0)
        v = {
            n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            for n, t in theta.items()
        }
        try:
            pushed = jvp(self.forward, (theta,), (v,))
            back = jvp(self.inverse, pushed[:1], pushed[1:])[1]
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)
            return True
        limits = {n: torch.finfo(t.dtype).eps ** 0.25 * (t.abs() + 1) for n, t in v.items()}
        return all(bool(((back[n] - t).abs() <= limits[n]).all()) for n, t in v.items())

    def pulled_back(self, w: Params) -> Params:
        """θ = f⁻¹(w), verified: f(θ) = w, and df is regular there."""
        with torch.no_grad():
            found = self.inverse(dict(w))
            refuse_shapes(found, w)
            theta = {n: t.detach().clone() for n, t in found.items()}
            again = self.forward(dict(theta))
        refuse_shapes(again, w)
        for name, value in w.items():
            eps = torch.finfo(value.dtype).eps
            limit = eps**0.75 * (value.abs().amax() + 1) if value.numel() else 0.0
            if not bool(((again[name] - value).abs() <= limit).all()):
                raise PullbackError(
                    "The transformation is not invertible",
                    f"f(f⁻¹(w)) differs from w in {name!r}",
                    "Use a diffeomorphism whose range has all weights, and its own inverse",
                )
        if not self.regular(theta):
            raise PullbackError(
                "The transformation is not a diffeomorphism",
                "its derivative is singular or not finite at the model's weights",
                "Use a function with f'(θ) ≠ 0 there: θ + θ³ instead of θ³",
            )
        return theta

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


class Elementwise(Diffeomorphism):
    """w_i = f(θ_i), for each tensor.

    Its range must hold all weights: exp and log, for weights that are positive.

    >>> cubic().inverse({"w": torch.tensor([2.0, -10.0], dtype=torch.float64)})["w"]
    tensor([ 1.0000, -2.0000], dtype=torch.float64)
    """

    def __init__(
        self, function: Callable[[Tensor], Tensor], inverse: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(
            lambda theta: {n: function(t) for n, t in theta.items()},
            lambda w: {n: inverse(t) for n, t in w.items()},
        )


def cubic() -> Diffeomorphism:
    """w = θ + θ³, with θ = (2/√3) sinh(⅓ asinh(3√3 w/2))."""
    root = 3**0.5
    return Elementwise(
        lambda t: t + t**3, lambda w: 2 / root * torch.sinh(torch.asinh(1.5 * root * w) / 3)
    )


def refuse_shapes(found: object, like: Params) -> None:
    """Raise where names, shapes or dtypes are not those of the parameters."""
    want = {n: (tuple(t.shape), t.dtype) for n, t in like.items()}
    have = found
    if isinstance(found, dict):
        have = {n: (tuple(t.shape), t.dtype) for n, t in found.items()}
    if have != want:
        raise PullbackError(
            "The diffeomorphism changes names, shapes or dtypes",
            f"parameters {want} became {have}",
            "Return a dict of the same names and shapes, computed in the dtype of its argument",
        )


class EntryPermutation(Diffeomorphism):
    """The entries of each tensor in a random order, drawn from the seed."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _orders(self, params: Params) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return {
            n: torch.randperm(p.numel(), generator=generator).to(p.device)
            for n, p in params.items()
        }

    def forward(self, theta: Params) -> Params:
        orders = self._orders(theta)
        return {n: t.flatten()[orders[n]].view(t.shape) for n, t in theta.items()}

    def inverse(self, w: Params) -> Params:
        orders = self._orders(w)
        return {n: t.flatten()[orders[n].argsort()].view(t.shape) for n, t in w.items()}
