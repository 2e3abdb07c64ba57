"""Parameters of linear networks, and checks of the inputs of closed forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.checks import require_finite_tensor, require_number
from .._core.errors import PullbackError
from .._core.factor import Factor
from .._core.space import compute_dtype, relative_tolerance
from ..grams import FactoredGram
from ..maps import Linearization
from .grams import FlatFactor


def refuse_data(x: Tensor, y: Tensor) -> None:
    """Raise unless x is (N, D) and y is (N,), real, finite and not empty."""
    require_finite_tensor("The data matrix x", x, ("N", "D"))
    require_finite_tensor("The labels y", y.double(), (len(x),))


def read_signs(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Return labels ±1 in a dtype; raise where they have other values."""
    if not bool((y.to(dtype).abs() == 1).all()):
        raise PullbackError(
            "The labels are not signs",
            f"found values such as {float(y.flatten()[0]):g}",
            "Encode the two classes as −1 and +1 (2·y − 1 for labels 0 and 1)",
        )
    return y.to(dtype)


def refuse_zero_tangent(size: Tensor) -> None:
    """Raise where J = 0, so that no move of the parameters moves β."""
    if not bool(size > 0):
        raise PullbackError(
            "The tangent is zero",
            "the factors vanish so that no small change of one of them changes their product",
            "Start from factors of which at most one is zero",
        )


@dataclass(frozen=True)
class RandomSource:
    """A generator or a seed, with the dtype and device of new tensors."""

    generator: torch.Generator | None = None
    seed: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.generator is not None and self.seed is not None:
            raise PullbackError(
                "Both a generator and a seed were given",
                "only one of them can decide the factors",
                "Pass generator= or seed=, not both",
            )
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise PullbackError("The dtype is not usable", f"got {self.dtype}", "Use a float type")

    def draw(self, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Standard normal tensors, the same for a seed on every device and in every dtype."""
        generator = self.generator
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed)
        device = "cpu" if generator is None else generator.device
        factors = []
        for shape in shapes:
            normal = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
            factors.append(self.convert(normal))
        return factors

    def convert(self, w: Tensor) -> Tensor:
        """Return a tensor in this dtype on this device, by default torch's default ones."""
        return w.to(device=self.device, dtype=self.dtype or torch.get_default_dtype())

    def copy_factors(self, factors: Any, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return copies of a user's factors, each of its shape; they keep dtype and device."""
        factors = list(factors)
        if len(factors) != len(shapes):
            raise PullbackError(
                "The number of factors does not fit",
                f"got {len(factors)} for a depth of {len(shapes)}",
                "Pass one tensor per factor",
            )
        tensors = [torch.as_tensor(w).detach() for w in factors]
        for i, (w, shape) in enumerate(zip(tensors, shapes, strict=True)):
            require_finite_tensor(f"Factor {i}", w, shape)
        return [w.to(device=self.device, dtype=self.dtype, copy=True) for w in tensors]


def read_whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return a user's values as integers ≥ 1; raise where they are none."""
    numbers: list[Any] = [None]
    if isinstance(values, Iterable):
        numbers = list(values)
    for number in numbers:
        require_number(name, number, least=1, whole=True)
    return tuple(int(number) for number in numbers)


class FactoredModule(nn.Module):
    """A module whose parameters are the factors of β, named factors.0, factors.1, …"""

    factors: nn.ParameterList

    def _set_factors(self, factors: Sequence[Tensor]) -> None:
        self.factors = nn.ParameterList([nn.Parameter(w) for w in factors])

    @property
    def depth(self) -> int:
        """L, the number of factors."""
        return len(self.factors)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What closed forms are computed in: half precisions are promoted."""
        dtype = self.factors[0].dtype
        for w in self.factors:
            dtype = torch.promote_types(dtype, w.dtype)
        return compute_dtype(dtype)

    def values(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """The factors without their graph, in one dtype."""
        dtype = dtype or self.compute_dtype
        return [w.detach().to(dtype) for w in self.factors]

    def like_factors(self, moves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The moves in each factor's own dtype."""
        return tuple(m.to(w.dtype) for m, w in zip(moves, self.factors, strict=True))

    def pullback_gram(self, linear: Linearization, factor: Factor) -> FactoredGram | None:
        """G = JᵀMJ in closed form for calls of `forward`; None for anything else.

        Hooks and ties may change a model, so Aᵀc must be what autograd says for a random c.
        """
        call = _read_plain_call(linear)
        if call is None:
            return None
        leaves = linear.leaves  # pyright: ignore[reportAttributeAccessIssue]
        numbers = {f"factors.{i}": i for i in range(self.depth)}
        if self._has_ties() or not numbers.keys() >= leaves.keys():
            return None
        factors = self.values(linear.space.dtype)
        for name, leaf in leaves.items():
            factors[numbers[name]] = leaf.detach().to(linear.space.dtype)
        args = _read_arguments(call)
        if len(args) == 1 and args[0].ndim != 2:
            return None
        chosen = [numbers[name] for name in linear.space.names]
        flat = FlatFactor(factor, tuple(linear.value.shape))
        gram = self.closed_gram(factors, chosen, args, flat)
        if not _agrees_with_autograd(gram, linear, factor):
            return None
        return gram

    def _has_ties(self) -> bool:
        """Return True if one parameter is several factors."""
        return len({id(w) for w in self.factors}) < self.depth

    def closed_gram(
        self, factors: list[Tensor], chosen: list[int], args: list[Tensor], factor: FlatFactor
    ) -> FactoredGram:
        """G over the chosen factors for `forward(*args)`."""
        raise NotImplementedError


def _read_plain_call(linear: Linearization) -> Any:
    """Return the recorded call whose whole output the metric sees, samples along axis 0, or None.

    A linearization that was not recorded from a module's call has no `map` and no `leaves`.
    """
    source = getattr(linear, "map", None)
    if source is None or getattr(linear, "leaves", None) is None:
        return None
    if source.output is not None or source.batch_dim != 0:
        return None
    return source.call


def _read_arguments(call: Any) -> list[Tensor]:
    """Return the arguments x and columns of a call of `forward`, those that are not None."""
    named = dict(zip(("x", "columns"), call.args, strict=False)) | call.kwargs
    return [named[name] for name in ("x", "columns") if named.get(name) is not None]


def _agrees_with_autograd(gram: FactoredGram, linear: Linearization, factor: Factor) -> bool:
    """Return True if the Gram's Aᵀc is JᵀS c by autograd, for a random c."""
    value = linear.value
    generator = torch.Generator().manual_seed(0)
    shape = (len(value), *factor.white)
    c = torch.randn(shape, generator=generator, dtype=torch.float64).to(value)
    by_autograd = linear.vjp(factor.apply(c))
    difference = by_autograd - gram.lift(c.flatten())
    dtype = getattr(linear, "graph", value).dtype
    return bool(difference.norm() <= relative_tolerance(dtype, 10) * by_autograd.norm())
