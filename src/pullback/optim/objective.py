"""An objective: terms on derivatives of a network, or residuals, and their problem of one step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from .._core.errors import PullbackError, reraise_fatal
from .._core.factor import Blocks, Diagonal, Factor
from .._core.state import RandomState
from ..grams import RowBlock
from ..maps import ChunkedMap, IntegralMap, ObjectiveMap, OperatorMap
from ..metrics import Metric
from .problem import Displace, StepProblem


@dataclass(frozen=True)
class _TrialLimits:
    """How many trial points are evaluated in one batch."""

    #: bytes of their activations: about a cache
    cpu_bytes: int = 2**26
    #: a share of a GPU's memory that other tensors leave
    cuda_bytes: int = 2**33
    #: on other devices
    other_bytes: int = 2**28
    #: activations per value of a map that does not know its own number
    activations_per_value: int = 64

    def bytes_on(self, device: torch.device) -> int:
        """Return how many bytes the activations of trial points may take on a device."""
        if device.type == "cpu":
            return self.cpu_bytes
        return self.cuda_bytes if device.type == "cuda" else self.other_bytes


_LIMITS = _TrialLimits()


class Term(ABC):
    """ℓ(z) for the values z of a map, with the metric that goes with it."""

    def __init__(self, map: ObjectiveMap | OperatorMap | ChunkedMap | IntegralMap) -> None:
        self.map = map

    @abstractmethod
    def loss(self, z: Tensor) -> Tensor:
        """Return ℓ(z), a scalar."""

    @abstractmethod
    def slope(self, z: Tensor) -> Tensor:
        """Return ∂ℓ/∂z."""

    @abstractmethod
    def factor(self, z: Tensor) -> Factor:
        """Return S with S Sᵀ the metric at z."""

    #: whether S r = ∂ℓ/∂z is solved by r = z
    whitened: bool = False


class Squares(Term):
    """½‖z‖², in the Euclidean metric of z: Gauss–Newton."""

    whitened = True

    def loss(self, z: Tensor) -> Tensor:
        return 0.5 * z.square().sum()

    def slope(self, z: Tensor) -> Tensor:
        return z

    def factor(self, z: Tensor) -> Factor:
        return Diagonal(torch.ones_like(z))


class EnergyTerm(Term):
    """Σ_i q_i e_i(z_i), in the metric q_i ∇²e_i(z_i) of the energy's own second variation.

    Args:
        map: its values z (N, C) are what the density depends on.
        density: z ↦ e (N,), entry i of z_i alone, convex in it.
        weights: q, (N,).
    """

    def __init__(
        self,
        map: ObjectiveMap | OperatorMap | ChunkedMap,
        density: Callable[[Tensor], Tensor],
        weights: Tensor,
    ) -> None:
        super().__init__(map)
        self._density = density
        self._weights = weights

    def loss(self, z: Tensor) -> Tensor:
        return (self._weights * self._density(z)).sum()

    def slope(self, z: Tensor) -> Tensor:
        return grad(self.loss)(z)

    def factor(self, z: Tensor) -> Factor:
        size = z.shape[1]
        eye = torch.eye(size, dtype=z.dtype, device=z.device)
        columns = [jvp(grad(self.loss), (z,), (e.expand_as(z),))[1] for e in eye]
        return Blocks.of_metric(torch.stack(columns, -1), (size,))


class Objective:
    """A loss Σ_k ℓ_k(φ_k(w)) as terms whose maps know their own structure.

    On several processes the loss is the sum of their objectives'.

    Args:
        terms: ℓ_k with φ_k.
        shared: whether other processes have terms too, so that here may be none.
    """

    def __init__(self, terms: Sequence[Term], *, shared: bool = False) -> None:
        self.terms = tuple(terms)
        if not self.terms and not shared:
            raise PullbackError("The objective has no terms", "there is no loss", "Pass some")

    def loss(self, params: Mapping[str, Tensor]) -> Tensor:
        """Return L, a scalar."""
        first, *others = (term.loss(term.map(params)) for term in self.terms)
        return sum(others, first)


class ObjectiveProblem(StepProblem):
    """L = Σ_k ℓ_k(z_k): half the square of the weighted residuals, or an `Objective`'s terms.

    The metric is that of the terms (Gauss–Newton for residuals), unless other values are given to
    measure with (`metric_batch`): then it is the optimizer's metric on those.
    """

    proven = True  # by torch.func, or once by the operator's map itself

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        objective: Objective | Callable[..., Any],
        reduction: str,
    ) -> None:
        super().__init__(params)
        self._random = RandomState(self.space.device)
        self._reduction = reduction
        if not isinstance(objective, Objective):
            residuals = self._make_residual_map(self._make_repeatable(objective))
            terms = [Squares(residuals)] if residuals.rows else []
            objective = Objective(terms, shared=True)
        self._objective = objective
        self._terms = objective.terms

    def _make_repeatable(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the same random numbers at every call.

        Loss, Jacobian and trials must agree.
        """
        random = RandomState(self.space.device)

        def repeat(point: dict[str, Tensor]) -> Any:
            random.restore()
            return function(point)

        return repeat

    def _make_residual_map(self, function: Callable[..., Any]) -> ObjectiveMap:
        """Return the map to the residuals, weighted for a mean or a sum over samples."""
        return ObjectiveMap(function, self._reduction)

    def evaluate(self) -> str:
        with torch.autocast(self.space.device.type, enabled=False):
            self.loss = float(self.sum_tensors(self._linearize())[0])
            if not math.isfinite(self.loss):
                return self.find_fault()
            gradient, pulled_gradient = self._differentiate()
        # r is used where a term of any process has one
        has_white = any(term.whitened for term in self._terms)
        self._uses_white = not self.all_agree(not has_white)
        self.gradient, self._pulled_gradient = self.sum_tensors(gradient, pulled_gradient)
        if not bool(self.gradient.any()) and self.loss != 0:
            self._refuse_constant()
        return self.find_fault()

    def _linearize(self) -> Tensor:
        """Linearize the maps of all terms; return their loss."""
        self._linearizations = [term.map.linearize(self.params) for term in self._terms]
        # on a CPU a trial of maps that are carried forward is work enough for one core
        is_structured = all(x.structured for x in self._linearizations)
        self._evaluates_singly = self.space.device.type == "cpu" and is_structured
        losses = []
        self._footprint = 0
        for term, linearization in zip(self._terms, self._linearizations, strict=True):
            values = linearization.value.numel()
            default = _LIMITS.activations_per_value * values
            self._footprint += getattr(linearization, "footprint", default)
            losses.append(term.loss(linearization.value))
        return _sum(losses, self.space.zeros())

    def _differentiate(self) -> tuple[Tensor, Tensor]:
        """Return ∇L, and what terms with r = z add to it."""
        self._row_blocks = []
        gradients = []
        white_gradients = []
        for term, linearization in zip(self._terms, self._linearizations, strict=True):
            z = linearization.value
            row_block = RowBlock(linearization, term.factor(z))
            self._row_blocks.append(row_block)
            if linearization.structured and term.whitened:
                # rows cost no more than a reverse pass, and the solver needs them anyway
                gradient = row_block.lift(term.slope(z).flatten())
            else:
                gradient = linearization.vjp(term.slope(z))
            gradients.append(gradient)
            if term.whitened:
                white_gradients.append(gradient)
        zero = self.space.zeros(self.space.size)
        return _sum(gradients, zero), _sum(white_gradients, zero)

    def _refuse_constant(self) -> None:
        """Raise where no residual moves with the parameters."""
        ones = torch.ones_like(self.gradient)
        depends = any(bool(x.jvp(ones).any()) for x in self._linearizations)
        if self.all_agree(not depends):
            raise PullbackError(
                "The objective does not depend on the parameters",
                "its residuals have no gradient",
                "Use the given parameter dict, for example with torch.func.functional_call",
            )

    def row_blocks(self, metric: Metric, batch: Any) -> tuple[list[RowBlock], Tensor | None]:
        if batch is not None:
            return self._measure_batch(batch, metric), None
        if not self._uses_white:
            return self._row_blocks, None
        whites = [self.space.zeros(0)]
        for term, row_block in zip(self._terms, self._row_blocks, strict=True):
            if term.whitened:
                whites.append(row_block.linearization.value.flatten())
            else:
                whites.append(self.space.zeros(row_block.count))
        return self._row_blocks, torch.cat(whites)

    def _measure_batch(self, batch: Any, metric: Metric) -> list[RowBlock]:
        """Return the rows of the metric at the values of `batch`, a function of the parameters."""
        return self._measure_values(self._make_residual_map(self._make_repeatable(batch)), metric)

    def _measure_values(self, values: ObjectiveMap, metric: Metric) -> list[RowBlock]:
        """Return the rows of the metric at the values of a map; none if it has no values here."""
        if not values.rows:
            return []
        linearization = values.linearize(self.params)
        return [RowBlock(linearization, metric.factor(linearization.value))]

    def pulled_gradient(self) -> Tensor:
        return self._pulled_gradient

    def losses(self, moves: Tensor, displace: Displace) -> Tensor:
        return self.sum_tensors(self._evaluate_local_terms(moves, displace))[0]

    def _evaluate_local_terms(self, moves: Tensor, displace: Displace) -> Tensor:
        """Return what this process's terms add to the loss after each move, (k,)."""

        def evaluate(move: Tensor) -> Tensor:
            return self._objective.loss(displace(self.params, move))

        if not self._terms:
            return moves.new_zeros(len(moves))
        with torch.no_grad():
            if self._evaluates_singly:
                return torch.stack([evaluate(move) for move in moves])
            bytes_per_trial = self._footprint * moves.element_size()
            chunk = max(1, _LIMITS.bytes_on(moves.device) // bytes_per_trial)
            try:
                return vmap(evaluate, chunk_size=chunk, randomness="same")(moves)
            except RuntimeError as error:
                reraise_fatal(error)  # else the objective or retraction branches on its data
                return torch.stack([evaluate(move) for move in moves])

    def rollback(self) -> None:
        self._random.restore()


def _sum(tensors: list[Tensor], zero: Tensor) -> Tensor:
    """Return the sum of tensors of one shape; `zero` if there are none."""
    if not tensors:
        return zero
    return torch.stack(tensors).sum(0)
