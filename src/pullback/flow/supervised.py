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
    """Derivatives at one batch of logits.

    Attributes:
        slope: g.
        velocity: v = M⁻¹g.
        root: the diagonal S̃.
        white: r̃.
    """

    slope: Tensor
    velocity: Tensor
    root: Tensor
    white: Tensor


def score_bernoulli(z: Tensor, y: Tensor) -> Score:
    """Return the derivatives of Σ softplus(z) − y z, for labels y in [0, 1] shaped like z.

    v = (1 − y)/σ(−z) − y/σ(z), and r = v √(σ(z)σ(−z)) = (1 − y)e^(z/2) − y e^(−z/2).
    """
    y = _read_labels(y, z)
    half = 0.5 * (F.logsigmoid(z) + F.logsigmoid(-z))
    c = half.max()
    slope = (1 - y) * z.sigmoid() - y * (-z).sigmoid()
    v = _masked_product(1 - y, 1 + z.exp()) - _masked_product(y, 1 + (-z).exp())
    white = _masked_product(1 - y, (z / 2 - c).exp()) - _masked_product(y, (-z / 2 - c).exp())
    return Score(slope, v, (half - c).exp(), white)


def _masked_product(y: Tensor, x: Tensor) -> Tensor:
    """y·x, zero where y is, however large x."""
    return torch.where(y == 0, 0.0, y * x)


def _read_labels(y: Tensor, z: Tensor) -> Tensor:
    """Return labels in [0, 1] in the shape of the logits."""
    if y.numel() != z.numel() or not bool(((y >= 0) & (y <= 1)).all()):
        raise PullbackError(
            "The labels do not fit the logits",
            f"got {tuple(y.shape)} between {float(y.min()):g} and {float(y.max()):g} for "
            f"{tuple(z.shape)}",
            "Give one label in [0, 1] per logit ((1 + y)/2 of signs)",
        )
    return y.to(z).reshape(z.shape)


@dataclass(frozen=True)
class SupervisedThresholds:
    """Numbers of the weighted least-squares problem.

    Attributes:
        clear: singular values of J above this share of the largest clearly move the logits, so
            that their absence in S̃J is a loss of digits and not of rank.
    """

    clear: float = 1e-6


THRESHOLDS = SupervisedThresholds()


def _describe_hidden(count: int) -> str:
    return (
        f"the weights of samples differ so much that {count} directions round to zero beside "
        "others (there are more samples than parameters, and some logits are tens ahead of others)"
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
        if isinstance(self.inputs, tuple):
            return self.inputs
        return (self.inputs,)


class SupervisedField(VectorField):
    """The flow of `Supervised`; by the closure of its loss where there is no closed form."""

    def __init__(
        self,
        model: nn.Module,
        data: Supervised,
        is_natural: bool,
        *,
        metric: Metric | None = None,
        solver: Solver | None = None,
        output: Selector = None,
        memory: int = 2**30,
        **options: Any,
    ) -> None:
        is_likelihood = isinstance(data.likelihood, Likelihood)
        remedy = "Pass one of pullback.likelihoods"
        require(is_likelihood, "The likelihood", data.likelihood, remedy)
        refuse_unknown("reduction", data.reduction, ("mean", "sum"))
        target_type = type(data.targets).__name__
        is_tensor = isinstance(data.targets, Tensor)
        require(is_tensor, "The data's targets", target_type, "Pass a tensor")
        self._data = data
        self._output = output
        self._memory = memory
        self._plans: dict[Any, Any] = {}
        if metric is None:
            metric = Fisher(data.likelihood)
        if is_natural:
            options |= {"reduction": data.reduction, "solver": solver, "metric": metric}
            options |= {"output": output, "gram": GramForm(memory=memory)}
        super().__init__(model, self._evaluate_loss, is_natural, **options)
        #: solves in log domain; None where there is no closed form
        self._solver: PseudoInverse | None = None
        is_fisher = isinstance(metric, Fisher) and type(metric.likelihood) is type(data.likelihood)
        has_closed_form = isinstance(data.likelihood, Bernoulli) and is_natural and is_fisher
        if has_closed_form and isinstance(solver, PseudoInverse):
            self._solver = solver

    def _evaluate_loss(self) -> Tensor:
        return self._reduce_loss(self._make_map().value(self.module(*self._data.arguments)))

    def _reduce_loss(self, z: Tensor) -> Tensor:
        """Return the sum or mean of −log p(y | z)."""
        data = self._data
        y = data.targets
        if isinstance(data.likelihood, Categorical):
            if not y.is_floating_point():
                y = y.long()
        elif y.numel() == z.numel():
            y = y.to(z).reshape(z.shape)
        nll = data.likelihood.nll(z, y)
        if data.reduction == "sum":
            return nll.sum()
        return nll.sum() / data.likelihood.samples(z)

    def _make_map(self) -> ModuleMap:
        call = Call.of(*self._data.arguments)
        return ModuleMap(self.module, call, output=self._output, plans=self._plans)

    def local(self, flat: Tensor) -> FieldValue:
        if self._solver is None:
            return super().local(flat)
        with self.at(flat):
            linear = self._make_map().linearize(self.space.split(flat))
            score = score_bernoulli(linear.value, self._data.targets.to(linear.value.device))
            loss = float(self._reduce_loss(linear.value))
            weight = 1.0
            if self._data.reduction == "mean":
                weight = 1 / self._data.likelihood.samples(linear.value)
            with torch.no_grad():
                gradient = weight * linear.vjp(score.slope)
                x, hidden_count = self._find_natural_gradient(linear, score)
                if hidden_count:
                    return FieldValue.without_velocity(flat, _describe_hidden(hidden_count))
                return FieldValue.check(loss, gradient, -x)

    def _find_natural_gradient(self, linear: Linearization, score: Score) -> tuple[Tensor, int]:
        """Return J⁺v if its rows are independent, else (S̃J)⁺r̃.

        Also return how many directions that clearly move the logits are lost in S̃J, whose weights
        may differ by more than the digits of the numbers.
        """
        v = score.velocity
        is_finite = torch.isfinite(v)
        identity = Diagonal(torch.ones_like(v))
        unweighted = self._solve_least_squares(linear, identity, torch.where(is_finite, v, 0.0))
        if unweighted.rank == v.numel() and bool(is_finite.all()):
            return unweighted.x, 0
        weighted = self._solve_least_squares(linear, Diagonal(score.root), score.white)
        return weighted.x, max(0, unweighted.clear_count - weighted.rank)

    def _solve_least_squares(
        self, linear: Linearization, factor: Factor, r: Tensor
    ) -> _LeastSquares:
        """Return A⁺r for A = SᵀJ."""
        assert self._solver is not None
        block = RowBlock(linear, factor)
        gram = assemble([block], "auto", self._memory, self._solver.prefers)
        state = self._solver.init(gram)
        solution = self._solver.solve(state, block.pull(r.flatten()), whitened=r.flatten())
        clear_count = 0
        if len(state.sigma):
            clear_count = int((state.sigma > THRESHOLDS.clear * state.sigma.max()).sum())
        return _LeastSquares(solution.x, solution.rank or 0, clear_count)


@dataclass(frozen=True)
class _LeastSquares:
    """A solution of a least-squares problem.

    Attributes:
        x: A⁺r.
        rank: of A.
        clear_count: how many singular values of A are far from zero.
    """

    x: Tensor
    rank: int
    clear_count: int
