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
        self._function = function
        self._inverse = inverse

    def forward(self, theta: Params) -> Params:
        """w = f(θ)."""
        return self._function(dict(theta))

    def inverse(self, w: Params) -> Params:
        """θ = f⁻¹(w)."""
        return self._inverse(dict(w))

    def is_regular(self, theta: Params) -> bool:
        """Return True if df is invertible at θ: d(f⁻¹)(df v) = v for a random v, to ε^¼.

        Also if f or its inverse has no forward-mode derivative: nothing is known against it then.
        """
        generator = torch.Generator().manual_seed(0)
        v = {
            name: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
            for name, t in theta.items()
        }
        try:
            w = self.forward(theta)
            pushed = jvp(self.forward, (theta,), (v,))[1]
            returned = jvp(self.inverse, (w,), (pushed,))[1]
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)
            return True
        for name, t in v.items():
            limit = torch.finfo(t.dtype).eps ** 0.25 * (t.abs() + 1)
            if not bool(((returned[name] - t).abs() <= limit).all()):
                return False
        return True

    def find_coordinates(self, w: Params) -> Params:
        """Return θ = f⁻¹(w); raise unless f(θ) = w, to ε^¾, and df is regular there."""
        with torch.no_grad():
            inverse = self.inverse(dict(w))
            require_same_shapes(inverse, w)
            theta = {name: t.detach().clone() for name, t in inverse.items()}
            returned = self.forward(dict(theta))
        require_same_shapes(returned, w)
        for name, weight in w.items():
            if not weight.numel():
                continue
            limit = torch.finfo(weight.dtype).eps ** 0.75 * (weight.abs().amax() + 1)
            if not bool(((returned[name] - weight).abs() <= limit).all()):
                raise PullbackError(
                    "The transformation is not invertible",
                    f"f(f⁻¹(w)) differs from w in {name!r}",
                    "Use a diffeomorphism whose range has all weights, and its own inverse",
                )
        if not self.is_regular(theta):
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


def require_same_shapes(result: object, params: Params) -> None:
    """Raise unless the result is a dict with names, shapes and dtypes of the parameters."""
    expected = _describe_shapes(params)
    actual = result
    if isinstance(result, dict):
        actual = _describe_shapes(result)
    if actual != expected:
        raise PullbackError(
            "The diffeomorphism changes names, shapes or dtypes",
            f"parameters {expected} became {actual}",
            "Return a dict of the same names and shapes, computed in the dtype of its argument",
        )


def _describe_shapes(params: Params) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(t.shape), t.dtype) for name, t in params.items()}


class EntryPermutation(Diffeomorphism):
    """The entries of each tensor in a random order, drawn from the seed."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def _draw_orders(self, params: Params) -> dict[str, Tensor]:
        """Return a permutation of each tensor's entries, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return {
            n: torch.randperm(p.numel(), generator=generator).to(p.device)
            for n, p in params.items()
        }

    def forward(self, theta: Params) -> Params:
        orders = self._draw_orders(theta)
        return {n: t.flatten()[orders[n]].view(t.shape) for n, t in theta.items()}

    def inverse(self, w: Params) -> Params:
        orders = self._draw_orders(w)
        return {n: t.flatten()[orders[n].argsort()].view(t.shape) for n, t in w.items()}
