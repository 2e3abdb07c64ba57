r"""The projected kernel K_f of a metric: the reproducing kernel of T_fΦ inside the function space.

    K_f(x, x') = J(x) G⁺ J(x')ᵀ = Σ_i h_i(x) ⊗ h_i(x'),        G = JᵀMJ = AᵀA on the support

With A = U Σ Vᵀ the functions h = J V Σ⁻¹ are an orthonormal basis of T_fΦ in the metric.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError, refuse_unknown
from .._core.products import full_precision
from ..grams import RowBlock, assemble
from ..grams.assembly import choose_form
from ..likelihoods import Likelihood
from ..maps import Linearization, identity_covectors
from ..metrics import Euclidean, Fisher, Metric, as_metric
from ..solvers import PseudoInverse
from .change import Expansion, FunctionChange
from .kernel import FeatureKernel, check_cotangents
from .tangent import Tangent, as_arguments, as_tangent
from .tiles import MEMORY

AnyMetric = Metric | Callable[[Tensor], Tensor]


class Projected(FeatureKernel):
    """K_f for a metric measured on a support, and the projection onto T_fΦ that it stands for.

    Args:
        tangent: the tangent space.
        support: the inputs on which the metric measures functions.
        metric: any metric, or a function of z.
        rcond: singular values of A below rcond·σ_max count as zero, as in `PseudoInverse`.
        memory: bytes that A may take; beyond, A Aᵀ is used, whose condition is the square.
    """

    def __init__(
        self,
        tangent: Tangent,
        support: Any,
        metric: AnyMetric | None = None,
        *,
        rcond: float | None = None,
        memory: int = MEMORY,
    ) -> None:
        super().__init__(tangent)
        args = as_arguments(support)
        self.linear = tangent.at(args)
        factor = _choose_metric(metric).factor(self.linear.value, inputs=args.tensors[0])
        self.part = RowBlock(self.linear, factor)
        self._solver = PseudoInverse(rcond)
        space = tangent.space
        form = choose_form(self.part.count, space.size, space.dtype.itemsize, memory, "rows")
        with torch.no_grad(), full_precision(space.device):
            gram = assemble([self.part], form, memory, "rows")
            self._spectrum = self._solver.init(gram)
        if not self._spectrum.finite:
            raise PullbackError(
                "The metric's Gram is not finite",
                "J or the metric overflows on the support",
                "Check the model's outputs there",
            )
        self.rank = self._spectrum.rank
        self._sigma = self._spectrum.sigma.to(space.dtype)
        #: V, (p, k), unless A Aᵀ was formed
        self._v: Tensor | None = None
        if form != "kernel":
            eye = torch.eye(self.rank, dtype=self._spectrum.sigma.dtype, device=space.device)
            self._v = self._spectrum.combine(eye).T.to(space.dtype)

    @property
    def width(self) -> int:
        if self._v is None:
            return self.rank
        return self.rank + self.tangent.space.size

    def to_direction(self, v: Tensor) -> Tensor:
        """Return G⁺v."""
        return self._solver.solve(self._spectrum, v).x

    def features(self, linear: Linearization) -> Tensor:
        """Return H = J V Σ⁻¹, (N, m, k), so that K_f = H H'ᵀ."""
        shape = len(linear.value), linear.value[0].numel(), self.rank
        if self._v is not None:
            return (linear.rows() @ self._v).view(shape) / self._sigma
        pulled = linear.pullback(identity_covectors(linear.value))
        across = pulled.kernel(self.part.pulled_covectors)  # J(x) Jᵀ, or J(x) Aᵀ
        if self.part.factor.couples_samples:
            across = self.part.transpose(across)
        assert self._spectrum.left is not None
        return (self._spectrum.left(across.T) / self._sigma[:, None] ** 2).T.reshape(shape)

    def coefficients(self, cotangents: Tensor) -> Tensor:
        """Return ⟨∇ℓ, h_i⟩ = Σ_n c_n·h_i(x_n), (k,), for cotangents c on the support."""
        c = check_cotangents(cotangents, self.linear)
        return torch.einsum("nmk,nm->k", self.features(self.linear), c.flatten(1))

    def direction(self, cotangents: Tensor) -> Tensor:
        """Return G⁺Jᵀc, (p,): from r with S r = c where there is one, which keeps the digits."""
        c = check_cotangents(cotangents, self.linear)
        whitened = self.part.factor.whiten(c).value
        if whitened is not None:
            whitened = whitened.flatten()
        gradient = self.linear.vjp(c)
        return self._solver.solve(self._spectrum, gradient, whitened=whitened).x


def _choose_metric(metric: AnyMetric | None) -> Metric:
    if metric is None:
        return Euclidean()
    return as_metric(metric)


def projected_kernel(
    model: nn.Module | Tangent,
    x: Any,
    x2: Any = None,
    *,
    metric: AnyMetric,
    support: Any = None,
    layout: str = "full",
    params: Mapping[str, Tensor] | None = None,
    rcond: float | None = None,
    memory: int = MEMORY,
) -> Tensor:
    """Return K_f = J (JᵀMJ)⁺ J'ᵀ of any metric, in the layouts of `ntk`.

    With `Sobolev` and J of full row rank on the support it is the Sobolev kernel itself there. M is
    the metric of the function space only as far as the support shows it: the norm that it gives is
    a lower bound, attained by functions in the span of the kernel's sections there.

    Args:
        model, x, x2, layout, params: as in `ntk`.
        metric: how long a move of the function is.
        support: the inputs on which the metric measures, by default x.
        rcond: the cut-off on singular values of A.
        memory: bytes that A may take.
    """
    if support is None:
        support = x
    kernel = Projected(as_tangent(model, params), support, metric, rcond=rcond, memory=memory)
    return kernel(x, x2, layout=layout, memory=memory)


def natural_ntk(
    model: nn.Module | Tangent,
    x: Any,
    x2: Any = None,
    *,
    likelihood: Likelihood | None = None,
    **options: Any,
) -> Tensor:
    """Return the natural NTK J F⁺ J'ᵀ with the Fisher matrix F of a likelihood.

    Natural gradients move f by it. Without a likelihood F = JᵀJ, the Fisher matrix of a unit
    Gaussian: where J has full row rank on the support, the natural NTK there is the identity
    whatever the parametrization. Further options are those of `projected_kernel`.
    """
    metric: Metric = Euclidean() if likelihood is None else Fisher(likelihood)
    return projected_kernel(model, x, x2, metric=metric, **options)


FORMS = ("pushforward", "orthonormal", "kernel")


@dataclass(frozen=True)
class Combination:
    """Σ_l c_l h_l of the orthonormal basis that a projected kernel has."""

    kernel: Projected
    coefficients: Tensor

    def __call__(self, x: Any) -> Tensor:
        """Return the function's values, (N, *event)."""
        event = self.kernel.linear.value.shape[1:]
        return (self.kernel.features_at(x) @ self.coefficients).unflatten(1, event)

    def norm(self) -> Tensor:
        """Return ‖Σ c_l h_l‖ in the metric, which is the norm of the coefficients."""
        return self.coefficients.norm()


def project(
    model: nn.Module | Tangent,
    x: Any,
    *,
    gradient: Tensor | None = None,
    values: Tensor | None = None,
    metric: AnyMetric | None = None,
    form: str = "pushforward",
    rcond: float | None = None,
) -> FunctionChange | Combination | Expansion:
    """Return P∇ℓ from the loss's differential, or P h from the values of a function h.

    The result is a function, which can be called at any points.

    Args:
        model: as for `ntk`.
        x: the points of the loss, on which the metric measures too.
        gradient: c = ∂ℓ/∂f(x), (N, *event).
        values: h(x), (N, *event), in place of the gradient.
        metric: M, by default Euclidean.
        form: "pushforward" gives a `FunctionChange` with its parameter direction G⁺Jᵀc (the
            natural gradient), "orthonormal" a `Combination`, "kernel" an `Expansion`.
        rcond: the cut-off on singular values of A.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> project(model, x, values=torch.tensor([[0.0], [5.0]]))(x)
    tensor([[2.],
            [4.]])
    """
    refuse_unknown("form", form, FORMS)
    kernel = Projected(as_tangent(model), x, metric, rcond=rcond)
    c = check_cotangents(_require_one(gradient, values), kernel.linear)
    if values is not None:
        c = kernel.part.factor.matvec(c)
    if form == "orthonormal":
        return Combination(kernel, kernel.coefficients(c))
    if form == "kernel":
        return Expansion(kernel, x, c)
    return FunctionChange(kernel.tangent, kernel.direction(c))


def surject(
    model: nn.Module | Tangent,
    x: Any,
    *,
    gradient: Tensor | None = None,
    values: Tensor | None = None,
    metric: AnyMetric | None = None,
) -> FunctionChange:
    """Return S∇ℓ = Σ_i ⟨∇ℓ, ∂_iφ⟩ ∂_iφ = J Jᵀc: the standard gradient, seen among functions.

    S vanishes on the complement of T_fΦ as P does, but it is no projection: on T_fΦ it is J JᵀM.
    """
    tangent = as_tangent(model)
    linear = tangent.at(x)
    c = check_cotangents(_require_one(gradient, values), linear)
    if values is not None:
        factor = _choose_metric(metric).factor(linear.value, inputs=as_arguments(x).tensors[0])
        c = factor.matvec(c)
    return FunctionChange(tangent, linear.vjp(c))


def _require_one(gradient: Tensor | None, values: Tensor | None) -> Tensor:
    """Return the gradient or the values; raise unless exactly one of them was passed."""
    if values is None and gradient is not None:
        return gradient
    if gradient is None and values is not None:
        return values
    raise PullbackError(
        "There is no one thing to project",
        "gradient= and values= were given both or not at all",
        "Pass the loss's differential as gradient=, or a function's values as values=",
    )
