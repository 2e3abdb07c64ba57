"""Where the factors of a network come from: given tensors, or numbers drawn with a seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from .._core.space import compute_dtype
from ..maps import Linearization
from .checks import refuse_shape


@dataclass(frozen=True)
class Source:
    """A generator or a seed, with the dtype and device of what is drawn."""

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
            refuse_shape(f"Factor {i}", w, shape)
            if not w.is_floating_point():
                raise PullbackError(
                    f"Factor {i} is not of a float type", f"got {w.dtype}", "Pass float tensors"
                )
        return [w.to(device=self.device, dtype=self.dtype, copy=True) for w in tensors]


def whole_numbers(name: str, given: Any, least: int = 1) -> tuple[int, ...]:
    """The given values as integers ≥ least."""
    values: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(
        isinstance(v, Integral) and not isinstance(v, bool) and int(v) >= least for v in values
    ):
        raise PullbackError(
            f"{name} is not usable", f"got {given!r}", f"Use whole numbers ≥ {least}"
        )
    return tuple(int(v) for v in values)


class Factored(nn.Module):
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

    def linearized(self, linear: Linearization) -> tuple[list[Tensor], list[int]] | None:
        """The factors of a linearization of this very module, and which are its parameters.

        None where the values that the metric sees are not simply this module's output.
        """
        source, leaves = getattr(linear, "map", None), getattr(linear, "leaves", None)
        if source is None or leaves is None or source.output is not None or source.batch_dim != 0:
            return None
        names = {f"factors.{i}": i for i in range(self.depth)}
        if len({id(w) for w in self.factors}) < self.depth or not names.keys() >= leaves.keys():
            return None
        factors = self.values(linear.space.dtype)
        for name, leaf in leaves.items():
            factors[names[name]] = leaf.detach().to(linear.space.dtype)
        return factors, [names[name] for name in linear.space.names]

    def arguments(self, linear: Linearization) -> tuple[Tensor | None, Tensor | None]:
        """What `forward` was called with."""
        call = getattr(linear, "map").call  # noqa: B009
        named = dict(zip(("x", "columns"), call.args, strict=False)) | call.kwargs
        return named.get("x"), named.get("columns")
