"""Diffeomorphisms w = f(θ) of parameters, as dicts of tensors by name.

Shapes are kept: w has the names and shapes of θ. A function of one's own joins by subclassing
`Diffeomorphism`, or with its inverse as `Elementwise(f, inverse)` or `Custom(f, inverse)`.
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
    """w_i = f(θ_i), for each tensor or for those named.

    Its range must hold all weights: exp and log, for weights that are positive.

    >>> cubic().inverse({"w": torch.tensor([2.0, -10.0], dtype=torch.float64)})["w"]
    tensor([ 1.0000, -2.0000], dtype=torch.float64)
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        inverse: Callable[[Tensor], Tensor],
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self._function, self._inverse = function, inverse
        self.names = names

    def forward(self, theta: Params) -> Params:
        return _some(theta, self.names, self._function)

    def inverse(self, w: Params) -> Params:
        return _some(w, self.names, self._inverse)


class Custom(Diffeomorphism):
    """Any function of the dict, and its inverse."""

    def __init__(
        self, function: Callable[[Params], Params], inverse: Callable[[Params], Params]
    ) -> None:
        self._function, self._inverse = function, inverse

    def forward(self, theta: Params) -> Params:
        return self._function(dict(theta))

    def inverse(self, w: Params) -> Params:
        return self._inverse(dict(w))


def sinh() -> Diffeomorphism:
    """w = sinh θ."""
    return Elementwise(torch.sinh, torch.asinh)


def cubic() -> Diffeomorphism:
    """w = θ + θ³, with θ = (2/√3) sinh(⅓ asinh(3√3 w/2))."""
    root = 3**0.5
    return Elementwise(
        lambda t: t + t**3, lambda w: 2 / root * torch.sinh(torch.asinh(1.5 * root * w) / 3)
    )


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


class Mixing(Diffeomorphism):
    r"""w = Mθ + c over the entries of the named tensors (or all), one after the other; M (p, p)."""

    def __init__(
        self, matrix: Tensor, shift: Tensor | None = None, *, names: Sequence[str] | None = None
    ) -> None:
        square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
        if not square or (shift is not None and shift.shape != matrix.shape[:1]):
            raise PullbackError(
                "The mixing is no change of coordinates",
                f"the matrix has shape {tuple(matrix.shape)}, the shift "
                f"{None if shift is None else tuple(shift.shape)}",
                "Give a square matrix, and a vector as long as its side",
            )
        wide = matrix.detach().to(torch.float64)
        factor, pivots, info = torch.linalg.lu_factor_ex(wide)
        self._matrix, self._lu = wide, (factor, pivots)
        self._shift = wide.new_zeros(len(wide)) if shift is None else shift.detach().to(wide)
        self.names = names
        values = factor.diagonal().abs()
        eps = torch.finfo(matrix.dtype).eps if matrix.is_floating_point() else 1e-16
        if len(wide) and (int(info) or not bool(values.min() > len(wide) * eps * values.max())):
            raise PullbackError(
                "The mixing is not invertible",
                f"its matrix of side {len(wide)} is singular to working precision",
                "Use a matrix of full rank",
            )

    def forward(self, theta: Params) -> Params:
        return flatly(theta, self.names, self._apply)

    def inverse(self, w: Params) -> Params:
        return flatly(w, self.names, self._solve)

    def _apply(self, flat: Tensor) -> Tensor:
        self._fits(flat)
        return self._matrix.to(flat) @ flat + self._shift.to(flat)

    def _solve(self, flat: Tensor) -> Tensor:
        self._fits(flat)
        factor, pivots = (t.to(flat.device) for t in self._lu)
        right = (flat.to(torch.float64) - self._shift.to(flat.device))[:, None]
        return torch.linalg.lu_solve(factor, pivots, right)[:, 0].to(flat)

    def _fits(self, flat: Tensor) -> None:
        if len(flat) != len(self._matrix):
            raise PullbackError(
                "The mixing does not fit the parameters",
                f"they have {len(flat)} entries, the matrix has side {len(self._matrix)}",
                "Give a matrix for all entries of the named parameters together",
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


class Coupling(Diffeomorphism):
    r"""A normalizing flow's layers: w_b = θ_b∘exp(s(θ_a)) + t(θ_a) with w_a = θ_a, then a and b
    change places.

    The halves a, b are random; s and t are small random networks c·U tanh(Vθ_a) of `rank` units,
    so that all entries mix and nothing of side p is stored twice.
    """

    def __init__(
        self, seed: int = 0, *, layers: int = 2, strength: float = 0.3, rank: int = 4
    ) -> None:
        self.seed, self.layers, self.strength, self.rank = seed, layers, strength, rank

    def _half(self, flat: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices a, b; s and t as functions of θ_a."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(flat), generator=generator).to(flat.device)
        a, b = order.tensor_split(2) if layer % 2 == 0 else order.tensor_split(2)[::-1]
        generator.manual_seed(self.seed + 1 + layer)
        shapes = ((self.rank, len(a)), (2 * len(b), self.rank))
        v, u = (torch.randn(s, generator=generator, dtype=torch.float64).to(flat) for s in shapes)
        hidden = torch.tanh(v @ flat[a] / max(len(a), 1) ** 0.5)
        s, t = (self.strength * (u @ hidden) / self.rank**0.5).tensor_split(2)
        return a, b, torch.tanh(s), t

    def forward(self, theta: Params) -> Params:
        return flatly(theta, None, self._apply)

    def inverse(self, w: Params) -> Params:
        return flatly(w, None, self._undo)

    def _apply(self, flat: Tensor) -> Tensor:
        for layer in range(self.layers):
            _, b, s, t = self._half(flat, layer)
            flat = flat.index_put((b,), flat[b] * s.exp() + t)
        return flat

    def _undo(self, flat: Tensor) -> Tensor:
        for layer in reversed(range(self.layers)):
            _, b, s, t = self._half(flat, layer)
            flat = flat.index_put((b,), (flat[b] - t) * (-s).exp())
        return flat
