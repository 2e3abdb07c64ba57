r"""Kernel and Gaussian-process prediction with a tangent kernel.

Training the linearized network by gradient flow on ½·mean(f − y)² from f₀ for a time t gives

    f_t(x*) = f₀(x*) + T (y − f₀(x)),     T = K(x*, x) (K + λ)⁻¹ (1 − e^(−t (K + λ)/n))

with n = N·m numbers in the mean; as t → ∞ this is kernel regression. Over an ensemble whose
initial functions are a Gaussian process with mean zero and covariance K₀, and targets with noise of
variance λ, the mean of f_t is T y and its covariance

    Σ_t = K₀(x*, x*) − T K₀(x, x*) − K₀(x*, x) Tᵀ + T (K₀ + λ) Tᵀ,

which for K₀ = K and t → ∞ is the posterior of the Gaussian process with covariance K.

K is the kernel of one network of finite width. Kernels in the limit of infinite width, and with
them NNGP priors in closed form, are out of scope: pass an empirical estimate of K₀ as `prior`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .._core.capture import Selector, select_output, unwrap_model
from .._core.checks import require_finite_tensor, require_number
from .._core.errors import PullbackError, refuse_unknown
from .._core.graph import disable_fused_attention
from ..maps import FunctionLinearization
from ..maps.module import refuse_coupled
from ..solvers import Relative
from .layouts import as_matrix
from .tangent import Tangent

Kernel = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Prediction:
    """Mean (N*, *event), and the covariance (N*, N*, m, m) where it was asked for."""

    mean: Tensor
    covariance: Tensor | None = None


def predict(
    kernel: Kernel,
    x: Any,
    y: Tensor,
    x_test: Any,
    *,
    t: float | None = None,
    f0: Callable[[Any], Tensor] | None = None,
    diag_reg: float | Relative = 0.0,
    covariance: bool = False,
    prior: Kernel | None = None,
    reduction: str = "mean",
) -> Prediction:
    """Return f_t at new points.

    Args:
        kernel: K, such as `NTK(Tangent(model))`, or any function of two batches; (N, N') acts on
            each output alone, (N, N', m, m) on all.
        x: training inputs.
        y: targets (N, *event).
        x_test: where to predict.
        t: training time, which is lr times the number of steps of gradient descent; None for the
            end of training.
        f0: the initial function, for one network (the model itself); None for zero, the mean of an
            ensemble.
        diag_reg: λ added to the diagonal, absolute; `Relative(c)` is c times the mean diagonal.
        covariance: whether to compute the covariance too.
        prior: K₀, by default K.
        reduction: of the loss: "mean" over all numbers, or "sum".

    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [3.0]])
    >>> linear = lambda a, b: a @ b.T + 1
    >>> predict(linear, x, y, torch.tensor([[2.0]])).mean
    tensor([[5.0000]])
    """
    targets, event = _flatten_targets(y)
    m = targets.shape[1]
    k = as_matrix(kernel(x, x), m)
    across = as_matrix(kernel(x_test, x), m)
    _check_fit(k, across, targets)
    targets = targets.to(k)
    reg = _choose_regularization(diag_reg, k)
    time = _choose_time(t, reduction, targets.numel())
    response = _response(k, across, reg, time)
    if f0 is None:
        mean = (response @ targets.flatten()).view(-1, m)
    else:
        initial = _evaluate_initial(f0, x, k, m)
        mean = (response @ (targets - initial).flatten()).view(-1, m)
        mean = mean + _evaluate_initial(f0, x_test, across, m)
    mean = mean.unflatten(1, event)
    if not covariance:
        return Prediction(mean)
    return Prediction(mean, _covariance(prior or kernel, x, x_test, m, response, reg))


def _choose_regularization(diag_reg: float | Relative, k: Tensor) -> float:
    """Return the absolute λ of a kernel matrix."""
    if isinstance(diag_reg, Relative):
        diag_reg = diag_reg.value * float(k.diagonal().mean())
    require_number("diag_reg", diag_reg)
    return float(diag_reg)


def _choose_time(t: float | None, reduction: str, count: int) -> float | None:
    """Return t/n, or t for a sum: the factor of eigenvalues; None for the end of training."""
    refuse_unknown("reduction", reduction, ("mean", "sum"))
    if t is None or t == inf:
        return None
    require_number("t", t)
    if reduction == "mean":
        return t / count
    return t


def _evaluate_initial(f0: Callable[[Any], Tensor], points: Any, kernel: Tensor, m: int) -> Tensor:
    """Return f₀ at the points that the rows of a kernel belong to, (N, m)."""
    with torch.no_grad():
        values = f0(points).detach().to(kernel)
    if values.numel() != len(kernel):
        raise PullbackError(
            "The initial function does not fit the targets",
            f"f0 gave {tuple(values.shape)} where the kernel has {len(kernel)} rows",
            f"Let it return {m} numbers per point",
        )
    return values.reshape(-1, m)


def _response(k: Tensor, across: Tensor, reg: float, time: float | None) -> Tensor:
    """Return T, from one eigendecomposition; targets in the null space of K have no effect."""
    values, u = torch.linalg.eigh((k + k.T) / 2)
    values = values.clamp(min=0) + reg
    is_nonzero = values > len(values) * torch.finfo(k.dtype).eps * values.max()
    if time is None:
        gain = torch.where(is_nonzero, 1 / values, 0.0)
    else:  # (1 − e^(−τλ))/λ → τ as λ → 0
        gain = torch.where(is_nonzero, -torch.expm1(-time * values) / values, time)
    return ((across @ u) * gain) @ u.T


def _covariance(prior: Kernel, x: Any, x_test: Any, m: int, response: Tensor, reg: float) -> Tensor:
    """Return Σ_t, (N*, N*, m, m)."""
    k = as_matrix(prior(x, x), m)
    across = as_matrix(prior(x_test, x), m)
    at_test = as_matrix(prior(x_test, x_test), m)
    mixed = response @ across.T
    explained = response @ k @ response.T + reg * (response @ response.T)
    sigma = at_test - mixed - mixed.T + explained
    n = len(sigma) // m
    return ((sigma + sigma.T) / 2).view(n, m, n, m).transpose(1, 2)


def _flatten_targets(y: Tensor) -> tuple[Tensor, torch.Size]:
    """Return the targets as (N, m), and the shape of one of them."""
    require_finite_tensor("The batch of targets", y)
    y = y.detach()
    if y.ndim == 1:
        return y[:, None], torch.Size((1,))
    return y.flatten(1), y.shape[1:]


def _check_fit(k: Tensor, across: Tensor, y: Tensor) -> None:
    """Raise unless the kernels are finite and have one row per target."""
    if k.shape[0] != y.numel() or across.shape[1] != len(k):
        raise PullbackError(
            "The targets do not fit the kernel",
            f"{y.numel()} numbers for kernels {tuple(k.shape)} and {tuple(across.shape)}",
            "Pass one target per training input and output",
        )
    for matrix in (k, across):
        require_finite_tensor("The kernel", matrix)


class Linearized(nn.Module):
    """x ↦ φ(w₀)(x) + dφ_{w₀}(w − w₀)(x), linear in its parameters w.

    w starts at w₀ and is what an optimizer moves (`weights.parameters()`); w₀ is kept in buffers.
    Gradients in w flow through, so the model can be trained: its training is exactly the kernel
    regression with the NTK at w₀ that `predict` computes. `train()` and `eval()` leave the network
    in the mode that it was linearized in: f₀ is one function.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, Tensor] | None, output: Selector):
        super().__init__()
        tangent = Tangent(model, params)
        refuse_coupled(unwrap_model(model))
        self.weights = copy.deepcopy(unwrap_model(model))
        parameters = dict(self.weights.named_parameters())
        self._names = tuple(tangent.params)
        self._output = output
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in self._names)
        for i, name in enumerate(self._names):
            origin = tangent.params[name]
            parameters[name].data.copy_(origin)
            self.register_buffer(f"origin_{i}", origin)

    def train(self, mode: bool = True) -> Linearized:
        """Set this module's flag alone."""
        self.training = mode
        return self

    def origin(self) -> dict[str, Tensor]:
        """Return w₀ by name."""
        return {name: getattr(self, f"origin_{i}") for i, name in enumerate(self._names)}

    def forward(self, *args: Any, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the value at w, or at `params`, where parameters without a value stay at w₀."""
        parameters = dict(self.weights.named_parameters())
        if params is None:
            w = {name: parameters[name] for name in self._names}
        else:
            w = {**self.origin(), **params}
        fixed = {n: p.detach() for n, p in parameters.items() if n not in self._names}
        move = {name: w[name] - origin for name, origin in self.origin().items()}

        def function(p: dict[str, Tensor]) -> Tensor:
            output = functional_call(self.weights, {**fixed, **p}, args)
            return select_output(output, self._output)

        with disable_fused_attention():  # the fused one has no forward mode
            at = FunctionLinearization(function, self.origin())
            return at.value + at.jvp(at.space.flatten(move))


def linearize(
    model: nn.Module, params: Mapping[str, Tensor] | None = None, *, output: Selector = None
) -> Linearized:
    """Return the first-order model of a network at its present parameters, or at `params`.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> first = linearize(model)
    >>> x = torch.randn(4, 2)
    >>> torch.equal(first(x), model(x))
    True
    """
    return Linearized(model, params, output)
