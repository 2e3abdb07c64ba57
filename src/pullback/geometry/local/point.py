"""One point of a model: φ: Ξ → (Z, g) linearized at ξ, and what the geometry there says.

    J = dφ_ξ,   g = S Sᵀ,   A = SᵀJ = U Σ Vᵀ,   G = JᵀgJ = AᵀA

Nothing squares A: the natural parameter gradient is A⁺r with S r = dL, the projection onto the
image of dφ is v ↦ J A⁺Sᵀv.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.checks import require_finite_tensor, require_number
from ..._core.errors import PullbackError, require
from ...grams import Gram, RowBlock, assemble
from ...optim.checks import refuse_inference
from ...solvers import PseudoInverse, Solver
from .ambient import MetricLike, Parametrization, Phi, Vector, require_scalar_loss
from .inverses import Rank, choose_rcond

Loss = Callable[[Tensor], Tensor]


def differentiate(loss: Loss, value: Tensor) -> Tensor:
    """Return ∂L/∂z at z, in its shape; zero if L does not depend on z."""
    with torch.enable_grad():
        z = value.detach().clone().requires_grad_()
        total = loss(z)
        require_scalar_loss(total)
        require_finite_tensor("L", total)
        derivative = None
        if total.requires_grad:
            (derivative,) = torch.autograd.grad(total.reshape(()), z, allow_unused=True)
    if derivative is None:
        derivative = torch.zeros_like(z)
    require_finite_tensor("dL", derivative)
    return derivative.detach()


def raise_covector(block: RowBlock, covector: Tensor) -> Tensor:
    """Return the v with g v = dL of least norm, the gradient of L on (Z, g).

    It is v = S⁺ᵀr with S r = dL, sample by sample unless g couples them.
    """
    factor = block.factor
    value = block.linearization.value
    r = factor.whiten(covector).value
    if r is None:
        raise PullbackError(
            "dL is not in the range of the metric",
            "g is singular or overflows, and no vector v has g v = dL",
            "Use a nonsingular metric, or a loss that does not see its null directions",
        )
    if factor.couples_samples:
        eye = torch.eye(value.numel(), dtype=value.dtype, device=value.device)
        transposed = block.transpose(eye).T  # Sᵀ, (k, n)
        return (torch.linalg.pinv(transposed) @ r.flatten()).reshape(value.shape)
    columns = factor.covectors(value).flatten(2).permute(1, 2, 0)  # (N, |event|, R)
    flat = r.reshape(len(value), prod(factor.white))
    return (torch.linalg.pinv(columns.mT) @ flat[..., None]).reshape(value.shape)


#: bytes that A may take before G is held in another form, as by default in `grams.assembly`
_MEMORY = 2**30


@dataclass(frozen=True)
class Decomposition:
    """grad^Z L = tangent + residual, orthogonal in g; all in the shape of φ(ξ).

    Attributes:
        ambient: grad^Z L, the v with g v = dL (of least norm where g is singular).
        tangent: its projection on the image of dφ: what a natural gradient step can follow.
        residual: what is lost.
        length: ‖grad^Z L‖_g.
        lost: ‖residual‖_g / ‖grad^Z L‖_g, between 0 and 1.
    """

    ambient: Tensor
    tangent: Tensor
    residual: Tensor
    length: float
    lost: float


class Point:
    """φ at ξ.

    Args:
        phi: a function of ξ (a tensor or a dict of tensors) that gives a tensor, or a module.
        xi: where; None for a module's own parameters.
        metric: g on Z: None for the Euclidean one, a matrix (n, n) over the entries of φ(ξ), a
            function z ↦ matrix, or one of `pullback.metrics` (samples first). With a module a
            function gives one matrix per sample, (N, m, m).
        inputs: a module's inputs, a tensor or a tuple of arguments.
        reduction: whether one of `pullback.metrics` is a "mean" over the samples (by default
            with a module, as in `NaturalGradient`) or a "sum" (by default with a function).
            A matrix is neither divided nor multiplied.
        rcond: singular values of A below rcond·σ_max count as zero; by default
            10·max(n, p, 10)·ε, at most √ε: the round-off of J, and not only of its SVD.

    >>> circle = Point(lambda a: torch.stack([a.cos(), a.sin()]), torch.tensor(0.0).double())
    >>> circle.pushforward(torch.tensor(1.0).double())
    tensor([-0., 1.], dtype=torch.float64)
    """

    def __init__(
        self,
        phi: Phi,
        xi: Vector | None = None,
        metric: MetricLike = None,
        *,
        inputs: Any = None,
        reduction: str | None = None,
        rcond: float | None = None,
    ) -> None:
        refuse_inference("it records no graph, so there are no derivatives", "Point")
        self._phi = Parametrization(phi, xi, metric, inputs, reduction)
        self._linear = self._phi.linearize()
        self._block = RowBlock(self._linear, self._phi.factor(self._linear.value))
        if rcond is not None:
            require_number("rcond", rcond, below=1.0)
        self._rcond = rcond
        self._refuse_stochastic()

    @property
    def value(self) -> Tensor:
        """φ(ξ), in its own shape."""
        return self._phi.restore(self._linear.value)

    @property
    def parameters(self) -> int:
        """p, the dimension of Ξ."""
        return self._phi.space.size

    def pushforward(self, v: Vector) -> Tensor:
        """dφ_ξ v = J v, in the shape of φ(ξ)."""
        return self._phi.restore(self._linear.jvp(self._phi.flatten(v)))

    def pullback(self, covector: Tensor) -> Tensor | dict[str, Tensor]:
        """Jᵀu: a covector of Z seen by the parameters, in the form of ξ."""
        u = self._phi.arrange_vector(covector, self._linear.value, "The covector")
        return self._phi.unflatten(self._linear.vjp(u))

    @cached_property
    def operator(self) -> Gram:
        """G as an operator, from A wherever that fits the memory."""
        gram = assemble([self._block], "auto", _MEMORY, "rows")
        if not bool(torch.isfinite(gram.trace())):
            raise PullbackError(
                "dφ is not finite at ξ",
                "the derivative or the metric overflows or is undefined",
                "Move ξ, or scale it",
            )
        return gram

    def gram(self) -> Tensor:
        """G = JᵀgJ as a matrix (p, p), in the order of the flattened ξ."""
        return self.operator.dense()

    @cached_property
    def rank(self) -> Rank:
        """The rank of dφ_ξ (of A, where g is singular) with its spectrum and tolerance."""
        return Rank.of(self.operator, self.rcond)

    @property
    def rcond(self) -> float:
        """The relative size below which singular values of A count as zero."""
        if self._rcond is None:
            return choose_rcond(self.operator)
        return self._rcond

    @cached_property
    def _moore_penrose(self) -> Any:
        """Return the factorization of G by `PseudoInverse`."""
        return PseudoInverse(self.rcond).init(self.operator)

    def gradient(self, loss: Loss | Vector) -> Tensor | dict[str, Tensor]:
        """∇_ξ L = Jᵀ∂L/∂z, in the form of ξ."""
        return self._phi.unflatten(self._compute_gradient(loss)[0])

    def natural_gradient(
        self, loss: Loss | Vector, inverse: Solver | None = None
    ) -> Tensor | dict[str, Tensor]:
        r"""The natural parameter gradient G⁻∇_ξ L, an ascent direction in the form of ξ.

        Args:
            loss: L on Z, a function of φ(ξ); or ∇_ξ L itself, in the form of ξ. From L the solve
                starts at r with S r = dL and keeps the digits that forming ∇_ξ L would lose.
            inverse: a solver: `MoorePenrose` (default), `RandomInverse`, `WeightedNorm`. A damped
                solver such as `Cholesky` gives (G + λ)⁻¹∇_ξ L: no generalized inverse, so that its
                pushforward is not the projected gradient and depends on the parametrization.
        """
        g, r = self._compute_gradient(loss)
        if inverse is None:
            solver: Solver = PseudoInverse(self.rcond)
            state = self._moore_penrose
        else:
            remedy = "Pass a solver, such as RandomInverse()"
            require(isinstance(inverse, Solver), "The inverse", inverse, remedy)
            solver = inverse
            state = solver.init(self.operator)
        if not bool(g.any()) and (r is None or not bool(r.any())):
            return self._phi.unflatten(torch.zeros_like(g))
        solution = solver.solve(state, g, whitened=r)
        if not solution.status.ok and self.rank.rank > 0:
            raise PullbackError(
                "There is no natural gradient here", solution.status.value, "Check φ and g at ξ"
            )
        return self._phi.unflatten(solution.x)

    def project(self, v: Tensor) -> Tensor:
        """Π v = J A⁺Sᵀv: the g-orthogonal projection of a tangent vector of Z on the image of dφ.

        The pushforward of the natural parameter gradient is Π grad^Z L, for any generalized
        inverse (Theorem 1 of van Oostrum, Müller and Ay, 2023).
        """
        vector = self._phi.arrange_vector(v, self._linear.value, "The vector")
        return self._phi.restore(self._project_whitened(self._block.transpose(vector.flatten())))

    def decompose(self, loss: Loss) -> Decomposition:
        """Split grad^Z L into its part in the image of dφ and the rest."""
        covector = self._compute_covector(loss)
        ambient = raise_covector(self._block, covector)
        whitened = self._block.transpose(ambient.flatten())
        tangent = self._project_whitened(whitened)
        residual = ambient - tangent
        length = whitened.norm()
        residual_length = self._block.transpose(residual.flatten()).norm()
        lost_share = 0.0
        if bool(length > 0):
            lost_share = float(residual_length / length)
        return Decomposition(
            ambient=self._phi.restore(ambient),
            tangent=self._phi.restore(tangent),
            residual=self._phi.restore(residual),
            length=float(length),
            lost=lost_share,
        )

    def image(self) -> Tensor:
        """An orthonormal basis of the image of A = SᵀJ, in the coordinates of Sᵀv: (n, rank)."""
        if not self.rank.rank:
            return self._linear.value.new_zeros(self.operator.count, 0)
        eye = torch.eye(self.rank.rank, dtype=self.operator.dtype, device=self.operator.device)
        right_vectors = self._moore_penrose.combine(eye)  # of the SVD of A, (rank, p)
        images = torch.stack([self._block.push(v) for v in right_vectors], 1)
        return torch.linalg.qr(images / images.norm(dim=0)).Q

    def draw_neighbours(self, radius: float, tries: int, seed: int) -> Iterator[Vector]:
        """Yield random parameters at the distance radius·max(1, ‖ξ‖) from ξ, in its form."""
        generator = torch.Generator().manual_seed(seed)
        xi = self._phi.space.flatten(self._phi.point)
        distance = radius * max(1.0, float(xi.norm()))
        for _ in range(tries):
            direction = torch.randn(len(xi), generator=generator, dtype=torch.float64).to(xi)
            move = self._phi.space.split(distance * direction / direction.norm())
            neighbour = {n: w + move[n].to(w.dtype) for n, w in self._phi.point.items()}
            yield self._phi.as_argument(neighbour)

    def residual(self, loss: Loss) -> Tensor:
        """grad^Z L − Π grad^Z L, in the shape of φ(ξ)."""
        return self.decompose(loss).residual

    def _project_whitened(self, whitened: Tensor) -> Tensor:
        """Return Π v = J A⁺c for c = Sᵀv, (n,)."""
        if self.rank.rank == 0:
            return torch.zeros_like(self._linear.value)
        g = self._block.pull(whitened)
        solver = PseudoInverse(self.rcond)
        solution = solver.solve(self._moore_penrose, g, whitened=whitened)
        return self._linear.jvp(solution.x)

    def _compute_gradient(self, loss: Loss | Vector) -> tuple[Tensor, Tensor | None]:
        """Return ∇_ξ L (p,), and r with Aᵀr = ∇_ξ L if L is a function on Z that has one."""
        if isinstance(loss, (Tensor, Mapping)):
            return self._phi.flatten(loss, "The gradient"), None
        covector = self._compute_covector(loss)
        gradient = self._linear.vjp(covector)
        whitened = self._block.factor.whiten(covector).value
        if whitened is None:
            return gradient, None
        return gradient, whitened.flatten()

    def _compute_covector(self, loss: Loss) -> Tensor:
        """Return ∂L/∂z with samples first."""
        covector = differentiate(loss, self.value)
        return covector.to(self._linear.value.dtype).reshape(self._linear.value.shape)

    def _refuse_stochastic(self) -> None:
        with torch.no_grad():
            second_value = self._phi.evaluate(self._phi.point)
        first_value = self.value
        limit = 10 * torch.finfo(first_value.dtype).eps ** 0.5 * first_value.norm()
        if bool((first_value - second_value.to(first_value)).norm() > limit):
            raise PullbackError(
                "φ is stochastic",
                "evaluated twice at ξ it gave two values",
                "Turn dropout off (model.eval()), or fix the random numbers",
            )
