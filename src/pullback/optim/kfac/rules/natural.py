"""The natural gradient of the K-FAC metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ....grams.kronecker import (
    EigenBlock,
    FactorInverses,
    GramBlock,
    Pair,
    Units,
    factor_matrix,
    invert_factors,
)
from ....grams.kronecker.blocks import from_bases, to_bases
from ....likelihoods import Likelihood
from ....maps.roles import Role
from ....metrics import Metric
from ...foreign_arguments import NATURAL_COUNTERPARTS, explain_unknown_arguments
from ..arguments import check
from ..factors.block import BlockKind
from ..factors.damping import Damping, as_damping, find_shifts
from .base import (
    BlockShape,
    Defaults,
    Estimation,
    FactorAverages,
    RefreshReport,
    Rule,
    RuleState,
    Statistics,
    StepContext,
)
from .half_inverse import pays_in_half, widen
from .natural_states import (
    EigenState,
    InverseState,
    UnitState,
    pad_to_aligned,
    round_up_to_aligned,
)


@dataclass(frozen=True)
class Retries:
    """How a factor that could not be inverted is tried again."""

    #: what the damping is multiplied by each time
    growth: float = 10.0
    #: attempts in all: λ·10⁷ is more than any factor that was met needs
    most: int = 8


_RETRIES = Retries()


class Natural(Rule):
    r"""F̂⁻¹g: steepest descent for the length √(xᵀF̂x), with every parameter that has a block,

        F̂ = ⊕_l R_l ⊗ C_l,    F̂⁻¹g = R⁻¹ G C⁻¹,

    for R = Σ δδᵀ/N of the cotangents at a layer's outputs and C = mean aaᵀ of its inputs.

    Args:
        likelihood: whose Fisher information is the metric on outputs, such as `Categorical()`, or
            the loss itself, such as `nn.CrossEntropyLoss()`.
        metric: instead, any metric of the library; by default that of ½‖·‖². `Sobolev` relates the
            samples of one forward call by the model's first tensor.
        fisher: "mc", the default, draws targets, "exact" takes the metric as it is (a reverse pass
            per output), "empirical" the loss's own gradient.
        damping: λ, or an object: `Tikhonov`, `Exact`, `Invariant`, `Adaptive`.
        momentum: μ in m ← μm + F̂⁻¹g; param groups may have their own.
        kl_clip: δ, such that η²·mᵀF̂m ≤ δ for the step ηm, momentum included. F̂ is that of the
            last refresh. "auto" is 1e-3, or none where a closure controls the step; None
            switches it off.
        ekfac: correct the eigenvalues by second moments of the gradient in the eigenbases; those of
            linear and convolution layers used once. λ is added to them.
        warmup: w, the first steps that all take statistics and invert. After them the gaps between
            statistics and between inversions grow as steps/w, until they are those of the schedule.
            Inverses of the first step alone would be wrong by the tenth, and those of the tenth by
            the thirtieth: the curvature changes fastest at the start.
        estimation: how factors are estimated.
    """

    name: ClassVar = "natural"
    reads: ClassVar = Statistics.INPUTS_AND_OUTPUTS
    squares_gradients: ClassVar = False
    can_rescale: ClassVar = True
    defaults: ClassVar = Defaults(lr=0.1, statistics_every=10, invert_every=100)
    refreshed_entries: ClassVar = 2**29
    refreshes_together: ClassVar = True
    damping: Damping

    @explain_unknown_arguments(NATURAL_COUNTERPARTS)
    def __init__(
        self,
        likelihood: Likelihood | Callable[..., Tensor] | None = None,
        *,
        metric: Metric | Callable[[Tensor], Tensor] | None = None,
        fisher: str | None = None,
        damping: float | Damping = 1e-3,
        momentum: float = 0.9,
        kl_clip: float | str | None = "auto",
        ekfac: bool = False,
        warmup: int = 10,
        estimation: Estimation | None = None,
    ) -> None:
        check(momentum=momentum, kl_clip=kl_clip, ekfac=ekfac, warmup=warmup, estimation=estimation)
        self.damping = as_damping(damping)  # pyright: ignore[reportIncompatibleVariableOverride]
        self.momentum = momentum
        self.ekfac = ekfac
        self.kl_clip = kl_clip
        self.warmup = warmup
        if estimation is None:
            estimation = Estimation()
        estimation = estimation.with_defaults(
            fisher, default_fisher="mc", default_ema=self.default_ema, default_joint=True
        )
        self.estimation = estimation.with_metric(likelihood, metric, measures_spectrum=ekfac)
        refuse_combinations(self.estimation, self.damping)

    @property
    def _uses_eigenbases(self) -> bool:
        """Whether R ⊗ C + λ itself is inverted, in the eigenbases of its factors."""
        return self.damping.exact or self.ekfac

    def accepts(self, role: Role) -> bool:
        return True

    def fits(self, shape: BlockShape) -> bool:
        return True

    def group_options(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    # --- state ------------------------------------------------------------------------------------

    def init(self, shape: BlockShape) -> RuleState:
        if shape.kind is not BlockKind.KRONECKER:
            units, parameters = shape.size
            return UnitState(inverse=shape.zeros(units, parameters, parameters))
        blocks, rows, columns = shape.size
        if shape.dense_rows:
            left = shape.zeros(blocks, rows, rows)
        else:
            left = None
        if self._uses_eigenbases:
            if shape.dense_columns:
                right = shape.zeros(blocks, columns, columns)
            else:
                right = None
            state = EigenState(left, right, shape.zeros(*shape.size), None, None)
            if self.ekfac:
                state.spectrum = shape.zeros(*shape.size)
                state.mass = shape.zeros(blocks)
            return state
        filled = round_up_to_aligned(columns)
        if shape.dense_columns:
            right = shape.zeros(blocks, filled, filled)
        else:
            right = shape.zeros(blocks, filled)
        if left is None:
            left = shape.zeros(blocks, rows)
        if pays_in_half(left, right):
            left = left.half()
            right = right.half()
        return InverseState(left, right, rows=shape.zeros(blocks, rows), unit=shape.zeros(blocks))

    def convert(self, state: RuleState, shape: BlockShape) -> RuleState:
        new = self.init(shape)
        if not isinstance(state, InverseState) or not isinstance(new, InverseState):
            return super().convert(state, shape)
        left = state.left
        right = state.right
        if state.in_half is not None:
            left, right = widen(state.in_half)
        left = left.to(shape.device, shape.dtype)
        right = right.to(shape.device, shape.dtype)
        new.store(left, right, is_half=new.in_half is not None)
        return new

    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        if isinstance(state, UnitState):
            return self._refresh_units(averages, state)
        if isinstance(state, EigenState):
            return self._refresh_eigen(averages, state)
        (report,) = self.refresh_stacks([averages], [state])
        return report

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        if isinstance(state, UnitState):
            return (state.inverse * gradient[:, None]).sum(-1)
        if isinstance(state, EigenState):
            coordinates = to_bases(state.left, gradient, state.right) * state.scale
            return from_bases(state.left, coordinates, state.right)
        assert isinstance(state, InverseState)
        return state.apply(gradient)

    def direction_with_bias(
        self, weight: Tensor, bias: Tensor, state: RuleState, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(state, InverseState) or state.right.ndim == 2:
            return super().direction_with_bias(weight, bias, state, step)
        return state.apply_with_bias(weight, bias)

    # --- inverses of both factors -----------------------------------------------------------------

    def refresh_stacks(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> Iterator[RefreshReport]:
        """Refresh all stacks; the factors of all of them are inverted together by Cholesky."""
        indices = [i for i, state in enumerate(states) if isinstance(state, InverseState)]
        inverses = dict(zip(indices, self._invert([averages[i] for i in indices]), strict=True))
        for i, state in enumerate(states):
            if isinstance(state, InverseState):
                yield self._store_inverses(inverses.pop(i), averages[i], state)
            else:
                yield self.refresh(averages[i], state)

    def _store_inverses(
        self, inverse: FactorInverses, averages: FactorAverages, state: InverseState
    ) -> RefreshReport:
        """Store the inverses of a stack, found block by block if one failed or may be singular."""
        report = RefreshReport()
        left, right = inverse.matrices
        if any(inverse.failed) or self._inverts_on_range(averages):
            left, right = self._invert_one_by_one(averages, report)
        state.store(left, pad_to_aligned(right), is_half=state.in_half is not None)
        return report

    def _invert_one_by_one(
        self, averages: FactorAverages, report: RefreshReport
    ) -> tuple[Tensor, Tensor]:
        """Return the inverses of all blocks, each with as much damping as it needs."""
        lefts: list[Tensor] = []
        rights: list[Tensor] = []
        for block in range(len(averages.pair.output_factor)):
            left, right = self._invert_one(averages.select(block), block, report)
            lefts.append(left)
            rights.append(right)
        return torch.cat(lefts), torch.cat(rights)

    def _inverts_on_range(self, averages: FactorAverages) -> bool:
        """Return whether singular factors are inverted on their range.

        They are so without damping, and with an invariant one.
        """
        return averages.damping == 0 or self.damping.needs_reference

    def _invert(self, stacks: Sequence[FactorAverages]) -> list[FactorInverses]:
        """Return the inverses of both damped factors of each stack."""
        factors: list[Tensor] = []
        divisors: list[Tensor] = []
        shifts: list[Tensor] = []
        for averages in stacks:
            factors += [averages.pair.output_factor, averages.pair.input_factor]
            divisors += [averages.mass, averages.mass]
            shifts += self._find_shifts(averages)
        singular = any(self._inverts_on_range(averages) for averages in stacks)
        inverses = invert_factors(factors, divisors=divisors, shifts=shifts, singular=singular)
        return [inverses[2 * i : 2 * i + 2] for i in range(len(stacks))]

    def _find_shifts(self, averages: FactorAverages) -> list[Tensor]:
        """Return what the damping adds to the left and to the right factor."""
        rows = factor_matrix.diagonal(averages.pair.output_factor).mean(-1) / averages.mass
        columns = factor_matrix.diagonal(averages.pair.input_factor).mean(-1) / averages.mass
        reference: Any = averages.reference
        return list(find_shifts(self.damping, (rows, columns), reference, averages.damping))

    def _invert_one(
        self, averages: FactorAverages, block: int, report: RefreshReport
    ) -> list[Tensor]:
        """Return the inverses of one block's factors, with more damping where they fail.

        The report notes it under the number `block`.
        """
        (inverse,) = self._invert([averages])
        attempts = 1
        if averages.damping:
            attempts = _RETRIES.most
        for attempt in range(1, attempts):
            if not any(inverse.failed):
                break
            raised = averages.damping * _RETRIES.growth**attempt
            (inverse,) = self._invert([replace(averages, damping=raised)])
            if not any(inverse.failed):
                report.note(block, f"its damping was raised to {raised:.3g} to invert it")
        if any(inverse.failed):
            report.fail(block, "its sides could not be inverted")
        for name, rank in zip(("output", "input"), inverse.ranks, strict=True):
            if rank is not None:
                description = f"rank {int(rank.min())}, inverted on its range"
                report.note(block, f"its {name} side is singular: {description}")
        return inverse.matrices

    # --- eigenbases -------------------------------------------------------------------------------

    def _refresh_eigen(self, averages: FactorAverages, state: EigenState) -> RefreshReport:
        """Find the eigenbases; corrected eigenvalues are carried to the new ones."""
        report = RefreshReport()
        pair = averages.normalize()
        assert isinstance(pair, Pair)
        try:
            rows, left = factor_matrix.eigendecompose(pair.output_factor)
            columns, right = factor_matrix.eigendecompose(pair.input_factor)
        except torch.linalg.LinAlgError:
            for block in range(len(pair.output_factor)):
                report.fail(block, "its eigenvalues were not found")
            return report
        values = rows[..., None] * columns[:, None]
        if state.spectrum is not None and state.mass is not None and not averages.is_first:
            row_rotation = _compute_overlap(left, state.left)
            column_rotation = _compute_overlap(right, state.right)
            state.spectrum = EigenBlock(row_rotation, column_rotation, state.spectrum).diagonal()
            has_spectrum = (state.mass > 0)[:, None, None]
            values = torch.where(has_spectrum, _remove_bias(state.spectrum, state.mass), values)
        state.left = left
        state.right = right
        state.scale = _invert_values(values, averages.damping)
        return report

    def measured_bases(self, state: RuleState) -> tuple[Tensor | None, Tensor | None] | None:
        if isinstance(state, EigenState) and state.spectrum is not None:
            return state.left, state.right
        return None

    def observe(self, spectrum: Tensor, state: RuleState, damping: float) -> None:
        assert isinstance(state, EigenState)
        assert state.spectrum is not None
        assert state.mass is not None
        state.spectrum.lerp_(spectrum, 1 - self.find_ema())
        state.mass.lerp_(torch.ones_like(state.mass), 1 - self.find_ema())
        state.scale.copy_(_invert_values(_remove_bias(state.spectrum, state.mass), damping))

    # --- gains, shifts and single entries ---------------------------------------------------------

    def _refresh_units(self, averages: FactorAverages, state: UnitState) -> RefreshReport:
        """Invert the damped matrices of all units, and note a rank that is not full."""
        report = RefreshReport()
        damped, shift = self._damp_units(averages)
        state.inverse = damped.inverse(shift)
        if self.damping.needs_reference:
            rank = round(float((damped.matrices * state.inverse).sum()))  # tr M M⁺
            size = damped.matrices[..., 0].numel()
            if rank < size:
                text = f"it is singular: rank {rank} of {size}, inverted on its range"
                report.note(0, text)
        return report

    def _damp_units(self, averages: FactorAverages) -> tuple[Units, float]:
        """Return the units' matrices, and the multiple of the identity still to be added."""
        units = averages.normalize()
        reference = averages.reference
        assert isinstance(units, Units)
        assert reference is None or isinstance(reference, Units)
        return self.damping.units(units, reference, averages.damping)

    # --- the metric -------------------------------------------------------------------------------

    def gram(self, averages: FactorAverages, state: RuleState) -> GramBlock:
        if not isinstance(state, EigenState) or averages.is_first:
            return averages.normalize()
        if state.spectrum is None or state.mass is None or not bool((state.mass > 0).all()):
            return averages.normalize()
        # copies, since `observe` and `rescale` change the state in place
        if state.left is None:
            left = None
        else:
            left = state.left.clone()
        if state.right is None:
            right = None
        else:
            right = state.right.clone()
        return EigenBlock(left, right, _remove_bias(state.spectrum, state.mass))

    def damped_gram(self, averages: FactorAverages, state: RuleState) -> GramBlock:
        if isinstance(state, UnitState):
            damped, shift = self._damp_units(averages)
            identity = torch.eye(damped.matrices.shape[-1]).to(damped.matrices)
            return Units(damped.matrices + shift * identity)
        if isinstance(state, EigenState):
            values = torch.where(state.scale > 0, 1 / state.scale, 0.0)
            return EigenBlock(state.left, state.right, values)
        pair = averages.normalize()
        assert isinstance(pair, Pair)
        left, right = self._find_shifts(averages)
        return Pair(_add_shift(pair.output_factor, left), _add_shift(pair.input_factor, right))

    def rescale(self, state: RuleState, rows: Tensor, columns: Tensor) -> None:
        """Set R⁻¹ ← L R⁻¹L and C⁻¹ ← D C⁻¹D for L = diag l, D = diag r."""
        assert isinstance(state, (UnitState, InverseState, EigenState))
        state.rescale(rows, columns)


def refuse_combinations(estimation: Estimation, damping: Damping) -> None:
    """Raise for options of the natural gradient that do not go together."""
    metric = estimation.metric
    assert metric is not None
    if estimation.measures_spectrum and damping.needs_reference:
        raise PullbackError(
            "Corrected eigenvalues do not go with this damping",
            f"{damping!r} adds to the sides, and ekfac=True damps the corrected eigenvalues",
            "Give a number, or leave ekfac out",
        )
    if not metric.couples_samples:
        return
    if estimation.fisher == "empirical":
        raise PullbackError(
            'fisher="empirical" does not go with this metric',
            f"{metric!r} relates samples, and their own gradients are not the same covector",
            'Use fisher="mc" or "exact"',
        )
    if estimation.measures_spectrum:
        raise PullbackError(
            "ekfac=True does not go with this metric",
            f"{metric!r} relates samples, and the corrected eigenvalues are sums over single ones",
            "Leave ekfac out",
        )


def _add_shift(side: Tensor, by: Tensor) -> Tensor:
    """Return side + by for multiples of the identity (B,), or for sides."""
    if by.ndim == 1:
        return factor_matrix.add_identity(side, by)
    return factor_matrix.add(side, by)


def _compute_overlap(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """Return NewᵀOld of two bases; None is the identity, of a side that is a diagonal."""
    if new is None or old is None:
        return None
    return new.mT @ old


def _remove_bias(spectrum: Tensor, mass: Tensor) -> Tensor:
    """Return the running mean without the weight of its empty beginning."""
    tiny = torch.finfo(mass.dtype).tiny
    return spectrum / mass.clamp(min=tiny)[:, None, None]


def _invert_values(values: Tensor, damping: float) -> Tensor:
    """Return 1/(values + λ); without damping on the range only."""
    if damping == 0:
        keep = factor_matrix.is_above_round_off(values.flatten(1)).view_as(values)
        return torch.where(keep, 1 / values, 0.0)
    return 1 / (values + damping)
