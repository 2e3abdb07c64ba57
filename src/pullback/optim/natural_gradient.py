"""The exact natural gradient as a `torch.optim.Optimizer`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._core.capture import Selector, unwrap_model
from .._core.errors import PullbackError, Status, refuse_unknown, require_type
from .._core.groups import find_processes, refuse_unknown_group
from .._core.processes import Traffic
from .._core.products import full_precision
from ..grams import FORMS, RowBlock, RowStack, assemble, assemble_stack, coverage
from ..likelihoods import Likelihood, reduction_of
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
    metric_of,
    own_group,
    refuse_context,
    refuse_metric,
    refuse_model,
    refuse_parameter,
    refuse_sharded,
    warn_growth,
)
from .closure import ClosureProblem
from .objective import Objective, ObjectiveProblem
from .problem import StepInfo, StepProblem, System, explains

#: caches, torch's hooks on the optimizer, and the function by which a scheduler counts calls
_UNSAVED = ("_cache", "_names", "_schedule", "_optimizer_", "step")


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
        gram: the form of the Gram: "auto", "rows", "kernel", "dense" or "matrix_free".
        reduction: "mean" or "sum" over samples, for metric and loss alike; by default that of the
            loss given as `likelihood`, else "mean".
        output: which tensor of a structured output the metric sees.
        batch_dim: the output's axis of samples.
        metric_batch: other inputs to average the metric over (see `step`).
        retract: brings moved parameters back to where they may be: a function of the parameter
            dict, or a dict of functions by name.
        maximize: ascend instead of descend.
        memory: bytes that one matrix of the Gram may take.
        group: the processes that train together, each with its own samples; by default those of a
            `DistributedDataParallel` model. The loss is the mean of what their closures return, and
            the metric the mean over all samples.
    """

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
        gram: str = "auto",
        reduction: str | None = None,
        output: Selector = None,
        batch_dim: int = 0,
        metric_batch: Any = None,
        retract: Any = None,
        maximize: bool = False,
        memory: int = 2**30,
        group: Any = None,
    ) -> None:
        refuse_model(model)
        refuse_sharded(model, "the exact Gram couples all of them")
        self._processes = find_processes(model, group, type(self).__name__)
        reduction = reduction_of(likelihood) if reduction is None else reduction
        refuse_unknown("gram", gram, FORMS)
        refuse_unknown("reduction", reduction, ("mean", "sum"))
        require_type("solver", solver, Solver)
        require_type("step", step, Step)
        self.model = model
        self.metric = metric_of(likelihood, metric)
        self.solver = Cholesky() if solver is None else solver
        default = Backtracking() if lr is None else Constant(lr)
        self.rule = default if step is None else step
        self.gram, self.reduction, self.maximize, self.memory = gram, reduction, maximize, memory
        self.output, self.batch_dim, self.metric_batch = output, batch_dim, metric_batch
        self._retract = retract
        self._register()
        self._retraction()  # refuses unknown names at once
        if params is None:
            params = [p for p in unwrap_model(model).parameters() if p.requires_grad]
            if not params:
                raise PullbackError(
                    "There is nothing to optimize",
                    "no parameter of the model requires a gradient",
                    "Unfreeze some, or name those to be unfrozen later with params=",
                )
        self._schedule = self._first_schedule()
        super().__init__(params, {"lr": self.rule.initial_lr if lr is None else lr})
        # all processes have the same options, and begin where the first one is
        stages = ("metric", "solver", "rule", "gram", "reduction", "batch_dim", "maximize")
        options = {n: getattr(self, n) for n in stages}
        self._processes.require_same(
            "their options", {**options, "parameters": [*self._names.values()]},
            "Build the optimizer alike on all processes",
        )  # fmt: skip
        self._processes.broadcast_first([*unwrap_model(model).parameters()])

    def _register(self) -> None:
        self._cache: dict[str, Any] = {}
        self._names = {id(p): n for n, p in unwrap_model(self.model).named_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        """All but hooks and caches: a copy or a pickle brings its model along."""
        return {n: v for n, v in vars(self).items() if not n.startswith(_UNSAVED)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:
            self._register()
        saved = (self.state[p].get("schedule") for p in self._parameters())
        self._schedule = shared_numbers(self._first_schedule(), saved)
        self._complete_state()

    def state_dict(self) -> dict[str, Any]:
        """Param groups and what the step keeps; a copy, which later steps leave alone."""
        self._complete_state()
        out = super().state_dict()
        return {**out, "state": copy.deepcopy(out["state"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume to the same bits; a state that cannot be used changes nothing."""
        if not {"state", "param_groups"} <= {*state_dict}:
            raise PullbackError(
                "The saved state is not an optimizer's",
                "it has no state by parameter, or no param groups",
                "Load what NaturalGradient.state_dict() gave",
            )
        if any("schedule" not in own for own in state_dict["state"].values()):
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
        for p in self._parameters():
            vectors = merge_saved(first_vectors(self.rule, p), self.state[p].get("rule", {}))
            # torch's full_state_dict reads the device off a tensor that has an axis
            device = p.new_empty(0)
            self.state[p] = {"schedule": self._schedule, "device": device, "rule": vectors}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up more of the model's parameters, with their own lr."""
        group = own_group(param_group, self._names, {id(p) for p in self._parameters()})
        if not float(group.get("lr", self.defaults["lr"])) >= 0:
            raise PullbackError(
                "The learning rate is not usable",
                f"got {group.get('lr', self.defaults['lr'])}",
                "Use a number ≥ 0, and maximize=True to ascend",
            )
        super().add_param_group(group)
        self._complete_state()

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
        refuse_context(closure, objective)
        if self._processes.group is None:
            refuse_unknown_group(type(self).__name__, "it was built before they met")
        batch = self.metric_batch if metric_batch is None else metric_batch
        problem = self._problem(closure, objective)
        if objective is not None and batch is None:
            refuse_metric(self.metric)
        try:
            info = self._take(problem, batch)
        except Exception:
            problem.rollback()
            raise
        if closure is not None and not self.maximize:
            warn_growth(
                self._cache.setdefault("growth", [info.loss, 0]), info.loss,
                "Leave step= and lr= out, use steps.LevenbergMarquardt(), or raise the solver's "
                "damping", 3,
            )  # fmt: skip
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
        refuse_context(closure, objective)
        problem = self._problem(closure, objective)
        batch = self.metric_batch if metric_batch is None else metric_batch
        try:
            reason = problem.evaluate()
            if reason:
                raise PullbackError("There is no natural gradient here", reason, "Check the loss")
            with torch.no_grad(), torch.autocast(problem.space.device.type, enabled=False):
                _, system = self._system(problem, batch)
                return self._local(problem, system).direction()
        finally:
            problem.rollback()

    def traffic(self) -> dict[str, Traffic]:
        """What this process sent so far, by purpose; nothing where it is alone."""
        return self._processes.traffic()

    def __repr__(self) -> str:
        stages = f"metric={self.metric!r}, solver={self.solver!r}, step={self.rule!r}"
        return f"{super().__repr__()[:-1]}    {stages}\n)"

    def _take(self, problem: StepProblem, batch: Any) -> StepInfo:
        reason = problem.evaluate()
        if not reason and self._idle(problem):
            reason = "the gradient is zero, and so is the learning rate"
        if reason:
            problem.rollback()
            return StepInfo(problem.loss, False, reason=reason, parameters=problem.space.size)
        with torch.no_grad(), torch.autocast(problem.space.device.type, enabled=False):
            parts, system = self._system(problem, batch)
            local = self._local(problem, system)
            move = self._agreed(self.rule.take(local), local.state)
            if move.accepted:
                self._apply(problem, move)
            else:
                problem.rollback()
            self._remember(problem, local.state)
        self._schedule["steps"] += 1
        return _record(problem, system, parts, move, self._sign)

    def _idle(self, problem: StepProblem) -> bool:
        """Whether a step without a gradient and a rate asks for nothing."""
        rates = [float(group["lr"]) for group in self.param_groups]
        return not any(rates) and not bool(problem.gradient.any())

    def _agreed(self, move: Move, state: dict[str, Any]) -> Move:
        """The first process's move, to the bit; all have computed the same one to round-off."""
        processes = self._processes
        if processes.is_single:
            return move
        numbers = {k: v for k, v in state.items() if isinstance(v, (int, float))}
        rates = [float(group["lr"]) for group in self.param_groups]
        found = processes.gather_objects((move.size, move.accepted, numbers, rates))
        if any(own[3] != rates for own in found):
            raise PullbackError(
                "The processes differ in their learning rates",
                f"they are {', '.join(str(own[3]) for own in found)}",
                "Step a scheduler on every process, or on none",
            )
        size, accepted, numbers, _ = found[0]
        state.update(numbers)
        processes.broadcast_first([direction := move.direction.clone()], "moves")
        return replace(move, direction=direction, size=size, accepted=accepted)

    def _system(self, problem: StepProblem, batch: Any) -> tuple[list[RowBlock], System]:
        """Pull the metric back; once more, if the model's structure is not what it was."""
        parts, system, explained = self._pull(problem, batch)
        if not problem.proven and not explained:
            self._cache.pop("plans", None)
            parts, system, _ = self._pull(problem, batch)
        return parts, system

    def _pull(self, problem: StepProblem, batch: Any) -> tuple[list[RowBlock], System, bool]:
        """The rows of this process, the system of all, and whether autograd agrees with it."""
        # the replayed forward pass keeps the closure's own arithmetic: a last bit may flip a ReLU
        parts, own = problem.parts(self.metric, batch)
        space, rows, white = problem.space, sum(part.count for part in parts), own
        stages = self.gram, self.memory, self.solver.prefers
        with full_precision(space.device, rows * space.size):
            if self._processes.is_single:
                gram = assemble(parts, *stages)
            else:
                stack = RowStack(parts, space, self._processes, problem.model)
                gram, white = assemble_stack(stack, own, *stages)
                rows = stack.count
        explained = problem.proven or explains(gram, parts, problem, own)
        return parts, System.of(gram, problem, white, rows), explained

    def _problem(self, closure: Any, objective: Any) -> StepProblem:
        active = self._active()
        if closure is None:
            return ObjectiveProblem(active, objective, self.reduction, self._processes)
        return ClosureProblem(
            active,
            self.model,
            closure,
            reduction=self.reduction,
            output=self.output,
            batch_dim=self.batch_dim,
            memory=self._cache,
            processes=self._processes,
        )

    @property
    def _sign(self) -> float:
        return -1.0 if self.maximize else 1.0

    def _active(self) -> dict[str, nn.Parameter]:
        """The parameters that take part, by name, in the order of the groups."""
        now = {id(p) for p in unwrap_model(self.model).parameters()}
        if any(id(p) not in now for group in self.param_groups for p in group["params"]):
            raise PullbackError(
                "The model's parameters were replaced",
                "some of those given to the optimizer are no longer in the model",
                "Build the optimizer after load_state_dict(assign=True) or a change of parameters",
            )
        active = {
            self._names[id(p)]: p
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        }
        for name, p in active.items():
            refuse_parameter(name, p)
        return active

    def _local(self, problem: StepProblem, system: System) -> Local:
        """The local picture, with the sign turned where we maximize."""
        sign = self._sign
        system = -system if self.maximize else system
        precise = system.precisely()
        self.solver.seek(self._schedule["steps"])
        state = precise(self.solver.init)(system.gram)
        lr, scale = self._rates(problem)
        place = partial(self._place, problem, scale)
        vectors = [self.state[p]["rule"] for p in problem.params.values()]
        return Local(
            loss=sign * problem.loss,
            gradient=system.gradient,
            solve=system.solver(self.solver, state),
            path=precise(lambda: system.path(self.solver, state)),
            inner_products=precise(system.gram.inner_products),
            losses=lambda moves: sign * problem.losses(moves, place),
            lr=lr,
            scaled=lambda v: scale * v,
            state=recall(self.rule, self._schedule["rule"], vectors, problem.space.flatten),
        )

    def _remember(self, problem: StepProblem, state: dict[str, Any]) -> None:
        """Save what the step left in its state; frozen parameters have moved by zero."""
        params = self._parameters()

        def split(flat: Tensor) -> Iterator[Tensor]:
            pieces = problem.space.split(flat)
            for p in params:
                piece = pieces.get(self._names[id(p)])
                yield torch.zeros_like(p) if piece is None else piece.to(p.dtype, copy=True)

        vectors = [self.state[p]["rule"] for p in params]
        store(self.rule, state, self._schedule["rule"], vectors, split)

    def _rates(self, problem: StepProblem) -> tuple[float | None, Tensor | float]:
        """The learning rate, if all groups agree, and what multiplies a move."""
        rates = [float(group["lr"]) for group in self.param_groups]
        if len(set(rates)) == 1:
            return rates[0], rates[0]
        by_id = {
            id(p): r for g, r in zip(self.param_groups, rates, strict=True) for p in g["params"]
        }
        filled = {n: torch.full_like(p, by_id[id(p)]) for n, p in problem.params.items()}
        return None, problem.space.flatten(filled)

    def _place(
        self,
        problem: StepProblem,
        scale: Tensor | float,
        origin: Mapping[str, Tensor],
        move: Tensor,
    ) -> dict[str, Tensor]:
        """retract(w − lr·move), by name."""
        moved = problem.space.split(scale * move)
        with torch.no_grad():
            point = {n: w - moved[n].to(w.dtype) for n, w in origin.items()}
        if self._retract is None:
            return point
        return {**point, **self._retraction()(point)}

    def _retraction(self) -> Any:
        return retraction(self._retract, tuple(self._names.values()))

    def _apply(self, problem: StepProblem, move: Move) -> None:
        pieces = problem.space.split(move.direction)
        for group in self.param_groups:
            chosen = [p for p in group["params"] if p.requires_grad]
            if not chosen:
                continue
            deltas = [pieces[self._names[id(p)]].to(p.dtype) for p in chosen]
            torch._foreach_add_(chosen, deltas, alpha=-float(group["lr"]) * move.size)
        if self._retract is not None:
            now = {n: p.detach() for n, p in problem.params.items()}
            for name, value in self._retraction()(now).items():
                problem.params[name].copy_(value)
        torch.clear_autocast_cache()


def _record(
    problem: StepProblem, system: System, parts: list[RowBlock], move: Move, sign: float
) -> StepInfo:
    solution, gram = move.solution, system.gram
    form = "matrix_free" if gram.structure.holds == "operator" else gram.structure.holds
    form = "closed form" if gram.structure.closed else form
    return StepInfo(
        loss=problem.loss,
        accepted=move.accepted,
        step_size=move.size,
        damping=solution.damping,
        rank=solution.rank,
        gram=form,
        rows=system.rows,
        parameters=gram.size,
        whitened=system.white is not None and system.extra is None,
        status=system.status if solution.status is Status.OK else solution.status,
        reason=move.reason,
        new_loss=None if move.loss is None else sign * move.loss,
        trials=move.trials,
        coverage=coverage(parts),
    )
