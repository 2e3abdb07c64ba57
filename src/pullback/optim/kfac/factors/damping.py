r"""Damping of Kronecker blocks: what is added to R ⊗ C before it is inverted.

A damping answers three questions: what is added to a pair of factors (`find_shifts`), what to gains
and shifts (`units`), and how λ follows the success of a step (`next`). A damping whose λ follows
the loss needs a closure (`is_controlled`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...._core.checks import require_number
from ...._core.errors import PullbackError
from ....grams.kronecker import Pair, Units
from ....steps import RatioDamping
from .block import BlockKey, Factors

#: long-run averages of the factors of blocks
Reference = Mapping[BlockKey, Factors]
#: the mean eigenvalues of the output factor and of the input factor, by group
Means = tuple[Tensor, Tensor]


class Damping(ABC):
    """How a block R ⊗ C is made safely invertible.

    Attributes:
        value: λ, in the units of the Gram.
        exact: whether R ⊗ C + λ is inverted as it stands, in the eigenbases of its sides.
        needs_reference: whether long-run averages of the blocks are needed.
        reference: long-run averages by block, instead of the means of all statistics so far.
        is_controlled: whether λ follows the loss, which a closure has to evaluate again.
    """

    exact: bool = False
    needs_reference: bool = False
    reference: Reference | None = None
    is_controlled: bool = False

    def __init__(self, value: float = 1e-3) -> None:
        require_number("The damping", value)
        self.value = float(value)

    @abstractmethod
    def find_shifts(
        self, means: Means, reference: Pair | None, value: float
    ) -> tuple[Tensor, Tensor]:
        """Return what is added to the output factor (left) and to the input factor (right).

        Args:
            means: the mean eigenvalue of either side, by group, (G,).
            reference: the long-run averages of the block, where they are needed.
            value: λ.

        Returns:
            For each a multiple of the identity, (G,), diagonals (G, n) or matrices (G, n, n).
        """

    def units(self, block: Units, reference: Units | None, value: float) -> tuple[Units, float]:
        """Return gains and shifts, and the multiple of the identity that is still to be added."""
        return block, value

    def next(self, value: float, ratio: float) -> float:
        """Return λ after a step with this ratio of actual to predicted reduction."""
        return value

    def __repr__(self) -> str:
        fields = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({fields})"


class Tikhonov(Damping):
    r"""(R + √λ/π) ⊗ (C + π√λ) with π² = (tr C/dim C)/(tr R/dim R), as Martens and Grosse do.

    It adds λ to R ⊗ C and two terms between; the split π keeps those smallest in trace. With λ = 0
    nothing is added, and singular sides are inverted on their range.
    """

    def find_shifts(
        self, means: Means, reference: Pair | None, value: float
    ) -> tuple[Tensor, Tensor]:
        rows, columns = means
        tiny = torch.finfo(rows.dtype).tiny ** 0.5
        pi = (columns.clamp(min=tiny) / rows.clamp(min=tiny)).sqrt().clamp(1e-6, 1e6)
        pi = torch.where((rows > tiny) & (columns > tiny), pi, 1.0)
        root = value**0.5
        return root / pi, root * pi


class Exact(Damping):
    """R ⊗ C + λ itself, inverted in the eigenbases of R and C: an eigh per side."""

    exact = True

    def find_shifts(
        self, means: Means, reference: Pair | None, value: float
    ) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(means[0]), torch.zeros_like(means[1])


class Invariant(Damping):
    r"""(R + λR_ref) ⊗ (C + λC_ref), which keeps K-FAC's affine invariance exactly.

    A multiple of the identity depends on coordinates; second moments transform as R and C do, and
    so do those B of a unit's gain and shift: B + λB_ref. References are the plain means of all
    statistics so far, or those in `reference`, a `KFAC.average()` taken on much data. Directions
    that they lack as well, such as pixels that never light, are left out by a pseudo-inverse and
    reported.
    """

    needs_reference = True

    def __init__(self, value: float = 1e-2, reference: Reference | None = None) -> None:
        super().__init__(value)
        if isinstance(reference, Mapping):
            items = reference.items()
        else:
            items = ()
        are_blocks = [isinstance(k, BlockKey) and isinstance(v, Mapping) for k, v in items]
        if reference is not None and not (are_blocks and all(are_blocks)):
            description = type(reference).__name__
            if reference == {}:
                description = "an empty one"
            raise PullbackError(
                "The damping's reference is not usable",
                f"got {description}",
                "Give what KFAC.average() of the same network returned, or leave it out",
            )
        self.reference = reference

    def find_shifts(
        self, means: Means, reference: Pair | None, value: float
    ) -> tuple[Tensor, Tensor]:
        assert reference is not None
        return value * reference.output_factor, value * reference.input_factor

    def units(self, block: Units, reference: Units | None, value: float) -> tuple[Units, float]:
        assert reference is not None
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

    is_controlled = True

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
        if self.inner.is_controlled:
            raise PullbackError(
                "Adaptive damping is not usable",
                f"{self.inner!r} adapts already",
                "Give a number, or another damping",
            )
        if isinstance(factor, (int, float)) and factor > 0:
            decrease = 1 / factor
        else:
            decrease = factor
        self._rule = RatioDamping(low, high, factor, decrease, smallest, largest)
        self.exact = self.inner.exact
        self.needs_reference = self.inner.needs_reference
        self.reference = self.inner.reference

    def find_shifts(
        self, means: Means, reference: Pair | None, value: float
    ) -> tuple[Tensor, Tensor]:
        return self.inner.find_shifts(means, reference, value)

    def units(self, block: Units, reference: Units | None, value: float) -> tuple[Units, float]:
        return self.inner.units(block, reference, value)

    def next(self, value: float, ratio: float) -> float:
        return self._rule.next(value, ratio)

    def __repr__(self) -> str:
        return f"Adaptive({self.inner!r}, {self._rule!r})"


def as_damping(damping: Damping | float) -> Damping:
    """Return the damping itself, or `Tikhonov` of a number."""
    if not isinstance(damping, Damping):
        return Tikhonov(damping)
    if not hasattr(damping, "value"):
        raise _make_unusable_error(
            damping, "it has no value λ", "Call super().__init__(value) in its constructor"
        )
    return damping


def find_shifts(
    damping: Damping, means: Means, reference: Pair | None, value: float
) -> tuple[Tensor, Tensor]:
    """Return `damping.find_shifts`; raise where it does not give two tensors, block by block."""
    shifts: Any = damping.find_shifts(means, reference, value)
    expected = "Return two tensors, for the output and the input factor, of shape (blocks,)"
    if not isinstance(shifts, (tuple, list)) or len(shifts) != len(means):
        why = f"find_shifts returned {type(shifts).__name__}"
        raise _make_unusable_error(damping, why, expected)
    for shift, mean in zip(shifts, means, strict=True):
        if not isinstance(shift, Tensor):
            why = f"find_shifts returned {type(shift).__name__} for a side"
            raise _make_unusable_error(damping, why, expected)
        if shift.shape[:1] != mean.shape:
            why = f"find_shifts returned shape {tuple(shift.shape)} for {len(mean)} blocks"
            raise _make_unusable_error(damping, why, expected)
    left, right = shifts
    return left, right


def _make_unusable_error(damping: Damping, why: str, remedy: str) -> PullbackError:
    """Return the error for a user's damping that does not do what a damping must."""
    return PullbackError(f"The damping {type(damping).__name__} is not usable", why, remedy)


def refuse_reference(damping: Damping, statistics: Reference) -> None:
    """Raise where factors of the damping's reference have other sizes than the statistics."""
    for key, reference in (damping.reference or {}).items():
        means = statistics.get(key, {})
        for factor in means.keys() & reference.keys():
            measured = tuple(means[factor].shape)
            other = tuple(reference[factor].shape)
            if (measured[0], measured[-1]) != (other[0], other[-1]):  # one may be a diagonal
                raise PullbackError(
                    "The damping's reference does not fit",
                    f"for {key.names[0]!r} it has {other}, and the statistics {measured}",
                    "Give what KFAC.average() of the same network returned",
                )
