"""K-FAC as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from random import Random
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..._core.capture import Selector, unwrap_model
from ..._core.errors import PullbackError
from ..._core.flags import DeferredFlags, Guard
from ..._core.groups import (
    find_group,
    find_processes,
    refuse_unknown_group,
    unwrap_distributed,
)
from ..._core.processes import Traffic
from ..._core.shards import (
    ModelParameters,
    get_local_piece,
    is_sharded,
    shard_like,
)
from ...grams.kronecker import Kronecker
from ...likelihoods import Likelihood
from ...metrics import Metric
from ...steps import Need, Step
from ..checks import (
    collect_gradients,
    prepare_param_group,
    refuse_inference,
    refuse_model,
)
from ..closure import ClosureMemory, ClosureWarning
from ..foreign_arguments import KFAC_COUNTERPARTS, explain_unknown_arguments
from ..objective import Objective, ObjectiveProblem
from ..problem import StepProblem
from . import arguments, options, report, update
from .assignment import Assignment
from .block_stack import Tensors
from .checkpoint import (
    make_half_loaded_error,
    make_incomplete_error,
    publish,
    restore,
    select_saved_states,
)
from .clip import KLClip, get_length_buffer, sum_lengths
from .closure import evaluate, make_problem, try_move
from .factors.block import BlockKey, BlockKind, FactorKey, names_of
from .factors.damping import Damping
from .replicas import Replicas
from .report import Coverage, CoverageFacts, Degenerate, KFACInfo, Notices
from .rules import Rule, Statistics
from .schedule import Schedule
from .state import BlockMeans, KFACState
from .statistics.capture import StatisticsCapture
from .statistics.terms import average_terms
from .step_rule import NUMBERS, VECTORS, StepMemory, StepView, find_damping, replace_directions
from .update import BUFFERS, GroupUpdate

#: what belongs to hooks, or to the model's objects
_UNSAVED = ("_capture", "_params", "_deferred_flags", "_closure_memory")
_NOT_FINITE = "a gradient is not finite"


@dataclass
class PendingStatistics:
    """The statistics of a step, until the averages contain them."""

    #: let go once they are averaged: their memory serves the refresh
    means: BlockMeans
    #: the conditions under which they enter the averages
    guard: Guard = field(default_factory=lambda: Guard(is_deferred=False))
    #: whether the averages contain them
    is_averaged: bool = False
    #: whether states are refreshed once the averages contain them
    leads_to_refresh: bool = False


class KFAC(Optimizer):
    r"""Train with K-FAC's factors in an ordinary loop: `loss.backward(); opt.step()`.

    `KFAC(model)` takes Adam's steps in the eigenbases of every weight's two factors: R = Σ δδᵀ/N of
    the cotangents at the layer's output, and C = mean aaᵀ of its inputs. Embeddings, gains and
    biases follow AdamW inside the same optimizer. For networks with a normalization, and for
    transformers, known by an embedding, an attention layer or a layer norm, it takes the polar
    factor of the momentum, whitened by C (`rule="spectral"`). A transformer's output layer then
    follows AdamW too, and AdamW takes half the rate.

    With a likelihood or a damping it is the natural gradient of the K-FAC metric,

        w ← w − η F̂⁻¹∇L,    F̂ = ⊕_l R_l ⊗ C_l.

    On statistics steps, while the loss's gradient passes the model's output, targets drawn from
    the model's own predictions are then sent down the same graph: R and C are those of the true
    Fisher, whatever the loss was.

    Options of a rule are arguments of the rule: `KFAC(model, rule=Natural(fisher="exact"))`. It has
    defaults for what is not given here:

    | argument | `Eigenbasis` | `Spectral`, `TwoSided` | `Natural` |
    |---|---|---|---|
    | `lr` | 9e-3 | 6e-3 | 0.1 |
    | `statistics_every`, `invert_every` | 10, 10 | 10, 20 | 10, 100 |

    Args:
        model: the module that is called in the loop.
        lr: η; schedulers may change it.
        rule: a `Rule`, or its name with the default options: "eigenbasis", "spectral",
            "two-sided", "natural". By default "natural" where `likelihood`, `damping` or `step` is
            given, else "spectral" for transformers and normalized networks, and "eigenbasis" for
            others.
        likelihood: short for `rule=Natural(likelihood)`.
        damping: short for `rule=Natural(damping=...)`, or with "spectral" or "two-sided" for that
            rule's.
        params: parameters or param groups, by default all of the model's. Groups may have their own
            `lr` and `weight_decay`, with `Natural` `momentum`, and with other rules `betas`. These
            reach parameters that follow AdamW alone: `Eigenbasis(betas=)` and
            `Spectral(momentum=, adapt=)` are options of the rule. Groups with `"rule": "adam"`
            follow AdamW at the group's rate.
        weight_decay: decoupled, w ← (1 − η·weight_decay)w.
        statistics_every, invert_every: steps between statistics, and between refreshes of what a
            rule makes of them: inverses, roots or bases. Until the first `invert_every` steps are
            done, these are also refreshed at the first, second, fourth, ... statistics. `Natural`
            does both at each of its first ten steps, and then at gaps of a tenth of the steps done,
            until these are as long as given here.
        step: a rule of `pullback.steps` that chooses the move along the natural rule's direction,
            by the loss at trial points or the exact quadratic model: `QuadraticModel()`,
            `LevenbergMarquardt()`, `TrustNorm(...)`, `Backtracking()`, ... `lr`, by default 1,
            multiplies the move. Needs `step(closure)`.
        output: which tensor of a structured output the metric sees.
        grad_scaler: with fisher="empirical", the scaler of the loss.
        group: the processes that train together, by default those of the model's wrapper. Where a
            model is not wrapped, its gradients are averaged over them in `step`, or before it by
            `average_gradients`, which clipping needs.
        workers: how many of the processes hold a block's state, a divisor of their number; by
            default all, and one where `fully_shard` has cut the model. With fewer, directions are
            sent instead.
    """

    @explain_unknown_arguments(KFAC_COUNTERPARTS)
    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        rule: Rule | str | None = None,
        likelihood: Likelihood | Callable[..., Tensor] | None = None,
        damping: float | Damping | None = None,
        params: Iterable[Any] | None = None,
        weight_decay: float = 0.0,
        statistics_every: int | None = None,
        invert_every: int | None = None,
        step: Step | None = None,
        output: Selector = None,
        grad_scaler: Any = None,
        group: ProcessGroup | None = None,
        workers: int | None = None,
    ) -> None:
        refuse_model(model, "KFAC")
        processes = find_processes(model, group, "KFAC")
        is_wrapped = find_group(model) is not None
        self.model = model = unwrap_distributed(model)
        arguments.check(params=params)
        user_arguments = options.Arguments(
            rule=rule, likelihood=likelihood, damping=damping, lr=lr, weight_decay=weight_decay,
            statistics_every=statistics_every, invert_every=invert_every, output=output,
            grad_scaler=grad_scaler, step=step,
        )  # fmt: skip
        self._options = options.resolve(model, user_arguments)
        is_sharded_model = any(map(is_sharded, model.parameters()))
        if is_sharded_model and workers is None and not self._options.measures_spectrum:
            workers = 1
        self._replicas = Replicas(
            processes, workers, is_wrapped=is_wrapped, is_owned=is_sharded_model
        )
        self._closed = False
        #: whether gradients were averaged over processes since the last step
        self._has_averaged = False
        #: of every parameter whether it is trained, and the rule that its group asks for, when
        #: blocks were last assigned
        self._group_choices: list[tuple[bool, Any]] = []
        self._notices = Notices()
        self._info = KFACInfo()
        self._clip = self._make_clip()
        self._curvature = self._empty_state()
        self._step_memory = self._make_step_memory()
        if params is None:
            params = unwrap_model(model).parameters()
        chosen = list(params)
        options.refuse_unready(model, chosen)
        self._register()
        self._replicas.refuse_options(self._options)
        if is_sharded_model:
            options.refuse_shards(self._options)
        super().__init__(chosen, self._options.group_defaults)
        self._replicas.synchronize(
            self._params, self._options.common, self.param_groups, self._schedule.numbers
        )

    def _make_clip(self) -> KLClip | None:
        if self._options.kl_clip is None:
            return None
        return KLClip(self._options.kl_clip, measures_every_step=self._options.is_controlled)

    def _make_step_memory(self) -> StepMemory | None:
        if self._options.step is None:
            return None
        return StepMemory.empty(self._options.step, self._schedule.damping)

    def _empty_state(self) -> KFACState:
        """Return the state of an optimizer that has done nothing."""
        rule = self._options.rule
        schedule = Schedule(self._options.statistics_every, self._options.invert_every, rule.warmup)
        if rule.damping is not None:
            schedule.damping = rule.damping.value
        step_rule = self._options.step
        if step_rule is not None:
            schedule.damping = find_damping(step_rule) or schedule.damping
        return KFACState(Assignment(rule, self._options.others), self._replicas, schedule)

    def _register(self) -> None:
        """Find the model's parameters and hook the model."""
        processes = self._replicas.processes
        self._params = ModelParameters(self.model, processes)
        if processes.rank:
            rank = f" {processes.rank}"
        else:
            rank = ""
        seed = self._options.rule.estimation.seed
        schedule = self._schedule  # not the optimizer, which holds the hooks
        self._capture = StatisticsCapture(
            self.model,
            self._options,
            self._assignment,
            lambda: Random(f"{seed} {schedule.step}{rank}").getrandbits(32),
            gather_params=self._params.leaves if self._params.shards else None,
        )
        self._replicas.attach(self._capture, partial(_launch_sums, ref(self)))  # hooks hold it
        self._deferred_flags: DeferredFlags | None = None
        # KFAC gives the warnings itself
        self._closure_memory = ClosureMemory(warned={*ClosureWarning})

    def _launch(self) -> None:
        """Begin to sum statistics over processes, while the backward pass goes on."""
        self._replicas.launch_sums(self._capture.pool, self._params)

    # --- options --------------------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        """The rule of parameters that have a block."""
        return self._options.rule

    @property
    def metric(self) -> Metric:
        """The metric on outputs."""
        return self._options.metric

    @property
    def damping(self) -> Damping | None:
        """What is added to averages before they are inverted, if anything is."""
        return self._options.rule.damping

    @property
    def kl_clip(self) -> float | None:
        """δ of the KL clip, or None."""
        return self._options.kl_clip

    @property
    def reduction(self) -> str:
        """Of the loss, "mean" or "sum"."""
        return self._options.reduction

    @property
    def grad_scaler(self) -> Any:
        """The scaler of the loss, if it was given."""
        return self._options.grad_scaler

    @property
    def statistics_every(self) -> int:
        """Steps between statistics."""
        return self._options.statistics_every

    @property
    def invert_every(self) -> int:
        """Steps between refreshes."""
        return self._options.invert_every

    @property
    def is_controlled(self) -> bool:
        """Whether steps look at the loss again, and need a closure."""
        return self._options.is_controlled

    @property
    def _schedule(self) -> Schedule:
        return self._curvature.schedule

    @property
    def _assignment(self) -> Assignment:
        return self._curvature.assignment

    # --- a torch optimizer's duties -------------------------------------------------------------

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks from the model; the optimizer goes on with what it knows.

        Where several processes train together, all of them call it: the group in which they sum
        statistics during the backward pass is given up.
        """
        self._capture.close()
        self._replicas.close()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up more of the model's parameters."""
        present: set[int] = set()
        for group in self.param_groups:
            present.update(map(id, group["params"]))
        group = prepare_param_group(
            param_group, self.model, self._params.names, present, sharded=True
        )
        arguments.check_group(group, self.defaults)
        super().add_param_group(group)
        self._assign()
        self._allocate_entries()
        self._allocate_buffers()
        self._publish()

    @property
    def _optimized(self) -> dict[str, Any]:
        """The parameters of all param groups, by name."""
        return self._params.in_groups(self.param_groups)

    def _assign(self) -> None:
        """Settle which parameters are measured: all, or the matrices that follow the rule."""
        with_rule = [group for group in self.param_groups if group.get("rule")]
        self._assignment.set_parameters(self._optimized, self._params.in_groups(with_rule))
        self._capture.set_measured(self._assignment.measured)

    def _reassign_if_groups_changed(self) -> None:
        """Assign blocks anew if a parameter was frozen or thawed, or a group has another rule.

        The state of frozen parameters is given up; the first pass after they thaw measures them
        again.
        """
        choices: list[tuple[bool, Any]] = []
        for group in self.param_groups:
            rule = group.get("rule")
            choices += [(p.requires_grad, rule) for p in group["params"]]
        if choices == self._group_choices:
            return
        for group in self.param_groups:
            if group.get("rule"):
                arguments.check_group({"rule": group["rule"]}, self.defaults)
        self._group_choices = choices
        self._assignment.measure_initial_sizes(self._optimized)
        self._assign()
        self._drop_frozen()
        self._allocate_entries()
        self._allocate_buffers()
        self._publish()

    def _drop_frozen(self) -> None:
        """Give up states, momentum and the step rule's vectors of frozen parameters."""
        chosen = self._optimized
        self._capture.structure.forget(self._curvature.drop_idle(chosen))
        for name in [name for name, p in chosen.items() if not p.requires_grad]:
            for buffer in (*BUFFERS, VECTORS):
                self.state[chosen[name]].pop(buffer, None)
            if self._step_memory is not None:
                self._step_memory.vectors.pop(name, None)

    def _publish(self) -> None:
        """Put averages, states and schedule under the parameters, where torch looks for them."""
        publish(self._curvature, self.state, self._optimized)

    def _allocate_entries(self) -> None:
        """Make the states of trained parameters that follow the rule for others, entry by entry."""
        curvature = self._curvature
        if self._assignment.others is None:
            return
        present = {key.names[0] for key in curvature.states.blocks}
        for name in self._assignment.elementwise:
            p = self._params.by_name[name]
            if p.requires_grad and name not in present:
                curvature.allocate_entries(name, p)

    def _allocate_buffers(self) -> None:
        """Make momenta, and lengths for the KL clip, of trained parameters that follow the rule."""
        elementwise = {*self._assignment.elementwise}
        for group in self.param_groups:
            for p in [p for p in group["params"] if p.requires_grad]:
                name = self._params.names[id(p)]
                if name not in elementwise:
                    self._allocate_block_buffers(name, p, group)

    def _allocate_block_buffers(self, name: str, p: Tensor, group: Mapping[str, Any]) -> None:
        """Make the buffers of a parameter that follows the rule for blocks."""
        if group.get("momentum") and self._step_memory is None:
            update.get_momentum_buffer(self.state, p)
        if self._step_memory is not None:
            self.state[p][NUMBERS] = self._step_memory.numbers
            self.state[p][VECTORS] = self._step_memory.vectors_of(name, p)
        if self._clip is not None:
            get_length_buffer(p, self.state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics of gradients that were never used."""
        super().zero_grad(set_to_none)
        self._has_averaged = False
        self._capture.clear_pool()

    def average_gradients(self) -> None:
        """Average the gradients over processes now, so that they can be clipped before `step`.

        `step` then does not average them again. A wrapper (DDP, FSDP) has averaged them in the
        backward pass, and alone there is nothing to do: then the call changes nothing. All
        processes call it after the last backward pass of a step.
        """
        if self._has_averaged:
            return
        self._replicas.average_gradients(self._params, self.param_groups, self._capture.is_wrapped)
        self._has_averaged = True

    def __getstate__(self) -> dict[str, Any]:
        """All but the hooks: a copy or a pickle brings its model along."""
        self._read_deferred_flags()
        state = {n: v for n, v in vars(self).items() if n not in _UNSAVED}
        state.pop("step", None)  # a scheduler counts calls by a function of its own
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:
            self._register()
            self._publish()
            self._resume()

    def state_dict(self) -> dict[str, Any]:
        """Param groups, and under each parameter momentum, averages, states and schedule.

        Where processes hold parts of it (`workers` fewer than all), all of them call this together.
        Where `fully_shard` has cut the model, averages and states are `DTensor`s too.
        """
        curvature = self.blocks
        replicas = self._replicas
        try:
            with replicas.explain_lost_process("state_dict()"):
                replicas.collect_states(curvature.states)
                publish(curvature, self.state, self._optimized, replicas.cut_piece)
            out = super().state_dict()
            copies = {number: dict(saved) for number, saved in out["state"].items()}
            return {**out, "state": copies}
        finally:
            replicas.release(curvature.states, curvature.averages)
            self._publish()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume to the same bits; a state that cannot be used changes nothing."""
        params = self._params.by_name
        names = [[*self._params.in_groups([group])] for group in self.param_groups]
        saved = select_saved_states(state_dict, names, ("schedule", "table", "state"))
        for name, state in saved.items():
            if "momentum" in state and state["momentum"].shape != params[name].shape:
                raise make_incomplete_error(f"the moments of {name!r} have another shape")
        fresh = self._empty_state()
        fresh.assignment = self._assignment.copy()
        restore(fresh, saved, self._optimized)
        self._read_deferred_flags()
        super().load_state_dict({**state_dict, "state": {}})
        self._assignment.roles |= fresh.assignment.roles
        fresh.assignment = self._assignment
        fresh.take_over_from(self._curvature, saved)
        self._curvature = fresh
        self._assign()
        for name, state in saved.items():
            p = params[name]
            if "momentum" in state:
                self.state[p]["momentum"] = shard_like(state["momentum"], p)
            if "length" in state:
                self.state[p]["length"] = state["length"].detach().to(p.device, copy=True)
        if self._step_memory is not None:
            self._step_memory.load(saved, params)
        self._allocate_buffers()
        self._publish()
        self._resume()

    def _resume(self) -> None:
        """Tell a fresh capture which blocks are known, after a state was loaded or unpickled."""
        self._assign()
        partners: dict[str, tuple[str, ...]] = {}
        for key in self._curvature.measured_keys:
            partners |= dict.fromkeys(key.names, key.names)
        if self._schedule.statistics_count:  # others were not used yet
            params = self._params.by_name
            trained = {n for n in self._assignment.measured if params[n].requires_grad}
            partners |= {n: (n,) for n in trained - partners.keys()}
        self._capture.structure.partners = partners
        self._capture.structure.bases = self._curvature.bases
        self._capture.reset()
        self._capture.announce(self._is_statistics_step)
        if self._closed:
            self.close()

    # --- the step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        objective: Objective | Callable[[dict[str, Tensor]], Any] | None = None,
    ) -> Any:
        """One step from the gradients at hand, or those that a closure or an objective gives.

        Args:
            closure: clears the gradients, evaluates the loss, calls backward and returns it. Needed
                where the step is controlled: by `Adaptive` damping, or by `step=`.
            objective: a loss on derivatives of the network, as terms of
                an `optim.Objective`; their own metric is used.

        Returns:
            The loss, or None where none was computed here; `info` says what was done. A rejected
            step has left the parameters as they were (running averages in buffers have seen the
            closure's pass, as after any forward pass). An exception from a controlled step has
            changed nothing at all.
        """
        self._refuse_unready_step()
        was_announced = self._capture.is_announced
        expects_statistics = self._capture.wants_statistics
        self._read_deferred_flags()
        self._reassign_if_groups_changed()
        has_run_backward = closure is None and objective is None
        problem = None
        if not has_run_backward or self._options.is_controlled:
            problem = make_problem(
                closure, objective, self._options, self._capture, self._params, self.param_groups,
                self._replicas, self._closure_memory,
            )  # fmt: skip
        # where the last step was rejected, the forward pass was not told that statistics are due
        self._has_missed_announcement = (
            has_run_backward and not was_announced and self._is_statistics_step
        )
        if not self._options.is_controlled:
            return self._take_step(problem, closure, expects_statistics)
        takes_statistics = expects_statistics or self._is_statistics_step
        has_statistics = self._capture.pool.calls > 0
        should_refresh = self._schedule.should_refresh_again
        may_update_averages = takes_statistics or has_statistics or should_refresh
        with self._transaction(problem, may_update_averages=may_update_averages):
            return self._take_step(problem, closure, expects_statistics)

    def _refuse_unready_step(self) -> None:
        """Raise where no step can be taken: in inference mode, with bad rates or half a state."""
        refuse_inference("what is made there cannot be updated later")
        arguments.check_rates(self.param_groups)
        if self._replicas.processes.group is None:
            refuse_unknown_group("KFAC", "it was built before they met")
        if self._curvature.awaits_load:
            raise make_half_loaded_error()

    def _take_step(
        self, problem: StepProblem | None, closure: Any, expects_statistics: bool
    ) -> Any:
        """Gradients → statistics → averages → states → directions → update; return the loss.

        `expects_statistics` says that the passes before this step were to give statistics.
        """
        loss = evaluate(problem, closure)
        self._capture.check_squared_error(loss)
        gradients = self._collect_gradients()
        if self._is_dry_run(gradients):
            self._capture.clear_pool()
            return loss
        if problem is not None and not isfinite(problem.loss):
            return self._reject(f"the loss is {problem.loss}", loss)
        self._notices.watch_growth(loss)
        # nothing else refers to the means, whose memory serves the refresh once they are averaged
        pending = PendingStatistics(
            self._collect_statistics(problem, gradients, expects_statistics)
        )
        pending.leads_to_refresh = self._is_refresh_due(pending.means)
        # a guard of its own for the statistics: theirs may be void where the step is not
        guard = Guard(self._can_defer(pending.means, gradients))
        if not self._check_gradients(gradients, pending, guard):
            self._notices.warn_not_finite()
            return self._reject(_NOT_FINITE, loss)
        pending.guard = guard.copy()
        if not self._can_postpone_averages(pending, guard):
            self._update_averages(pending, gradients)
        directions, stacked = self._find_directions(gradients, guard.is_void, pending)
        if not self.rule.squares_gradients and not guard.holds_finite(stacked):
            return self._reject("a direction is not finite", loss)
        if not pending.is_averaged:
            pending.guard = guard.copy()
            self._update_averages(pending, gradients)
        self._info = self._move(directions, problem, gradients, guard.is_void)
        self._finish(pending, guard)
        return loss

    def _collect_gradients(self) -> dict[str, Tensor]:
        """Average all gradients over processes and return them by name.

        They are whole ones, or pieces of parameters that are treated by entries.
        """
        params = self._params
        self.average_gradients()
        self._has_averaged = False
        gradients = collect_gradients(self.param_groups, params.names, params.shapes)
        if not params.shards:
            return gradients
        entries = self._curvature.entry_names
        pieces = {n: get_local_piece(g) for n, g in gradients.items() if n in entries}
        whole = params.gather_whole(
            {n: g for n, g in gradients.items() if n not in pieces}, "gradients"
        )
        collected = {**pieces, **whole}
        return {name: collected[name] for name in gradients}

    def _is_dry_run(self, gradients: Tensors) -> bool:
        """Return True if nothing is to move: all learning rates and all gradients are zero.

        torch's functions for checkpoints take such a step to let an optimizer make its state.
        """
        if any(group["lr"] != 0 for group in self.param_groups):
            return False
        return not any(bool(g.any()) for g in gradients.values())

    # --- statistics -----------------------------------------------------------------------------

    @property
    def _is_statistics_step(self) -> bool:
        """Whether the step that comes takes statistics."""
        return not self._closed and self._schedule.is_statistics_step and self._can_measure

    @property
    def _can_measure(self) -> bool:
        """Whether the rule reads statistics and a trained parameter may follow it."""
        if self.rule.reads is Statistics.NONE:
            return False
        params = self._params.by_name
        if self._assignment.has_one_rule:
            return True
        return any(params[n].requires_grad for n in self._assignment.measured)

    def _collect_statistics(
        self, problem: StepProblem | None, gradients: Tensors, expects_statistics: bool
    ) -> BlockMeans:
        """Return the means of what was seen since the last step, or of an objective's terms."""
        self._has_skipped_statistics = False
        if (expects_statistics or self._capture.pool.calls) and not self._has_missed_announcement:
            self._sum_statistics(gradients)
        if isinstance(problem, ObjectiveProblem):
            return self._measure_objective(problem)
        if not self._can_measure:
            self._warn_of_missing_blocks()
        if not self._capture.pool.calls:
            self._refuse_missing_statistics()
            return {}
        return self._average_statistics()

    def _sum_statistics(self, gradients: Tensors) -> None:
        """Sum the pooled statistics over processes; raise on all where their gradients differ.

        Gradients of which each process has a piece are not compared.
        """
        pieces = self._params.shards.keys() & self._curvature.entry_names
        whole = {n: g for n, g in gradients.items() if n not in pieces}
        self._replicas.sum_statistics(
            self._capture, self._params, self.param_groups, whole, self._schedule.numbers
        )

    def _average_statistics(self) -> BlockMeans:
        """Return the means of the blocks that follow the rule, as the table chooses them now."""
        scale = 1.0
        if self.grad_scaler is not None:
            scale = float(self.grad_scaler.get_scale())
        # gradients are averaged over processes, and cotangents not yet
        means = self._capture.take_means(scale * self._replicas.processes.size)
        self._has_skipped_statistics = means is None
        if means is None:
            return {}
        selected = self._assignment.select_blocks(means, self._options.sharing.longest)
        self._capture.set_measured(self._assignment.measured)
        if not self._schedule.statistics_count:
            self._warn_of_missing_blocks()
        return selected

    def _measure_objective(self, problem: ObjectiveProblem) -> BlockMeans:
        """Return the means of an objective's terms, where statistics are due."""
        if not self._is_statistics_step:
            return {}
        row_blocks, _ = problem.row_blocks(self.metric, None)
        generator = self._capture.generator(row_blocks[0].linearization.value.device)
        return average_terms(row_blocks, self._options, generator)

    def _refuse_missing_statistics(self) -> None:
        """Raise where statistics were due and no forward pass gave any."""
        if self._is_statistics_step and not self._has_missed_announcement:
            obstacle = self._capture.pool.obstacle
            raise PullbackError(
                "A statistics step saw no layer", obstacle.description, obstacle.remedy
            )

    def _can_defer(self, means: BlockMeans, gradients: Tensors) -> bool:
        """Return whether the step's outcome is of no consequence for what the host does next.

        The host then does not wait for the device: a flag there guards every change, and
        `_read_deferred_flags` reads it later.
        """
        first = next(iter(gradients.values()))
        if not first.is_cuda or self._options.is_controlled or self._schedule.should_refresh_again:
            return False
        if any(g.device != first.device for g in gradients.values()):
            return False
        if means and self._options.measures_spectrum:
            return False
        if self._is_refresh_due(means) and not self._can_defer_refresh():
            return False
        return self._curvature.can_defer(means)

    def _can_defer_refresh(self) -> bool:
        """Return whether states can be refreshed without a wait; the KL clip would not know."""
        return self._clip is None and self._curvature.can_refresh_on_device()

    def _is_refresh_due(self, means: BlockMeans) -> bool:
        """Return whether these statistics, once they are averaged, lead to a refresh."""
        return bool(means) and self._schedule.is_refresh_step(self._schedule.statistics_count + 1)

    def _can_postpone_averages(self, pending: PendingStatistics, guard: Guard) -> bool:
        """Return whether the averages take these statistics up after the directions are known.

        A direction that is not finite then voids the statistics as well. Several processes take
        them up before, once their gradients are known to be finite, as does a refresh.
        """
        return guard.is_deferred and self._replicas.is_single and not pending.leads_to_refresh

    def _check_gradients(
        self, gradients: Tensors, pending: PendingStatistics, guard: Guard
    ) -> bool:
        """Return False if a gradient is known not to be finite.

        A deferred step checks its directions instead, which are not finite then. That is too late
        for a rule that squares gradients, and for averages that take statistics up before the
        directions are known.
        """
        squares = self.rule.squares_gradients
        is_needed = squares or not guard.is_deferred
        if pending.means and not is_needed:
            is_needed = not self._can_postpone_averages(pending, guard)
        if not is_needed:
            return True
        return guard.holds_finite(list(gradients.values()), squares=squares)

    def _update_averages(self, pending: PendingStatistics, gradients: Tensors) -> None:
        """Take statistics up into the averages, once."""
        if not pending.means:
            return
        means = pending.means
        pending.means = {}
        pending.is_averaged = self._curvature.update_averages(means, pending.guard)
        if not pending.is_averaged:
            self._has_skipped_statistics = True
            return
        looks_for_unmeasured = pending.leads_to_refresh or not pending.guard.is_deferred
        if looks_for_unmeasured and self.rule.reads is not Statistics.INPUTS:
            without_block = {*self._assignment.elementwise, *self._capture.structure.diagonals}
            self._notices.warn_unmeasured(self._curvature, gradients, without_block)

    def _find_directions(
        self, gradients: dict[str, Tensor], is_void: Tensor | None, pending: PendingStatistics
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Refresh states when it is time; return directions by name, and the stacks that hold them.

        The stacks are few, so that a check of all directions is cheap.
        """
        self._refresh(pending)
        self._update_entry_states(gradients)
        curvature = self._curvature
        group_numbers = self._params.find_group_numbers(self.param_groups)
        if curvature.stack(self._params, group_numbers):  # states are other tensors
            self._publish()
            self._capture.structure.bases = curvature.bases
        return curvature.directions(gradients, self.param_groups, group_numbers, is_void)

    def _refresh(self, pending: PendingStatistics) -> None:
        """Refresh states when it is time, and note for the clip and the step rule that it was."""
        is_refreshed = self._curvature.refresh(pending.is_averaged, pending.guard)
        if is_refreshed and self._step_memory is not None:
            self._step_memory.inverted_damping = self._schedule.damping
        has_new_spectrum = pending.is_averaged and self._options.measures_spectrum
        if self._clip is not None and (is_refreshed or has_new_spectrum):
            self._clip.is_stale = True

    def _update_entry_states(self, gradients: dict[str, Tensor]) -> None:
        """Make states for new parameters of the rule for others, and drop those of new matrices.

        The former were frozen, or statistics have shown that they are no matrices; of the latter
        statistics have shown that they are. In `gradients`, those of sharded parameters that follow
        the rule for others are replaced by their local pieces.
        """
        if self._assignment.others is None:
            return
        curvature = self._curvature
        measured = names_of(curvature.measured_keys)
        entries = curvature.entry_names
        for name in entries & measured:
            curvature.states.drop(BlockKey(BlockKind.ENTRIES, (name,)))
        others = {*self._assignment.elementwise} | self._capture.structure.partners.keys()
        if not self._can_measure:
            others |= self._optimized.keys()
        for name in gradients.keys() & (others - measured - entries):
            p = self._params.by_name[name]
            if p.numel():
                curvature.allocate_entries(name, p)
                if name in self._params.shards:
                    gradients[name] = get_local_piece(p.grad)

    # --- moves ----------------------------------------------------------------------------------

    def _move(
        self,
        directions: Tensors,
        problem: Any,
        gradients: Tensors,
        is_void: Tensor | None,
    ) -> KFACInfo:
        """Clip, scale and move; where the step is controlled, look at the loss."""
        schedule = self._schedule
        damping = self.damping
        updates = self._make_updates(directions)
        info = KFACInfo(damping=schedule.damping)
        if self._step_memory is not None:
            info = self._choose_move(self._step_memory, updates, problem, gradients)
            if not info.accepted:
                return info
        if self._clip is not None:
            self._clip.apply(updates, gradients, self._curvature, self._params, self.state, is_void)
        if damping is None or not damping.is_controlled:
            update.apply_updates(updates, is_void)
            return info
        trial = try_move(updates, problem, self.metric, damping, schedule.damping, gradients)
        schedule.damping = trial.damping
        schedule.should_refresh_again = not trial.accepted
        return replace(trial, step_size=info.step_size, momentum=info.momentum)

    def _make_updates(self, directions: Tensors) -> list[GroupUpdate]:
        """Return the updates that these directions give, one for each param group and rule."""
        return update.make_updates(
            self.param_groups, self.state, self._params, directions, self._curvature,
            has_momentum=self._step_memory is None,
        )  # fmt: skip

    def _choose_move(
        self, memory: StepMemory, updates: list[GroupUpdate], problem: Any, gradients: Tensors
    ) -> KFACInfo:
        """Let the rule of `steps/` choose the move, and put it in place of the directions."""
        schedule = self._schedule

        def refresh(damping: float) -> list[GroupUpdate]:
            schedule.damping = damping
            schedule.should_refresh_again = True
            directions, _ = self._find_directions(dict(gradients), None, PendingStatistics({}))
            return self._make_updates(directions)

        view = StepView(problem, self.metric, gradients, updates, refresh)
        move = view.choose_move(memory)
        damping = view.next_damping(memory)
        if damping is not None:
            schedule.damping = damping
        if not move.accepted:
            schedule.should_refresh_again = Need.DAMPINGS in memory.step.needs
            return KFACInfo(False, move.reason, schedule.damping)
        replace_directions(updates, problem, move)
        factors = view.split_move(move)
        return KFACInfo(damping=schedule.damping, step_size=factors[0], momentum=factors[1])

    def squared_length(self, move: Tensors) -> Tensor:
        """xᵀF̂x for a move x by parameter name, with F̂ as it is averaged now.

        All processes call it; each adds what its averages give.
        """
        whole = self._params.gather_whole(move, "moves")
        return sum_lengths(
            self._curvature.compute_lengths(whole, self._params.templates, damped=False)
        )

    def _finish(self, pending: PendingStatistics, guard: Guard) -> None:
        """Count a step that was taken, report it, and prepare the next forward pass."""
        schedule = self._schedule
        has_missed_statistics = self._has_missed_announcement and not pending.is_averaged
        if has_missed_statistics and schedule.is_refresh_step(schedule.statistics_count + 1):
            schedule.should_refresh_again = True  # with the statistics that come a step later
        schedule.count_step()
        self._capture.reset()
        needs_statistics = self._is_statistics_step or self._capture.lacks_block
        self._capture.announce(needs_statistics or has_missed_statistics)
        notes = report.list_notes(self._curvature, self._has_skipped_statistics)
        self._info = replace(self._info, took_statistics=pending.is_averaged, notes=notes)
        if guard.is_good is not None:
            is_averaged = guard.is_good
            if pending.is_averaged:
                is_averaged = pending.guard.is_good
            flags: Any = (guard.is_good, is_averaged)
            self._deferred_flags = DeferredFlags(
                torch.stack(flags), takes_statistics=pending.is_averaged
            )

    def _reject(self, reason: str, loss: Any) -> Any:
        """Report a step that was not taken, forget its statistics, and return the loss."""
        self._capture.reset()
        self._info = KFACInfo(False, reason, self._schedule.damping)
        return loss

    def _read_deferred_flags(self) -> None:
        """Read the flags of the last deferred step; take back its counts if it was void.

        Blocks that failed in its refresh are refreshed again.
        """
        deferred = self._deferred_flags
        self._deferred_flags = None
        if deferred is None:
            if self._curvature.deferred_refresh is not None:  # of a step that an exception ended
                self._curvature.finish_deferred_refresh()
            return
        has_moved, has_averaged = deferred.flags()
        if deferred.takes_statistics and not has_averaged:
            self._schedule.uncount_statistics()
            self._has_skipped_statistics = has_moved
            notes = report.list_notes(self._curvature, has_moved)
            self._info = replace(self._info, took_statistics=False, notes=notes)
        if not has_moved:
            self._schedule.uncount_step()
            self._capture.announce(self._is_statistics_step or self._capture.lacks_block)
            if not self._capture.is_announced:
                self._capture.clear_pool()  # what was gathered meanwhile is not due after all
            self._info = KFACInfo(False, _NOT_FINITE, self._schedule.damping)
            self._notices.warn_not_finite()
        if self._curvature.finish_deferred_refresh(is_void=not has_averaged):
            notes = report.list_notes(self._curvature, self._has_skipped_statistics)
            self._info = replace(self._info, notes=notes)

    @contextmanager
    def _transaction(
        self, problem: StepProblem | None, *, may_update_averages: bool
    ) -> Iterator[None]:
        """After an exception, put back everything that a step may change.

        Averages and states are copied only where the step `may_update_averages`.
        """
        curvature = self._curvature
        numbers = dict(self._schedule.numbers)
        shared_objects = (
            self._replicas,
            self.rule,
            self.damping,
            self._assignment,
            self._options.step,
        )
        shared = {id(x): x for x in shared_objects}
        before = None
        if may_update_averages:
            before = deepcopy(curvature, shared)
        step_memory = deepcopy(self._step_memory, shared)
        assignment = self._assignment.copy()
        params = list(self._optimized.values())
        buffers = _list_buffers(self.state[p] for p in params)
        copies = [(t, t.clone()) for t in (*params, *buffers)]
        try:
            yield
        except BaseException:
            if problem is not None:
                problem.rollback()
            for t, copy in copies:
                t.copy_(copy)
            self._schedule.numbers.update(numbers)
            self._assignment.restore(assignment)
            self._capture.set_measured(assignment.measured)
            if step_memory is not None:
                self._step_memory = step_memory
                self._allocate_buffers()
            if before is not None:
                before.take_over_from(curvature, self._params.by_name)
                self._curvature = before
            self._publish()
            self._capture.structure.bases = self._curvature.bases
            self._capture.reset()
            raise

    # --- reports --------------------------------------------------------------------------------

    @property
    def blocks(self) -> KFACState:
        """Averages and states of all blocks, as of the last step."""
        self._read_deferred_flags()
        return self._curvature

    @contextmanager
    def _with_whole_averages(self) -> Iterator[KFACState]:
        """Give `blocks` with the averages of all of them; all processes call it together."""
        curvature = self.blocks
        self._replicas.assemble_averages(curvature.block_averages)
        try:
            yield curvature
        finally:
            self._replicas.release(curvature.states, curvature.averages)

    @property
    def statistics_due(self) -> bool:
        """Whether the next forward pass gives statistics.

        Between them forward and backward passes may be replayed from a CUDA graph, if they fill the
        same gradients.
        """
        return self._capture.wants_statistics

    @property
    def info(self) -> KFACInfo:
        """What the last step did."""
        self._read_deferred_flags()
        return self._info

    def coverage(self) -> Coverage:
        """What every parameter's block is, and why; the first statistics show it."""
        structure = self._capture.structure
        reasons = report.refine_reasons(self.model, self._assignment, structure.reasons)
        facts = CoverageFacts(self.blocks, self._optimized, reasons, structure.diagonals)
        return report.make_coverage(facts, dict(unwrap_model(self.model).named_parameters()))

    def _warn_of_missing_blocks(self) -> None:
        """Warn once of what has no block, or what AdamW takes although it is in no known layer."""
        if self._notices.has_warned_of_missing_blocks:
            return
        reasons = report.explain_missing_blocks(self._assignment, self._capture.structure.diagonals)
        reasons = report.refine_reasons(self.model, self._assignment, reasons)
        self._notices.warn_of_missing_blocks(self._optimized, reasons, self._assignment.others)

    def gram(self) -> Kronecker:
        """F̂ without damping, over the parameters that have a block, in the model's order."""
        with self._with_whole_averages() as curvature:
            return report.assemble_gram(curvature, self._params.by_name)

    def average(self) -> dict[BlockKey, dict[FactorKey, Tensor]]:
        """The averages as they are, to serve as an `Invariant` damping's reference."""
        with self._with_whole_averages() as curvature:
            averages = curvature.averages
            return {k: a.normalize() for k, a in averages.items() if k in curvature.measured_keys}

    def degenerate(self) -> list[Degenerate]:
        """Blocks on which F̂ is no metric, and why: directions that change nothing."""
        with self._with_whole_averages() as curvature:
            return report.find_degenerate(curvature)

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        buffers = _list_buffers(self.state.values())
        sizes = self._curvature.memory()
        if buffers:
            sizes["momentum"] = sum(get_local_piece(t).nbytes for t in buffers)
        return sizes

    def traffic(self) -> dict[str, Traffic]:
        """What this process sent so far, by purpose; nothing where it is alone."""
        return self._replicas.processes.traffic()


def _list_buffers(states: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    """Return momenta and the like from the states of parameters."""
    buffers: list[Tensor] = []
    for state in states:
        buffers += [state[name] for name in BUFFERS if name in state]
    return buffers


def _launch_sums(reference: ref[KFAC]) -> None:
    """Begin to sum the statistics of an optimizer that still exists."""
    optimizer = reference()
    if optimizer is not None:
        optimizer._launch()
