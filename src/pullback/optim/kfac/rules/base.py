"""The contract of a rule: how gradients of equal blocks become directions.

A rule owns its state, a dataclass of tensors stacked over B blocks of one shape. It answers three
questions: what the state is at first (`init`), what averages of a layer's factors make of it
(`refresh`, expensive and rare), and what direction a gradient gives (`direction`, every step).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ...._core.flags import lerp_unless
from ....grams.kronecker import GramBlock, Pair, Units
from ....likelihoods import reduction_of
from ....maps.layers.moments import Sharing
from ....maps.roles import Role
from ....metrics import Metric
from ...checks import choose_metric
from ..factors.averages import divide_by_mass
from ..factors.block import BlockKind
from ..factors.damping import Damping


class Statistics(Enum):
    """What a rule reads of a layer."""

    NONE = "none"
    #: second moments of the layer's inputs, from the forward pass
    INPUTS = "inputs"
    #: those of the cotangents at its outputs too, from the backward pass
    INPUTS_AND_OUTPUTS = "inputs and outputs"


@dataclass(frozen=True)
class Estimation:
    """How factors are estimated.

    Attributes:
        fisher: "mc" draws targets from the model's predictions, "exact" takes the metric as it is
            (a reverse pass per output), "empirical" the loss's own gradient. By default the rule's:
            "empirical" with `Eigenbasis`, "mc" with all others.
        draws: targets per sample for "mc".
        ema: the weight of the past in the averages. By default the rule's `default_ema`.
        sharing: "expand" or "reduce", how positions that share a weight enter.
        max_factor: the longest side held as a matrix; longer ones are diagonals.
        batch_dim: the output's axis of samples.
        reduction: "mean" or "sum" over samples, of the loss and hence of F̂; by default that of the
            loss given as likelihood, else "mean".
        seed: of the draws, which follow from it and the number of the step.
        metric: the metric on outputs; by default that of ½‖·‖². Rules set it from a likelihood.
        joint: whether weight and bias of a layer share a block; by default they do with `Natural`.
        measures_spectrum: whether second moments of the gradient are measured in the bases that the
            rule names. Rules set it.
    """

    fisher: str | None = None
    draws: int = 1
    ema: float | None = None
    sharing: str = "expand"
    max_factor: int = 8192
    batch_dim: int = 0
    reduction: str | None = None
    seed: int = 0
    metric: Metric | None = None
    joint: bool | None = None
    measures_spectrum: bool = False

    def with_defaults(
        self,
        fisher: str | None,
        *,
        default_fisher: str,
        default_joint: bool = False,
        default_ema: float | None = None,
    ) -> Estimation:
        """Return the same with a rule's argument `fisher`, and its defaults for what is None."""
        if fisher is None:
            fisher = self.fisher
        if fisher is None:
            fisher = default_fisher
        joint = self.joint
        if joint is None:
            joint = default_joint
        ema = self.ema
        if ema is None:
            ema = default_ema
        return replace(self, fisher=fisher, joint=joint, ema=ema)

    def with_metric(self, likelihood: Any, metric: Any, **changes: Any) -> Estimation:
        """Return the same for the Fisher metric of a likelihood, or for a metric."""
        if metric is None and likelihood is None:
            metric = self.metric
        reduction = self.reduction or reduction_of(likelihood)
        return replace(
            self, metric=choose_metric(likelihood, metric), reduction=reduction, **changes
        )

    def make_sharing(self) -> Sharing:
        """Return how a layer's moments are formed: over which positions, and up to which size."""
        return Sharing(self.sharing == "reduce", self.batch_dim, self.max_factor)


@dataclass(frozen=True)
class Defaults:
    """The arguments of `KFAC` where none are given."""

    lr: float = 1e-3
    statistics_every: int = 10
    invert_every: int = 10


@dataclass(frozen=True)
class BlockShape:
    """The coordinates of blocks, and in which form their factors are held.

    `size` is (B, O, n) for weights, where n counts a bias that shares the block; (U, k) for k
    parameters of each of U units; and (1, N) for entries.
    """

    kind: BlockKind
    size: tuple[int, ...]
    #: whether the factor that acts on rows, or on columns, is a matrix and no diagonal
    dense_rows: bool
    dense_columns: bool
    dtype: torch.dtype
    device: torch.device
    #: row counts of the independent matrices that the weight holds one below the other
    split: tuple[int, ...] = ()
    #: the role of the weight, where it is known
    role: Role | None = None
    #: whether the weight's length has no effect, because all that it gives is normalized
    is_normalized: bool = False
    #: the root mean square of the weight's entries before its first step, where it is known
    initial_size: float | None = None

    def zeros(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros on the blocks' device."""
        return torch.zeros(size, dtype=dtype or self.dtype, device=self.device)


#: metadata of a field of a `RuleState` that `refresh` replaces, and that other processes receive
REFRESHED = {"refreshed": True}
#: the same for symmetric matrices, of which half is sent
SYMMETRIC = {"refreshed": True, "symmetric": True}


@dataclass
class RuleState:
    """What a rule keeps for B blocks of one shape: tensors whose first axis counts blocks.

    Where `is_rebuilt`, a refresh replaces all tensors and reads none of the old ones: it sees the
    state of the first of B blocks.
    """

    is_rebuilt: ClassVar[bool] = False

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, by name."""
        return {n: t for n, t in vars(self).items() if isinstance(t, Tensor)}

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a state with changed tensors."""
        return replace(self, **{n: change(t) for n, t in self.tensors().items()})

    @property
    def form(self) -> tuple[object, ...]:
        """What states must have in common to be stacked."""
        tensors = self.tensors()
        others = [(n, v) for n, v in vars(self).items() if n not in tensors]
        shapes = [(n, t.shape[1:], t.dtype, t.device) for n, t in tensors.items()]
        return type(self), *others, *shapes

    @classmethod
    def refreshed_names(cls) -> tuple[str, ...]:
        """Return the names of the tensors that `refresh` replaces."""
        return tuple(f.name for f in fields(cls) if f.metadata.get("refreshed"))

    @classmethod
    def symmetric_names(cls) -> tuple[str, ...]:
        """Return the names of those among them that are symmetric matrices."""
        return tuple(f.name for f in fields(cls) if f.metadata.get("symmetric"))


@dataclass(frozen=True)
class InputFactor:
    """The input factor (B, n, n) of a rule that reads `Statistics.INPUTS`, perhaps a diagonal."""

    input_factor: Tensor

    @property
    def output_factor(self) -> Tensor:
        """Raise: the output factor is not measured."""
        raise PullbackError(
            "The rule asks for a factor that is not measured",
            "it declares reads = Statistics.INPUTS and reads the output factor",
            "Declare reads = Statistics.INPUTS_AND_OUTPUTS",
        )


@dataclass(frozen=True)
class FactorAverages:
    """Averages of the factors of B blocks of one shape.

    `gram` holds the factors, `Pair(left, right)` of a weight: left (B, O, O) acts on its rows and
    right (B, n, n) on its columns, either perhaps a diagonal. They are yet to be divided by
    `mass`, one number for all blocks or one for each.
    """

    gram: Pair | Units | InputFactor
    mass: Tensor
    #: λ in use
    damping: float = 0.0
    #: whether the blocks have never been refreshed
    is_first: bool = False
    #: long-run averages, where the damping asks for them
    reference: Pair | Units | None = None

    @property
    def pair(self) -> Pair | InputFactor:
        """The two factors of a weight, or the one that the rule reads."""
        assert not isinstance(self.gram, Units)
        return self.gram

    def normalize(self) -> Any:
        """Return the averages over their mass: `Pair`, `InputFactor` or `Units`, as `gram` is."""
        if isinstance(self.gram, Units):
            return Units(divide_by_mass(self.gram.matrices, self.mass))
        if isinstance(self.gram, InputFactor):
            return InputFactor(divide_by_mass(self.gram.input_factor, self.mass))
        return Pair(
            divide_by_mass(self.gram.output_factor, self.mass),
            divide_by_mass(self.gram.input_factor, self.mass),
        )

    def select(self, i: int) -> FactorAverages:
        """Return the averages of one block of matrices; those of units stay whole."""
        mass = self.mass
        if mass.ndim:
            mass = mass[i : i + 1]
        return replace(
            self,
            gram=_select_block(self.gram, i),
            mass=mass,
            reference=_select_block(self.reference, i),
        )


def _select_block(gram: Any, i: int) -> Any:
    """Return one block of factors of matrices; anything else is returned as it is."""
    if isinstance(gram, InputFactor):
        return InputFactor(gram.input_factor[i : i + 1])
    if isinstance(gram, Pair):
        return Pair(gram.output_factor[i : i + 1], gram.input_factor[i : i + 1])
    return gram


@dataclass
class RefreshReport:
    """Which blocks of a stack could not be refreshed, and notes on blocks by their index."""

    failed: set[int] = field(default_factory=set)
    notes: dict[int, list[str]] = field(default_factory=dict)

    def note(self, block: int, text: str) -> None:
        """Add a note on a block, which `KFACInfo.notes` shows."""
        self.notes.setdefault(block, []).append(text)

    def fail(self, block: int, text: str) -> None:
        """Note why a block could not be refreshed; it keeps its last state."""
        self.failed.add(block)
        self.note(block, text)


@dataclass(frozen=True)
class StepContext:
    """What a direction may depend on beside gradient and state.

    Attributes:
        count: steps that the blocks have taken, this one included.
        options: of the param group, such as `betas`; schedulers change them.
        is_void: a float32 flag on the device, 1 where the step is to change nothing; None where it
            is known to count.
    """

    count: int
    options: Mapping[str, Any]
    is_void: Tensor | None = None

    def average(self, moment: Tensor, new: Tensor, weight: float) -> None:
        """Set moment ← moment + weight·(new − moment), unless the step is void."""
        lerp_unless(self.is_void, [moment], [new], weight)

    def average_all(self, moments: list[Tensor], news: list[Tensor], weight: float) -> None:
        """Set several moments as `average` does, by one kernel; they share dtype and device."""
        lerp_unless(self.is_void, moments, news, weight)

    def add_one(self, counts: Tensor) -> None:
        """Count the step, unless it is void."""
        if self.is_void is None:
            counts += 1
        else:
            counts += (1 - self.is_void).to(counts)


class Rule(ABC):
    """How a gradient becomes a direction.

    Attributes:
        name: how `coverage()` and saved states call it.
        reads: the statistics that it needs.
        defaults: of arguments of `KFAC` that are not given.
        is_elementwise: whether each entry's direction depends on that entry alone, so that pieces
            of a sharded parameter are treated where they are.
        squares_gradients: whether it squares gradients: a step is rejected beforehand where squares
            would overflow. For other rules directions are checked.
        distinguishes_sides: whether rows and columns are treated differently. Then the rows of a
            block are a layer's outputs, also where the layer holds its weight as (inputs, outputs);
            they are so for all rules that read inputs alone.
        takes_head: whether it is for the last linear map too.
        rate: the share of the learning rate that it takes.
        estimation: how its statistics are estimated.
        default_ema: the weight of the past in averages where `estimation` has none.
        others: the rule for parameters that it does not take, by default `AdamW()`.
        warmup: first steps that all take statistics and refresh; then gaps grow (`Schedule`).
        kl_clip: δ in η²·mᵀF̂m ≤ δ for the step ηm, None, or "auto" for 1e-3 unless a closure
            controls the step.
        damping: what is added to averages before they are inverted, if anything is; λ is part of
            the optimizer's schedule.
        cuda_graph: whether directions of small weights are replayed from a CUDA graph. `direction`
            is then to be the same operations in every step, which read of the step `is_void` alone
            and wait for nothing.
        can_rescale: whether its state can follow parameters whose units are rescaled (`rescale`).
        first_entries: entries of factors whose first refresh one step may do; None for all.
        refreshed_entries: entries of factors that are refreshed together: copies of more would
            take much memory.
        refreshes_together: whether `refresh_stacks` shares work between stacks.
        refreshes_ahead: whether `refresh_stacks` starts all work when it is called, and waits for
            the device when its reports are asked for; other stacks are then started meanwhile.
    """

    name: ClassVar[str] = ""
    reads: ClassVar[Statistics]
    defaults: ClassVar[Defaults] = Defaults()
    is_elementwise: ClassVar[bool] = False
    squares_gradients: ClassVar[bool] = True
    can_rescale: ClassVar[bool] = False
    distinguishes_sides: ClassVar[bool] = False
    cuda_graph: bool = False
    takes_head: bool = True
    rate: float = 1.0
    estimation: Estimation = Estimation()
    default_ema: ClassVar[float] = 0.95
    others: Rule | None = None
    warmup: int = 0
    kl_clip: float | str | None = None
    damping: Damping | None = None
    first_entries: ClassVar[int | None] = None
    refreshed_entries: ClassVar[int] = 2**27
    refreshes_together: ClassVar[bool] = False
    refreshes_ahead: ClassVar[bool] = False

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse a class whose declarations contradict each other."""
        reads = getattr(cls, "reads", None)
        if not isinstance(reads, Statistics):
            raise _make_class_error(
                cls, f"reads is {reads!r}", "Declare reads = Statistics.INPUTS, say"
            )
        if cls.is_elementwise and reads is not Statistics.NONE:
            why = "an elementwise rule sees single entries, which have no factors"
            raise _make_class_error(cls, why, "Declare reads = Statistics.NONE")
        if reads is Statistics.NONE and not cls.is_elementwise:
            why = "without statistics it is not known which parameters are matrices"
            raise _make_class_error(
                cls, why, "Declare is_elementwise = True, or reads = Statistics.INPUTS"
            )
        if not isinstance(cls.name, str) or not cls.name:
            raise _make_class_error(cls, "it has no name", "Declare name = '...'")
        return super().__new__(cls)

    def __init__(self, *, others: Rule | None = None, estimation: Estimation | None = None) -> None:
        """Set what every rule may be told; a rule with options of its own may call it."""
        if others is not None:
            self.others = others
        if estimation is not None:
            self.estimation = estimation

    @abstractmethod
    def init(self, shape: BlockShape) -> RuleState:
        """Return the state of blocks that have no averages yet."""

    @abstractmethod
    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        """Replace the `refreshed` tensors of a state; blocks that failed keep their last ones."""

    @abstractmethod
    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        """Return the direction of a gradient, and advance moments.

        The gradient has the blocks' size: (B, O, n), of units (U, k), of entries (1, N). It may be
        `p.grad` itself, so it is not to be changed in place.
        """

    def make_state(self, shape: BlockShape) -> RuleState:
        """Return the state that `init` gives; raise where it cannot be stacked with others."""
        state = self.init(shape)
        if not isinstance(state, RuleState):
            why = f"init returned {type(state).__name__}"
            raise _make_class_error(type(self), why, "Return a dataclass that extends RuleState")
        names = {f.name for f in fields(state)}
        for name, value in vars(state).items():
            if name not in names:
                why = f"{name} of its state is no field of a dataclass"
                remedy = f"Decorate {type(state).__name__} with @dataclass, and declare the field"
                raise _make_class_error(type(self), why, remedy)
            if isinstance(value, Tensor):
                if value.shape[:1] != shape.size[:1]:
                    counted = f"{shape.size[0]} blocks"
                    why = f"{name} of its state has shape {tuple(value.shape)} for {counted}"
                    remedy = "Let the first axis of every tensor count blocks, shape.size[0]"
                    raise _make_class_error(type(self), why, remedy)
            elif not _is_hashable(value):
                why = f"{name} of its state is a {type(value).__name__}"
                remedy = "Use a field for each tensor, and a tuple in the place of a list"
                raise _make_class_error(type(self), why, remedy)
        return state

    def find_ema(self) -> float:
        """Return the weight of the past in averages of factors."""
        if self.estimation.ema is None:
            return self.default_ema
        return self.estimation.ema

    # --- what may be overridden -------------------------------------------------------------------

    def default_arguments(self) -> Defaults:
        """Return the arguments of `KFAC` where none are given: by default those of the class."""
        return self.defaults

    def accepts(self, role: Role) -> bool:
        """Return whether parameters of this role follow the rule.

        By default matrices, and all parameters where the rule is elementwise.
        """
        if self.is_elementwise:
            return True
        if role is Role.HEAD:
            return self.takes_head
        return role in (Role.MATRIX, Role.CONVOLUTION, Role.EXPERTS)

    def fits(self, shape: BlockShape) -> bool:
        """Return whether blocks of this shape have the factors that the rule reads."""
        if self.is_elementwise:
            return True
        if self.reads is Statistics.INPUTS:
            return shape.dense_columns
        return shape.dense_rows and shape.dense_columns

    def direction_with_bias(
        self, weight: Tensor, bias: Tensor, state: RuleState, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Return `direction` of weights (B, O, I) with biases (B, O) as last columns, as two parts.

        A rule that can do without the copies overrides this.
        """
        direction = self.direction(torch.cat([weight, bias[..., None]], 2), state, step)
        return direction[..., :-1].contiguous(), direction[..., -1]

    def directions(
        self, gradients: Sequence[Tensor], states: Sequence[RuleState], step: StepContext
    ) -> list[Tensor]:
        """Return `direction` of several small stacks of one dtype and device.

        A rule that does with one operation what stacks have in common overrides this.
        """
        pairs = zip(gradients, states, strict=True)
        return [self.direction(gradient, state, step) for gradient, state in pairs]

    def refresh_stacks(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> Iterator[RefreshReport]:
        """Refresh several stacks, and yield the report of each in turn.

        The caller copies a stack's state before it asks for the next. A rule that shares work
        between stacks overrides this.
        """
        for stack_averages, state in zip(averages, states, strict=True):
            report = self.refresh(stack_averages, state)
            if not isinstance(report, RefreshReport):
                why = f"refresh returned {type(report).__name__}"
                raise _make_class_error(type(self), why, "Return a RefreshReport()")
            yield report

    @property
    def refreshes_on_device(self) -> bool:
        """Whether there is a `refresh_on_device`: steps with a refresh then need no wait at all.

        That is more than `refreshes_ahead`, which waits once, later in the same step.
        """
        return False

    def refresh_on_device(
        self, averages: Sequence[FactorAverages], states: Sequence[RuleState]
    ) -> list[Tensor]:
        """Refresh several stacks without a wait; return flags of the blocks that succeeded, (B,).

        Refreshed tensors keep their shapes. The caller keeps the last state of a block that failed,
        and refreshes it again by `refresh_stacks` at the next step, when its flag is known.
        """
        raise NotImplementedError

    def convert(self, state: RuleState, shape: BlockShape) -> RuleState:
        """Return a state on the device and in the dtype of `shape`."""
        dtypes = {name: t.dtype for name, t in self.init(shape).tensors().items()}
        tensors = {n: t.to(shape.device, dtypes[n]) for n, t in state.tensors().items()}
        return replace(state, **tensors)

    def group_options(self) -> dict[str, Any]:
        """Return the options that param groups have for this rule."""
        return {}

    def gram(self, averages: FactorAverages, state: RuleState) -> GramBlock:
        """Return F̂ of the blocks, without damping."""
        return averages.normalize()

    def damped_gram(self, averages: FactorAverages, state: RuleState) -> GramBlock:
        """Return the metric F of which directions are F⁻¹g, for the KL clip."""
        return self.gram(averages, state)

    def measured_bases(self, state: RuleState) -> tuple[Tensor | None, Tensor | None] | None:
        """Return the bases in which second moments of the gradient are measured, if any are."""
        return None

    def observe(self, spectrum: Tensor, state: RuleState, damping: float) -> None:
        """Take up second moments of the gradient in `measured_bases`."""
        raise NotImplementedError(type(self).__name__)

    def rescale(self, state: RuleState, rows: Tensor, columns: Tensor) -> None:
        """Let a state follow weights that became l_o W_oi r_i, with l (B, O) and r (B, n).

        Units have the scales of their entries, (U, k), as rows.
        """
        raise NotImplementedError(type(self).__name__)

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v!r}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({options})"


def _is_hashable(value: Any) -> bool:
    """Return True if a value can be part of a state's form: no list, nor a tuple with one."""
    try:
        hash(value)
    except TypeError:
        return False
    return True


class StateCheck:
    """What a state holds before a rule's method is called, to refuse changes that would be lost.

    It finds mistakes in rules that users write. The state that `refresh` and `direction` get is a
    stack of the blocks' states. After a refresh the `REFRESHED` tensors are copied to the blocks,
    and sent to other processes. Between refreshes the blocks' tensors are views of the stack's:
    what is written into them is kept.
    """

    def __init__(self, rule: Rule, state: RuleState) -> None:
        self._rule = type(rule)
        self._state = state
        self._values = dict(vars(state))
        self._versions = {name: t._version for name, t in state.tensors().items()}

    def refuse_undeclared_changes(self, blocks: int) -> None:
        """Raise where `refresh` changed a tensor that is not `REFRESHED`, or left blocks out."""
        refreshed = self._state.refreshed_names()
        for name, value in vars(self._state).items():
            if name in refreshed:
                self._refuse_other_length(name, value, blocks)
            elif self._is_replaced(name) or self._is_written(name):
                why = f"refresh changed {name} of the state, which is not declared as refreshed"
                remedy = f"Declare {name}: Tensor = field(metadata=REFRESHED)"
                raise _make_class_error(self._rule, why, remedy)

    def refuse_other_shapes(self) -> None:
        """Raise where `refresh_on_device` changed a shape: a block that fails keeps its last state.

        Whether it fails is not known when the states are copied.
        """
        for name in self._state.refreshed_names():
            old = self._values.get(name)
            new = getattr(self._state, name)
            if isinstance(old, Tensor) and new.shape != old.shape:
                shapes = f"{tuple(old.shape)} to {tuple(new.shape)}"
                why = f"refresh_on_device changed the shape of {name} from {shapes}"
                remedy = "Keep the shape, or let refreshes_on_device be False"
                raise _make_class_error(self._rule, why, remedy)

    def refuse_replaced_tensors(self) -> None:
        """Raise where `direction` put another tensor in the place of one of the state's."""
        for name in vars(self._state):
            if self._is_replaced(name):
                why = f"direction replaced {name} of the state"
                remedy = f"Write into the tensor, such as by step.average(state.{name}, new, 0.1)"
                raise _make_class_error(self._rule, why, remedy)

    def _is_replaced(self, name: str) -> bool:
        return name not in self._values or getattr(self._state, name) is not self._values[name]

    def _is_written(self, name: str) -> bool:
        return name in self._versions and self._values[name]._version != self._versions[name]

    def _refuse_other_length(self, name: str, value: Any, blocks: int) -> None:
        """Raise where the first axis of a refreshed tensor does not count the blocks."""
        if self._state.is_rebuilt or not isinstance(value, Tensor) or len(value) == blocks:
            return
        why = f"refresh left {name} with shape {tuple(value.shape)} for {blocks} blocks"
        raise _make_class_error(self._rule, why, "Let the first axis count blocks")


def make_direction_error(rule: Rule, direction: Any, gradient: Tensor) -> PullbackError:
    """Return the error for a direction that does not have its gradient's shape."""
    result = type(direction).__name__
    if isinstance(direction, Tensor):
        result = f"shape {tuple(direction.shape)}"
    why = f"direction returned {result} for a gradient of shape {tuple(gradient.shape)}"
    return _make_class_error(type(rule), why, "Return one direction of the gradient's shape")


def _make_class_error(cls: type, why: str, remedy: str) -> PullbackError:
    return PullbackError(f"The rule {cls.__name__} is not usable", why, remedy)
