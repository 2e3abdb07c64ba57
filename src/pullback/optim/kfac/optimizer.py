"""K-FAC as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from itertools import chain
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
from ..._core.flags import DeferredFlags, are_finite
from ..._core.groups import (
    find_group,
    find_processes,
    refuse_unknown_group,
    unwrap_distributed,
)
from ..._core.processes import Traffic
from ..._core.shards import ModelParameters, get_local_piece, is_sharded, reshard, shard_like
from ...grams.kronecker import Kronecker
from ...likelihoods import Likelihood
from ...metrics import Metric
from ...steps import QuadraticModel
from ..checks import dense_gradients, own_group, refuse_inference, refuse_model
from ..closure import ClosureMemory, ClosureWarning
from ..objective import Objective, ObjectiveProblem
from ..problem import StepProblem
from . import options, report, update
from .closure import best_combination, evaluate, problem_of, trial_move
from .factors.block import BlockKey, FactorKey
from .factors.damping import Damping
from .factors.preconditioner import Preconditioner
from .replicas import Replicas
from .report import Coverage, Degenerate, KFACInfo
from .rules import Natural, Rule
from .state import BlockMeans, KFACState, incomplete, publish, restore, saved_by_name
from .statistics.capture import StatisticsCapture, averaged_parts
from .statistics.plan import Forecast, follows, forecast, measured_names
from .update import BUFFERS, Guard, Share, Tensors

#: what belongs to hooks, or to the model's objects
_UNSAVED = ("_capture", "_params", "_verdict", "_memory")
_NOT_FINITE = "a gradient is not finite"


class KFAC(Optimizer):
    r"""Train with K-FAC's factors in an ordinary loop: `loss.backward(); opt.step()`.

    `KFAC(model)` takes Adam's steps in the eigenbases of every weight's two factors: R = Σ δδᵀ/N of
    the cotangents at the layer's output, and C = mean aaᵀ of its inputs. Embeddings, gains and
    biases follow AdamW inside the same optimizer. For networks with a normalization, and for
    transformers, known by an embedding, an attention layer or a layer norm, it takes the polar
    factor of the momentum, whitened by C (`rule="spectral"`). A transformer's output layer then
    follows AdamW too, and AdamW takes half the rate.

    With a likelihood, a metric or a damping it is the natural gradient of the K-FAC metric,

        w ← w − η F̂⁻¹∇L,    F̂ = ⊕_l R_l ⊗ C_l.

    On statistics steps, while the loss's gradient passes the model's output, targets drawn from
    the model's own predictions are then sent down the same graph: R and C are those of the true
    Fisher, whatever the loss was.

    Defaults depend on the rule; what has none ("–") is refused:

    | argument | `Eigenbasis` | `Spectral` | `Natural` |
    |---|---|---|---|
    | `lr` | 3e-3 | 6e-3 | 0.1 |
    | `fisher` | "empirical" | – | "mc" |
    | `damping` | – | 0.2 | 1e-3 |
    | `momentum`, `kl_clip` | – | – | 0.9, 1e-3 |
    | `ekfac`, `step` | – | – | off |
    | `ema` | 0.95 | 0.8 | 0.95 |
    | `statistics_every`, `invert_every` | 10, 10 | 10, 20 | 10, 100 |

    Args:
        model: the module that is called in the loop.
        lr: η; schedulers may change it.
        rule: "eigenbasis", "spectral", "natural", or a `Rule`. By default "natural" where
            `likelihood`, `metric`, `fisher`, `damping`, `momentum`, `kl_clip`, `ekfac` or `step` is
            given, else "spectral" for transformers and normalized networks, and "eigenbasis"
            for others.
        likelihood: whose Fisher information is the metric on outputs, such as `Categorical()`, or
            the loss itself, such as `nn.CrossEntropyLoss()` (`likelihoods.from_loss`).
        metric: instead, any metric of the library; by default that of ½‖·‖². `Sobolev` relates the
            samples of one forward call by the model's first tensor.
        fisher: "mc" draws targets, "exact" takes the metric as it is (a reverse pass per output),
            "empirical" the loss's own gradient.
        damping: λ, or an object: `Tikhonov`, `Exact`, `Invariant`, `Adaptive`; for `Spectral` a
            part of C's mean diagonal.
        momentum: of the natural direction; other rules have their own.
        betas: of Adam: in eigenbases, and for parameters that follow AdamW (embeddings, gains,
            biases, and param groups with `"rule": "adam"`).
        weight_decay: decoupled, w ← (1 − η·weight_decay)w.
        kl_clip: δ, such that η²·mᵀF̂m ≤ δ for the step ηm that is taken, momentum included, and F̂
            as it is averaged now. It takes as many products as to apply the inverses. "auto" is
            1e-3, or none where a closure controls the step; None switches it off.
        ema: the weight of the past in the averages.
        statistics_every, invert_every: steps between statistics and between inversions. Until the
            first `invert_every` steps are done, inverses are also renewed at the first, second,
            fourth, ... statistics.
        params: parameters or param groups, by default all of the model's. Groups may have their own
            `lr`, `weight_decay`, `momentum` or `betas`. Those with `"rule": "adam"` follow AdamW at
            the group's rate.
        sharing: "expand" or "reduce", how places that share a weight enter (see `moments`).
        joint: whether weight and bias share a block.
        ekfac: correct the eigenvalues by second moments of the gradient in the eigenbases; those of
            linear and convolution layers used once. λ is added to them.
        max_factor: the longest side held as a matrix; longer ones are diagonals.
        draws: targets per sample for fisher="mc".
        reduction: "mean" or "sum" over samples, of the loss and hence of F̂; by default that of the
            loss given as `likelihood`, else "mean".
        output: which tensor of a structured output the metric sees.
        batch_dim: the output's axis of samples.
        grad_scaler: with fisher="empirical", the scaler of the loss.
        step: `QuadraticModel()` finds learning rate and momentum from the exact quadratic model
            (`lr` multiplies them); needs `step(closure)`.
        seed: of the draws, which follow from it and the number of the step.
        group: the processes that train together, by default those of the model's wrapper. Where a
            model is not wrapped, its gradients are averaged over them in `step`.
        workers: how many of the processes hold an inverse, a divisor of their number; by default
            all, and one where `fully_shard` has cut the model. With fewer, directions are sent
            instead.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        rule: Rule | str | None = None,
        likelihood: Likelihood | Callable[..., Tensor] | None = None,
        metric: Metric | Callable[[Tensor], Tensor] | None = None,
        fisher: str | None = None,
        damping: float | Damping | None = None,
        momentum: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        kl_clip: float | str | None = "auto",
        ema: float | None = None,
        statistics_every: int | None = None,
        invert_every: int | None = None,
        params: Iterable[Any] | None = None,
        sharing: str = "expand",
        joint: bool = True,
        ekfac: bool = False,
        max_factor: int = 8192,
        draws: int = 1,
        reduction: str | None = None,
        output: Selector = None,
        batch_dim: int = 0,
        grad_scaler: Any = None,
        step: QuadraticModel | None = None,
        seed: int = 0,
        group: ProcessGroup | None = None,
        workers: int | None = None,
    ) -> None:
        refuse_model(model, "KFAC")
        processes, wrapped = find_processes(model, group, "KFAC"), find_group(model) is not None
        self.model = model = unwrap_distributed(model)
        options.check(params=params)
        own = self._options = options.resolve(
            model, likelihood, metric, lr=lr, rule=rule, fisher=fisher, damping=damping,
            momentum=momentum, betas=betas, weight_decay=weight_decay, kl_clip=kl_clip, ema=ema,
            statistics_every=statistics_every, invert_every=invert_every, sharing=sharing,
            joint=joint, ekfac=ekfac, max_factor=max_factor, draws=draws, reduction=reduction,
            output=output, batch_dim=batch_dim, grad_scaler=grad_scaler, step=step, seed=seed,
        )  # fmt: skip
        self._rule, self.metric, self.damping = own.rule, own.metric, own.damping
        self.kl_clip, self.ema, self.ekfac, self.seed = own.kl_clip, own.ema, ekfac, seed
        self.statistics_every, self.invert_every = own.statistics_every, own.invert_every
        self.reduction, self.grad_scaler, self.quadratic = own.reduction, grad_scaler, step
        # a framework that wraps the model later may let one process save alone: no shares then
        lazy = group is None and not (ekfac or own.damping.referenced or own.controlled)
        shards, read = any(map(is_sharded, model.parameters())), own.kl_clip is not None
        if shards and workers is None and not ekfac:
            workers = 1
        self._replicas = Replicas(
            processes, workers, wrapped=wrapped, lazy=lazy, read=read, owned=shards
        )
        self._closed, self._warned_plain = False, False
        self._warned: set[str] = set()
        self._info, self._skipped = KFACInfo(), False
        self._growth: list[Any] = []  # the first loss of a closure, and steps far above it
        schedule = {"step": 0, "taken": 0, "damping": self.damping.value, "retry": 0}
        self._held = self._empty_state(schedule)
        given = list(unwrap_model(model).parameters() if params is None else params)
        options.refuse_unready(model, given)
        self._register()
        several, teams = not processes.is_single, self._replicas.placement.has_several_teams
        options.refuse_spread(own, several=several, teams=teams, shards=shards)
        super().__init__(given, own.defaults)
        self._replicas.meet(self._params, own.common, self.param_groups, schedule)

    def _empty_state(self, schedule: dict[str, Any]) -> KFACState:
        # on a CPU it is cheaper to solve with factors that serve one step than to invert them
        cpu = all(p.device.type == "cpu" for p in unwrap_model(self.model).parameters())
        once, exact = cpu and self._options.once, self.damping.exact or self.ekfac
        needs = "eigenbasis" if exact else "factors" if once else "inverse"
        rule = Natural(needs) if isinstance(self._rule, Natural) else self._rule
        own = Preconditioner(rule, self.damping, ekfac=self.ekfac)
        return KFACState(own, self._replicas, schedule)

    def _register(self) -> None:
        """Find the model's parameters and hook the model."""
        processes = self._replicas.processes
        self._params = ModelParameters(self.model, processes)
        rank = f" {processes.rank}" if processes.rank else ""
        seed, schedule = self.seed, self._held.schedule  # not the optimizer, which holds the hooks
        self._capture = StatisticsCapture(
            self.model,
            self._options,
            lambda: Random(f"{seed} {schedule['step']}{rank}").getrandbits(32),
            several=not processes.is_single,
            whole=self._params.leaves if self._params.shards else None,
        )
        if not processes.is_single:
            me = ref(self)  # hooks hold it
            self._capture.completed = lambda: (own := me()) and own._launch()
        self._verdict: DeferredFlags | None = None
        # KFAC gives the warnings itself
        self._memory = ClosureMemory(warned={*ClosureWarning})

    def _launch(self) -> None:
        """Begin to sum statistics over processes, while the backward pass goes on."""
        self._replicas.launch(self._capture.pool, self._params)

    # --- a torch optimizer's duties -------------------------------------------------------------

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks from the model; the optimizer goes on with what it knows."""
        self._capture.close()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up more of the model's parameters."""
        held = {id(p) for group in self.param_groups for p in group["params"]}
        group = own_group(param_group, self._params.names, held, sharded=True)
        options.check_group(group, self.defaults)
        super().add_param_group(group)
        self._choose()
        self._held.reserve_expected(self._forecast(frozen=False))
        self._publish()  # first, so that parameters stand in their order
        self._make_buffers()

    @property
    def _chosen(self) -> dict[str, Any]:
        """The groups' parameters, by name; for the metric the others are constants."""
        return self._params.in_groups(self.param_groups)

    def _choose(self) -> None:
        """Settle which parameters are measured: all, or the matrices that follow the rule."""
        own = self._params.in_groups(group for group in self.param_groups if not group.get("rule"))
        given = [n for n, p in own.items() if p.numel()]
        self._measured = measured_names(self.model, self._params.by_name, given, self._options)
        self._capture.choose(self._measured)

    def _forecast(self, *, frozen: bool = True) -> Forecast:
        """The blocks that are expected, with or without parameters that are frozen now."""
        if self._params.shards:
            reshard(unwrap_model(self.model))
        given = {*self._measured}
        every = self._params.by_name.items()
        some = {n: p for n, p in every if n in given and (frozen or p.requires_grad)}
        return forecast(self.model, some, self._options)

    def _publish(self) -> None:
        publish(self._held, self.state, self._chosen)

    def _make_buffers(self) -> None:
        """Make Adam's two moments, or momentum where a group or the quadratic model has one."""
        adam = self._chosen.keys() - {*self._measured} if self._rule.matrices else ()
        for group in self.param_groups:
            for p in group["params"]:
                if self._params.names[id(p)] in adam:
                    update.buffer_of(self.state, p, "first")
                    update.buffer_of(self.state, p, "second")
                elif group.get("momentum") or self.quadratic is not None:
                    update.buffer_of(self.state, p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics of gradients that were never used."""
        super().zero_grad(set_to_none)
        self._capture.clear()

    def __getstate__(self) -> dict[str, Any]:
        """All but the hooks: a copy or a pickle brings its model along."""
        self._read_verdict()
        own = {n: v for n, v in vars(self).items() if n not in _UNSAVED}
        own.pop("step", None)  # a scheduler counts calls by a function of its own
        return own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:
            self._register()
            self._publish()
            self._resume()

    def state_dict(self) -> dict[str, Any]:
        """Param groups, and under each parameter momentum, averages, inverses and schedule.

        Where processes hold parts of it (`workers` fewer than all, or statistics since the last
        inversion), all of them call this together. Where `fully_shard` has cut the model, averages
        and inverses are `DTensor`s too.
        """
        held, replicas = self.blocks, self._replicas
        try:
            replicas.collect(held.preconditioner, held.blocks)
            publish(held, self.state, self._chosen, replicas.piece)
        except RuntimeError as error:
            if replicas.alone:
                raise
            raise PullbackError(
                "state_dict() did not hear from all processes",
                "each of them holds a part of the state, and one did not call it, or is lost",
                "Call state_dict() on all processes together; one of them may write it",
            ) from error
        else:
            out = super().state_dict()
            return {**out, "state": {number: dict(own) for number, own in out["state"].items()}}
        finally:
            replicas.release(held.preconditioner, held.averages)
            self._publish()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume to the same bits; a state that cannot be used changes nothing."""
        groups, params = self.param_groups, self._params.by_name
        names = [[*self._params.in_groups([group])] for group in groups]
        wanted = [part for part in self.state[groups[0]["params"][0]] if part not in BUFFERS]
        saved = saved_by_name(state_dict, names, wanted)
        for name, own in saved.items():
            parts = [part for part in BUFFERS if part in own]
            if any(own[part].shape != params[name].shape for part in parts):
                raise incomplete(f"the moments of {name!r} have another shape")
        fresh = self._empty_state(dict(self._held.schedule))
        restore(fresh, saved, params, self._forecast())
        self._read_verdict()
        super().load_state_dict({**state_dict, "state": {}})
        fresh.inherit(self._held, saved)
        self._held = fresh
        for name, own in saved.items():
            p = params[name]
            for part in [part for part in BUFFERS if part in own]:
                self.state[p][part] = shard_like(own[part], p)
        self._make_buffers()
        self._publish()
        self._resume()

    def _resume(self) -> None:
        self._choose()
        partners = {n: key.names for key in self._held.learned for n in key.names}
        if self._held.schedule["taken"]:  # others were not used yet
            params = self._params.by_name
            unused = {n for n in self._measured if params[n].requires_grad} - partners.keys()
            partners |= {n: (n,) for n in unused}
        self._capture.structure.partners = partners
        self._capture.structure.bases = self._held.bases
        self._capture.reset()
        self._capture.watch.wants_compiled_calls = self._due()
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
        refuse_inference("what is made there cannot be updated later")
        options.check_rates(self.param_groups)
        if self._replicas.processes.group is None:
            refuse_unknown_group("KFAC", "it was built before they met")
        told, wanted = self._capture.watch.wants_compiled_calls, self._capture.wanted
        self._read_verdict()
        given = self._capture, self._params, self.param_groups, self._replicas.processes
        problem = problem_of(closure, objective, self._options, *given, self._memory)
        # the forward pass was not told that statistics are due, where the last step was rejected
        owing = closure is None and objective is None and not told and self._due()
        if not self._options.controlled:
            return self._take(problem, closure, owing, wanted)
        learning = wanted or self._due() or self._capture.pool.calls or self._held.schedule["retry"]
        with self._transaction(problem, learning=bool(learning)):
            return self._take(problem, closure, owing, wanted)

    @contextmanager
    def _transaction(self, problem: StepProblem | None, *, learning: bool) -> Iterator[None]:
        """After an exception, put back everything that a step may change.

        A step that is not `learning` renews neither statistics nor inverses.
        """
        own, schedule = self._held.preconditioner, dict(self._held.schedule)
        shared = {id(x): x for x in (self._replicas, own.rule, own.damping)}
        before = deepcopy(self._held, shared) if learning else None
        params = list(self._chosen.values())
        buffers = [update.buffer_of(self.state, p) for p in params if "momentum" in self.state[p]]
        copies = [(t, t.clone()) for t in (*params, *buffers)]
        try:
            yield
        except BaseException:
            if problem is not None:
                problem.rollback()
            for t, copy in copies:
                t.copy_(copy)
            self._held.schedule.update(schedule)
            if before is not None:
                before.inherit(self._held, self._params.by_name)
                self._held = before
            self._publish()
            self._capture.structure.bases = self._held.bases
            self._capture.reset()
            raise

    def _take(self, problem: StepProblem | None, closure: Any, owing: bool, wanted: bool) -> Any:
        """Statistics → averages → inverses → directions → update, as far as each is due.

        Where nothing that the host does next depends on the device, the host does not wait for it:
        a flag there guards every change, and `_read_verdict` reads it later.
        """
        loss, capture, groups = evaluate(problem, closure), self._capture, self.param_groups
        held, params, rule = self._held, self._params, self._rule
        self._replicas.average_gradients(params, groups, capture.wrapped)
        gradients = dense_gradients(groups, params.names, params.shapes)
        gradients = params.gather_whole(gradients, "gradients")
        if self._idle(gradients):
            capture.clear()
            return loss
        if problem is not None and not isfinite(problem.loss):
            return self._reject(f"the loss is {problem.loss}", loss)
        report.watch_growth(self._growth, loss)
        if not self._replicas.alone and (wanted or capture.pool.calls) and not owing:
            self._launch()
            self._replicas.join(capture, params, groups, gradients, held.schedule)
        found = self._statistics(problem, owing)
        guard = Guard(self._deferrable(found, gradients))
        late = guard.deferred and self._replicas.alone  # no inverse waits for the statistics
        if rule.moments or not guard.deferred or (found and not late):  # else directions tell
            good = are_finite(list(gradients.values()), squares=bool(rule.moments))
            if not guard.holds(good):
                return self._reject(_NOT_FINITE, loss)
        learned, taken = Guard(guard.deferred, guard.good), False
        if found and not late:
            taken = self._learn(found, gradients, learned)
            found = {}  # its memory serves the inversion
        held.renew(taken, self.invert_every)
        if held.stack(params.by_name, params.templates):  # inverses are other tensors now
            self._publish()
            capture.structure.bases = held.bases
            for name in chain.from_iterable(key.names for key in held.preconditioner.ready):
                for moment in BUFFERS[1:]:  # Adam's: the parameter follows the rule from now on
                    self.state[params.by_name[name]].pop(moment, None)
        directions, stacks = held.directions(gradients, guard.good)
        if not rule.moments and not guard.holds(are_finite(stacks)):
            return self._reject("a direction is not finite", loss)
        if found:
            learned = Guard(guard.deferred, guard.good)
            taken = self._learn(found, gradients, learned)
        broken, moving = guard.broken, self.quadratic is not None
        shares = update.shares_of(groups, self.state, params, directions, moving)
        info = self._move(shares, problem, gradients, broken)
        if rule.matrices:  # others follow AdamW; a matrix without statistics yet waits
            others = {*self._measured} - capture.structure.partners.keys() | directions.keys()
            rest = {n: g for n, g in gradients.items() if n not in others}
            unready = sorted(held.learned - held.preconditioner.ready, key=lambda key: key.names)
            late = {n: rest.pop(n) for key in unready for n in key.names if n in rest}
            count = held.schedule["step"] + 1
            update.adam_move(groups, self.state, params, rest, count, rule.rest, broken)
            update.adam_move(groups, None, params, late, 1, rule.rest, broken)
        self._finish(info, owing, taken)
        if guard.good is not None:
            flags: Any = guard.good, learned.good if taken else guard.good
            self._verdict = DeferredFlags(torch.stack(flags), taken)
        return loss

    def _idle(self, gradients: Tensors) -> bool:
        """Whether a step without a gradient and a rate asks for nothing."""
        if any(group["lr"] != 0 for group in self.param_groups):
            return False
        return not any(bool(g.any()) for g in gradients.values())

    def _deferrable(self, found: BlockMeans, gradients: Tensors) -> bool:
        """Whether the step's outcome is of no consequence for what the host does next."""
        held = self._held
        some = next(iter(gradients.values()))
        if not some.is_cuda or self._options.controlled or held.schedule["retry"]:
            return False
        if any(g.device != some.device for g in gradients.values()):
            return False
        count = held.schedule["taken"] + 1
        if found and (self.ekfac or held.inverts(count, self.invert_every)):
            return False
        return held.guardable(found, self.ema)

    def _due(self) -> bool:
        if self._closed or self._held.schedule["step"] % self.statistics_every:
            return False
        return self._measuring

    @property
    def _measuring(self) -> bool:
        """Whether there is anything to measure: not where no matrix follows the rule."""
        params = self._params.by_name
        return not self._rule.matrices or any(params[n].requires_grad for n in self._measured)

    def _statistics(self, problem: StepProblem | None, owing: bool) -> BlockMeans:
        """The means of what was seen since the last step, or of an objective's terms."""
        self._skipped, capture = False, self._capture
        if isinstance(problem, ObjectiveProblem):
            if not self._due():
                return {}
            parts, _ = problem.row_blocks(self.metric, None)
            generator = capture.generator(parts[0].linearization.value.device)
            return averaged_parts(parts, self._options, generator)
        if not self._warned_plain and not self._measuring:
            self._warn_plain()
        if not capture.pool.calls:
            if self._due() and not owing:
                raise PullbackError(
                    "A statistics step saw no layer",
                    capture.pool.missed,
                    "Call the module given to KFAC, in training mode, and backpropagate from its "
                    "output before step()",
                )
            return {}
        scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        # gradients are averaged over processes, and cotangents not yet
        found = capture.take(scale * self._replicas.processes.size)
        self._skipped = found is None
        if found is not None and not self._held.schedule["taken"]:
            self._warn_plain()
        return {k: own for k, own in (found or {}).items() if follows(self._options, k, own)}

    def _learn(self, found: BlockMeans, gradients: Tensors, guard: Guard) -> bool:
        held = self._held
        if not held.learn(found, self.ema, guard):
            self._skipped = True
            return False
        if not guard.deferred and not self._rule.matrices:
            self._warned |= report.warn_unmeasured(held, gradients, self._warned)
        return True

    def _move(
        self, shares: Sequence[Share], problem: Any, gradients: Tensors, broken: Tensor | None
    ) -> KFACInfo:
        """Clip, scale and move; where the step is controlled, look at the loss."""
        schedule, factors = self._held.schedule, (None, None)
        value = schedule["damping"]
        if self.quadratic is not None:
            # a multiple of references is no multiple of the identity
            shift = 0.0 if self.damping.referenced else value
            exact = problem, self.metric
            factors = best_combination(shares, *exact, self.quadratic, gradients, shift)
        if self.kl_clip is not None:
            update.clip_shares(shares, self.kl_clip, self.squared_length)
        if self.damping.controlled:
            info = trial_move(shares, problem, self.metric, self.damping, value, gradients)
            schedule["damping"], schedule["retry"] = info.damping, int(not info.accepted)
        else:
            update.move(shares, broken)
            info = KFACInfo(damping=value)
        return replace(info, step_size=factors[0], momentum=factors[1])

    def squared_length(self, move: Tensors) -> Tensor:
        """xᵀF̂x for a move x by parameter name, with F̂ as it is averaged now.

        All processes call it; each adds what its shares of the averages give.
        """
        # each process moves a piece of a parameter in shards
        return self._held.squared_length(
            self._params.gather_whole(move, "moves"), self._params.templates
        )

    def _finish(self, info: KFACInfo, owing: bool, taken: bool) -> None:
        """Count the step and report it; what was seen belonged to the old parameters."""
        self._held.schedule["step"] += 1
        self._capture.reset()
        self._capture.watch.wants_compiled_calls = (
            self._due() or (owing and not taken) or self._capture.lacking
        )
        self._info = replace(info, taken=taken, notes=report.notes_of(self._held, self._skipped))

    def _reject(self, reason: str, loss: Any) -> Any:
        self._capture.reset()
        self._info = KFACInfo(False, reason, self._held.schedule["damping"])
        return loss

    def _read_verdict(self) -> None:
        """Read the last step's flags: take back what was counted if it moved or learned nothing."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        moved, learned = verdict.flags()
        schedule = self._held.schedule
        if verdict.takes_statistics and not learned:
            schedule["taken"] -= 1
            self._skipped = moved
            notes = report.notes_of(self._held, moved)
            self._info = replace(self._info, taken=False, notes=notes)
        if not moved:
            schedule["step"] -= 1
            self._capture.watch.wants_compiled_calls = self._due() or self._capture.lacking
            if (
                not self._capture.watch.wants_compiled_calls
            ):  # what was gathered meanwhile is not due after all
                self._capture.clear()
            self._info = KFACInfo(False, _NOT_FINITE, schedule["damping"])

    # --- reports --------------------------------------------------------------------------------

    @property
    def blocks(self) -> KFACState:
        """Averages and inverses of all blocks, as of the last step."""
        self._read_verdict()
        return self._held

    @contextmanager
    def _whole(self) -> Iterator[KFACState]:
        """The same, with averages that are whole meanwhile; all processes call it."""
        held = self.blocks
        self._replicas.assemble(held.blocks)
        try:
            yield held
        finally:
            self._replicas.release(held.preconditioner, held.averages)

    @property
    def statistics_due(self) -> bool:
        """Whether the next forward pass gives statistics.

        Between them forward and backward passes may be replayed from a CUDA graph, if they fill the
        same gradients.
        """
        return self._capture.wanted

    @property
    def info(self) -> KFACInfo:
        """What the last step did."""
        self._read_verdict()
        return self._info

    def coverage(self) -> Coverage:
        """What every parameter's block is, and why; before any statistics, what is expected."""
        held, params = self.blocks, dict(unwrap_model(self.model).named_parameters())
        reasons = report.name_parametrizations(self.model, self._capture.structure.reasons)
        known = self._forecast().kinds, reasons, self._others()
        return report.coverage_of(held, params, self._chosen, self._measured, *known, self._rule)

    def _others(self) -> dict[str, str]:
        """Why the rule is not for some of the parameters; all are measured for the natural one."""
        if not self._rule.matrices:
            return {}
        apart = self._params.in_groups(group for group in self.param_groups if group.get("rule"))
        expected = forecast(self.model, self._params.by_name, self._options)
        longest = self._options.sharing.longest
        return report.left_to_adam(expected, self._chosen, self._measured, apart, longest)

    def _warn_plain(self) -> None:
        """Warn once of what has no block, or what AdamW takes although it is in no known layer."""
        if self._warned_plain:
            return
        self._warned_plain = True
        every = {n: why for n, why in self._others().items() if why == report.NO_MATRIX}
        every |= report.name_parametrizations(self.model, self._capture.structure.plain)
        report.warn_diagonal(self._chosen, every, self._rule)

    def gram(self) -> Kronecker:
        """F̂ without damping, over the parameters that have a block, in the model's order."""
        with self._whole() as held:
            return report.gram_of(held, self._params.by_name)

    def average(self) -> dict[BlockKey, dict[FactorKey, Tensor]]:
        """The averages as they are, to serve as an `Invariant` damping's reference."""
        with self._whole() as held:
            return {k: a.corrected() for k, a in held.averages.items() if k in held.learned}

    def degenerate(self) -> list[Degenerate]:
        """Blocks on which F̂ is no metric, and why: directions that change nothing."""
        with self._whole() as held:
            return report.degenerate_of(held)

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        buffers = [s[part] for s in self.state.values() for part in BUFFERS if part in s]
        return {**self._held.memory(), "momentum": sum(get_local_piece(t).nbytes for t in buffers)}

    def traffic(self) -> dict[str, Traffic]:
        """What this process sent so far, by purpose; nothing where it is alone."""
        return self._replicas.processes.traffic()
