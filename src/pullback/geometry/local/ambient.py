"""The function space around a point: sample points, values, metrics and coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import unwrap_model
from ..._core.checks import require_finite_tensor
from ..._core.errors import PullbackError, refuse_unknown, require, reraise_fatal
from ..._core.factor import Factor, Scaled
from ..._core.space import ParameterSpace
from ...maps import Call, FunctionLinearization, Linearization, ModuleMap
from ...metrics import Euclidean, Metric, MetricFunction, as_metric

Phi = nn.Module | Callable[..., Tensor]
Vector = Tensor | Mapping[str, Tensor]

MetricLike = Metric | Tensor | Callable[[Tensor], Tensor] | None

#: the name of ξ among the parameters if it is a single tensor
_XI = "xi"


def require_scalar_loss(loss: Any) -> None:
    """Raise unless a loss is a tensor of one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    description = type(loss).__name__
    if isinstance(loss, Tensor):
        description = str(tuple(loss.shape))
    raise PullbackError(
        "The loss is not a tensor of one number",
        f"got {description}",
        "Return a sum or a mean, without .item()",
    )


class Parametrization:
    """φ: Ξ → (Z, g) at ξ: evaluates, linearizes, and gives S with S Sᵀ = g at z.

    Inside, parameters are named tensors, vectors at ξ are flat (p,), and values have samples first,
    (N, *event), as every metric of the library expects them. A matrix g (n, n) measures all entries
    of z together: there z is one sample, (1, n). Outside, vectors have the form of ξ, and values
    the shape that φ gave them.

    Args:
        phi: the map; a module brings its own names.
        xi: a tensor, a dict of tensors, or None for a module's parameters that require gradients.
        metric, inputs, reduction: as in `Point`.
    """

    def __init__(
        self, phi: Phi, xi: Vector | None, metric: MetricLike, inputs: Any, reduction: str | None
    ) -> None:
        require(callable(phi), "The map φ", phi, "Pass a function or an nn.Module")
        refuse_unknown("reduction", reduction, (None, "mean", "sum"))
        parameters = _collect_parameters(phi, xi)
        for name, parameter in parameters.items():
            require_finite_tensor(f"The coordinate {name!r}", parameter)
        self.point = {name: parameter.detach() for name, parameter in parameters.items()}
        self.space = ParameterSpace(self.point)
        self._phi = phi
        self._is_single_tensor = isinstance(xi, Tensor)
        self._module = phi if isinstance(phi, nn.Module) else None
        if reduction is None:
            reduction = "sum" if self._module is None else "mean"
        self._reduction = reduction
        self._inputs = _as_arguments(inputs)
        #: whether z is one point whose entries g may couple, and not a batch of samples
        self._is_one_sample = _couples_entries(metric, self._module)
        self._metric = self._make_metric(metric)
        with torch.no_grad():
            z = self.evaluate(self.point)
        self.shape = z.shape
        require_finite_tensor("φ(ξ)", z)

    def _make_metric(self, metric: MetricLike) -> Metric:
        if metric is None:
            return Euclidean()
        if self._is_one_sample or isinstance(metric, Tensor):
            return MetricFunction(_as_matrix_function(metric, self.restore))
        return as_metric(metric)

    def as_argument(self, point: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Return named tensors in the form of ξ, in which φ takes them: a tensor or a dict."""
        if self._is_single_tensor:
            return point[_XI]
        return dict(point)

    def flatten(self, v: Vector, what: str = "The vector") -> Tensor:
        """Return a vector at ξ as (p,): shaped like ξ, flat already, or a dict by name.

        Errors call it `what`.
        """
        pieces = v if isinstance(v, Mapping) else {_XI: v}
        for piece in pieces.values():
            require_finite_tensor(what, piece)
        shapes: object = {name: tuple(piece.shape) for name, piece in pieces.items()}
        if isinstance(v, Tensor):
            shapes = tuple(v.shape)
        expected: object = dict(zip(self.space.names, self.space.shapes, strict=True))
        if self._is_single_tensor:
            expected = self.space.shapes[0]
        if shapes not in (expected, (self.space.size,)):
            raise PullbackError(
                f"{what} does not fit ξ",
                f"got {shapes}, ξ has {expected}",
                "Shape it like ξ, or flatten both",
            )
        if isinstance(v, Mapping):
            moved = {name: piece.detach().to(self.space.device) for name, piece in v.items()}
            return self.space.flatten(moved)
        return v.detach().reshape(-1).to(self.space.device, self.space.dtype)

    def unflatten(self, flat: Tensor) -> Tensor | dict[str, Tensor]:
        """Return a flat vector (p,) in the form of ξ."""
        return self.as_argument(self.space.split(flat))

    def evaluate(self, point: Mapping[str, Tensor]) -> Tensor:
        """Return φ at named tensors, in φ's own shape."""
        if self._module is None:
            z = self._phi(self.as_argument(point))
        else:
            z = self._make_module_map().call_with(point, *self._inputs)
        if isinstance(z, Tensor) and z.is_floating_point() and z.numel() > 0:
            return z
        description = type(z).__name__
        if isinstance(z, Tensor):
            description = f"{z.dtype} {tuple(z.shape)}"
        raise PullbackError(
            "φ does not give a point of Z",
            f"got {description}",
            "Return one real, non-empty floating-point tensor",
        )

    def linearize(self) -> Linearization:
        """Return φ at ξ with products by J = dφ_ξ."""
        if self._module is not None and not self._is_one_sample:
            return self._make_module_map().linearize(self.point)
        return FunctionLinearization(lambda point: self.arrange(self.evaluate(point)), self.point)

    def factor(self, z: Tensor) -> Factor:
        """Return S with S Sᵀ = g at values with samples first; a mean over these is part of g."""
        inputs = next((x for x in self._inputs if isinstance(x, Tensor)), None)
        try:
            factor = self._metric.factor(z, inputs=inputs)
        except (RuntimeError, TypeError, IndexError) as error:
            reraise_fatal(error)
            raise PullbackError(
                "The metric could not be evaluated", f"it raised {error!r}", "Check it at φ(ξ)"
            ) from error
        if self._is_one_sample or self._reduction == "sum":
            return factor
        return Scaled(factor, 1.0 / self._metric.samples(z), tuple(z.shape[1:]))

    def arrange(self, z: Tensor) -> Tensor:
        """Return values with samples first, (N, *event), from φ's own shape."""
        if self._is_one_sample:
            return z.reshape(1, -1)
        if z.ndim < 2:
            return z.reshape(-1, 1)
        return z

    def restore(self, z: Tensor) -> Tensor:
        """Return values in φ's own shape, from samples first."""
        return z.reshape(self.shape)

    def arrange_vector(self, v: Tensor, value: Tensor, what: str) -> Tensor:
        """Return a tangent vector or covector at z with samples first, shaped like `value`.

        It may have φ's own shape or be flat. Errors call it `what`.
        """
        require_finite_tensor(what, v)
        if tuple(v.shape) not in ((value.numel(),), tuple(self.shape), tuple(value.shape)):
            raise PullbackError(
                f"{what} does not fit φ(ξ)",
                f"got {tuple(v.shape)}, φ(ξ) has {tuple(self.shape)}",
                "Shape it like φ(ξ)",
            )
        return v.detach().to(value).reshape(value.shape)

    def _make_module_map(self) -> ModuleMap:
        if self._module is None or not self._inputs:
            raise PullbackError(
                "The module has nothing to be evaluated at",
                "no inputs were given, and a module's point of Z is its outputs on them",
                "Pass inputs=x",
            )
        return ModuleMap(self._module, Call.of(*self._inputs))


def _as_arguments(inputs: Any) -> tuple[Any, ...]:
    """Return a module's positional arguments: a tuple stays, None is no argument."""
    if inputs is None:
        return ()
    if isinstance(inputs, tuple):
        return inputs
    return (inputs,)


def _couples_entries(metric: MetricLike, module: nn.Module | None) -> bool:
    """Return True if the metric measures all entries of z together, and not sample by sample.

    A matrix does. So does a function of z, or no metric at all, if φ is a function: nothing says
    which axis of its value would be the samples.
    """
    if isinstance(metric, Tensor):
        return True
    if isinstance(metric, Metric) or module is not None:
        return False
    return metric is None or callable(metric)


def _collect_parameters(phi: Phi, xi: Vector | None) -> dict[str, Tensor]:
    """Return ξ as named tensors."""
    if isinstance(phi, nn.Module):
        return _collect_module_parameters(phi, xi)
    if isinstance(xi, Mapping):
        return dict(xi)
    require(isinstance(xi, Tensor), "ξ", xi, "Pass a tensor or a dict of tensors")
    return {_XI: xi}  # pyright: ignore[reportReturnType]


def _collect_module_parameters(module: nn.Module, xi: Vector | None) -> dict[str, Tensor]:
    """Return ξ of a module by name: the trainable parameters, or those of a dict."""
    parameters = dict(unwrap_model(module).named_parameters())
    if xi is None:
        return {name: p for name, p in parameters.items() if p.requires_grad}
    if not isinstance(xi, Mapping):
        raise PullbackError(
            "ξ of a module is not given by name",
            f"got {type(xi).__name__}",
            "Pass None for the module's own parameters, or a dict of tensors by name",
        )
    for name, value in xi.items():
        if name not in parameters or parameters[name].shape != value.shape:
            shapes = {n: tuple(p.shape) for n, p in parameters.items()}
            raise PullbackError(
                f"The module has no parameter {name!r} of shape {tuple(value.shape)}",
                f"its parameters are {shapes}",
                "Use names and shapes of model.named_parameters()",
            )
    return dict(xi)


def _as_matrix_function(
    metric: Any, restore: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """Return z (1, n) ↦ g (1, n, n) of a matrix, or of a function of z in φ's own shape.

    The function raises unless g is square and symmetric.
    """

    def evaluate_matrix(z: Tensor) -> Tensor:
        g = metric
        if not isinstance(metric, Tensor):
            g = metric(restore(z))
        n = z.shape[1]
        require_finite_tensor("The metric", g, (n, n))
        g = g.detach().to(z)
        asymmetry = (g - g.T).abs().max()
        if bool(asymmetry > torch.finfo(z.dtype).eps ** 0.5 * g.abs().max()):
            raise PullbackError(
                "The metric is not symmetric",
                f"g and gᵀ differ by {float(asymmetry):.3g}",
                "Pass (g + gᵀ)/2, if that is what is meant",
            )
        return g[None]

    return evaluate_matrix
