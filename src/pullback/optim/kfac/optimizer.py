"""K-FAC as a `torch.optim.Optimizer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite, isnan
from random import Random
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ..._core.capture import Selector, plain
from ..._core.errors import PullbackError
from ..._core.flags import Verdict, finite
from ..._core.processes import Traffic, find_processes, group_of, refuse_untold, unwrapped
from ..._core.shards import Shards, local, reshard
from ...grams.kronecker import Kronecker
from ...grams.kronecker.packed import Side, memory
from ...likelihoods import Likelihood, reduction_of
from ...maps.layers.moments import Sharing
from ...metrics import Metric
from ...steps import QuadraticModel
from ..checks import dense_gradients, own_group, refuse_model, refuse_sparse, warn_growth
from ..terms import Objective
from . import options
from .closure import (
    ClosureSource,
    ObjectiveSource,
    Outcome,
    Output,
    Source,
    best_combination,
    refuse_sources,
    trial_move,
)
from .factors.average import block_of, guardable
from .factors.damping import Damping, refuse_reference
from .factors.factor import SPECTRUM, BlockKey, Factor, block_shape, describe, to_block
from .factors.placement import Placement
from .factors.preconditioner import Preconditioner
from .report import Coverage, Degenerate, KFACInfo, Row, degenerate_sides
from .rules.rule import Rule
from .state import (
    KFACState,
    Undo,
    publish,
    restore,
    saved_by_name,
)
from .statistics.capture import StatisticsCapture, averaged, averaged_parts
from .statistics.coupling import refuse_options
from .statistics.covectors import Recipe
from .statistics.plan import Forecast, forecast
from .statistics.sync import (
    join_layouts,
    join_partners,
    layouts_of,
    shared_sides,
    sum_pool,
    sum_sides,
)
from .update import (
    AdamShare,
    Share,
    adam_move,
    clip_shares,
    like_parameter,
    move,
)

#: what belongs to hooks, or to the model's objects
_UNSAVED = ("_capture", "_names", "_by_name", "_like", "_shards", "_verdict", "_plans")
_NOT_FINITE = "a gradient is not finite"
_DIAGONAL = 0.1  # of the parameters that may go without a layer's block
#: a parameter's own tensors: momentum, or Adam's moments
_BUFFERS = ("momentum", "first", "second")


def _gatherer(shards: Shards, params: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Return a function that gathers sharded parameters, as leaves of a graph of their own."""
    shapes = {n: p.shape for n, p in params.items()}

    def gather() -> dict[str, Tensor]:
        with torch.no_grad():
            found = shards.gather({n: local(p) for n, p in params.items()}, shapes, "parameters")
        return {n: t.detach().requires_grad_(params[n].requires_grad) for n, t in found.items()}

    return gather


class KFAC(Optimizer):
    r"""Train with K-FAC's factors in an ordinary loop: `loss.backward(); opt.step()`.

    `KFAC(model)` takes Adam's steps in the eigenbases of every weight's two factors: R = Σ δδᵀ/N of
    the cotangents at the layer's output, and C = mean aaᵀ of its inputs. Embeddings, gains and
    biases follow AdamW inside the same optimizer. For models of tokens, with an embedding or an
    attention layer, it takes the polar factor of the momentum, whitened by C (`rule="spectral"`);
    the output layer then follows AdamW too, all of it at half the rate.

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
            given, else "spectral" for models of tokens and "eigenbasis" for others.
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
            all. With fewer, directions are sent instead.
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
        self._processes = find_processes(model, group, "KFAC")
        #: whether a wrapper averages the gradients
        self._wrapped = group_of(model) is not None
        model = unwrapped(model)
        reduction = reduction_of(likelihood) if reduction is None else reduction
        self._rule = options.rule_of(
            rule, betas, model, likelihood=likelihood, metric=metric, fisher=fisher,
            damping=damping, momentum=momentum, kl_clip=None if kl_clip == "auto" else kl_clip,
            ekfac=ekfac or None, step=step,
        )  # fmt: skip
        own = options.filled(
            self._rule, kl_clip, step, lr=lr, fisher=fisher, damping=damping, momentum=momentum,
            ema=ema, statistics_every=statistics_every, invert_every=invert_every,
        )  # fmt: skip
        options.check(
            **{n: v for n, v in vars(own).items() if n != "damping"}, betas=betas, draws=draws,
            weight_decay=weight_decay, sharing=sharing,
            reduction=reduction, max_factor=max_factor, batch_dim=batch_dim, output=output,
            joint=joint, ekfac=ekfac, seed=seed, step=step, grad_scaler=grad_scaler, params=params,
        )  # fmt: skip
        joint = joint and not self._rule.matrices
        self.model, self.metric = model, options.metric_of(likelihood, metric)
        self.damping = options.damping_of(own.damping, ekfac=ekfac)
        refuse_options(self.metric, fisher=own.fisher, ekfac=ekfac)
        self.kl_clip, self.ema, self.ekfac, self.seed = own.kl_clip, own.ema, ekfac, seed
        self.statistics_every, self.invert_every = own.statistics_every, own.invert_every
        self.reduction, self.grad_scaler, self.quadratic = reduction, grad_scaler, step
        scaled = grad_scaler is not None or self._rule.matrices  # bases do not depend on scales
        self._recipe = Recipe(
            self.metric, own.fisher, Sharing(sharing == "reduce", batch_dim, max_factor), joint,
            draws, output, batch_dim, ekfac, reduction, scaled, self._rule.inputs,
            self._rule.matrices,
        )  # fmt: skip
        self._placement = Placement(self._processes, workers)
        if ekfac and not self._placement.across.alone:
            raise PullbackError(
                "workers= does not go with ekfac=True",
                "all processes measure in the eigenbases",
                "Leave workers out, so that all of them hold these",
            )
        # averages are linear: between inversions processes may hold shares of them
        lazy = not (self._processes.alone or ekfac or self.damping.referenced or self._controlled)
        # but a framework that wraps the model later may let one of them save alone
        self._lazy = lazy and group is None
        self._shared = False
        self._closed, self._warned = False, False
        self._info, self._skipped = KFACInfo(), False
        self._growth: list[Any] = []  # the first loss of a closure, and steps far above it
        schedule = {"step": 0, "taken": 0, "damping": self.damping.value, "retry": 0}
        self._held = self._empty_state(schedule)
        given = list(plain(model).parameters() if params is None else params)
        options.refuse_unready(model, given)
        self._register()
        if self._shards and self._controlled:
            raise PullbackError(
                "A controlled step does not go with a sharded model",
                "Adaptive damping and QuadraticModel look at whole parameters",
                "Leave them out, or wrap the model in DistributedDataParallel",
            )
        defaults = {"lr": own.lr, "weight_decay": weight_decay}
        defaults |= {"betas": betas, "rule": None} if self._rule.matrices else {}
        defaults |= {} if self._rule.matrices else {"momentum": own.momentum}
        super().__init__(given, defaults)
        self._meet(own, betas, sharing, joint, max_factor, draws, batch_dim, workers)

    def _meet(self, own: Any, *rest: object) -> None:
        """Raise where processes differ in model or options; begin at the same parameters."""
        if self._processes.alone:
            return
        options = {**vars(own), "metric": self.metric, "rule": self._rule, "seed": self.seed}
        options |= {"step": self.quadratic, "reduction": self.reduction, "ekfac": self.ekfac}
        names = ("betas", "sharing", "joint", "max_factor", "draws", "batch_dim", "workers")
        options |= dict(zip(names, rest, strict=True))
        shapes = {n: (tuple(p.shape), p.dtype) for n, p in self._by_name.items()}
        self._processes.same("their model", shapes, "Build the same model in every process")
        self._processes.same("the options of KFAC", options, "Give all of them the same options")
        self._processes.same("the options of KFAC", self._rates(), "Give all the same param groups")
        if not self._wrapped:
            held = [p.data for p in self._by_name.values()]
            self._processes.exchange(held, [0] * len(held), "parameters")

    def _rates(self) -> dict[str, Any]:
        """What param groups and schedule say, without numbers on a device."""
        out: dict[str, Any] = {}
        for i, group in enumerate(self.param_groups):
            own = {n: v for n, v in group.items() if not isinstance(v, Tensor)}
            own["params"] = [self._names[id(p)] for p in group["params"]]
            out |= {f"{name} of param group {i}": v for name, v in own.items()}
        return out | {f"the schedule's {n}": v for n, v in self._held.schedule.items()}

    def _empty_state(self, schedule: dict[str, Any]) -> KFACState:
        # on a CPU it is cheaper to solve with factors that serve one step than to invert them
        once = self.invert_every == 1 == self.statistics_every and not self.damping.referenced
        once = once and self.damping.value > 0 and not self.damping.controlled
        cpu = all(p.device.type == "cpu" for p in plain(self.model).parameters())
        rule = self._rule.suited(once=once and cpu, exact=self.damping.exact or self.ekfac)
        preconditioner = Preconditioner(rule, self.damping, ekfac=self.ekfac)
        return KFACState(preconditioner, self.damping.referenced, schedule)

    def _register(self) -> None:
        """Find the model's parameters and hook the model."""
        self._by_name = dict(plain(self.model).named_parameters())
        self._names = {id(p): n for n, p in self._by_name.items()}
        self._shapes = {n: p.shape for n, p in self._by_name.items()}
        self._shards = Shards(self._by_name, self._processes)
        #: what shows the parameters' shapes
        self._like = {
            n: torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
            if n in self._shards
            else p
            for n, p in self._by_name.items()
        }
        rank = f" {self._processes.rank}" if self._processes.rank else ""
        seed, schedule = self.seed, self._held.schedule  # not the optimizer, which holds the hooks
        self._capture = StatisticsCapture(
            self.model,
            self._recipe,
            lambda: Random(f"{seed} {schedule['step']}{rank}").getrandbits(32),
            several=not self._processes.alone,
            whole=_gatherer(self._shards, self._by_name) if self._shards else None,
        )
        self._verdict: Verdict | None = None
        self._plans: dict[Any, Any] = {}

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
        group = own_group(param_group, self._names, held, sharded=True)
        options.check_group(group, self.defaults)
        super().add_param_group(group)
        self._choose()
        self._reserve()
        self._publish()  # first, so that parameters stand in their order
        self._make_buffers()

    @property
    def _chosen(self) -> dict[str, Any]:
        """The groups' parameters, by name; for the metric the others are constants."""
        return {self._names[id(p)]: p for group in self.param_groups for p in group["params"]}

    def _choose(self) -> None:
        """Settle which parameters are measured: all, or the matrices that follow the rule."""
        given = {n: p for n, p in self._chosen.items() if p.numel()}
        self._measured = list(given)
        if self._rule.matrices:
            every = forecast(self.model, self._by_name, self._recipe.sharing, joint=False)
            weights = {
                k.names[0]: own for k, own in every.factors.items() if k.kronecker and not k.bias
            }
            dense = [n for n, own in weights.items() if all(t.ndim == 3 for t in own.values())]
            if self._rule.inputs:  # theirs is the side of columns; that of outputs is not read
                read = {
                    n: [(f.side, own[f].ndim) for f in [*own][::2]] for n, own in weights.items()
                }
                dense = [n for n, sides in read.items() if {*sides} == {("right", 3)}]
            # what no module of a known kind holds may turn out to be one, by what is done with it
            unknown = {n: p for n, p in self._by_name.items() if n not in every.kinds}
            dense += [n for n, p in unknown.items() if p.ndim > 1 and min(p.shape[-2:]) > 1]
            head = set() if self._rule.head else {every.last}
            adam = {self._names[id(p)] for g in self.param_groups if g["rule"] for p in g["params"]}
            self._measured = [n for n in dense if n in given and n not in {*head, *adam}]
        self._capture.choose(self._measured)

    def _forecast(self, *, frozen: bool = True) -> Forecast:
        """The blocks that are expected, with or without parameters that are frozen now."""
        given = {*self._measured}
        if self._shards:
            reshard(plain(self.model))
        some = {n: p for n, p in self._by_name.items() if n in given}
        some = {n: p for n, p in some.items() if frozen or p.requires_grad}
        sharing, joint = self._recipe.sharing, self._recipe.joint
        return forecast(self.model, some, sharing, joint, flat=self._rule.inputs)

    def _reserve(self) -> None:
        """Show the blocks that are expected, of parameters that have none with statistics."""
        held = self._held
        learned = {n for key in held.learned for n in key.names}
        for key, factors in self._forecast(frozen=False).factors.items():
            if key not in held.averages and learned.isdisjoint(key.names):
                for other in [k for k in held.averages if not {*key.names}.isdisjoint(k.names)]:
                    held.drop(other)  # a bias whose weight came with another group
                held.reserve(key, factors)

    def _publish(self) -> None:
        publish(self._held, self.state, self._chosen)

    def _make_buffers(self) -> None:
        """Make the momentum of all parameters whose group has one, or Adam's two moments."""
        ruled = {*self._measured}
        for group in self.param_groups:
            for p in group["params"]:
                if self._rule.matrices and self._names[id(p)] not in ruled:
                    self._buffer(p, "first")
                    self._buffer(p, "second")
                elif self.quadratic is not None or group.get("momentum"):
                    self._buffer(p)

    def _buffer(self, p: Tensor, name: str = "momentum") -> Tensor:
        """One of the parameter's own buffers, on its device."""
        own = self.state[p]
        if name not in own:
            own[name] = torch.zeros_like(p)
        elif own[name].device != p.device or own[name].dtype != p.dtype:
            own[name] = own[name].to(p)
        return own[name]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics of gradients that were never used."""
        super().zero_grad(set_to_none)
        self._capture.clear()

    def __getstate__(self) -> dict[str, Any]:
        """All but the hooks: a copy or a pickle brings its model along."""
        self._settle()
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
        inversion), all of them call this together.
        """
        self._settle()
        own = self._held.preconditioner
        spread = not self._placement.across.alone
        try:
            self._whole()
            if spread:
                self._placement.collect(own)
        except RuntimeError as error:
            raise PullbackError(
                "state_dict() did not hear from all processes",
                "each of them holds a part of the state, and one did not call it, or is lost",
                "Call state_dict() on all processes together; one of them may write it",
            ) from error
        self._held.take_memory()
        self._publish()
        out = super().state_dict()
        if spread:
            out["state"] = {number: dict(held) for number, held in out["state"].items()}
            self._placement.release(own)
            self._publish()
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume to the same bits; a state that cannot be used changes nothing."""
        names = [[self._names[id(p)] for p in group["params"]] for group in self.param_groups]
        some = self.state[self.param_groups[0]["params"][0]]
        saved = saved_by_name(state_dict, names, [part for part in some if part not in _BUFFERS])
        fresh = self._empty_state(dict(self._held.schedule))
        try:
            restore(fresh, saved, self._by_name, self._forecast())
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise PullbackError(
                "The saved state is not whole",
                f"its averages cannot be read ({error!r})",
                "Load what KFAC.state_dict() gave, as it was",
            ) from error
        self._settle()
        super().load_state_dict({**state_dict, "state": {}})
        for key, average in self._held.averages.items():
            if not any(n in saved for n in key.names) and key not in fresh.averages:
                fresh.reserve(key, average.value)  # of parameters that were frozen when saved
        self._held.schedule.update(fresh.schedule)  # the dict itself is shared
        fresh.schedule = self._held.schedule
        self._held, self._shared = fresh, False
        self._place()
        for name, own in saved.items():
            p = self._by_name[name]
            for part in _BUFFERS:
                if part in own:
                    buffer = own[part].detach().to(p.device, p.dtype, copy=True)
                    self.state[p][part] = buffer
        self._make_buffers()
        self._publish()
        self._resume()

    def _resume(self) -> None:
        self._choose()
        self._capture.structure.partners = {
            n: key.names for key in self._held.learned for n in key.names
        }
        self._show_bases()
        self._capture.settle()
        self._capture.due = self._due()
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
        options.refuse_inference()
        options.check_rates(self.param_groups)
        if self._processes.group is None:
            refuse_untold("KFAC", "it was built before they met")
        told, wanted = self._capture.due, self._capture.wanted
        self._settle()
        rule = self._rule if self._rule.matrices else None
        refuse_sources(closure, objective, controlled=self._controlled, rule=rule)
        if objective is not None and not self._processes.alone:
            raise PullbackError(
                "An objective does not go with several processes",
                "its terms have counts of their own, which are not joined",
                "Use NaturalGradient or pde.solve on several processes",
            )
        source = self._source(closure, objective)
        # the forward pass was not told that statistics are due, where the last step was rejected
        owing = closure is None and objective is None and not told and self._due()
        if not self._controlled:
            return self._take(source, owing, wanted)
        undo = self._undo()
        try:
            return self._take(source, owing, wanted)
        except BaseException:
            source.restore()
            undo.restore()
            self._publish()
            due = self._capture.due
            self._capture.settle()
            self._capture.due = due
            raise

    @property
    def _controlled(self) -> bool:
        return self.damping.controlled or self.quadratic is not None

    def _source(self, closure: Any, objective: Any) -> Source:
        if objective is not None:
            params = {n: p for n, p in self._chosen.items() if p.requires_grad}
            return ObjectiveSource(params, objective, self.metric, self.reduction)
        if closure is None:
            return Source()
        recipe = self._recipe
        own = (recipe.output, recipe.batch_dim, self.reduction, self._plans)
        output = Output(self.model, self.metric, *own, self._processes)
        unwatched = self._capture.unwatched
        return ClosureSource(output, self._by_name, closure, self._controlled, unwatched)

    def _undo(self) -> Undo:
        every = list(self._chosen.values())
        buffers = [self._buffer(p) for p in every if "momentum" in self.state[p]]
        due = self._capture.wanted or self._due() or bool(self._capture.pool.calls)
        learning = due or bool(self._held.schedule["retry"])
        return Undo(self._held, every, buffers, learning=learning)

    def _take(self, source: Source, owing: bool, wanted: bool) -> Any:
        """Statistics → averages → inverses → directions → update, as far as each is due."""
        loss = source.evaluate()
        self._average_gradients()
        gradients = self._gradients()
        if self._idle(gradients):
            return loss
        if source.loss is not None and not isfinite(source.loss):
            return self._reject(f"the loss is {source.loss}", loss)
        self._watch_growth(loss)
        if not self._processes.alone and (wanted or self._capture.pool.calls) and not owing:
            self._join(gradients)
        found = self._statistics(source, owing)
        if self._deferrable(found, gradients):
            self._take_unseen(found, gradients, owing)
            return loss
        if not bool(finite(list(gradients.values()), squares=bool(self._rule.moments))):
            return self._reject(_NOT_FINITE, loss)
        taken = self._learn(found)
        del found  # its memory serves the inversion
        self._renew(taken)
        directions, stacks = self._directions(gradients)
        if not self._rule.moments and not bool(finite(stacks)):
            return self._reject("a direction is not finite", loss)
        outcome = self._move(self._shares(directions), source, gradients)
        adam_move(self._adam_shares(gradients, directions), self._held.schedule["step"] + 1)
        self._finish(taken, owing, outcome)
        return loss

    def _watch_growth(self, loss: Any) -> None:
        """Warn of a closure's loss that has grown, where reading it waits for no device."""
        if isinstance(loss, Tensor):
            loss = loss.item() if loss.device.type == "cpu" and loss.numel() == 1 else None
        if isinstance(loss, float):
            self._growth = self._growth or [loss, 0]
            warn_growth(self._growth, loss, "Take a smaller lr, or a smaller kl_clip=", 5)

    def _idle(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether a step without a forward pass, a gradient and a rate asks for nothing."""
        if self._capture.called or any(group["lr"] != 0 for group in self.param_groups):
            return False
        return not any(bool(g.any()) for g in gradients.values())

    def _take_unseen(
        self, found: Mapping[BlockKey, Any], gradients: Mapping[str, Tensor], owing: bool
    ) -> None:
        """The same without waiting for the device, which moves nothing where it must not.

        `_settle` takes notice later.
        """
        squares = bool(self._rule.moments)
        good = finite(list(gradients.values()), squares=True) if squares else None
        directions, stacks = self._directions(gradients, good)
        shares, good = self._shares(directions), finite(stacks) if good is None else good
        learned, broken = good, (~good).float()
        if found:  # before the clip, which is by the averages as they are now
            new = [memory(t) for own in found.values() for t in own.values()]
            learned = good & self._everywhere(finite(new))
            self._split()
            self._held.update(found, self.ema, (~learned).float())
        if self.kl_clip is not None:
            clip_shares(shares, self.kl_clip, self.squared_length)
        move(shares, broken)
        adam = self._adam_shares(gradients, directions)
        adam_move(adam, self._held.schedule["step"] + 1, broken)
        self._skipped = False
        self._finish(bool(found), owing, Outcome(damping=self._held.schedule["damping"]))
        self._verdict = Verdict(torch.stack([good, learned]), bool(found))

    def _deferrable(self, found: Mapping[BlockKey, Any], gradients: Mapping[str, Tensor]) -> bool:
        """Whether the step's outcome is of no consequence for what the host does next."""
        held = self._held
        if self._controlled or held.schedule["retry"] or not held.complete:
            return False
        some = next(iter(gradients.values()))
        if not some.is_cuda or any(g.device != some.device for g in gradients.values()):
            return False
        if not found:
            return True
        if (
            self.ekfac
            or self._inverts(held.schedule["taken"] + 1)
            or not held.learned.issuperset(found)
        ):
            return False
        if not all(held.averages[key].fits(own) for key, own in found.items()):
            return False
        return guardable([(held.averages[key], own) for key, own in found.items()], self.ema)

    def _gradients(self) -> dict[str, Tensor]:
        """The gradients at hand, by name."""
        found = dense_gradients(self.param_groups, self._names, self._shapes)
        if not self._shards:
            return found
        return self._shards.gather(
            {n: local(g) for n, g in found.items()}, self._shapes, "gradients"
        )

    def _due(self) -> bool:
        if self._closed or self._held.schedule["step"] % self.statistics_every:
            return False
        # where no matrix follows the rule, there is nothing to measure
        return not self._rule.matrices or any(
            self._by_name[n].requires_grad for n in self._measured
        )

    def _statistics(self, source: Source, owing: bool) -> dict[BlockKey, dict[Factor, Side]]:
        """The means of what was seen since the last step, or of an objective's terms."""
        self._skipped = False
        if (parts := source.parts()) is not None:
            if not self._due():
                return {}
            generator = self._capture.generator(parts[0].linear.value.device)
            return averaged_parts(parts, self._recipe, generator)
        if not self._capture.pool.calls:
            if self._due() and not owing:
                raise PullbackError(
                    "A statistics step saw no layer",
                    self._capture.pool.missed,
                    "Call the module given to KFAC, in training mode, and backpropagate from its "
                    "output before step()",
                )
            return {}
        pool = self._capture.take()
        self._skipped = not pool.sums and not pool.samples > 0  # nothing finite was met
        scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        scale *= self._processes.size  # gradients are averaged over processes, cotangents not yet
        found = averaged(pool, self._recipe, scale)
        return {k: own for k, own in found.items() if self._follows(k, own)}

    def _follows(self, key: BlockKey, factors: Mapping[Factor, Side]) -> bool:
        """Whether a block follows the rule: what is no matrix after all follows AdamW."""
        if not self._rule.matrices:
            return True
        read = [t for f, t in factors.items() if f.side == "right" or not self._rule.inputs]
        return key.kronecker and not key.bias and all(len(t.shape) == 3 for t in read)

    # --- several processes ----------------------------------------------------------------------

    def _average_gradients(self) -> None:
        """Average the gradients of a model that no wrapper does it for."""
        if self._processes.alone or self._wrapped or self._capture.wrapped:
            return
        params = [p for p in self._chosen.values() if p.requires_grad and p.numel()]
        given = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
        for p, g in zip(params, given, strict=True):
            refuse_sparse(self._names[id(p)], g)
        some = torch.tensor([p.grad is not None for p in params], device=params[0].device)
        *total, counts = self._processes.sum([*given, some.double()], "gradients")
        for p, g, count in zip(params, total, counts.tolist(), strict=True):
            p.grad = g.div_(self._processes.size) if count else None

    def _join(self, gradients: Mapping[str, Tensor]) -> None:
        """Make the pooled sums those of all processes; raise on all where they contradict."""
        pool, structure, processes = self._capture.pool, self._capture.structure, self._processes
        broken = isinstance(pool.samples, float) and isnan(pool.samples)
        layouts = {} if broken else layouts_of(pool)
        told = [repr((layouts, sorted(structure.partners.items()))), repr([*gradients])]
        codes = [crc32(text.encode()) for text in (*told, repr(self._rates()))]
        signed = [*codes, *(-code for code in codes)]
        *found, whole, called = processes.least([*signed, int(not broken), -int(pool.calls > 0)])
        alike = [low == -high for low, high in zip(found[:3], found[3:], strict=True)]
        if not alike[2]:
            remedy = "Change param groups and load states in all of them alike"
            processes.same("the options of KFAC", self._rates(), remedy)
        if not alike[1]:
            given = {f"that of {n}": "there" if n in gradients else None for n in self._chosen}
            remedy = "Wrap the model in DistributedDataParallel(find_unused_parameters=True)"
            processes.same("their gradients", given, remedy)
        if not called:
            return
        if not alike[0] and whole:
            every = processes.values((layouts, dict(structure.partners)))
            layouts = join_layouts([own for own, _ in every])
            structure.partners = join_partners([own for _, own in every])
        pool.calls = max(pool.calls, 1)
        if whole:
            shared = {key: self._shared_sides(key, own.sides) for key, own in layouts.items()}
            sum_pool(pool, layouts, self._by_name, processes, shared)
        else:
            pool.sums, pool.samples = {}, torch.nan

    def _everywhere(self, flag: Tensor) -> Tensor:
        """Whether the flag is true on all processes, of what only their sum makes the same."""
        return self._processes.agree(flag) if self._lazy else flag

    def _shared_sides(
        self, key: BlockKey, shapes: Mapping[Factor, Sequence[int]]
    ) -> frozenset[str]:
        """The sides of a block of which processes hold shares between inversions."""
        if not self._lazy:
            return frozenset()
        return shared_sides(key, shapes, read=self.kl_clip is not None)

    def _averages_in_shares(self) -> list[Side]:
        """The sides of which processes hold shares, in an order that all have."""
        out = []
        for key in sorted(self._held.learned, key=lambda key: key.names):
            value = self._held.averages[key].value
            some = self._shared_sides(key, {f: t.shape for f, t in value.items()})
            out += [value[f] for f in sorted(value) if f.side in some]
        return out

    def _split(self) -> None:
        """Let averages be shares, whose sum over all processes is the average."""
        if self._lazy and not self._shared:
            self._shared = True
            held = [memory(side) for side in self._averages_in_shares()]
            if self._processes.rank and held:
                torch._foreach_zero_(held)

    def _whole(self) -> None:
        """Make averages whole, where they are shares; all processes call it."""
        if not self._shared:
            return
        sides = self._averages_in_shares()
        totals = sum_sides(sides, self._processes, [True] * len(sides))
        for side, total in zip(sides, totals, strict=True):
            memory(side).copy_(memory(total))
        self._shared = False

    def _place(self) -> None:
        """Give new blocks an owner."""
        if self._processes.alone:
            return
        own, held = self._held.preconditioner, self._held
        self._placement.assign(own, held.averages.keys() - held.reserved)
        self._placement.release(own)

    def traffic(self) -> dict[str, Traffic]:
        """What this process sent so far, by purpose; nothing where it is alone."""
        return self._processes.traffic()

    # --- statistics, averages, inverses, directions ---------------------------------------------

    def _learn(self, found: Mapping[BlockKey, dict[Factor, Side]]) -> bool:
        """Take up statistics, if all are finite."""
        if not found:
            return False
        every = [memory(t) for own in found.values() for t in own.values()]
        if not bool(self._everywhere(finite(every))):
            self._skipped = True
            return False
        refuse_reference(self.damping, found)
        held, value = self._held, self._held.schedule["damping"]
        if held.make_room(found):
            self._place()
            self._publish()
        spectra = {k: own.pop(SPECTRUM) for k, own in found.items() if SPECTRUM in own}
        self._split()
        held.update(found, self.ema, None)
        if spectra:
            held.preconditioner.correct(spectra, self.ema, value)
        self._warn_unmeasured()
        self._warn_diagonal()
        return True

    def _warn_unmeasured(self) -> None:
        """Say once which parameters the loss reaches and the measured output does not."""
        if self._warned or self._rule.matrices:
            return
        seen = {n for key in self._held.learned for n in key.names}
        rest = {n: g for n, g in self._gradients().items() if n not in seen}
        lost = [n for n, g in rest.items() if bool(g.any())]
        if lost:
            self._warned = True
            warnings.warn(
                f"The loss reaches {', '.join(lost)}, on which the measured output does not "
                "depend: their gradient is followed as it is. Measure their output too (output=), "
                "or give them to another optimizer.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _warn_diagonal(self) -> None:
        """Say once that more than a tenth of what is trained has no block of its layer."""
        if self._held.schedule["taken"] != 1:
            return
        sizes = {n: p.numel() for n, p in self._chosen.items() if p.requires_grad}
        plain = {n: why for n, why in self._capture.structure.plain.items() if n in sizes}
        share = sum(sizes[n] for n in plain) / max(1, sum(sizes.values()))
        if share > _DIAGONAL:
            most = max(plain, key=sizes.__getitem__)
            what = "follow AdamW" if self._rule.matrices else "are held as a diagonal"
            warnings.warn(
                f"{100 * share:.0f} % of the trained parameters {what}, {most} among them: "
                f"{plain[most]}. coverage() says what is known of each.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _inverts(self, count: int) -> bool:
        """Whether inverses are to be renewed with this many statistics taken up."""
        step = self._held.schedule["step"]
        early = step < self.invert_every and count & (count - 1) == 0
        return step % self.invert_every == 0 or early

    def _renew(self, taken: bool) -> None:
        """Renew inverses when it is time, and make those that are missing."""
        held, schedule = self._held, self._held.schedule
        keys = sorted(held.learned, key=lambda key: key.names)
        if not (taken and self._inverts(schedule["taken"])) and not schedule["retry"]:
            keys = [k for k in keys if k not in held.preconditioner.ready]
        schedule["retry"] = 0
        if keys:
            self._whole()
            own = held.preconditioner
            self._placement.renew(own, held.averages, keys, schedule["damping"])

    def _directions(
        self, gradients: Mapping[str, Tensor], good: Tensor | None = None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The rule's directions by name, and in few tensors."""
        own = self._held.preconditioner
        self._held.follow(self._by_name)
        if not own.stacked:
            own.stack(self._like)
            self._publish()
            self._show_bases()
        found, stacks = own.directions(gradients, good)
        found, stacks = self._placement.complete(own, found, stacks, gradients)
        if not self._rule.matrices:  # without a block the gradient is followed
            stacks += [g for n, g in gradients.items() if n not in found]
            found = {n: found.get(n, g) for n, g in gradients.items()}
        return found, stacks

    def _adam_shares(
        self, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor]
    ) -> list[AdamShare]:
        """The parameters that follow AdamW, by group; a matrix without statistics yet waits."""
        if not self._rule.matrices:
            return []
        waiting = {*self._measured} - self._capture.structure.partners.keys()
        rest = {n for n in gradients if n not in directions and n not in waiting}
        shares = []
        for group in self.param_groups:
            params: list[Any] = [p for p in group["params"] if self._names[id(p)] in rest]
            if params:
                names = [self._names[id(p)] for p in params]
                given = [gradients[n] for n in names]
                first, second = ([self._buffer(p, part) for p in params] for part in _BUFFERS[1:])
                if self._shards:
                    given = list(map(self._shards.cut, names, given))
                    params, first, second = (
                        list(map(local, some)) for some in (params, first, second)
                    )
                lr = group["lr"] if group["rule"] else self._rule.rest * group["lr"]
                betas, decay = group["betas"], float(group["weight_decay"])
                shares.append(AdamShare(params, given, first, second, lr, betas, decay))
        return shares

    def _show_bases(self) -> None:
        """Let statistics be taken in the eigenbases."""
        own = self._held.preconditioner
        if self.ekfac:
            bases = {k: own.inverses[k] for k in own.spectra if k in own.ready}
            self._capture.structure.bases = bases

    def _shares(self, directions: Mapping[str, Tensor]) -> list[Share]:
        shares, names_of = [], self._names
        for group in self.param_groups:
            params: list[Any] = [p for p in group["params"] if names_of[id(p)] in directions]
            if params:
                names = [names_of[id(p)] for p in params]
                momentum, lr = float(group.get("momentum", 0.0)), group["lr"]
                buffered = momentum or self.quadratic is not None
                buffers = [self._buffer(p) for p in params] if buffered else []
                if isinstance(lr, Tensor) and not lr.is_cuda:
                    lr = float(lr)
                given = [directions[n] for n in names]
                if self._shards:
                    params, buffers = list(map(local, params)), list(map(local, buffers))
                    given = list(map(self._shards.cut, names, given))
                own = list(map(like_parameter, given, params))
                decay = float(group["weight_decay"])
                shares.append(Share(names, params, own, buffers, lr, momentum, decay))
        return shares

    def _move(
        self, shares: Sequence[Share], source: Source, gradients: Mapping[str, Tensor]
    ) -> Outcome:
        """Clip, scale and move; where the step is controlled, look at the loss."""
        value, factors = self._held.schedule["damping"], (None, None)
        if self.quadratic is not None:
            # a multiple of references is no multiple of the identity
            shift = 0.0 if self.damping.referenced else value
            factors = best_combination(shares, source, self.quadratic, gradients, shift)
        if self.kl_clip is not None:
            clip_shares(shares, self.kl_clip, self.squared_length)
        if not self.damping.controlled:
            move(shares)
            return Outcome(True, "", value, None, *factors)
        outcome = trial_move(shares, source, self.damping, value, gradients)
        schedule = self._held.schedule
        schedule["damping"], schedule["retry"] = outcome.damping, int(not outcome.accepted)
        return replace(outcome, step_size=factors[0], momentum=factors[1])

    def squared_length(self, move: Mapping[str, Tensor]) -> Tensor:
        """xᵀF̂x for a move x by parameter name, with F̂ as it is averaged now.

        All processes call it; each adds what its shares of the averages give.
        """
        if self._shards:  # of which each process moves a piece
            move = self._shards.gather(move, self._shapes, "moves")
        held, total = self._held, []
        for key in sorted(held.learned, key=lambda key: key.names):
            if move.keys().isdisjoint(key.names):
                continue
            average = held.averages[key]
            some = [move[n] if n in move else torch.zeros_like(self._like[n]) for n in key.names]
            shape = block_shape(key, average.value)
            v = to_block(key, [t.to(average.mass.dtype) for t in some], shape)
            shapes = {f: t.shape for f, t in average.value.items()}
            shared = self._shared_sides(key, shapes) if self._shared else None
            first = self._processes.rank == 0
            if shared == frozenset() and not first:  # held by all, and added by one
                total.append(v.new_zeros(()))
                continue
            corner = float(first or shared is None or "mean" not in shared)
            block = held.preconditioner.block(key, average, corner)
            total.append((v * block.matvec(v)).sum())
        if not total:  # no statistics yet
            return next(iter(move.values())).new_zeros(())
        found = torch.stack([t.to(total[0]) for t in total]).sum()
        if self._shared:
            found = self._processes.sum([found], "lengths")[0]
        return found.clamp(min=0)

    def _finish(self, taken: bool, owing: bool, outcome: Outcome) -> None:
        """Count the step and report it; what was seen belonged to the old parameters."""
        schedule = self._held.schedule
        schedule["step"] += 1
        owing = owing and not taken
        self._capture.settle()
        self._capture.due = self._due() or owing or self._capture.lacking
        self._info = KFACInfo(
            outcome.accepted, outcome.reason, schedule["damping"], taken, self._notes(),
            outcome.ratio, outcome.step_size, outcome.momentum,
        )  # fmt: skip

    def _reject(self, reason: str, loss: Any) -> Any:
        self._capture.settle()
        self._info = KFACInfo(False, reason, self._held.schedule["damping"])
        return loss

    def _notes(self) -> dict[str, str]:
        notes = {", ".join(k.names): note for k, note in self._held.preconditioner.notes.items()}
        if self._skipped:
            notes["statistics"] = "they were not finite, or not complete; the last good ones stay"
        return notes

    def _settle(self) -> None:
        """Take notice of a step that moved nothing or learned nothing, if the last one did so."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        moved, learned = verdict.flags()
        schedule = self._held.schedule
        if verdict.learning and not learned:
            schedule["taken"] -= 1
            self._skipped = moved
            self._info = replace(self._info, taken=False, notes=self._notes())
        if not moved:
            schedule["step"] -= 1
            self._capture.due = self._due() or self._capture.lacking
            if not self._capture.due:  # what was gathered meanwhile is not due after all
                self._capture.clear()
            self._info = KFACInfo(False, _NOT_FINITE, schedule["damping"])

    @property
    def blocks(self) -> KFACState:
        """Averages and inverses of all blocks, as of the last step."""
        self._settle()
        return self._held

    # --- reports --------------------------------------------------------------------------------

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
        self._settle()
        return self._info

    def coverage(self) -> Coverage:
        """What every parameter's block is, and why; before any statistics, what is expected."""
        self._settle()
        held, guess = self._held, self._forecast().kinds
        blocks = {n: k for k in held.learned for n in k.names}
        given = {id(p) for group in self.param_groups for p in group["params"]}
        reasons, rows = self._capture.structure.reasons, []
        for name, p in plain(self.model).named_parameters():
            block, reason = guess.get(name, ("diagonal", "plain parameter"))
            rule = type(self._rule).__name__.lower()
            if not p.requires_grad:
                block, reason, rule = "none", "frozen", "none"
            elif id(p) not in given:
                block, reason, rule = "none", "not given to the optimizer", "none"
            elif not p.numel():
                block, reason, rule = "none", "it has no entries", "none"
            elif name in blocks:
                key = blocks[name]
                block = describe(key, held.averages[key].value)
                reason = reasons.get(name) or reason
                if key in held.preconditioner.notes:
                    reason += f"; {held.preconditioner.notes[key]}"
            elif self._rule.matrices and (name not in self._measured or held.schedule["taken"]):
                block, rule = "none", "adam"
                reason = reasons.get(name) or "an embedding, an output layer, a gain or a bias"
            elif held.schedule["taken"]:
                block = "gradient"
                reason = "no output seen so far depended on it; its gradient is followed as it is"
            elif name not in guess:
                reason = "plain parameter: the first statistics show what is done with it"
            rows.append(Row(name, tuple(p.shape), block, reason, rule))
        out = Coverage(rows)
        out.forecast = not held.learned
        return out

    def gram(self) -> Kronecker:
        """F̂ without damping, over the parameters that have a block, in the model's order."""
        self._settle()
        self._whole()
        held = self._held
        keys = [k for k in held.averages if k in held.learned]
        if not keys:
            raise PullbackError(
                "There are no statistics yet", "no step was taken", "Call step() first"
            )
        covered, start, offsets = {n for k in keys for n in k.names}, 0, {}
        for name, p in self._by_name.items():
            if name in covered:
                offsets[name], start = start, start + p.numel()
        index = []
        for key in keys:
            params = [(offsets[n], self._by_name[n]) for n in key.names]
            places = [torch.arange(at, at + p.numel()).view(p.shape) for at, p in params]
            shape = block_shape(key, held.averages[key].value)
            index.append(to_block(key, places, shape).flatten())
        blocks = [held.preconditioner.block(k, held.averages[k]) for k in keys]
        return Kronecker(blocks, torch.cat(index).to(blocks[0].diagonal().device))

    def average(self) -> dict[BlockKey, dict[Factor, Tensor]]:
        """The averages as they are, to serve as an `Invariant` damping's reference."""
        self._settle()
        self._whole()
        held = self._held
        return {k: a.corrected() for k, a in held.averages.items() if k in held.learned}

    def degenerate(self) -> list[Degenerate]:
        """Blocks on which F̂ is no metric, and why: directions that change nothing."""
        self._settle()
        self._whole()
        held = self._held
        found = [(k, a) for k, a in held.averages.items() if k in held.learned]
        return [d for k, a in found for d in degenerate_sides(k, block_of(k, a.corrected()))]

    def memory(self) -> dict[str, int]:
        """Bytes held, by what for."""
        buffers = [s[part] for s in self.state.values() for part in _BUFFERS if part in s]
        return {**self._held.memory(), "momentum": sum(t.nbytes for t in buffers)}
