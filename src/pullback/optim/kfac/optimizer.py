"""K-FAC as a `torch.optim.Optimizer`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._core.capture import Selector, plain
from ..._core.errors import PullbackError
from ...grams.kronecker.sides import diagonal
from ...likelihoods import Likelihood
from ...maps.layers.moments import Sharing
from ...metrics import Euclidean, Fisher, Metric, as_metric
from ...steps import QuadraticModel
from ..checks import gradient_of, own_group, refuse_model
from ..terms import Objective
from .checks import check, refuse_inference, refuse_unready
from .control import Control, Look, finite, fusible
from .coupling import refuse_options
from .curvature import Curvature
from .damping import Adaptive, Damping, as_damping
from .gather import Gatherer, Recipe
from .info import KFACInfo
from .ranks import Ranks
from .reports import Reports
from .source import source_of
from .sums import Key

_MEMORY = "pullback"


class KFAC(Reports, Optimizer):
    r"""w ← w − η F̂⁻¹∇L with the K-FAC metric F̂ = ⊕_l R_l ⊗ C_l, in an ordinary training loop.

    On statistics steps, while the loss's gradient passes the model's output, targets drawn from
    the model's own predictions are sent down the same graph: R = Σ δδᵀ/N and C = mean āāᵀ of the
    true Fisher, whatever the loss was. Everything else is `loss.backward(); opt.step()`.

    Args:
        model: the module that is called in the loop.
        lr: η; schedulers may change it.
        likelihood: whose Fisher information is the metric on outputs, such as `Categorical()`.
        metric: instead, any metric of the library; by default that of ½‖·‖². `Sobolev` relates the
            samples of one forward call by the model's first tensor.
        fisher: "mc" draws targets, "exact" takes the metric as it is (a reverse pass per output),
            "empirical" the loss's own gradient.
        damping: λ, or an object: `Tikhonov`, `Exact`, `Invariant`, `Adaptive`.
        momentum: of the preconditioned gradient.
        weight_decay: decoupled, w ← (1 − η·weight_decay)w.
        kl_clip: δ, such that η²·ΔᵀF̂Δ ≤ δ for the preconditioned gradient Δ, before momentum, and
            the F̂ of the last inversion.
        ema: the weight of the past in the averages.
        statistics_every, invert_every: steps between statistics and between inversions. Until the
            first `invert_every` steps are done, inverses are also renewed at the first, second,
            fourth, ... statistics.
        params: parameters or param groups, by default all of the model's.
        sharing: "expand" or "reduce", how places that share a weight enter (see `moments`).
        joint: whether weight and bias share a block.
        ekfac: correct the eigenvalues by second moments of the gradient in the eigenbases; those of
            linear and convolution layers used once. λ is added to them.
        max_factor: the longest side held as a matrix; longer ones are diagonals.
        draws: targets per sample for fisher="mc".
        reduction: "mean" or "sum" over samples, of the loss and hence of F̂.
        output: which tensor of a structured output the metric sees.
        batch_dim: the output's axis of samples.
        grad_scaler: with fisher="empirical", the scaler of the loss.
        step: `QuadraticModel()` finds learning rate and momentum from the exact quadratic model
            (`lr` multiplies them); needs `step(closure)`.
        seed: of the draws.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        likelihood: Likelihood | None = None,
        metric: Metric | Callable[[Tensor], Tensor] | None = None,
        fisher: str = "mc",
        damping: float | Damping = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        kl_clip: float | None = None,
        ema: float = 0.95,
        statistics_every: int = 10,
        invert_every: int = 100,
        params: Iterable[Any] | None = None,
        sharing: str = "expand",
        joint: bool = True,
        ekfac: bool = False,
        max_factor: int = 8192,
        draws: int = 1,
        reduction: str = "mean",
        output: Selector = None,
        batch_dim: int = 0,
        grad_scaler: Any = None,
        step: QuadraticModel | None = None,
        seed: int = 0,
    ) -> None:
        refuse_model(
            model, "KFAC", "its hooks see one process alone, and samples live on several of them"
        )
        check(
            lr=lr, momentum=momentum, weight_decay=weight_decay, kl_clip=kl_clip, ema=ema,
            statistics_every=statistics_every, invert_every=invert_every, draws=draws,
            fisher=fisher, sharing=sharing, reduction=reduction, max_factor=max_factor,
            batch_dim=batch_dim, output=output, joint=joint, ekfac=ekfac, seed=seed,
        )  # fmt: skip
        if likelihood is not None and metric is not None:
            raise PullbackError(
                "Both a likelihood and a metric were given",
                "the likelihood's Fisher information is itself a metric",
                "Give one of them",
            )
        if ekfac and as_damping(damping).referenced:
            raise PullbackError(
                "Corrected eigenvalues do not go with this damping",
                f"{damping!r} adds to the sides, and ekfac=True damps the corrected eigenvalues",
                "Give a number, or leave ekfac out",
            )
        if likelihood is not None:
            metric = Fisher(likelihood)
        self.model = model
        self.metric = as_metric(Euclidean() if metric is None else metric)
        refuse_options(self.metric, fisher=fisher, ekfac=ekfac)
        self.fisher, self.damping = fisher, as_damping(damping)
        self.kl_clip, self.ema, self.rule = kl_clip, ema, step
        self.statistics_every, self.invert_every = statistics_every, invert_every
        self.sharing = Sharing(sharing == "reduce", batch_dim, max_factor)
        self.joint, self.ekfac, self.draws, self.reduction = joint, ekfac, draws, reduction
        self.output, self.batch_dim, self.grad_scaler = output, batch_dim, grad_scaler
        self.seed, self._closed = seed, False
        params = list(plain(model).parameters() if params is None else params)
        refuse_unready(model, params)
        self._register()
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.curvature = Curvature()
        self._memory.update(steps=0, taken=0, damping=self.damping.value)

    def _register(self) -> None:
        self._by_name = dict(plain(self.model).named_parameters())
        self._names = {id(p): n for n, p in self._by_name.items()}
        self._shapes = {n: p.shape for n, p in self._by_name.items()}
        recipe = Recipe(
            self.metric, self.fisher, self.sharing, self.joint, self.draws, self.output,
            self.batch_dim,
        )  # fmt: skip
        self._gatherer = Gatherer(self.model, recipe, self.seed)
        self._ranks = Ranks(self.model)
        self._info = KFACInfo()
        self._look: Look | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but the hooks: a copy or a pickle brings its model along."""
        self._settle()
        apart = ("_gatherer", "_ranks", "_names", "_by_name", "_look")
        own = {n: v for n, v in vars(self).items() if n not in apart}
        own.pop("step", None)  # a scheduler counts calls by a function of its own
        return {**own, "gathered": self._gatherer.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gathered = state.pop("gathered", None)
        info = state.pop("_info", None)
        super().__setstate__(state)
        if gathered is not None:
            self._register()
            self._choose()
            self._gatherer.load_state_dict(gathered)
            self._resume()
            self._info = info

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the hooks from the model; the optimizer goes on with what it knows."""
        self._gatherer.close()
        self._ranks.close()
        self._closed = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up more of the model's parameters."""
        group = own_group(param_group, self._names)
        check(**{n: group[n] for n in ("lr", "momentum", "weight_decay") if n in group})
        super().add_param_group(group)
        self._choose()

    def _choose(self) -> None:
        """Only the groups' parameters take part; for the metric the others are constants."""
        self._gatherer.choose(self._names[id(p)] for g in self.param_groups for p in g["params"])

    @property
    def _memory(self) -> dict[str, Any]:
        """What is saved beside the param groups; the key is no tensor, so torch passes it on."""
        return self.state[_MEMORY]  # pyright: ignore[reportArgumentType]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics of gradients that were never used."""
        super().zero_grad(set_to_none)
        self._gatherer.clear()
        self._ranks.clear()

    def _forget(self) -> None:
        """What was seen belonged to gradients that are used or dropped, and to old parameters."""
        self._gatherer.settle()
        self._ranks.clear()

    def _due(self) -> bool:
        return not self._closed and self._memory["steps"] % self.statistics_every == 0

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
            step has changed nothing.
        """
        refuse_inference()
        self._settle()
        source = source_of(self, closure, objective)
        loss = source.evaluate()
        params = self._active()
        low = self._ranks.low(self.curvature.inverses, self._by_name)
        look = Look(source.loss, [p.grad for p in params.values()], low)
        learning = self._gatherer.pool.calls > 0 or self._due()
        if learning and (reason := look.reason()):
            return self._rejected(reason, loss)
        taken = self._learn(source.found())
        # corrected eigenvalues belong to the old eigenbases: new ones serve from the next step on
        self._invert(taken and not self.ekfac)
        low = look.low()
        directions = self.curvature.precondition(self._by_name, params, low)
        # between statistics nothing waits for the device: it moves nothing by itself if it must not
        late = not learning and self.rule is None and not isinstance(self.damping, Adaptive)
        late = late and fusible(params, directions)
        if not learning and not late and (reason := look.reason()):
            return self._rejected(reason, loss)
        control = Control(self, params, directions, source, look.broken if late else None)
        accepted, reason = control.move()
        if self.ekfac:
            self._invert(taken)
        self._memory["steps"] += 1
        self._forget()
        self._gatherer.due = self._due() or self._gatherer.lacking
        self._look = look if late else None
        self._info = KFACInfo(
            accepted,
            reason,
            self._memory["damping"],
            taken,
            self._notes(),
            control.ratio,
            *control.factors,
            len(low),
        )
        return loss

    @property
    def info(self) -> KFACInfo:
        """What the last step did."""
        self._settle()
        return self._info

    def _settle(self) -> None:
        """Take notice of a step that moved nothing, if the last one was such."""
        look, self._look = self._look, None
        if look is not None and (reason := look.reason()):
            self._memory["steps"] -= 1
            self._gatherer.due = self._due() or self._gatherer.lacking
            self._info = KFACInfo(False, reason, self._memory["damping"])

    def _rejected(self, reason: str, loss: Any) -> Any:
        self._forget()
        self._info = KFACInfo(False, reason, self._memory["damping"])
        return loss

    def _active(self) -> dict[str, nn.Parameter]:
        """The parameters with a gradient, by name, in the order of the groups."""
        out = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and p.grad is not None:
                    name = self._names[id(p)]
                    gradient_of(name, p)
                    if p.shape != self._shapes[name]:
                        raise PullbackError(
                            f"Parameter {name!r} changed its shape",
                            f"it was {tuple(self._shapes[name])}, and is {tuple(p.shape)} now",
                            "Build the optimizer again after changing the model",
                        )
                    out[name] = p
        return out

    def _learn(self, found: dict[Key, dict[str, Tensor]] | None) -> bool:
        """Take up the statistics gathered since the last step, if all are finite."""
        self._skipped = False
        if found is None:
            found = self._gathered()
        if not found:
            return False
        # of a second moment the diagonal tells: no entry is larger
        self._skipped = not finite([diagonal(t) for x in found.values() for t in x.values()])
        if self._skipped:
            self._memory["skipped"] = self._memory.get("skipped", 0) + 1
            return False
        self.curvature.take(found, self.ema, self.damping, self._memory["damping"])
        self._memory["taken"] += 1
        return True

    def _gathered(self) -> dict[Key, dict[str, Tensor]]:
        """The averages over what the hooks saw since the last step."""
        if not self._gatherer.pool.calls:
            if self._due():
                raise PullbackError(
                    "A statistics step saw no layer",
                    self._gatherer.missed,
                    "Call the module given to KFAC, in training mode, and backpropagate from its "
                    "output before step()",
                )
            return {}
        self._skipped = not self._gatherer.pool.sums  # nothing finite was met
        loss_scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.get_scale())
        return self._gatherer.averages(self.reduction, loss_scale)

    def _invert(self, taken: bool) -> None:
        """Renew inverses when it is time, and make those that are missing."""
        steps, count, held = self._memory["steps"], self._memory["taken"], self.curvature
        early = steps < self.invert_every and count & (count - 1) == 0
        again = self._memory.pop("again", False)  # the damping grew after a rejected step
        if (taken and (steps % self.invert_every == 0 or early)) or again:
            keys = list(held.averages)
        else:
            keys = [k for k in held.averages if k not in held.inverses]
        if keys:
            once = self.invert_every == 1 == self.statistics_every and on_cpu(self._by_name)
            held.invert(self.damping, self._memory["damping"], keys, eigen=self.ekfac, once=once)
            if self.ekfac:
                self._gatherer.bases = held.inverses

    def _notes(self) -> dict[str, str]:
        notes = {", ".join(k.names): note for k, note in self.curvature.notes.items()}
        if self._skipped:
            notes["statistics"] = "they were not finite; the last good ones stay"
        return notes

    def state_dict(self) -> dict[str, Any]:
        """Param groups, momentum, averages, inverses and the draws' random state."""
        self._settle()
        out = super().state_dict()
        memory = {
            **self._memory,
            "curvature": self.curvature.state_dict(),
            "gathered": self._gatherer.state_dict(),
        }
        out["state"] = {**out["state"], _MEMORY: copy.deepcopy(memory)}
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume to the same bits."""
        if _MEMORY not in state_dict.get("state", {}):
            raise PullbackError(
                "The saved state is not KFAC's",
                "it holds no averages",
                "Load what KFAC.state_dict() gave",
            )
        super().load_state_dict(dict(state_dict))
        memory = copy.deepcopy(state_dict["state"][_MEMORY])
        self.curvature.load_state_dict(memory.pop("curvature"))
        self._gatherer.load_state_dict(memory.pop("gathered"))
        self.state[_MEMORY] = memory  # pyright: ignore[reportArgumentType]
        self._resume()

    def _resume(self) -> None:
        if self.ekfac:
            self._gatherer.bases = self.curvature.inverses
        self._gatherer.settle()
        self._gatherer.due = self._due()
        if self._closed:
            self.close()


def on_cpu(parameters: Mapping[str, Tensor]) -> bool:
    """Whether the model is there, where solving with factors is cheaper than inverting them."""
    return next(iter(parameters.values())).device.type == "cpu"
