r"""Damping of Kronecker blocks: what is added to R ⊗ C before it is inverted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ....grams.kronecker import Pair, Units, sides
from ..statistics.sums import Key

Reference = Mapping[Key, Mapping[str, Tensor]]


class Damping(ABC):
    """How a block R ⊗ C is made safely invertible.

    Attributes:
        value: λ, in the units of the Gram.
        exact: whether R ⊗ C + λ is inverted as it stands, in the eigenbases of its sides.
        referenced: whether long-run averages of the blocks are needed.
        reference: instead of the plain averages of all statistics so far, these; by block.
        shifts_only: whether all that is added are the multiples of the identity in `shifts`.
    """

    exact: bool = False
    referenced: bool = False
    reference: Reference | None = None
    shifts_only: bool = False

    def __init__(self, value: float = 1e-3) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < float("inf"):
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

    def units(self, block: Units, reference: Units | None, value: float) -> tuple[Units, float]:
        """Gains and shifts or single entries, and the multiple of the identity yet to be added."""
        return block, value

    def refuse(self, found: Reference) -> None:
        """Raise where the given reference is that of other blocks than these."""
        for key, given in (self.reference or {}).items():
            new = found.get(key, {})
            for name in new.keys() & given.keys():
                own, other = tuple(new[name].shape), tuple(given[name].shape)
                if (own[0], own[-1]) != (other[0], other[-1]):  # one may be a diagonal
                    raise PullbackError(
                        "The damping's reference does not fit",
                        f"for {key.names[0]!r} it has {other}, and the statistics {own}",
                        "Give what KFAC.average() of the same network returned",
                    )

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
    transform as R and C do, and so do those B of a unit's gain and shift: B + λB_ref. The
    references are the plain averages of all statistics so far (or `reference`, a `KFAC.average()`
    taken on much data; for a block that is not in it, the former, and it is reported); directions
    that they lack as well, such as pixels that never light, are left out by a pseudo-inverse and
    reported.
    """

    referenced = True

    def __init__(self, value: float = 1e-2, reference: Reference | None = None) -> None:
        super().__init__(value)
        if reference is not None:
            _refuse_reference(reference)
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

    def units(self, block: Units, reference: Units | None, value: float) -> tuple[Units, float]:
        if reference is None:
            return block, 0.0
        return Units(block.matrices + value * reference.matrices), 0.0

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
        self.inner = as_damping(inner)
        super().__init__(self.inner.value)
        self.low, self.high, self.factor = low, high, factor
        self.smallest, self.largest = smallest, largest
        self._refuse()
        self.exact, self.referenced = self.inner.exact, self.inner.referenced
        self.reference, self.shifts_only = self.inner.reference, self.inner.shifts_only

    def _refuse(self) -> None:
        """Raise for bounds between which λ could not move."""
        inf = float("inf")
        given = {n: getattr(self, n) for n in ("low", "high", "factor", "smallest", "largest")}
        strange = [f"{n}={v!r}" for n, v in given.items() if not isinstance(v, (int, float))]
        if strange:
            why, remedy = f"got {strange[0]}", "Use a number"
        elif isinstance(self.inner, Adaptive):
            why, remedy = f"{self.inner!r} adapts already", "Give a number, or another damping"
        elif not 1 < self.factor < inf:
            why, remedy = f"got factor={self.factor!r}", "Use a number > 1"
        elif not 0 <= self.low <= self.high < inf:
            why = f"got low={self.low!r} and high={self.high!r}"
            remedy = "Use ratios with 0 ≤ low ≤ high"
        elif not 0 <= self.smallest <= self.largest < inf:
            why = f"got smallest={self.smallest!r} and largest={self.largest!r}"
            remedy = "Use bounds with 0 ≤ smallest ≤ largest"
        else:
            return
        raise PullbackError("Adaptive damping is not usable", why, remedy)

    def sides(
        self, pair: Pair, reference: Pair | None, value: float, *, spare: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.inner.sides(pair, reference, value, spare=spare)

    def shifts(self, rows: Tensor, columns: Tensor, value: float) -> tuple[Tensor, Tensor]:
        return self.inner.shifts(rows, columns, value)

    def units(self, block: Units, reference: Units | None, value: float) -> tuple[Units, float]:
        return self.inner.units(block, reference, value)

    def next(self, value: float, ratio: float) -> float:
        """λ after a step with this ratio of actual to predicted reduction."""
        if not ratio >= self.low:  # NaN too
            value *= self.factor
        elif ratio > self.high:
            value /= self.factor
        return min(max(value, self.smallest), self.largest)

    def __repr__(self) -> str:
        own = ("inner", "low", "high", "factor", "smallest", "largest")
        return f"Adaptive({', '.join(f'{n}={getattr(self, n)!r}' for n in own)})"


def as_damping(given: Damping | float) -> Damping:
    """The damping itself, or `Tikhonov` of a number."""
    return given if isinstance(given, Damping) else Tikhonov(given)


def _refuse_reference(given: object) -> None:
    """Raise for what is no `KFAC.average()`."""
    if isinstance(given, Mapping) and given:
        items = given.items()
        if all(isinstance(k, Key) and isinstance(v, Mapping) for k, v in items):
            return
    raise PullbackError(
        "The damping's reference is not usable",
        f"got {'an empty one' if given == {} else type(given).__name__}",
        "Give what KFAC.average() of the same network returned, or leave it out",
    )
