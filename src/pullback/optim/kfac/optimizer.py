"""K-FAC as a `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import Selector, plain
from ...likelihoods import Likelihood
from ...maps.layers.moments import Sharing
from ...metrics import Metric
from ...steps import QuadraticModel
from ..checks import own_group, refuse_model
from ..terms import Objective
from .blocks.curvature import Curvature
from .blocks.damping import Damping
from .blocks.ranks import Ranks
from .checks import (
    check,
    check_group,
    check_rates,
    damping_of,
    metric_of,
    refuse_inference,
    refuse_unready,
)
from .info import KFACInfo
from .reports import Reports
from .saving import MEMORY, Saving
from .source import source_of
from .statistics.coupling import refuse_options
from .statistics.gather import Gatherer
from .statistics.pool import Recipe
from .stepping.look import Look
from .stepping.moving import Moving
from .stepping.steady import Steady
from .stepping.undo import Undo


class KFAC(Reports, Moving, Saving):
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
            batch_dim=batch_dim, output=output, joint=joint, ekfac=ekfac, seed=seed, step=step,
            grad_scaler=grad_scaler, params=params,
        )  # fmt: skip
        self.model, self.metric = model, metric_of(likelihood, metric)
        self.damping = damping_of(damping, ekfac=ekfac)
        refuse_options(self.metric, fisher=fisher, ekfac=ekfac)
        self.fisher, self.kl_clip, self.ema, self.rule = fisher, kl_clip, ema, step
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
            self.batch_dim, self.ekfac,
        )  # fmt: skip
        self._gatherer = Gatherer(self.model, recipe, self.seed)
        self._ranks = Ranks(self.model)
        self._info = KFACInfo()
        self._steady = Steady()
        self._look: Look | None = None

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
        held = {id(p) for group in self.param_groups for p in group["params"]}
        group = own_group(param_group, self._names, held)
        check_group(group)
        super().add_param_group(group)
        self._choose()

    def _choose(self) -> None:
        """Only the groups' parameters take part; for the metric the others are constants."""
        chosen = [p for group in self.param_groups for p in group["params"] if p.numel()]
        self._gatherer.choose(self._names[id(p)] for p in chosen)

    @property
    def _memory(self) -> dict[str, Any]:
        """What is saved beside the param groups; the key is no tensor, so torch passes it on."""
        return self.state[MEMORY]  # pyright: ignore[reportArgumentType]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics of gradients that were never used."""
        super().zero_grad(set_to_none)
        self._gatherer.clear()
        self._ranks.clear()

    def _forget(self) -> None:
        """What was seen belonged to gradients that are used or dropped, and to old parameters."""
        self._gatherer.settle()
        self._ranks.clear()

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
        refuse_inference()
        check_rates(self.param_groups)
        told = self._gatherer.due
        self._settle()
        source = source_of(self, closure, objective)
        with Undo(self, source) if source.controlled else nullcontext():
            return self._take(source, told=told)
