"""The exact natural gradient as a `torch.optim.Optimizer`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._core.capture import Selector, unwrap_model
from .._core.errors import PullbackError, Status, require_type
from .._core.groups import find_processes, refuse_unknown_group
from .._core.processes import Traffic
from .._core.products import full_precision
from .._core.space import ParameterSpace
from ..grams import Gram, GramForm, RowStack, assemble_stack, coverage
from ..likelihoods import Likelihood
from ..metrics import Metric
from ..solvers import Cholesky, Solution, Solver
from ..steps import Backtracking, Constant, Local, Move, Step, retraction
from ..steps.memory import (
    first_numbers,
    first_vectors,
    merge_saved,
    recall,
    shared_numbers,
    store,
)
from .checks import (
    GrowthWatch,
    choose_metric,
    find_user_stacklevel,
    prepare_param_group,
    refuse_context,
    refuse_metric_of_objective,
    refuse_model,
    refuse_parameter,
    refuse_sharded,
)
from .closure import ClosureMemory, ClosureProblem
from .distributed import DistributedClosureProblem, DistributedObjectiveProblem
from .foreign_arguments import NATURAL_GRADIENT_COUNTERPARTS, explain_unknown_arguments
from .objective import Objective, ObjectiveProblem
from .outputs import Outputs, as_outputs
from .problem import StepInfo, StepProblem, System, agrees_with_autograd

#: caches, torch's hooks on the optimizer, and the function by which a scheduler counts calls
_UNSAVED = (
    "_inner_model",
    "_memory",
    "_growth",
    "_checked",
    "_retraction",
    "_names",
    "_schedule",
    "_optimizer_",
    "step",
)


@dataclass(frozen=True)
class PulledSystem:
    """The damped system of one step, and the rows that it came from."""

    system: System
    stack: RowStack


class NaturalGradient(Optimizer):
    r"""w ← retract(w − η (JᵀMJ + λ)⁺∇L), exactly, for any model and metric.

    Each step runs the closure once while the model's inputs, outputs and ∂L/∂outputs are
    recorded, pulls the metric back through a replayed forward pass, solves, and moves. `p.grad` is
    the truth: a regularizer in the closure counts.

    Args:
        model: the module whose outputs the metric measures.
        metric: a `Metric`, or a function z ↦ matrices (N, m, m); by default that of ½‖·‖².
        solver: how G⁺g is found.
        step: how far to go. By default `Backtracking()`, which never raises the loss; it runs the
            closure again at trial points, so the batch must be fixed outside the closure. Where
            `lr` is given, `Constant(lr)`.
        likelihood: instead of a metric, the likelihood whose Fisher information it is, or the loss
            itself, such as `nn.CrossEntropyLoss()` or `F.mse_loss` (`likelihoods.from_loss`).
        params: parameters or param groups, by default all that require gradients.
        lr: the learning rate of param groups that name none; by default the step's own.
        gram: the form of the Gram: "auto", "rows", "kernel", "dense" or "matrix_free"; or
            `grams.GramForm(form, memory)` with the bytes that one matrix may take.
        output: which tensor of a structured output the metric sees; or `optim.Outputs(select,
            batch_dim, reduction, metric_batch)` with its axis of samples, the reduction over them,
            and other inputs to average the metric over.
        retract: brings moved parameters back to where they may be: a function of the parameter
            dict, or a dict of functions by name.
        maximize: ascend instead of descend.
        group: the processes that train together, each with its own samples; by default those of a
            `DistributedDataParallel` model. The loss is the mean of what their closures return, and
            the metric the mean over all samples.
    """

    @explain_unknown_arguments(NATURAL_GRADIENT_COUNTERPARTS)
    def __init__(
        self,
        model: nn.Module,
        metric: Metric | Callable[[Tensor], Tensor] | None = None,
        solver: Solver | None = None,
        step: Step | None = None,
        *,
        likelihood: Likelihood | Callable[..., Tensor] | None = None,
        params: Iterable[Any] | None = None,
        lr: float | None = None,
        gram: str | GramForm = "auto",
        output: Selector | Outputs = None,
        retract: Any = None,
        maximize: bool = False,
        group: Any = None,
    ) -> None:
        refuse_model(model)
        refuse_sharded(model, "the exact Gram couples all of them")
        require_type("solver", solver, Solver)
        require_type("step", step, Step)
        self._processes = find_processes(model, group, type(self).__name__)
        self.model = model
        self.metric = choose_metric(likelihood, metric)
        self.solver = solver or Cholesky()
        self.rule = step or _default_step(lr)
        self.gram = gram if isinstance(gram, GramForm) else GramForm(gram)
        self.outputs = as_outputs(output, likelihood)
        self.maximize = maximize
        self._retract = retract
        self._set_caches()
        self._schedule = self._first_schedule()
        if params is None:
            params = _list_trainable(model)
        super().__init__(params, {"lr": self.rule.initial_lr if lr is None else lr})
        self._synchronize_processes()

    def _set_caches(self) -> None:
        """Set all that is neither copied nor pickled: caches, and the parameters' names."""
        #: the module behind `torch.compile` and wrappers
        self._inner_model = unwrap_model(self.model)
        self._memory = ClosureMemory()
        self._growth = GrowthWatch()
        self._names = {id(p): n for n, p in self._inner_model.named_parameters()}
        self._retraction = retraction(self._retract, tuple(self._names.values()))
        #: whether the step has numbers or vectors to save
        self._keeps_state = self.rule.inner is not None or bool(
            self.rule.numbers or self.rule.vectors
        )
        #: the parameters that were found usable
        self._checked: Sequence[object] = ()

    def _synchronize_processes(self) -> None:
        """Raise unless all processes have the same options; copy the first one's parameters."""
        options = {
            "metric": self.metric,
            "solver": self.solver,
            "rule": self.rule,
            "gram": self.gram.form,
            "reduction": self.outputs.reduction,
            "batch_dim": self.outputs.batch_dim,
            "maximize": self.maximize,
            "parameters": [*self._names.values()],
        }
        remedy = "Build the optimizer alike on all processes"
        self._processes.require_same("their options", options, remedy)
        self._processes.broadcast_first([*self._inner_model.parameters()])

    # --- state ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """All but hooks and caches: a copy or a pickle brings its model along."""
        return {n: v for n, v in vars(self).items() if not n.startswith(_UNSAVED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:
            self._set_caches()
        saved = (self.state[p].get("schedule") for p in self._list_parameters())
        self._schedule = shared_numbers(self._first_schedule(), saved)
        self._complete_state()

    def state_dict(self) -> dict[str, Any]:
        """Param groups and what the step keeps; a copy, which later steps leave alone."""
        self._complete_state()
        state = super().state_dict()
        return {**state, "state": copy.deepcopy(state["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume to the same bits; a state that cannot be used changes nothing."""
        if not {"state", "param_groups"} <= {*state_dict}:
            raise PullbackError(
                "The saved state is not an optimizer's",
                "it has no state by parameter, or no param groups",
                "Load what NaturalGradient.state_dict() gave",
            )
        if any("schedule" not in of_parameter for of_parameter in state_dict["state"].values()):
            raise PullbackError(
                "The saved state is not NaturalGradient's",
                "it has no schedule under its parameters: it is another optimizer's, or older",
                "Load what NaturalGradient.state_dict() of this version gave, or start anew",
            )
        super().load_state_dict(state_dict)

    def _first_schedule(self) -> dict[str, Any]:
        return {"steps": 0, "rule": first_numbers(self.rule)}

    def _complete_state(self) -> None:
        """Give each parameter the numbers that all share, and its part of the step's vectors."""
        for p in self._list_parameters():
            vectors = merge_saved(first_vectors(self.rule, p), self.state[p].get("rule", {}))
            # torch's full_state_dict reads the device off a tensor that has an axis
            device = p.new_empty(0)
            self.state[p] = {"schedule": self._schedule, "device": device, "rule": vectors}

    def _recall(self, problem: StepProblem) -> dict[str, Any]:
        """Return what the step kept, in the form in which it finds it in `Local.state`."""
        if not self._keeps_state:
            return {}
        vectors = [self.state[p]["rule"] for p in problem.params.values()]
        return recall(self.rule, self._schedule["rule"], vectors, problem.space.flatten)

    def _remember(self, problem: StepProblem, state: dict[str, Any]) -> None:
        """Save what the step left in `Local.state`; the moves of frozen parameters are zero."""
        if not self._keeps_state and not state:
            return
        params = self._list_parameters()

        def split(flat: Tensor) -> Iterator[Tensor]:
            pieces = problem.space.split(flat)
            for p in params:
                piece = pieces.get(self._names[id(p)])
                yield torch.zeros_like(p) if piece is None else piece.to(p.dtype, copy=True)

        vectors = [self.state[p]["rule"] for p in params]
        store(self.rule, state, self._schedule["rule"], vectors, split)

    # --- parameters -----------------------------------------------------------------------------

    def _list_parameters(self) -> list[Tensor]:
        parameters: list[Tensor] = []
        for group in self.param_groups:
            parameters += group["params"]
        return parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up more of the model's parameters, with their own lr."""
        present = {id(p) for p in self._list_parameters()}
        group = prepare_param_group(param_group, self.model, self._names, present)
        lr = group.get("lr", self.defaults["lr"])
        if not float(lr) >= 0:
            raise PullbackError(
                "The learning rate is not usable",
                f"got {lr}",
                "Use a number ≥ 0, and maximize=True to ascend",
            )
        super().add_param_group(group)
        self._complete_state()

    def _find_trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters, by name, in the order of the groups; raise for others'."""
        in_model = {id(p) for p in self._inner_model.parameters()}
        active: dict[str, Any] = {}
        for p in self._list_parameters():
            if id(p) not in in_model:
                raise PullbackError(
                    "The model's parameters were replaced",
                    "some of those given to the optimizer are no longer in the model",
                    "Build the optimizer after load_state_dict(assign=True) or a change of "
                    "parameters",
                )
            if p.requires_grad:
                active[self._names[id(p)]] = p
        signature = [(id(p), p.dtype, p.device, p.layout) for p in active.values()]
        if signature != self._checked:
            for name, p in active.items():
                refuse_parameter(name, p)
            self._checked = signature
        return active

    def _list_rates(self) -> list[float]:
        """Return the learning rates of the param groups."""
        return [float(group["lr"]) for group in self.param_groups]

    # --- one step -------------------------------------------------------------------------------

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        objective: Objective | Callable[[dict[str, Tensor]], Any] | None = None,
        metric_batch: Any = None,
    ) -> StepInfo:
        """One natural-gradient step.

        Args:
            closure: clears the gradients, evaluates the loss, calls backward and returns it.
                Several forward calls pool their samples.
            objective: instead of a closure, a function of the parameter dict that returns
                residuals: a tensor, a pair (tensor, weight), or a dict of these. The loss is
                half their weighted mean square. Or an `optim.Objective`, whose terms know
                their own structure.
            metric_batch: inputs to average the metric over instead of the loss's own: a tensor, a
                tuple of arguments or a dict of keywords; with an objective, a function of the
                parameter dict whose values the metric sees.

        Returns:
            What was done; a rejected step has changed nothing.
        """
        batch = self.outputs.metric_batch if metric_batch is None else metric_batch
        problem = self._make_problem(closure, objective, batch)
        try:
            info = self._take_step(problem, batch)
        except Exception:
            problem.rollback()
            raise
        if closure is not None and not self.maximize:
            self._watch_growth(info.loss)
        return info

    def direction(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        objective: Objective | Callable[[dict[str, Tensor]], Any] | None = None,
        metric_batch: Any = None,
    ) -> Solution:
        """The natural gradient (G + λ)⁺∇L at the current parameters, which stay where they are.

        The arguments are those of `step`; `x` of the answer is flat, in the order of the groups.
        """
        batch = self.outputs.metric_batch if metric_batch is None else metric_batch
        problem = self._make_problem(closure, objective, batch)
        try:
            fault = problem.evaluate()
            if fault:
                raise PullbackError("There is no natural gradient here", fault, "Check the loss")
            with torch.no_grad(), torch.autocast(problem.space.device.type, enabled=False):
                pulled = self._pull_back(problem, batch)
                return self._make_local(problem, pulled.system).direction()
        finally:
            problem.rollback()

    def traffic(self) -> dict[str, Traffic]:
        """What this process sent so far, by purpose; nothing where it is alone."""
        return self._processes.traffic()

    def __repr__(self) -> str:
        stages = f"metric={self.metric!r}, solver={self.solver!r}, step={self.rule!r}"
        return f"{super().__repr__()[:-1]}    {stages}\n)"

    def _make_problem(self, closure: Any, objective: Any, batch: Any) -> StepProblem:
        """Return the problem of this step, from a closure or an objective."""
        refuse_context(closure, objective)
        if self._processes.group is None:
            refuse_unknown_group(type(self).__name__, "it was built before they met")
        if objective is not None and batch is None:
            refuse_metric_of_objective(self.metric)
        params = self._find_trained()
        is_single = self._processes.size == 1
        if objective is not None:
            reduction = self.outputs.reduction or "mean"
            if is_single:
                return ObjectiveProblem(params, objective, reduction)
            return DistributedObjectiveProblem(params, objective, reduction, self._processes)
        arguments = (params, self.model, closure, self.outputs, self._memory)
        if is_single:
            return ClosureProblem(*arguments)
        return DistributedClosureProblem(*arguments, self._processes)

    def _take_step(self, problem: StepProblem, batch: Any) -> StepInfo:
        """Evaluate the problem, take the step that the rule chooses, and return its record."""
        fault = problem.evaluate()
        if not fault and not any(self._list_rates()) and not bool(problem.gradient.any()):
            fault = "the gradient is zero, and so is the learning rate"
        if fault:
            problem.rollback()
            return StepInfo(problem.loss, False, reason=fault, parameters=problem.space.size)
        with torch.no_grad(), torch.autocast(problem.space.device.type, enabled=False):
            pulled = self._pull_back(problem, batch)
            local = self._make_local(problem, pulled.system)
            move = self.rule.take(local)
            if self._processes.size > 1:
                move = self._share_move(move, local.state)
            if move.accepted:
                self._apply(problem, move)
            else:
                problem.rollback()
            self._remember(problem, local.state)
        self._schedule["steps"] += 1
        return self._report(problem, pulled, move)

    def _pull_back(self, problem: StepProblem, batch: Any) -> PulledSystem:
        """Return the pulled-back system, by a second pullback if the model's structure changed."""
        pulled, is_consistent = self._pull_once(problem, batch)
        if not is_consistent:
            self._memory.plans = {}
            pulled, _ = self._pull_once(problem, batch)
        return pulled

    def _pull_once(self, problem: StepProblem, batch: Any) -> tuple[PulledSystem, bool]:
        """Return the system of all processes, and True if autograd agrees with it."""
        # the replayed forward pass keeps the closure's own arithmetic: a last bit may flip a ReLU
        row_blocks, white = problem.row_blocks(self.metric, batch)
        own_entries = sum(block.count for block in row_blocks) * problem.space.size
        with full_precision(problem.space.device, own_entries):
            stack = problem.stack_rows(row_blocks)
            gram, all_white = assemble_stack(
                stack, white, self.gram.form, self.gram.memory, self.solver.prefers
            )
        is_consistent = problem.proven or agrees_with_autograd(gram, stack, problem, white)
        system = System.of(gram, problem, all_white, stack.count)
        return PulledSystem(system, stack), is_consistent

    def _make_local(self, problem: StepProblem, system: System) -> Local:
        """Return the local model of the loss, of its negative where we maximize."""
        displacement = self._make_displacement(problem)
        loss = problem.loss
        losses = partial(problem.losses, displace=displacement.displace)
        if self.maximize:
            system = -system
            loss = -problem.loss
            losses = _negate(losses)
        self.solver.seek(self._schedule["steps"])
        factorized = system.factorize(self.solver)
        return Local(
            loss=loss,
            gradient=system.gradient,
            solve=factorized.solve,
            path=factorized.path,
            inner_products=factorized.inner_products,
            losses=losses,
            lr=displacement.common_rate,
            scaled=displacement.scale,
            state=self._recall(problem),
        )

    def _make_displacement(self, problem: StepProblem) -> Displacement:
        """Return how a move changes the parameters: learning rates by entry, and retraction."""
        rates = self._list_rates()
        if len(set(rates)) == 1:
            return Displacement(problem.space, rates[0], rates[0], self._retraction)
        filled = {}
        for group, rate in zip(self.param_groups, rates, strict=True):
            for p in group["params"]:
                filled[self._names[id(p)]] = torch.full_like(p, rate)
        flat = problem.space.flatten({name: filled[name] for name in problem.params})
        return Displacement(problem.space, flat, None, self._retraction)

    def _share_move(self, move: Move, state: dict[str, Any]) -> Move:
        """Return the first process's move, and set its numbers; raise if learning rates differ.

        The moves of all others are equal to it but for round-off.
        """
        numbers = {name: v for name, v in state.items() if isinstance(v, (int, float))}
        rates = self._list_rates()
        rates_by_rank = self._processes.gather_objects(rates)
        if any(others != rates for others in rates_by_rank):
            raise PullbackError(
                "The processes differ in their learning rates",
                f"they are {', '.join(map(str, rates_by_rank))}",
                "Step a scheduler on every process, or on none",
            )
        chosen = self._processes.broadcast_object((move.size, move.accepted, numbers))
        size, accepted, numbers = chosen
        state.update(numbers)
        direction = move.direction.clone()
        self._processes.broadcast_first([direction], "moves")
        return replace(move, direction=direction, size=size, accepted=accepted)

    def _apply(self, problem: StepProblem, move: Move) -> None:
        """Move the parameters."""
        pieces = problem.space.split(move.direction)
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.requires_grad]
            if not chosen:
                continue
            deltas = [pieces[self._names[id(p)]].to(p.dtype) for p in chosen]
            torch._foreach_add_(chosen, deltas, alpha=-float(group["lr"]) * move.size)
        if self._retraction is not None:
            moved = {name: p.detach() for name, p in problem.params.items()}
            for name, value in self._retraction(moved).items():
                problem.params[name].copy_(value)
        torch.clear_autocast_cache()

    def _report(self, problem: StepProblem, pulled: PulledSystem, move: Move) -> StepInfo:
        """Return the record of a step."""
        system = pulled.system
        solution = move.solution
        new_loss = move.loss
        if new_loss is not None and self.maximize:
            new_loss = -new_loss
        return StepInfo(
            loss=problem.loss,
            accepted=move.accepted,
            step_size=move.size,
            damping=solution.damping,
            rank=solution.rank,
            gram=_describe_form(system.gram),
            rows=system.rows,
            parameters=system.gram.size,
            whitened=system.white is not None and system.extra is None,
            status=system.status if solution.status is Status.OK else solution.status,
            reason=move.reason,
            new_loss=new_loss,
            trials=move.trials,
            coverage=coverage(pulled.stack.row_blocks),
        )

    def _watch_growth(self, loss: float) -> None:
        """Warn once of a loss that stays far above the first."""
        if self._growth.has_grown(loss):
            remedy = (
                "Leave step= and lr= out, use steps.LevenbergMarquardt(), or raise the solver's "
                "damping"
            )
            self._growth.warn(loss, remedy, find_user_stacklevel())


@dataclass(frozen=True)
class Displacement:
    """w ↦ retract(w − lr·move).

    Attributes:
        space: the parameters.
        rate: lr, a number or one for each entry, (p,).
        common_rate: the number, or None.
        retract: brings parameters back to where they may be, or None.
    """

    space: ParameterSpace
    rate: Tensor | float
    common_rate: float | None
    retract: Any

    def scale(self, move: Tensor) -> Tensor:
        """Return lr·move."""
        return self.rate * move

    def displace(self, origin: Mapping[str, Tensor], move: Tensor) -> dict[str, Tensor]:
        """Return the parameters after a move, by name."""
        pieces = self.space.split(self.rate * move)
        with torch.no_grad():
            point = {name: w - pieces[name].to(w.dtype) for name, w in origin.items()}
        if self.retract is None:
            return point
        return {**point, **self.retract(point)}


def _negate(losses: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function moves ↦ −losses(moves)."""
    return lambda moves: -losses(moves)


def _default_step(lr: float | None) -> Step:
    """Return a line search, or a constant step where a learning rate is given."""
    return Backtracking() if lr is None else Constant(lr)


def _list_trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient; raise where there is none."""
    params = [p for p in unwrap_model(model).parameters() if p.requires_grad]
    if not params:
        raise PullbackError(
            "There is nothing to optimize",
            "no parameter of the model requires a gradient",
            "Unfreeze some, or name those to be unfrozen later with params=",
        )
    return params


def _describe_form(gram: Gram) -> str:
    """Return the form in which a Gram was held, as `StepInfo` names it."""
    if gram.structure.closed:
        return "closed form"
    if gram.structure.holds == "operator":
        return "matrix_free"
    return gram.structure.holds
