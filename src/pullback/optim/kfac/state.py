"""What K-FAC knows while it trains: averages, the states of blocks, and the schedule."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._core.flags import Guard, are_finite_in_place
from ..._core.shards import ModelParameters, get_local_piece
from ...grams.kronecker.packed_matrix import FactorMatrix, get_entries, unpack
from .assignment import Assignment, make_entries_shape
from .block_stack import Tensors
from .factors.averages import Average, ema_update
from .factors.block import (
    SPECTRUM,
    Bases,
    BlockKey,
    BlockKind,
    FactorKey,
    Factors,
    from_block,
    to_block,
)
from .factors.damping import refuse_reference
from .replicas import Replicas, placeholder
from .rules import FactorAverages, Rule, StepContext
from .schedule import Schedule
from .stacks import BlockStates, DeferredRefresh

#: weights of the past below it would keep the round-off of what is forgotten
_LEAST_EMA = 0.5
#: the means of one statistics step
BlockMeans = Mapping[BlockKey, dict[FactorKey, FactorMatrix]]


@dataclass
class KFACState:
    """Averages and states of all blocks, and where the schedule stands.

    Attributes:
        assignment: which rule every parameter follows.
        replicas: the processes that share the work.
        schedule: steps, statistics and λ.
        states: of blocks, in the form in which rules apply them.
        averages: of the blocks' factors.
        measured_keys: blocks that have statistics; the others are expected.
        reserved: expected blocks whose tensors show their shapes and take no memory yet.
    """

    assignment: Assignment
    replicas: Replicas
    schedule: Schedule
    states: BlockStates = field(default_factory=BlockStates)
    averages: dict[BlockKey, Average] = field(default_factory=dict)
    measured_keys: set[BlockKey] = field(default_factory=set)
    reserved: set[BlockKey] = field(default_factory=set)
    #: whether all blocks are known from the table of a checkpoint alone, until a load fills them
    awaits_load: bool = False
    #: device and dtype of the model's parameters at the last step
    devices_and_dtypes: list[tuple[torch.device, torch.dtype]] = field(default_factory=list)
    #: a refresh for which the host has not waited yet
    deferred_refresh: DeferredRefresh | None = None
    #: the weight of the past in averages
    ema: float = field(init=False)

    def __post_init__(self) -> None:
        self.ema = self.assignment.rule.find_ema()

    @property
    def rule(self) -> Rule:
        """The rule of blocks that have statistics."""
        return self.assignment.rule

    @property
    def entry_names(self) -> set[str]:
        """The parameters that follow the rule for others, entry by entry."""
        return self.states.entry_names

    @property
    def references(self) -> Any:
        """Long-run averages by block, as the user gave them; None where the damping reads none.

        Without any from the user they are {}: blocks then read the means of all statistics.
        """
        damping = self.rule.damping
        if damping is None or not damping.needs_reference:
            return None
        return damping.reference or {}

    # --- room -------------------------------------------------------------------------------------

    def allocate(self, key: BlockKey, factors: Factors) -> None:
        """Make room for a block of these factors' shapes."""
        self.averages[key] = Average.empty(factors, has_mean=self.references is not None)
        shape = self.assignment.shape_of(key, factors)
        self.states.allocate(key, self.rule, shape, self.schedule.step)
        self.measured_keys.discard(key)
        self.reserved.discard(key)

    def allocate_entries(self, name: str, p: Tensor) -> BlockKey:
        """Make room for a parameter that follows the rule for others."""
        key = BlockKey(BlockKind.ENTRIES, (name,))
        others = self.assignment.others
        assert others is not None
        self.states.allocate(key, others, make_entries_shape(p), self.schedule.step)
        return key

    def reserve_block(self, key: BlockKey, factors: Factors) -> None:
        """Reserve a block of these shapes; memory is taken with its first statistics."""
        self.allocate(key, factors)
        self.averages[key].replace_tensors(placeholder)
        self.states.replace_tensors(key, placeholder)
        self.reserved.add(key)

    def make_room(self, means: BlockMeans) -> bool:
        """Make room for statistics whose blocks are new or have other shapes; say if it did."""
        blocks_of = _keys_by_name(self.averages)
        has_changed = False
        for key, factors in means.items():
            for old in {blocks_of[n] for n in key.names if blocks_of.get(n, key) != key}:
                # a bias was frozen, say, and the weight is by itself now
                has_changed |= self.drop(old)
            has_changed |= self._fit_block(key, factors)
        return has_changed

    def _fit_block(self, key: BlockKey, factors: Factors) -> bool:
        """Make room for the statistics of one block; return False if there was room already."""
        sides = {f: t for f, t in factors.items() if f != SPECTRUM}
        average = self.averages.get(key)
        if average is not None and average.fits(sides) and key not in self.reserved:
            return False
        if average is not None and key in self.measured_keys and average.has_shapes(sides):
            self.move_block(key, get_entries(next(iter(sides.values()))))
        else:
            self.allocate(key, sides)
        return True

    def move_block(self, key: BlockKey, template: Tensor) -> None:
        """Bring a block, with all that is in it, to the template's device and dtype."""
        self.averages[key].replace_tensors(lambda t: t.to(template))
        self.states.convert(key, template)

    def move_to_parameters(self, params: Tensors) -> None:
        """Bring blocks to the devices of their parameters, where the model was moved."""
        devices_and_dtypes = [(p.device, p.dtype) for p in params.values()]
        if devices_and_dtypes == self.devices_and_dtypes:
            return
        self.devices_and_dtypes = devices_and_dtypes
        self._move_entries(params)
        for key in self.measured_keys:
            mass = self.averages[key].mass
            device = params[key.names[0]].device
            if mass.device != device:
                self.move_block(key, mass.to(device))
        self.replicas.release(self.states, self.averages)

    def _move_entries(self, params: Tensors) -> None:
        """Bring states of single entries to the device and dtype of their parameters."""
        for key, block in list(self.states.blocks.items()):
            if not block.rule.is_elementwise:
                continue
            shape = make_entries_shape(params[key.names[0]])
            if (shape.dtype, shape.device) != (block.shape.dtype, block.shape.device):
                self.states.convert(key, torch.empty(0, dtype=shape.dtype, device=shape.device))

    def drop(self, key: BlockKey) -> bool:
        """Forget a block; return whether there was one."""
        self.states.drop(key)
        self.measured_keys.discard(key)
        self.reserved.discard(key)
        return self.averages.pop(key, None) is not None

    def drop_idle(self, params: Tensors) -> set[str]:
        """Forget blocks of frozen parameters, and of those that follow another rule now.

        Return the names of the parameters of these blocks.
        """
        elementwise = {*self.assignment.elementwise}
        frozen = {name for name, p in params.items() if not p.requires_grad}
        dropped: set[str] = set()
        for key, block in list(self.states.blocks.items()):
            idle = frozen if block.rule.is_elementwise else frozen | elementwise
            if idle.issuperset(key.names):
                self.drop(key)
                dropped.update(key.names)
        return dropped

    def take_over_from(self, old: KFACState, saved: Container[str]) -> None:
        """Take the place of `old`, with its schedule's dict, which the optimizer's state holds.

        Blocks of `old` whose parameters were not `saved`, since they were frozen, are reserved.
        """
        for key, average in old.averages.items():
            if not any(n in saved for n in key.names) and key not in self.averages:
                self.reserve_block(key, average.value)
        old.schedule.numbers.update(self.schedule.numbers)  # the dict itself is shared
        self.schedule = old.schedule
        self.replicas.forget_sums()

    # --- statistics → averages → states → directions ----------------------------------------------

    def update_averages(self, means: BlockMeans, guard: Guard) -> bool:
        """Take up the statistics of one step; return False where one of them is not finite.

        Second moments in eigenbases are removed from `means`, and go to the rules.
        """
        tensors: list[Tensor] = []
        for factors in means.values():
            tensors += map(get_entries, factors.values())
        if not guard.holds(self.replicas.processes.all_agree(are_finite_in_place(tensors))):
            return False
        if self.rule.damping is not None:
            refuse_reference(self.rule.damping, means)
        if not guard.is_deferred and self.make_room(means):
            self.replicas.assign_owners(
                self.states, self.averages, self.averages.keys() - self.reserved
            )
        spectra = {k: factors.pop(SPECTRUM) for k, factors in means.items() if SPECTRUM in factors}
        pairs: list[tuple[Average, Factors]] = []
        for key, factors in means.items():
            if self.replicas.keeps_average(key):
                pairs.append((self.averages[key], factors))
            else:
                pairs.append((self.averages[key], {}))
        ema_update(pairs, self.ema, guard.is_void)
        self.measured_keys.update(means)
        self.schedule.count_statistics()
        self._observe_spectra(spectra)
        return True

    def _observe_spectra(self, spectra: Mapping[BlockKey, FactorMatrix]) -> None:
        """Give second moments in the blocks' eigenbases to the rules that measure them."""
        for key, spectrum in spectra.items():
            block = self.states.blocks[key]
            block.rule.observe(unpack(spectrum), block.state, self.schedule.damping)

    def refresh(self, has_new_statistics: bool, guard: Guard) -> bool:
        """Refresh states when it is time, and make those that are missing; say if any changed.

        Where the guard is deferred, `finish_deferred_refresh` is to be called before the next step.
        """
        is_due = has_new_statistics and self.schedule.is_refresh_step(
            self.schedule.statistics_count
        )
        keys = self.measured_keys - self.states.ready
        if is_due or self.schedule.should_refresh_again:
            keys = self.measured_keys
        self.schedule.should_refresh_again = False
        if not keys:
            return False
        refreshed = self.states.limit_first_refreshes(sorted(keys, key=lambda key: key.names))
        if guard.is_deferred:
            self.deferred_refresh = self.states.refresh_on_device(
                self.averages, refreshed, self.schedule.damping, guard.is_void
            )
        else:
            self._refresh_now(refreshed)
        return True

    def _refresh_now(self, keys: Sequence[BlockKey]) -> None:
        self.replicas.refresh(
            self.states, self.averages, keys, self.schedule.damping, self.references
        )

    def finish_deferred_refresh(self, *, is_void: bool = False) -> bool:
        """Refresh, with a wait, the blocks that failed in a deferred refresh; say if there are any.

        Where that refresh was void, all blocks have kept their last states and notes.
        """
        deferred = self.deferred_refresh
        self.deferred_refresh = None
        if deferred is None or is_void:
            return False
        failed_keys = deferred.wait_for_failed_keys()
        for key in deferred.keys:
            self.states.blocks[key].note = ""
        if failed_keys:
            self._refresh_now(failed_keys)
        return bool(failed_keys)

    def stack(self, params: ModelParameters, group_numbers: Mapping[str, int]) -> bool:
        """Bring states to their parameters and into few stacks; True if that had to be done."""
        self.move_to_parameters(params.by_name)
        if self.states.is_stacked:
            return False
        self.states.stack(self._find_templates(params), group_numbers)
        return True

    def _find_templates(self, params: ModelParameters) -> Tensors:
        """Return what shows the shapes of directions: whole parameters, or pieces of entries."""
        pieces: dict[str, Tensor] = {}
        for name in params.shards.keys() & self.entry_names:
            pieces[name] = get_local_piece(params.by_name[name])
        return {**params.templates, **pieces}

    def directions(
        self,
        gradients: Tensors,
        groups: Sequence[Mapping[str, Any]],
        group_numbers: Mapping[str, int],
        is_void: Tensor | None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return directions by name, and the few tensors that hold them, for checks of all at once.

        A matrix whose state is not ready yet takes the first step of the rule for others. Without
        such a rule, a parameter without a block follows its gradient.
        """
        step = self.schedule.step
        directions, stacked = self.states.directions(
            gradients, groups, group_numbers, step, is_void
        )
        directions, stacked = self.replicas.gather_directions(
            self.states, directions, stacked, gradients
        )
        directions = {n: directions[n] for n in gradients if n in directions}
        not_ready = _keys_by_name(self.measured_keys - self.states.ready)
        for name, gradient in gradients.items():
            if name in directions:
                continue
            if self.assignment.others is None:
                directions[name] = gradient
            elif name in not_ready:
                options = groups[group_numbers[name]]
                context = StepContext(1, options, is_void)
                directions[name] = self._find_first_direction(gradient, context)
            else:
                continue
            stacked.append(directions[name])
        return directions, stacked

    def _find_first_direction(self, gradient: Tensor, step: StepContext) -> Tensor:
        """Return the first direction of the rule for others, whose state is not kept."""
        others = self.assignment.others
        assert others is not None
        shape = make_entries_shape(gradient)
        flat = gradient.reshape(1, -1).to(shape.dtype)
        return others.direction(flat, others.init(shape), step).view(gradient.shape)

    @property
    def bases(self) -> dict[BlockKey, Bases]:
        """The eigenbases in which statistics are to be taken."""
        bases: dict[BlockKey, Bases] = {}
        for key, block in self.states.blocks.items():
            if not block.is_ready:
                continue
            measured = block.rule.measured_bases(block.state)
            if measured is not None:
                bases[key] = Bases(*measured)
        return bases

    @property
    def block_averages(self) -> list[tuple[BlockKey, Average]]:
        """The blocks that have statistics, in an order that all processes have."""
        keys = sorted(self.measured_keys, key=lambda key: key.names)
        return [(key, self.averages[key]) for key in keys]

    # --- lengths ----------------------------------------------------------------------------------

    def compute_lengths(
        self, move: Tensors, templates: Tensors, *, damped: bool
    ) -> dict[str, Tensor]:
        """Return for each parameter ⟨x, Fx⟩ over its entries, for a move x by name.

        Their sum is xᵀFx. F is F̂, or if `damped` the metric whose inverse gives directions. All
        processes call it; each adds what its averages give.
        """
        shares: dict[str, Tensor] = {}
        for key, average in self.block_averages:
            if move.keys().isdisjoint(key.names):
                continue
            names = [n for n in key.names if n in move]
            if self.replicas.keeps_average(key):
                products = self._compute_block_products(
                    key, average, move, templates, damped=damped
                )
                shares |= {n: products[n] for n in names}
            else:
                shares |= {n: average.mass.new_zeros(()) for n in names}
        return self.replicas.sum_over_owners(shares)

    def _compute_block_products(
        self, key: BlockKey, average: Average, move: Tensors, templates: Tensors, *, damped: bool
    ) -> dict[str, Tensor]:
        """Return ⟨x, Fx⟩ of one block, parameter by parameter."""
        block = self.states.blocks[key]
        factor_averages = self.make_factor_averages(key, average)
        dtype = average.mass.dtype
        pieces: list[Tensor] = []
        for name in key.names:
            if name in move:
                pieces.append(move[name].to(dtype))
            else:
                pieces.append(torch.zeros_like(templates[name], dtype=dtype))
        v = to_block(key, pieces, block.shape.size)
        if damped:
            gram = block.rule.damped_gram(factor_averages, block.state)
        else:
            gram = block.rule.gram(factor_averages, block.state)
        product = v * gram.matvec(v)
        shapes = [templates[n] for n in key.names]
        products = from_block(key, product, shapes, block.shape.size)
        return {n: t.sum() for n, t in zip(key.names, products, strict=True)}

    def make_factor_averages(self, key: BlockKey, average: Average) -> FactorAverages:
        """Return a block's average as `Rule.gram` and `Rule.damped_gram` read it: both factors."""
        return self.states.make_factor_averages(
            key, average, self.schedule.damping, self.references
        )

    # --- on a device ------------------------------------------------------------------------------

    def can_defer(self, means: Mapping[BlockKey, Factors]) -> bool:
        """Return whether these statistics can be taken up under a flag on the device.

        All blocks have states and room for them, and there is such a kernel.
        """
        if not self.measured_keys <= self.states.ready or not self.measured_keys.issuperset(means):
            return False
        if self.ema < _LEAST_EMA:
            return False
        pairs = [
            (self.averages[k], new) for k, new in means.items() if self.replicas.keeps_average(k)
        ]
        return all(average.can_add_on_device(new) for average, new in pairs)

    def can_refresh_on_device(self) -> bool:
        """Return whether a refresh need not wait: one process, one device, and rules that can."""
        if not self.replicas.is_single or self.references is not None:
            return False
        devices = {self.averages[key].mass.device for key in self.measured_keys}
        blocks = self.states.blocks
        can_refresh = all(blocks[key].rule.refreshes_on_device for key in self.measured_keys)
        return can_refresh and len(devices) == 1

    def memory(self) -> dict[str, int]:
        """Return the bytes held, by what for."""
        averages: list[Tensor] = []
        for key in self.averages.keys() - self.reserved:
            averages.append(self.averages[key].mass)
            if self.replicas.keeps_average(key):
                averages += self.averages[key].sides()
        states: list[Tensor] = []
        for key, block in self.states.blocks.items():
            if not block.is_absent and key not in self.reserved:
                states += block.state.tensors().values()
        return {"averages": _nbytes(averages), "states": _nbytes(states)}


def _keys_by_name(keys: Iterable[BlockKey]) -> dict[str, BlockKey]:
    """Return the block of each parameter, by the parameter's name."""
    by_name: dict[str, BlockKey] = {}
    for key in keys:
        by_name |= dict.fromkeys(key.names, key)
    return by_name


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
