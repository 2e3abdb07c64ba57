r"""Diagonal networks β = w₁∘w₂∘⋯∘w_L and the linear model, with exact natural gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core.checks import require_finite_tensor, require_number
from .._core.errors import PullbackError
from ..grams import FactoredGram
from .grams import CoreGram, FlatFactor
from .parameters import FactoredModule, RandomSource, read_whole_numbers, refuse_zero_tangent
from .population import natural_gradient_from_rows, population_fisher


class DiagonalNetwork(FactoredModule):
    r"""x ↦ xᵀβ with β = w₁∘⋯∘w_L: logits of shape (N,) for inputs (N, D); `model()` is β, (D,).

    The tangent is dβ = Σ_l c_l∘dw_l with c_l = ∏_{m≠l} w_m. With h = √Σ_l c_l² it is dβ = h∘(E dw)
    for an E with orthonormal rows, so that everything about the L·D parameters is settled in D
    coordinates: A = SᵀX diag(h) E for any metric S Sᵀ on the logits.

    Args:
        dim: D.
        depth: L.
        init: the factors themselves (L tensors of D entries, or one of shape (L, D)), a number for
            every entry, or by default random entries ±U(½, 3/2), which keep clear of zero, where
            the tangent degenerates.
        generator, seed: where random factors come from.
        dtype, device: of the factors; by default torch's default ones, or those of given factors.

    >>> model = DiagonalNetwork(2, 3, init=2.0)
    >>> model(torch.tensor([[1.0, 0.5]]))
    tensor([12.], grad_fn=<...>)
    >>> [x.tolist() for x in model.natural_gradient(torch.tensor([12.0, 0.0]))]
    [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        init: float | Tensor | Sequence[Tensor] | None = None,
        *,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dim, depth = read_whole_numbers("dim or depth", [dim, depth])
        self.dim = dim
        source = RandomSource(generator, seed, dtype, device)
        shapes = [(dim,)] * depth
        if init is None:
            # The sign and the distribution function of a normal number are independent.
            normals = source.draw(shapes)
            self._set_factors([w.sign() * (0.5 + torch.erf(w.abs() / 2**0.5)) for w in normals])
        elif isinstance(init, (int, float)):
            full = torch.full((dim,), float(init), dtype=torch.float64)
            self._set_factors([source.convert(full.clone()) for _ in shapes])
        else:
            self._set_factors(source.copy_factors(init, shapes))

    @property
    def beta(self) -> Tensor:
        """β, (D,)."""
        return self.forward()

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Xβ, (..., ) for x (..., D); without an argument β."""
        beta = self.factors[0]
        for w in list(self.factors)[1:]:
            beta = beta * w
        if x is None:
            if self.depth == 1:
                return beta.clone()
            return beta
        if x.ndim == 0 or x.shape[-1] != self.dim:
            raise PullbackError(
                "The input does not fit the model",
                f"its shape is {tuple(x.shape)}, and β has {self.dim} entries",
                f"Pass x of shape (N, {self.dim})",
            )
        return x @ beta

    def natural_gradient(self, grad: Tensor, *, damping: float = 0.0) -> tuple[Tensor, ...]:
        r"""J⁺∇_β, one tensor (D,) per factor: c_l∘∇_β/(h² + λ), with J the tangent of β.

        Coordinates at which two factors vanish do not move (h = 0).
        """
        c, h = self._find_tangent(grad)
        require_number("The damping", damping)
        lengths = h.square() + damping
        along = torch.where(h > 0, grad.detach().to(h.dtype) / lengths, 0.0)
        return self.like_factors(list(c * along))

    def logistic_natural_gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        r"""F(w)⁺∇_w of L = Σ_n log(1 + e^{−y_n x_nᵀβ}), stable at logits of any size.

        Args:
            x: inputs (N, D); more or fewer samples than dimensions.
            y: labels −1 or +1, (N,).
        """
        require_finite_tensor("The data matrix x", x, ("N", self.dim))
        factors = self.values(torch.promote_types(self.compute_dtype, x.dtype))
        c, h = find_tangent(factors)
        refuse_zero_tangent(h.max())
        x = x.detach().to(h.dtype)
        logits = x @ torch.stack(factors).prod(0)
        along = natural_gradient_from_rows(x * h, y, logits)
        return self.like_factors(list(c * torch.where(h > 0, along / h, 0.0)))

    def population_natural_gradient(self, grad: Tensor) -> tuple[Tensor, ...]:
        r"""(JᵀF(β)J)⁺Jᵀ∇_β for the Fisher matrix of inputs x ~ N(0, 1): c_l∘(F⁻¹∇_β)/h².

        `grad` is ∇_β of a loss averaged over samples. Where h vanishes so does β, and F has no
        entry that ties the coordinate to the others: it is left out.
        """
        c, h = self._find_tangent(grad)
        fisher = population_fisher(torch.stack(self.values(h.dtype)).prod(0))
        d = fisher.solve(torch.where(h > 0, grad.detach().to(h.dtype), 0.0))
        along = torch.where(h > 0, d / h.square(), 0.0)
        require_finite_tensor("The natural gradient", along)
        return self.like_factors(list(c * along))

    def _find_tangent(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return c (L, D) and h (D,) in the dtype of factors and gradient."""
        require_finite_tensor("The gradient", grad, (self.dim,))
        c, h = find_tangent(self.values(torch.promote_types(self.compute_dtype, grad.dtype)))
        require_finite_tensor("A product of factors", h)
        refuse_zero_tangent(h.max())
        return c, h

    def closed_gram(
        self, factors: list[Tensor], chosen: list[int], args: list[Tensor], factor: FlatFactor
    ) -> FactoredGram:
        """G = Eᵀdiag(h)XᵀMX diag(h)E."""
        c, h = find_tangent(factors, chosen)
        if args:
            j = args[0].to(h.dtype) * h
        else:
            j = torch.diag(h)
        unit = torch.where(h > 0, c / h, 0.0)
        return CoreGram(
            factor.transpose(j.T).T.contiguous(),
            c.numel(),
            lambda v: (unit * v.view(unit.shape)).sum(0),
            lambda d: (unit * d[..., None, :]).flatten(-2),
        )


class LinearModel(DiagonalNetwork):
    """x ↦ xᵀβ with β itself the parameter, from zero unless `init` says otherwise.

    >>> LinearModel(3).natural_gradient(torch.tensor([1.0, 2.0, 3.0]))
    (tensor([1., 2., 3.]),)
    """

    def __init__(
        self,
        dim: int,
        init: float | Tensor = 0.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if isinstance(init, Tensor):
            factors = init[None]
        else:
            factors = init
        super().__init__(dim, 1, factors, dtype=dtype, device=device)


def find_tangent(
    factors: Sequence[Tensor], chosen: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """c_l = ∏_{m≠l} w_m for the chosen factors, (·, D), and h = √Σ c_l²; zeros are no obstacle."""
    before = [torch.ones_like(factors[0])]
    after = [torch.ones_like(factors[0])]
    for w in factors[:-1]:
        before.append(before[-1] * w)
    for w in reversed(factors[1:]):
        after.append(after[-1] * w)
    products = [a * b for a, b in zip(before, reversed(after), strict=True)]
    if chosen is not None:
        products = [products[i] for i in chosen]
    c = torch.stack(products)
    return c, torch.linalg.vector_norm(c, dim=0)
