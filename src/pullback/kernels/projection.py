r"""The orthogonal projection P onto the tangent space T_fΦ, in each of its forms.

With the differential c_n = ∂ℓ/∂f(x_n) of a loss, or with the values h(x_n) of a function, c = M h:

    pushforward    P∇ℓ = Σ_kl G⁺_kl (Σ_n c_n·∂_kφ(x_n)) ∂_lφ     by the coordinates' images
    orthonormal    P∇ℓ = Σ_l (Σ_n c_n·h_l(x_n)) h_l             by an orthonormal basis
    kernel         P∇ℓ = Σ_n K_f(·, x_n) c_n                    by the projected kernel

They are one function, and P² = P. The standard gradient is the image of the same differential under
the surjection S = J Jᵀ M, for which S² ≠ S unless the ∂_kφ are orthonormal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from ..metrics import Euclidean, Metric, as_metric
from .change import Expansion, FunctionChange
from .kernel import fitted
from .projected import Projected
from .tangent import Model, Tangent, arguments, as_tangent

FORMS = ("pushforward", "orthonormal", "kernel")
AnyMetric = Metric | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Combination:
    """Σ_l c_l h_l of the orthonormal basis that a projected kernel has."""

    kernel: Projected
    coefficients: Tensor

    def __call__(self, x: Any) -> Tensor:
        """(N, *event)."""
        event = self.kernel.linear.value.shape[1:]
        return (self.kernel.features_at(x) @ self.coefficients).unflatten(1, event)

    def norm(self) -> Tensor:
        """‖Σ c_l h_l‖ in the metric: that of the coefficients."""
        return self.coefficients.norm()


def project(
    model: Model | Tangent,
    x: Any,
    *,
    gradient: Tensor | None = None,
    values: Tensor | None = None,
    metric: AnyMetric | None = None,
    form: str = "pushforward",
    rcond: float | None = None,
) -> FunctionChange | Combination | Expansion:
    """P∇ℓ from the loss's differential, or P h from the values of a function h; callable anywhere.

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
    if form not in FORMS:
        raise PullbackError(
            f"Unknown form {form!r}", "it is not one of the forms", f"Use one of {FORMS}"
        )
    kernel = Projected(as_tangent(model), x, metric, rcond=rcond)
    given = fitted(_one_of(gradient, values), kernel.linear)
    c = given if values is None else kernel.part.factor.matvec(given)
    if form == "orthonormal":
        return Combination(kernel, kernel.coefficients(c))
    if form == "kernel":
        return Expansion(kernel, x, c)
    return FunctionChange(kernel.tangent, kernel.direction(c))


def surject(
    model: Model | Tangent,
    x: Any,
    *,
    gradient: Tensor | None = None,
    values: Tensor | None = None,
    metric: AnyMetric | None = None,
) -> FunctionChange:
    """S∇ℓ = Σ_i ⟨∇ℓ, ∂_iφ⟩ ∂_iφ = J Jᵀc: the standard gradient, seen among functions.

    S vanishes on the complement of T_fΦ as P does, but it is no projection: on T_fΦ it is J JᵀM.
    """
    tangent = as_tangent(model)
    linear = tangent.at(x)
    c = fitted(_one_of(gradient, values), linear)
    if values is not None:
        chosen = Euclidean() if metric is None else as_metric(metric)
        c = chosen.factor(linear.value, inputs=arguments(x)[0]).matvec(c)
    return FunctionChange(tangent, linear.vjp(c))


def _one_of(gradient: Tensor | None, values: Tensor | None) -> Tensor:
    given = gradient if values is None else values
    both = gradient is not None and values is not None
    if both or given is None or not bool(torch.isfinite(given).all()):
        raise PullbackError(
            "There is no one thing to project",
            "gradient= and values= were given both or not at all, or are not finite",
            "Pass the loss's differential as gradient=, or a function's values as values=",
        )
    return given
