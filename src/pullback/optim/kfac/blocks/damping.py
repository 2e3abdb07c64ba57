r"""Damping of Kronecker blocks: what is added to R ⊗ C before it is inverted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ....grams.kronecker import Pair, sides


class Damping(ABC):
    """How a block R ⊗ C is made safely invertible.

    Attributes:
        value: λ, in the units of the Gram.
        exact: whether R ⊗ C + λ is inverted as it stands, in the eigenbases of its sides.
        referenced: whether long-run averages of the sides are needed.
        shifts_only: whether all that is added are the multiples of the identity in `shifts`.
    """

    exact: bool = False
    referenced: bool = False
    shifts_only: bool = False

    def __init__(self, value: float = 1e-3) -> None:
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise PullbackError("The damping is not usable", f"got {value!r}", "Use a number ≥ 0")
        self.value = float(value)

    @abstractmethod
    def sides(
        self, pair: Pair, reference: Pair | None, value: float, *, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The two sides to be inverted; those of a spare pair may be overwritten."""

    def shifts(self, rows: Tensor, columns: Tensor, value: float) -> tuple[Tensor, Tensor]:
        """The multiples of the identity for left and right sides of these mean eigenvalues."""
        raise NotImplementedError(type(self).__name__)

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


class Tikhonov(Damping):
    r"""(R + √λ/π) ⊗ (C + π√λ) with π² = (tr C/dim C)/(tr R/dim R), as Martens and Grosse do.

    It adds λ to R ⊗ C and two terms between; the split π keeps those smallest in trace. With λ = 0
    nothing is added, and singular sides are inverted on their range.
    """

    shifts_only = True

    def sides(
        self, pair: Pair, reference: Pair | None, value: float, *, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        if value == 0:
            return pair.left, pair.right
        rows, columns = (sides.diagonal(s).mean(-1) for s in (pair.left, pair.right))
        left, right = self.shifts(rows, columns, value)
        return (
            sides.shifted(pair.left, left, spare=spare),
            sides.shifted(pair.right, right, spare=spare),
        )

    def shifts(self, rows: Tensor, columns: Tensor, value: float) -> tuple[Tensor, Tensor]:
        tiny = torch.finfo(rows.dtype).tiny ** 0.5
        pi = (columns.clamp(min=tiny) / rows.clamp(min=tiny)).sqrt().clamp(1e-6, 1e6)
        pi = torch.where((rows > tiny) & (columns > tiny), pi, 1.0)
        root = value**0.5
        return root / pi, root * pi


class Exact(Damping):
    """R ⊗ C + λ itself, inverted in the eigenbases of R and C (an eigh per side instead of a
    Cholesky factorization).
    """

    exact = True

    def sides(
        self, pair: Pair, reference: Pair | None, value: float, *, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        return pair.left, pair.right


class Invariant(Damping):
    r"""(R + λR_ref) ⊗ (C + λC_ref), which keeps K-FAC's affine invariance exactly.

    A multiple of the identity depends on coordinates; second moments taken in the same coordinates
    transform as R and C do. The references are the plain averages of all statistics so far (or of
    `reference`, a `KFAC.average()` taken on much data); directions that they lack as well, such as
    pixels that never light, are left out by a pseudo-inverse and reported.
    """

    referenced = True

    def __init__(self, value: float = 1e-2, reference: dict[str, Any] | None = None) -> None:
        super().__init__(value)
        self.reference = reference

    def sides(
        self, pair: Pair, reference: Pair | None, value: float, *, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        if reference is None:
            return pair.left, pair.right
        return (
            sides.add(pair.left, value * reference.left),
            sides.add(pair.right, value * reference.right),
        )

    def __repr__(self) -> str:
        return f"Invariant({self.value!r})"


class Adaptive(Damping):
    r"""Levenberg–Marquardt: λ follows how well the quadratic model predicted the last step.

    After a step Δ, ρ = (L(w − Δ) − L(w))/(½ΔᵀFΔ − gᵀΔ). Below `low` λ grows by `factor`, above
    `high` it shrinks. A step that raises the loss is taken back, its momentum is dropped, and λ
    grows. Needs `step(closure)`, with a closure that sees the same batch when it is called again.

    Args:
        inner: how λ enters a block.
        low, high: where λ starts to grow and to shrink.
        factor: by how much it does.
        smallest, largest: its bounds.
    """

    def __init__(
        self,
        inner: Damping | float = 1e-2,
        *,
        low: float = 0.25,
        high: float = 0.75,
        factor: float = 1.5,
        smallest: float = 1e-9,
        largest: float = 1e3,
    ) -> None:
        self.inner = inner if isinstance(inner, Damping) else Tikhonov(inner)
        super().__init__(self.inner.value)
        self.low, self.high, self.factor = low, high, factor
        self.smallest, self.largest = smallest, largest
        self.exact, self.referenced = self.inner.exact, self.inner.referenced
        self.shifts_only = self.inner.shifts_only

    def sides(
        self, pair: Pair, reference: Pair | None, value: float, *, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.inner.sides(pair, reference, value, spare=spare)

    def shifts(self, rows: Tensor, columns: Tensor, value: float) -> tuple[Tensor, Tensor]:
        return self.inner.shifts(rows, columns, value)

    def next(self, value: float, ratio: float) -> float:
        """λ after a step with this ratio of actual to predicted reduction."""
        if not ratio >= self.low:  # NaN too
            value *= self.factor
        elif ratio > self.high:
            value /= self.factor
        return min(max(value, self.smallest), self.largest)


def as_damping(given: Damping | float) -> Damping:
    """The damping itself, or `Tikhonov` of a number."""
    return given if isinstance(given, Damping) else Tikhonov(given)
