"""Spectral descent: the polar factor of the whitened momentum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf, sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...._core.errors import PullbackError, describe_value
from ....grams.kronecker import factor_matrix
from ....grams.kronecker.roots import (
    RootsWithFlags,
    half_precision,
    inverse_root,
    inverse_roots,
    polar,
    scale_to_half,
)
from ....maps.roles import Role
from ..arguments import check
from .adamw import AdamW
from .base import (
    SYMMETRIC,
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


@dataclass(frozen=True)
class Thresholds:
    """Numbers that the spectral rule was tuned with."""

    #: root mean square of a step's entries over learning rate and agreement. Of noise alone, whose
    #: Nesterov momentum of 0.9 has 0.27 of its size, steps have entries of 0.2, as Adam's do, so
    #: that its learning rates carry over.
    step_size: float = 0.75
    #: the same where agreement is not followed
    even_size: float = 0.2
    #: a weight was meant to be large if its first entries are so many times as large as torch would
    #: make them. Orthogonal, Xavier's and Kaiming's by inputs are below 3.
    unusual_size: float = 4.0
    #: and so many times as large as Kaiming's by outputs, unless it is the head
    unusual_size_by_outputs: float = 1.5
    #: and above this: transformers of any width begin with entries of 0.02
    least_unusual_size: float = 0.1
    #: with fewer inputs steps of a matrix are longer; the width at which the rate was chosen
    reference_width: int = 384
    #: by how much at most: layers of 32 to 96 inputs learned better at up to three times the step
    #: than at twice (`bench small-tasks`)
    most_growth: float = 3.0
    #: matrices whose shorter side is at least as long start gently: at 1,024 this lowered losses of
    #: text by 0.03 and more, at 768 and 384 it cost 0.001 to 0.004
    gentle_width: int = 1024
    #: rows are divided by their length, and by this at least: rows without a gradient have none
    least_length: float = 1e-3
    #: below this damping roots need products with 22 bits
    coarse_damping: float = 0.05
    #: what damping is raised by where a root did not converge
    damping_growth: float = 10.0


_THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class Filters:
    """Steps of the filters of convolutions whose outputs are normalized.

    The length of such a filter has no effect, so steps need not be short: a step that is too long
    makes the filter longer, and the next ones turn it less. All steps have one size, whether
    gradients agree or not.

    Attributes:
        momentum: the weight of the past in M.
        size: the root mean square of a step's entries over the learning rate.
    """

    momentum: float = 0.6
    size: float = 2.0

    def __post_init__(self) -> None:
        check(momentum=self.momentum, size=self.size)


#: the defaults
FILTERS = Filters()


def _check_filters(filters: Any) -> None:
    if filters is not None and not isinstance(filters, Filters):
        raise PullbackError(
            "filters= is not usable",
            f"got {describe_value(filters)}",
            "Use Filters(momentum=..., size=...), or None",
        )


@dataclass(frozen=True)
class CheckedRoots:
    """Inverse roots of one stack of factors, whose flags were read from the device.

    Attributes:
        roots: of the factors of B blocks, (B, n, n), or (B, n) of diagonals.
        failed_blocks: the numbers of the blocks that have none.
    """

    roots: Tensor
    failed_blocks: Sequence[int]


@dataclass
class SpectralState(RuleState):
    """The inverse root of the input factor, and moments of the gradient."""

    #: (C + λ tr(C)/n)^(-½) up to a number, (B, n, n), or (B, n) of a diagonal; zeros of a diagonal
    #: where nothing is whitened
    root: Tensor = field(metadata=SYMMETRIC)
    #: (B, O, n)
    momentum: Tensor
    #: running mean of the squares of each row's entries, from zero on, (B, O, 1); zeros without
    #: agreement
    square: Tensor
    #: by how much steps of each row are longer than usual, (B, O, 1)
    growth: Tensor
    split: tuple[int, ...] = ()
    #: of blocks whose steps are those of filters
    filters: Filters | None = None
    #: gradients in the mean of squares, (B, 1, 1), of blocks that start gently
    count: Tensor | None = None


class Spectral(Rule):
    r"""All singular directions of the whitened momentum alike:

        X = M (C + λ tr(C)/n)^(-½),    U = polar(X),    Δ = D U,

    with Nesterov's momentum M of the gradient and C = mean aaᵀ of the inputs. C comes from the
    forward pass: there is no second backward pass, and no output factor. A weight that holds
    several matrices one below the other, such as fused queries, keys and values, has the directions
    of these matrices.

    D sets the length of steps. All rows of a matrix have the same: the root mean square of their
    entries is 0.75 times that of M over that of the gradients, whose squares are averaged over
    steps. So steps are long where gradients agree, as Adam's are. Those of noise alone have entries
    of 0.2 on average at momentum 0.9, and larger ones at less of it: AdamW's learning rates carry
    over. Some steps are longer or shorter than that:

    - With n < 384 inputs they are √(384/n) times as long, at most three times, because an output
      adds up fewer of them (Yang et al., 2023, arXiv:2310.17813); filters of convolutions are not.
    - Weights that begin larger than usual initializations make them have longer ones in proportion.
    - Matrices with 1,024 rows and columns or more start gently. The mean squares of gradients are
      corrected for their start at zero, as Adam's are, and steps have the factor ‖U‖_F/√min(O, n).
      That is 1 but where momentum has few directions, as it has early in training and with batches
      of few samples.
    - Filters of convolutions before a normalization have steps of their own, `Filters`.

    Relatives: Muon (Jordan et al., 2024) is polar(M) alone. NorMuon (Li et al., 2025,
    arXiv:2510.05491) divides its rows by a running root mean square; here their length is set at
    each step. Newton–Muon (Du and Su, 2026, arXiv:2604.01472) multiplies gradients by the inverse
    of C before they are averaged; here it is the inverse root, after momentum.

    Args:
        momentum: the weight of the past in M.
        adapt: the weight of the past in the mean squares of the gradient.
        damping: λ.
        whitening: whether M is whitened. Without it X = M, and statistics, by default at every
            hundredth step, only show which weights are matrices.
        agreement: whether steps are longer where gradients agree. Without it their entries are 0.2
            on average at every step, so that the schedule alone sets their length.
        head: whether the output layer follows too.
        filters: steps of convolutions whose outputs are normalized at the first step; with None,
            for batch norms that are frozen later, they have the steps of other convolutions.
        gentle_start: whether all matrices, or none, start gently; by default wide ones do. It has
            no effect on steps of `Filters` and without `agreement`.
        warmup: w, the first steps that all take statistics and refresh. After them gaps grow as
            steps/w until they are the usual ones. A w of 10 adds about 40 refreshes.
        cuda_graph: whether directions are replayed from a CUDA graph, of weights of one shape that
            have at most 4M entries together; by default they are, but not those of a subclass. On a
            CPU there is no graph, and directions are the same.
        estimation: how C is estimated.
        others: the rule for all other parameters.
    """

    name: ClassVar = "spectral"
    reads: ClassVar = Statistics.INPUTS
    defaults: ClassVar = Defaults(lr=6e-3, statistics_every=10, invert_every=20)
    default_ema: ClassVar = 0.8
    refreshes_together: ClassVar = True
    refreshes_ahead: ClassVar = True
    refreshed_entries: ClassVar = 2**25
    #: declared by a class whose `direction` may be captured in a CUDA graph; not inherited
    has_fixed_operations: ClassVar = True
    #: declared by a class whose `list_factors` gives one matrix for each of a stack's, and whose
    #: `set_roots` replaces tensors by others of their shape; not inherited
    has_fixed_refresh: ClassVar = True

    def __init__(
        self,
        momentum: float = 0.9,
        adapt: float = 0.95,
        *,
        damping: float = 0.2,
        whitening: bool = True,
        agreement: bool = True,
        head: bool = False,
        filters: Filters | None = FILTERS,
        gentle_start: bool | None = None,
        warmup: int = 0,
        cuda_graph: bool | None = None,
        estimation: Estimation | None = None,
        others: Rule | None = None,
    ) -> None:
        check(
            momentum=momentum, adapt=adapt, damping=damping, whitening=whitening,
            agreement=agreement, head=head, gentle_start=gentle_start, warmup=warmup,
            cuda_graph=cuda_graph, estimation=estimation,
        )  # fmt: skip
        _check_filters(filters)
        self.momentum = momentum
        self.adapt = adapt
        self.relative_damping = damping
        self.whitening = whitening
        self.agreement = agreement
        self.takes_head = head
        self.filters = filters
        self.gentle_start = gentle_start
        self.warmup = warmup
        if cuda_graph is None:
            cuda_graph = "has_fixed_operations" in vars(type(self))
        self.cuda_graph = cuda_graph
        if estimation is None:
            estimation = Estimation()
        if others is None:
            others = AdamW(rate=0.5)
        self.estimation = estimation.with_defaults(
            None, default_fisher="mc", default_ema=self.default_ema
        )
        self.others = others

    def init(self, shape: BlockShape) -> SpectralState:
        blocks, rows, columns = shape.size
        root = shape.zeros(blocks, columns)
        if self.whitening and shape.dense_columns:
            root = shape.zeros(blocks, columns, columns, dtype=half_precision(root))
        filters = None
        if shape.role is Role.CONVOLUTION and shape.is_normalized:
            filters = self.filters
        growth = 1.0
        count = None
        if self.agreement and filters is None:
            growth = _find_growth(shape)
            if self._starts_gently(shape):
                count = shape.zeros(blocks, 1, 1)
        return SpectralState(
            root=root,
            momentum=shape.zeros(*shape.size),
            square=shape.zeros(blocks, rows, 1),
            growth=shape.zeros(blocks, rows, 1) + growth,
            split=shape.split,
            filters=filters,
            count=count,
        )

    def _starts_gently(self, shape: BlockShape) -> bool:
        """Return True if the matrices of a weight are wide, or if all start gently."""
        if self.gentle_start is not None:
            return self.gentle_start
        _, rows, columns = shape.size
        narrowest = min(rows, columns, *shape.split)
        return narrowest >= _THRESHOLDS.gentle_width

    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        """Find the inverse roots; with more bits and more damping where that fails."""
        (report,) = self._start_refresh([averages], [state])
        return report

    def refresh_stacks(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> Iterator[RefreshReport]:
        """Refresh all stacks; roots of one size are found together, by one wait for the device."""
        if type(self).refresh is not Spectral.refresh:  # a subclass has its own, stack by stack
            return super().refresh_stacks(averages, states)
        return self._start_refresh(averages, states)

    def list_factors(self, averages: FactorAverages, state: SpectralState) -> list[Tensor]:
        """Return the factors whose inverse roots the state holds."""
        return [averages.pair.input_factor]

    def set_roots(self, state: SpectralState, roots: Sequence[Tensor]) -> None:
        """Store the inverse roots of these factors in the state."""
        state.root = roots[0].to(state.root.dtype)

    @property
    def refreshes_on_device(self) -> bool:
        """Whether the host need not wait: the refresh of a subclass may."""
        return self.whitening and "has_fixed_refresh" in vars(type(self))

    def refresh_on_device(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> list[Tensor]:
        """Set the inverse roots of all states, also those that did not converge; return flags.

        Of float64 on a GPU they come from an `eigh`, which waits.
        """
        spectral_states = [state for state in states if isinstance(state, SpectralState)]
        factors_of_stacks = self._list_all_factors(averages, spectral_states)
        pending = start_roots(list(chain(*factors_of_stacks)), self.relative_damping)
        remaining_stacks = iter(pending.stacks)
        flags_of_stacks = []
        for state, factors in zip(spectral_states, factors_of_stacks, strict=True):
            stacks = list(islice(remaining_stacks, len(factors)))
            self.set_roots(state, [stack.roots for stack in stacks])
            flags_of_stacks.append(torch.stack([stack.has_converged for stack in stacks]).all(0))
        return flags_of_stacks

    def _list_all_factors(
        self, averages: Sequence[FactorAverages], states: Sequence[SpectralState]
    ) -> list[list[Tensor]]:
        """Return the factors of each stack, in the order in which `set_roots` takes their roots."""
        pairs = zip(averages, states, strict=True)
        return [self.list_factors(stack, state) for stack, state in pairs]

    def _start_refresh(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> Iterator[RefreshReport]:
        """Let the device find the roots of all states; the reports wait for it and set them."""
        if not self.whitening:
            return iter([RefreshReport() for _ in states])
        spectral_states = [state for state in states if isinstance(state, SpectralState)]
        factors_of_stacks = self._list_all_factors(averages, spectral_states)
        pending = start_roots(list(chain(*factors_of_stacks)), self.relative_damping)
        counts = [len(factors) for factors in factors_of_stacks]
        return self._finish_refresh(pending, spectral_states, counts)

    def _finish_refresh(
        self, pending: PendingRoots, states: Sequence[SpectralState], counts: Sequence[int]
    ) -> Iterator[RefreshReport]:
        """Set the roots of all states, so many of each, and yield which blocks failed."""
        checked = iter(pending.finish())
        for state, count in zip(states, counts, strict=True):
            checked_roots = list(islice(checked, count))
            self.set_roots(state, [stack.roots for stack in checked_roots])
            report = RefreshReport()
            for block in sorted({*chain(*(stack.failed_blocks for stack in checked_roots))}):
                report.fail(block, "its root did not converge")
            yield report

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        assert isinstance(state, SpectralState)
        filters = state.filters
        momentum = self.momentum
        if filters is not None:
            momentum = filters.momentum
        step.average(state.momentum, gradient, 1 - momentum)
        nesterov = torch.lerp(gradient, state.momentum, momentum)
        squares = _compute_mean_squares(nesterov)
        whitened = nesterov
        if self.whitening:
            whitened = self.whiten(nesterov, squares, state)
        mean_squares = state.square
        if self.agreement and filters is None:
            mean_squares = self.average_squares(_compute_mean_squares(gradient), state, step)
        matrices = zip(
            separate(whitened, state.split),
            separate(squares, state.split),
            separate(mean_squares, state.split),
            separate(state.growth, state.split),
            strict=True,
        )
        directions = []
        for matrix, squares_of_rows, mean_squares_of_rows, growth in matrices:
            polar_factor = polar(matrix)
            lengths = torch.linalg.vector_norm(
                polar_factor, dim=2, keepdim=True, dtype=gradient.dtype
            )
            if filters is not None:
                size = filters.size
            else:
                size = growth * self.find_step_size(squares_of_rows, mean_squares_of_rows)
            if state.count is not None:
                size = size * self.find_fullness(lengths, matrix.shape)
            directions.append(_make_even(polar_factor, lengths, size))
        return join(directions, gradient.shape)

    def average_squares(self, squares: Tensor, state: SpectralState, step: StepContext) -> Tensor:
        """Take up the mean squares of a gradient's rows, and return their running means.

        These begin at zero, which is corrected as in Adam where the start is gentle.
        """
        step.average(state.square, squares, 1 - self.adapt)
        if state.count is None:
            return state.square
        step.add_one(state.count)
        weight = 1 - self.adapt**state.count
        return state.square / weight.clamp(min=torch.finfo(weight.dtype).tiny)

    def find_step_size(self, squares: Tensor, mean_squares: Tensor) -> Tensor | float:
        """Return the root mean square of a step's entries over the learning rate, (B, 1, 1).

        Args:
            squares: the mean squares of the rows of Nesterov's momentum, (B, O, 1).
            mean_squares: running means of those of the gradient's rows, (B, O, 1).
        """
        if not self.agreement:
            return _THRESHOLDS.even_size
        noise = mean_squares.mean(1, keepdim=True).clamp(min=torch.finfo(squares.dtype).tiny)
        agreement = (squares.mean(1, keepdim=True) / noise).sqrt()
        return _THRESHOLDS.step_size * agreement

    def find_fullness(self, lengths: Tensor, shape: Sequence[int]) -> Tensor | float:
        """Return ‖U‖_F/√min(O, n) for polar factors U of this shape, (B, 1, 1).

        It is 1, by and large, but where momentum has few directions: early in training, or with
        batches of few samples.

        Args:
            lengths: of the rows of U, (B, O, 1).
            shape: B, O and n.
        """
        _, rows, columns = shape
        return (lengths.square().sum(1, keepdim=True) / min(rows, columns)).sqrt()

    def default_arguments(self) -> Defaults:
        if self.whitening:
            return self.defaults
        return replace(self.defaults, statistics_every=100, invert_every=100)

    def fits(self, shape: BlockShape) -> bool:
        return not self.whitening or super().fits(shape)

    def whiten(self, momentum: Tensor, squares: Tensor, state: SpectralState) -> Tensor:
        """Return M (C + λ tr(C)/n)^(-½), up to a number.

        `squares` are the mean squares of the rows of M, (B, O, 1), which bring M into the range of
        half precision.
        """
        if factor_matrix.is_diagonal(state.root):
            return momentum * state.root[:, None]
        if state.root.dtype == momentum.dtype:
            return torch.bmm(momentum, state.root)
        length = (momentum.shape[2] * squares.sum(1, keepdim=True)).sqrt()
        return torch.bmm(scale_to_half(momentum, length), state.root)


def _compute_mean_squares(x: Tensor) -> Tensor:
    """Return the mean squares of the rows of X, (B, O, 1), in one pass over X."""
    return torch.linalg.vector_norm(x, dim=2, keepdim=True).square_().div_(x.shape[2])


@dataclass(frozen=True)
class PendingRoots:
    """Inverse roots of several stacks, which the device may still be at work on."""

    factors: Sequence[Tensor]
    stacks: Sequence[RootsWithFlags]
    damping: float

    def finish(self) -> list[CheckedRoots]:
        """Return the roots, with more bits and damping where that fails.

        The device is waited for once.
        """
        flags = torch.cat([stack.has_converged for stack in self.stacks]).tolist()
        results = []
        start = 0
        for factor, stack in zip(self.factors, self.stacks, strict=True):
            stop = start + len(factor)
            failed = []
            for block, has_converged in enumerate(flags[start:stop]):
                if has_converged:
                    continue
                root = _find_fine_root(factor[block : block + 1], self.damping)
                if root is None:
                    failed.append(block)
                else:
                    stack.roots[block] = root[0]
            results.append(CheckedRoots(stack.roots, failed))
            start = stop
        return results


def start_roots(factors: Sequence[Tensor], damping: float) -> PendingRoots:
    """Let the device find the inverse roots of stacks of factors."""
    is_coarse = damping >= _THRESHOLDS.coarse_damping
    return PendingRoots(factors, inverse_roots(factors, damping, fine=not is_coarse), damping)


def _find_fine_root(factor: Tensor, damping: float) -> Tensor | None:
    """Return the inverse root of one factor with 22 bits, perhaps with more damping, or None."""
    for more_damping in (damping, _THRESHOLDS.damping_growth * damping):
        root, has_converged = inverse_root(factor, more_damping, fine=True)
        if bool(has_converged):
            return root
    return None


def separate(x: Tensor, split: tuple[int, ...]) -> Sequence[Tensor]:
    """Return the matrices that lie one below the other in X, (B, O, n).

    Those of one size are blocks of one tensor.
    """
    if not split:
        return [x]
    if len({*split}) == 1:
        return [x.reshape(len(x) * len(split), split[0], x.shape[2])]
    return x.split(split, dim=1)


def join(matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return what `separate` took apart, in this shape."""
    if len(matrices) == 1:
        return matrices[0].reshape(shape)
    return torch.cat(list(matrices), dim=1)


def _find_growth(shape: BlockShape) -> float:
    """Return by how much steps are longer: for few inputs, and for a weight made large."""
    columns = shape.size[2]
    growth = 1.0
    if shape.role is not Role.CONVOLUTION:
        growth = sqrt(_THRESHOLDS.reference_width / columns)
        growth = min(max(growth, 1.0), _THRESHOLDS.most_growth)
    if shape.initial_size is not None and _is_unusual(shape, shape.initial_size):
        growth *= shape.initial_size / _find_default_size(columns)
    return growth


def _find_default_size(columns: int) -> float:
    """Return the root mean square of the entries that torch's initialization makes."""
    return 1 / sqrt(3 * columns)


def _is_unusual(shape: BlockShape, size: float) -> bool:
    """Return True if no common initialization makes entries of this size."""
    _, rows, columns = shape.size
    usual_sizes = [
        _THRESHOLDS.least_unusual_size,
        _THRESHOLDS.unusual_size * _find_default_size(columns),
    ]
    if shape.role is not Role.HEAD:
        usual_sizes.append(_THRESHOLDS.unusual_size_by_outputs * sqrt(2 / rows))
    return max(usual_sizes) < size < inf


def _make_even(polar_factor: Tensor, lengths: Tensor, size: Tensor | float) -> Tensor:
    """Return U with rows of one length, and entries of this root mean square.

    `lengths` are those of the rows of U, (B, O, 1).
    """
    columns = polar_factor.shape[2]
    scale = size * sqrt(columns) / lengths.clamp(min=_THRESHOLDS.least_length)
    return polar_factor * scale
