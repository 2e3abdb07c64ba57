"""AdamW, for parameters that no matrix rule takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..arguments import check
from .base import (
    BlockShape,
    Defaults,
    FactorAverages,
    RefreshReport,
    Rule,
    RuleState,
    Statistics,
    StepContext,
)


@dataclass
class AdamWState(RuleState):
    """Running means of the gradient and of its square, of every entry."""

    first: Tensor
    second: Tensor


class AdamW(Rule):
    r"""Adam's step, entry by entry; weight decay is decoupled, as that of every rule is:

        m ← β₁m + (1 − β₁)g,    v ← β₂v + (1 − β₂)g²,    Δ = m̂/(√v̂ + ε).

    Args:
        betas: the weights of the past in m and v; param groups may have their own.
        eps: ε.
        rate: the share of the learning rate.
    """

    name: ClassVar = "adam"
    reads: ClassVar = Statistics.NONE
    is_elementwise: ClassVar = True
    defaults: ClassVar = Defaults(lr=1e-3)

    def __init__(
        self, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *, rate: float = 1.0
    ) -> None:
        check(betas=betas, eps=eps, rate=rate)
        self.betas = betas
        self.eps = eps
        self.rate = rate

    def group_options(self) -> dict[str, Any]:
        return {"betas": self.betas}

    def init(self, shape: BlockShape) -> AdamWState:
        return AdamWState(first=shape.zeros(*shape.size), second=shape.zeros(*shape.size))

    def refresh(self, averages: FactorAverages, state: RuleState) -> RefreshReport:
        return RefreshReport()

    def direction(self, gradient: Tensor, state: RuleState, step: StepContext) -> Tensor:
        assert isinstance(state, AdamWState)
        beta1, beta2 = step.options["betas"]
        step.average(state.first, gradient, 1 - beta1)
        step.average(state.second, gradient.square(), 1 - beta2)
        unbias1 = 1 - beta1**step.count
        unbias2 = 1 - beta2**step.count
        size = state.second.sqrt().div_(unbias2**0.5).add_(self.eps)
        return (state.first / size).div_(unbias1)
