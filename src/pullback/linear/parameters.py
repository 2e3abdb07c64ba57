"""Parameters of linear networks, and what the closed forms ask of their inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.checks import refuse_number, refuse_values
from .._core.errors import PullbackError
from .._core.factor import Factor
from .._core.space import compute_dtype, relative_tolerance
from ..grams import FactoredGram
from ..maps import Linearization
from .grams import FlatFactor


def refuse_data(x: Tensor, y: Tensor) -> None:
    """Raise unless x is (N, D) and y is (N,), real, finite and not empty."""
    refuse_values("The data matrix x", x, ("N", "D"))
    refuse_values("The labels y", y.double(), (len(x),))


def signs(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Labels as ±1 in the given dtype; labels of any other kind are refused."""
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
        where = "cpu" if generator is None else generator.device
        drawn = [
            torch.randn(s, generator=generator, dtype=torch.float64, device=where) for s in shapes
        ]
        return [self.place(w) for w in drawn]

    def place(self, w: Tensor) -> Tensor:
        """A tensor in this dtype on this device, the default ones where none were named."""
        return w.to(device=self.device, dtype=self.dtype or torch.get_default_dtype())

    def given(self, factors: Any, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Copies of given factors, each of its shape; they keep their own dtype and device."""
        factors = list(factors)
        if len(factors) != len(shapes):
            raise PullbackError(
                "The number of factors does not fit",
                f"got {len(factors)} for a depth of {len(shapes)}",
                "Pass one tensor per factor",
            )
        tensors = [torch.as_tensor(w).detach() for w in factors]
        for i, (w, shape) in enumerate(zip(tensors, shapes, strict=True)):
            refuse_values(f"Factor {i}", w, shape)
        return [w.to(device=self.device, dtype=self.dtype, copy=True) for w in tensors]


def whole_numbers(name: str, given: Any) -> tuple[int, ...]:
    """The given values as integers ≥ 1."""
    values: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    for value in values:
        refuse_number(name, value, least=1, whole=True)
    return tuple(int(v) for v in values)


class FactoredModule(nn.Module):
    """A module whose parameters are the factors of β, named factors.0, factors.1, …"""

    factors: nn.ParameterList

    def _hold(self, factors: Sequence[Tensor]) -> None:
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
        source, leaves = getattr(linear, "map", None), getattr(linear, "leaves", None)
        if source is None or leaves is None or source.output is not None or source.batch_dim != 0:
            return None  # the metric does not see simply this module's output
        names = {f"factors.{i}": i for i in range(self.depth)}
        if len({id(w) for w in self.factors}) < self.depth or not names.keys() >= leaves.keys():
            return None
        factors = self.values(linear.space.dtype)
        for name, leaf in leaves.items():
            factors[names[name]] = leaf.detach().to(linear.space.dtype)
        chosen = [names[name] for name in linear.space.names]
        value, call = linear.value, source.call
        named = dict(zip(("x", "columns"), call.args, strict=False)) | call.kwargs
        args = [named[n] for n in ("x", "columns") if named.get(n) is not None]
        if len(args) == 1 and args[0].ndim != 2:
            return None
        flat = FlatFactor(factor, tuple(value.shape))
        gram = self.closed_gram(factors, chosen, args, flat)
        generator = torch.Generator().manual_seed(0)
        shape = (len(value), *factor.white)
        c = torch.randn(shape, generator=generator, dtype=torch.float64).to(value)
        want, got = linear.vjp(factor.apply(c)), gram.lift(c.flatten())
        limit = relative_tolerance(getattr(linear, "graph", value).dtype, 10) * want.norm()
        return gram if bool((want - got).norm() <= limit) else None

    def closed_gram(
        self, factors: list[Tensor], chosen: list[int], args: list[Tensor], factor: FlatFactor
    ) -> FactoredGram:
        """G over the chosen factors for `forward(*args)`."""
        raise NotImplementedError
