r"""Diffeomorphisms w = f(θ) of parameters, as dicts of tensors by name.

Shapes are kept: w has the names and shapes of θ. A function of one's own joins by subclassing
`Diffeomorphism`, or as `Elementwise(f)` or `Custom(f)` with or without its inverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from ..._core.errors import PullbackError, reraise_fatal
from ..._core.space import ParameterSpace
from .root import elementwise_root, newton_root

Params = dict[str, Tensor]


class Diffeomorphism(ABC):
    """f with a smooth inverse."""

    @abstractmethod
    def forward(self, theta: Params) -> Params:
        """w = f(θ)."""

    @abstractmethod
    def inverse(self, w: Params) -> Params:
        """θ = f⁻¹(w)."""

    def regular(self, theta: Params) -> bool:
        """Whether df is invertible at θ: d(f⁻¹)(df v) = v for a random v.

        Where f or its inverse has no forward-mode derivative, nothing is known against it.
        """
        names, point = tuple(theta), tuple(theta.values())
        v = _directions(point)

        def along(map_: Callable[[Params], Params], at: Any, by: Any) -> Any:
            def function(*values: Tensor) -> tuple[Tensor, ...]:
                found = map_(dict(zip(names, values, strict=True)))
                return tuple(found[n] for n in names)

            return jvp(function, tuple(at), tuple(by))

        try:
            w, pushed = along(self.forward, point, v)
            back = along(self.inverse, w, pushed)[1]
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)
            return True
        limits = [torch.finfo(t.dtype).eps ** 0.25 * (t.abs() + 1) for t in v]
        return all(
            bool(((b - t).abs() <= e).all()) for b, t, e in zip(back, v, limits, strict=True)
        )

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
    """w_i = f(θ_i), for each tensor or for those named; without its inverse, f must be monotone.

    A closed form may have a smaller domain: exp and log, for weights that are positive.

    >>> cubic = Elementwise(lambda t: t + t**3)
    >>> cubic.inverse({"w": torch.tensor([2.0, -10.0], dtype=torch.float64)})["w"]
    tensor([ 1., -2.], dtype=torch.float64)
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        inverse: Callable[[Tensor], Tensor] | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self._function, self._inverse = function, inverse
        self.names = names

    def forward(self, theta: Params) -> Params:
        return _some(theta, self.names, self._function)

    def inverse(self, w: Params) -> Params:
        back = self._inverse
        if back is None:
            return _some(w, self.names, lambda t: elementwise_root(self._function, t))
        return _some(w, self.names, back)

    def regular(self, theta: Params) -> bool:
        """Whether f' is finite and nowhere zero, to working precision.

        Without a given inverse, f must be monotone on an interval around all entries too.
        """
        for name, t in theta.items():
            if self.names is not None and name not in self.names:
                continue
            slopes = [_slope(self._function, t)]
            if self._inverse is None and t.numel():
                reach = 2 * t.abs().max() * torch.ones_like(t)
                places = torch.linspace(-1, 1, 33, dtype=t.dtype).tolist()
                slopes += [_slope(self._function, s * reach) for s in places]
            here, every = slopes[0], torch.stack(slopes)
            sound = torch.isfinite(here) & (here.abs() > torch.finfo(t.dtype).eps)
            if not bool(sound.all()) or bool((every > 0).any() and (every < 0).any()):
                return False
        return True


class Custom(Diffeomorphism):
    """Any function of the dict; without its inverse, the root of f(θ) = w is sought by Newton.

    Newton's matrix is dense, (p, p): give the inverse where there are many parameters.
    """

    def __init__(
        self,
        function: Callable[[Params], Params],
        inverse: Callable[[Params], Params] | None = None,
    ) -> None:
        self._function, self._inverse = function, inverse

    def forward(self, theta: Params) -> Params:
        return self._function(dict(theta))

    def inverse(self, w: Params) -> Params:
        if self._inverse is not None:
            return self._inverse(dict(w))
        space = ParameterSpace(w)

        def flat(theta: Tensor) -> Tensor:
            found = self._function(space.split(theta))
            refuse_shapes(found, w)
            return space.flatten(found)

        found = space.split(newton_root(flat, space.flatten(w)))
        return {n: t.to(w[n].dtype) for n, t in found.items()}

    def regular(self, theta: Params) -> bool:
        """By the given inverse; a root that Newton has found is regular, or it refuses."""
        return self._inverse is None or super().regular(theta)


class Composed(Diffeomorphism):
    """w = f_k(…f_1(θ))."""

    def __init__(self, *parts: Diffeomorphism) -> None:
        self.parts = parts

    def forward(self, theta: Params) -> Params:
        for part in self.parts:
            theta = part.forward(theta)
        return theta

    def inverse(self, w: Params) -> Params:
        for part in reversed(self.parts):
            w = part.inverse(w)
        return w

    def regular(self, theta: Params) -> bool:
        """Whether each of them is, where it is reached."""
        for part in self.parts:
            if not part.regular(theta):
                return False
            theta = part.forward(theta)
        return True


def sinh() -> Diffeomorphism:
    """w = sinh θ."""
    return Elementwise(torch.sinh, torch.asinh)


def cubic() -> Diffeomorphism:
    """w = θ + θ³."""
    return Elementwise(lambda t: t + t**3)


def _slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    return jvp(function, (at,), (torch.ones_like(at),))[1]


def _directions(like: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in like]


def _some(params: Params, names: Sequence[str] | None, f: Callable[[Tensor], Tensor]) -> Params:
    _known(params, names)
    return {n: f(t) if names is None or n in names else t for n, t in params.items()}


def flatly(params: Params, names: Sequence[str] | None, f: Callable[[Tensor], Tensor]) -> Params:
    """Apply f to the entries of the named tensors as one vector."""
    _known(params, names)
    chosen = {n: t for n, t in params.items() if names is None or n in names}
    space = ParameterSpace(chosen)
    pieces = space.split(f(space.flatten(chosen)))
    return {n: pieces[n].to(t.dtype) if n in pieces else t for n, t in params.items()}


def _known(params: Params, names: Sequence[str] | None) -> None:
    unknown = sorted(set(names or ()) - set(params))
    if unknown:
        raise PullbackError(
            "The diffeomorphism names parameters that are not there",
            f"{unknown} are not among {sorted(params)}",
            "Use names as model.named_parameters() gives them",
        )


def refuse_shapes(found: object, like: Params) -> None:
    """Raise where names, shapes or dtypes are not those of the parameters."""
    want = {n: tuple(t.shape) for n, t in like.items()}
    have = {n: tuple(t.shape) for n, t in found.items()} if isinstance(found, dict) else found
    if have != want:
        raise PullbackError(
            "The diffeomorphism changes names or shapes",
            f"parameters of shapes {want} became {have}",
            "Return a dict with the same names and shapes",
        )
    assert isinstance(found, dict)
    for name, value in like.items():
        if found[name].dtype != value.dtype:
            raise PullbackError(
                "The diffeomorphism changes the dtype",
                f"{name!r} of {value.dtype} became {found[name].dtype}",
                "Compute in the dtype of its argument",
            )
