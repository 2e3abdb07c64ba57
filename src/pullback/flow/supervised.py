"""Natural gradient flow of classification losses, also where logits diverge, in log domain.

With g = ∂ℓ/∂z and the Fisher metric M, autograd's g = p − y rounds to zero from logits of about
37 on, and M vanishes with it; their quotient v = M⁻¹g does not. If J has full row rank, the natural
gradient is J⁺v whatever the weights in M. Elsewhere it is the weighted least-squares solution
(S̃J)⁺r̃ with S̃² = M e^(−2c) and S̃ r̃ = g e^(−2c), e^c the largest weight's root.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._core.capture import Selector
from .._core.errors import PullbackError, refuse_unknown, require
from .._core.factor import Diagonal, Factor
from ..grams import GramForm, RowBlock, assemble
from ..likelihoods import Bernoulli, Categorical, Likelihood
from ..maps import Call, Linearization, ModuleMap
from ..metrics import Fisher, Metric
from ..solvers import PseudoInverse, Solver
from .field import FieldValue, VectorField


@dataclass(frozen=True)
class Score:
    """What the flow needs of one batch of logits: g, v, and the diagonals S̃ and r̃."""

    slope: Tensor
    velocity: Tensor
    root: Tensor
    white: Tensor


def bernoulli(z: Tensor, y: Tensor) -> Score:
    """Σ softplus(z) − y z, for labels y in [0, 1] shaped like z.

    v = (1 − y)/σ(−z) − y/σ(z), and r = v √(σ(z)σ(−z)) = (1 − y)e^(z/2) − y e^(−z/2).
    """
    y = _labels_like(y, z)
    half = 0.5 * (F.logsigmoid(z) + F.logsigmoid(-z))
    c = half.max()
    slope = (1 - y) * z.sigmoid() - y * (-z).sigmoid()
    v = _masked_product(1 - y, 1 + z.exp()) - _masked_product(y, 1 + (-z).exp())
    white = _masked_product(1 - y, (z / 2 - c).exp()) - _masked_product(y, (-z / 2 - c).exp())
    return Score(slope, v, (half - c).exp(), white)


def _masked_product(y: Tensor, x: Tensor) -> Tensor:
    """y·x, zero where y is, however large x."""
    return torch.where(y == 0, 0.0, y * x)


def _labels_like(y: Tensor, z: Tensor) -> Tensor:
    if y.numel() != z.numel() or not bool(((y >= 0) & (y <= 1)).all()):
        raise PullbackError(
            "The labels do not fit the logits",
            f"got {tuple(y.shape)} between {float(y.min()):g} and {float(y.max()):g} for "
            f"{tuple(z.shape)}",
            "Give one label in [0, 1] per logit ((1 + y)/2 of signs)",
        )
    return y.to(z).reshape(z.shape)


_CLEAR = 1e-6
_HIDDEN = (
    "the weights of samples differ so much that {} directions round to zero beside others (there "
    "are more samples than parameters, and some logits are tens ahead of others)"
)


@dataclass(frozen=True)
class Supervised:
    """L = Σ −log p(y | model(x)), or its mean, with the Fisher metric of p.

    For `Bernoulli` the natural flow works in log domain and follows logits of any size; a
    closure's gradient p − y rounds to zero from logits of about 37 on. With more samples than
    parameters the weights of samples count, and a flow ends with a reason where they differ by
    more than the digits of the numbers.

    Args:
        inputs: x, a tensor or a tuple of arguments.
        targets: y, as the likelihood takes them.
        likelihood: p.
        reduction: "mean" or "sum", for loss and metric alike; the natural flow is the same.
    """

    inputs: Any
    targets: Tensor
    likelihood: Likelihood
    reduction: str = "mean"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The model's arguments."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)


class SupervisedField(VectorField):
    """The flow of `Supervised`; by the closure of its loss where there is no closed form."""

    def __init__(
        self,
        model: nn.Module,
        data: Supervised,
        kind: str,
        *,
        metric: Metric | None = None,
        solver: Solver | None = None,
        output: Selector = None,
        memory: int = 2**30,
        **options: Any,
    ) -> None:
        usable = isinstance(data.likelihood, Likelihood)
        require(usable, "The likelihood", data.likelihood, "Pass one of pullback.likelihoods")
        refuse_unknown("reduction", data.reduction, ("mean", "sum"))
        got = type(data.targets).__name__
        require(isinstance(data.targets, Tensor), "The data's targets", got, "Pass a tensor")
        self._data, self._output, self._memory = data, output, memory
        self._plans: dict[Any, Any] = {}
        chosen = Fisher(data.likelihood) if metric is None else metric
        if kind == "natural":
            options |= {"reduction": data.reduction, "solver": solver, "metric": chosen}
            options |= {"output": output, "gram": GramForm(memory=memory)}
        super().__init__(model, self._total, kind, **options)
        own = isinstance(chosen, Fisher) and type(chosen.likelihood) is type(data.likelihood)
        plain = isinstance(solver, PseudoInverse)
        log = isinstance(data.likelihood, Bernoulli) and kind == "natural"
        self._solver = solver if log and own and plain else None

    def _total(self) -> Tensor:
        z = self._map().value(self.module(*self._data.arguments))
        return self._reduced(z)

    def _reduced(self, z: Tensor) -> Tensor:
        data = self._data
        y = data.targets
        if isinstance(data.likelihood, Categorical):
            y = y if y.is_floating_point() else y.long()
        elif y.numel() == z.numel():
            y = y.to(z).reshape(z.shape)
        nll = data.likelihood.nll(z, y)
        return nll.sum() if data.reduction == "sum" else nll.sum() / data.likelihood.samples(z)

    def _map(self) -> ModuleMap:
        call = Call.of(*self._data.arguments)
        return ModuleMap(self.module, call, output=self._output, plans=self._plans)

    def local(self, flat: Tensor) -> FieldValue:
        if self._solver is None:
            return super().local(flat)
        with self.at(flat):
            linear = self._map().linearize(self.space.split(flat))
            score = bernoulli(linear.value, self._data.targets.to(linear.value.device))
            loss = float(self._reduced(linear.value))
            count = self._data.likelihood.samples(linear.value)
            mean = 1 / count if self._data.reduction == "mean" else 1.0
            with torch.no_grad():
                gradient = mean * linear.vjp(score.slope)
                x, hidden = self._natural(linear, score)
                if hidden:
                    return FieldValue.broken(flat, _HIDDEN.format(hidden))
                return FieldValue.checked(loss, gradient, -x)

    def _natural(self, linear: Linearization, score: Score) -> tuple[Tensor, int]:
        """J⁺v if its rows are independent, else (S̃J)⁺r̃.

        And how many directions that clearly move the logits are lost in S̃J, whose weights may
        differ by more than the digits of the numbers.
        """
        v = score.velocity
        finite, one = torch.isfinite(v), Diagonal(torch.ones_like(v))
        x, rank, clear = self._least_squares(linear, one, torch.where(finite, v, 0.0))
        if rank == v.numel() and bool(finite.all()):
            return x, 0
        x, seen, _ = self._least_squares(linear, Diagonal(score.root), score.white)
        return x, max(0, clear - seen)

    def _least_squares(
        self, linear: Linearization, factor: Factor, r: Tensor
    ) -> tuple[Tensor, int, int]:
        """A⁺r, the rank of A, and how many of its singular values are above _CLEAR·σ_max."""
        assert self._solver is not None
        part = RowBlock(linear, factor)
        gram = assemble([part], "auto", self._memory, self._solver.prefers)
        state = self._solver.init(gram)
        found = self._solver.solve(state, part.pull(r.flatten()), whitened=r.flatten())
        clear = int((state.sigma > _CLEAR * state.sigma.max()).sum()) if len(state.sigma) else 0
        return found.x, found.rank or 0, clear
