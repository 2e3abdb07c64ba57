"""Inner products and gradients in function spaces of a kernel.

On a finite set X of points a function is its vector of values f, and with K = B Bᵀ

    ⟨f, g⟩_K = fᵀ K⁺ g = (B⁺f)·(B⁺g)

for f and g in the range of K; outside it there is no such function in the space. The gradient of a
loss is ∇ℓ = Σ_i K(·, x_i) ∇L(f(x_i), y_i) in every such space:

    K = K_H   the gradient in an RKHS H of functions of x       (`metrics.rkhs`, or any function)
    K = K_f   its projection onto the tangent space T_fΦ        (`Projected`)
    K = Θ     the standard gradient, seen among functions       (`NTK`)
              whose metric ⟨dφ⁻¹f, dφ⁻¹g⟩ is the pushforward of the Euclidean one
    K = K_GTK the natural gradient of any basis                 (`GTK`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.checks import require_finite_tensor
from .._core.errors import PullbackError, require
from .change import Expansion, FunctionChange
from .kernel import TangentKernel
from .layouts import as_matrix
from .tangent import as_arguments, count_samples


def rkhs_inner(
    f: Tensor,
    g: Tensor | None = None,
    *,
    kernel: Tensor | None = None,
    basis: Tensor | None = None,
    rcond: float | None = None,
) -> Tensor:
    """Return ⟨f, g⟩ of functions given by their values.

    For batches (k, n) and (k', n) it is their Gram matrix (k, k').

    Args:
        f: values (n,), or (k, n) for k functions; n = N·m with the outputs of one point together.
        g: the same, by default f.
        kernel: K on the points: (n, n), or (N, N, m, m) as `ntk` gives it.
        basis: B, (n, k), in place of K = B Bᵀ; its condition is not squared.
        rcond: singular values below rcond·σ_max count as zero, by default n·ε for B as for K.

    Any basis is orthonormal for its own kernel:

    >>> b = torch.tensor([[1.0, 1.0], [0.0, 2.0], [3.0, 1.0]])
    >>> torch.allclose(rkhs_inner(b.T, basis=b), torch.eye(2), atol=1e-5)
    True
    """
    if kernel is not None and basis is None:
        whitener = _whiten_kernel(kernel, rcond)
    elif basis is not None and kernel is None:
        whitener = _whiten_basis(basis, rcond)
    else:
        raise PullbackError(
            "The function space is not determined",
            "it takes one of kernel= and basis=",
            "Pass the kernel's matrix on the points, or the basis' values there",
        )
    left = _find_coordinates(f, whitener)
    right = left if g is None else _find_coordinates(g, whitener)
    inner = left.vectors @ right.vectors.T
    if left.is_single:
        inner = inner[0]
    if right.is_single:
        return inner[..., 0]
    return inner


#: |K − Kᵀ| relative to |K| from which on a kernel is not symmetric, which round-off never reaches
_ASYMMETRY = 1e-3


def _whiten_basis(basis: Tensor, rcond: float | None) -> Tensor:
    """Return W, (rank, n), with fᵀK⁺g = (W f)·(W g) for K = B Bᵀ."""
    require_finite_tensor("The kernel or basis", basis)
    if rcond is None:
        rcond = max(basis.shape) * torch.finfo(basis.dtype).eps
    u, sigma, _ = torch.linalg.svd(basis, full_matrices=False)
    is_nonzero = sigma > rcond * sigma.max()
    return u[:, is_nonzero].T / sigma[is_nonzero, None]


def _whiten_kernel(kernel: Tensor, rcond: float | None) -> Tensor:
    """Return W, (rank, n), with fᵀK⁺g = (W f)·(W g)."""
    require_finite_tensor("The kernel or basis", kernel)
    eps = torch.finfo(kernel.dtype).eps
    k = kernel
    if kernel.ndim != 2:
        k = as_matrix(kernel, kernel.shape[-1])
    if k.shape[0] != k.shape[1] or not bool((k - k.T).norm() <= _ASYMMETRY * k.norm()):
        raise PullbackError(
            "The kernel is not symmetric",
            f"its matrix has shape {tuple(k.shape)}, or differs from its transpose",
            "Pass K(x, x) on one set of points",
        )
    values, u = torch.linalg.eigh((k + k.T) / 2)
    if bool(values.min() < -(eps**0.5) * values.abs().max()):
        raise PullbackError(
            "The kernel is not positive",
            f"its matrix has an eigenvalue {float(values.min()):.2g}",
            "Pass a reproducing kernel",
        )
    if rcond is None:
        rcond = len(k) * eps
    is_nonzero = values > rcond * values.max()
    return u[:, is_nonzero].T / values[is_nonzero].sqrt()[:, None]


@dataclass(frozen=True)
class _Coordinates:
    """W f of k functions, (k, rank), and whether f was given as one function."""

    vectors: Tensor
    is_single: bool


def _find_coordinates(f: Tensor, whitener: Tensor) -> _Coordinates:
    """Return W f; raise unless f lies in the range of the kernel."""
    n = whitener.shape[1]
    is_single = f.ndim == 1 or (f.shape[-1] != n and f.numel() == n)
    width = f.numel() if is_single else f.shape[-1]
    flat = f.reshape(-1, width)
    if flat.shape[1] != n:
        raise PullbackError(
            "The function does not fit the points",
            f"its values have shape {tuple(f.shape)} where the kernel has {n} rows",
            f"Pass {n} values, or one row of {n} per function",
        )
    flat = flat.to(whitener)
    require_finite_tensor("A function", flat)
    vectors = flat @ whitener.T
    # W⁺ = Wᵀ(W Wᵀ)⁻¹, and W's rows are orthogonal
    projected = (vectors / whitener.square().sum(1)) @ whitener
    limit = torch.finfo(flat.dtype).eps ** 0.5 * flat.norm(dim=1)
    if not bool(((projected - flat).norm(dim=1) <= limit).all()):
        raise PullbackError(
            "A function lies outside the space",
            "its values are not in the range of the kernel, where its norm would be infinite",
            "Project it first (kernels.project), or lower rcond",
        )
    return _Coordinates(vectors, is_single)


InputKernel = Callable[[Any, Any], Tensor]


def functional_gradient(
    kernel: TangentKernel | InputKernel, x: Any, cotangents: Tensor
) -> FunctionChange | Expansion:
    """Return the function Σ_i K(·, x_i) c_i, which can be called at any points.

    Args:
        kernel: a tangent kernel, which gives a `FunctionChange` with its parameter direction; or a
            function of two batches of inputs, which gives an `Expansion`.
        x: the points of the empirical loss.
        cotangents: c = ∂ℓ/∂f(x_i), (N, *event), as autograd gives it for ℓ(f(x)).

    >>> from pullback.metrics import Matern
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> gradient = functional_gradient(Matern(), x, torch.ones(2, 1))
    >>> gradient(torch.tensor([[0.0]]))
    tensor([[1.7358]])
    """
    if isinstance(kernel, TangentKernel):
        return kernel.expand(x, cotangents)
    remedy = "Pass NTK, GTK or Projected of a Tangent, or a function of two batches of inputs"
    require(callable(kernel), "The kernel", kernel, remedy)
    points = count_samples(as_arguments(x))
    require_finite_tensor("The batch of cotangents", cotangents)
    if len(cotangents) != points:
        raise PullbackError(
            "The cotangents do not fit the points",
            f"{tuple(cotangents.shape)} for {points} points",
            "Pass one cotangent per point",
        )
    c = cotangents.detach()
    if c.ndim == 1:
        c = c[:, None]
    return Expansion(kernel, x, c)
