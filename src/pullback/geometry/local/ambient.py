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

_NAME = "xi"  # what a single tensor is called inside


def require_scalar_loss(loss: Any) -> None:
    """Raise unless a loss is a tensor of one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise PullbackError(
            "The loss is not a tensor of one number",
            f"got {got}",
            "Return a sum or a mean, without .item()",
        )


class Parametrization:
    """φ: Ξ → (Z, g) at ξ: evaluates, linearizes, and gives S with S Sᵀ = g at z.

    ξ is held as named tensors; vectors at ξ are flat (p,) inside and like ξ outside. Values are
    samples first inside, (N, *event), as every metric of the library wants them. A matrix g,
    (n, n), measures all entries of z together: there z is one sample, (1, n).

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
        named = _collect_parameters(phi, xi)
        for name, value in named.items():
            require_finite_tensor(f"The coordinate {name!r}", value)
        self.point = {n: v.detach() for n, v in named.items()}
        self.space = ParameterSpace(self.point)
        self._phi, self._single = phi, isinstance(xi, Tensor)
        self._module = phi if isinstance(phi, nn.Module) else None
        self._reduction = reduction or ("sum" if self._module is None else "mean")
        self._inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
        #: whether z is one point whose entries g may couple, and not a batch of samples
        self._whole = False
        if metric is None:
            self._metric, self._whole = Euclidean(), self._module is None
        elif isinstance(metric, Metric):
            self._metric = metric
        elif isinstance(metric, Tensor) or (callable(metric) and self._module is None):
            self._metric, self._whole = MetricFunction(_matrices(metric, self.restore)), True
        else:
            self._metric = as_metric(metric)
        with torch.no_grad():
            z = self.value(self.point)
        self.shape = z.shape
        require_finite_tensor("φ(ξ)", z)

    def argument(self, point: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """What φ is called with."""
        return point[_NAME] if self._single else dict(point)

    def flat(self, v: Vector, what: str = "The vector") -> Tensor:
        """The (p,) vector of a tensor shaped like ξ, a flat tensor, or a dict by name."""
        named = dict(v) if isinstance(v, Mapping) else {_NAME: v}
        for value in named.values():
            require_finite_tensor(what, value)
        shapes = {n: tuple(x.shape) for n, x in named.items()}
        given = shapes if isinstance(v, Mapping) else shapes[_NAME]
        own = dict(zip(self.space.names, self.space.shapes, strict=True))
        want = own[_NAME] if self._single else own
        if given not in (want, (self.space.size,)):
            raise PullbackError(
                f"{what} does not fit ξ",
                f"got {given}, ξ has {want}",
                "Shape it like ξ, or flatten both",
            )
        if isinstance(v, Mapping):
            return self.space.flatten({n: x.detach().to(self.space.device) for n, x in v.items()})
        return v.detach().reshape(-1).to(self.space.device, self.space.dtype)

    def like(self, flat: Tensor) -> Tensor | dict[str, Tensor]:
        """The flat (p,) vector in the form in which ξ was given."""
        return self.argument(self.space.split(flat))

    def value(self, point: Mapping[str, Tensor]) -> Tensor:
        """φ at a point, in its own shape."""
        if self._module is None:
            z = self._phi(self.argument(point))
        else:
            z = self._map().call_with(point, *self._inputs)
        if not isinstance(z, Tensor) or not z.is_floating_point() or z.numel() == 0:
            got = f"{z.dtype} {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise PullbackError(
                "φ does not give a point of Z",
                f"got {got}",
                "Return one real, non-empty floating-point tensor",
            )
        return z

    def linearize(self) -> Linearization:
        """φ at ξ with products by J = dφ_ξ."""
        if self._module is not None and not self._whole:
            return self._map().linearize(self.point)
        return FunctionLinearization(lambda point: self.arrange(self.value(point)), self.point)

    def factor(self, z: Tensor) -> Factor:
        """S with S Sᵀ = g, at values as arranged inside."""
        inputs = next((x for x in self._inputs if isinstance(x, Tensor)), None)
        try:
            factor = self._metric.factor(z, inputs=inputs)
        except (RuntimeError, TypeError, IndexError) as error:
            reraise_fatal(error)
            raise PullbackError(
                "The metric could not be evaluated", f"it raised {error!r}", "Check it at φ(ξ)"
            ) from error
        if self._whole or self._reduction == "sum":
            return factor
        return Scaled(factor, 1.0 / self._metric.samples(z), tuple(z.shape[1:]))

    def arrange(self, z: Tensor) -> Tensor:
        """Values, or a vector at them, from φ's own shape to the one inside."""
        if self._whole:
            return z.reshape(1, -1)
        return z.reshape(-1, 1) if z.ndim < 2 else z

    def restore(self, z: Tensor) -> Tensor:
        """Back to φ's own shape."""
        return z.reshape(self.shape)

    def vector(self, v: Tensor, value: Tensor, what: str) -> Tensor:
        """A tangent vector or covector at z, in φ's own shape or flat, as arranged inside."""
        require_finite_tensor(what, v)
        if tuple(v.shape) not in ((value.numel(),), tuple(self.shape), tuple(value.shape)):
            raise PullbackError(
                f"{what} does not fit φ(ξ)",
                f"got {tuple(v.shape)}, φ(ξ) has {tuple(self.shape)}",
                "Shape it like φ(ξ)",
            )
        return v.detach().to(value).reshape(value.shape)

    def _map(self) -> ModuleMap:
        if self._module is None or not self._inputs:
            raise PullbackError(
                "The module has nothing to be evaluated at",
                "no inputs were given, and a module's point of Z is its outputs on them",
                "Pass inputs=x",
            )
        return ModuleMap(self._module, Call.of(*self._inputs))


def _collect_parameters(phi: Phi, xi: Vector | None) -> dict[str, Tensor]:
    if isinstance(phi, nn.Module):
        own = dict(unwrap_model(phi).named_parameters())
        if xi is None:
            return {n: p for n, p in own.items() if p.requires_grad}
        if not isinstance(xi, Mapping):
            raise PullbackError(
                "ξ of a module is not given by name",
                f"got {type(xi).__name__}",
                "Pass None for the module's own parameters, or a dict of tensors by name",
            )
        for name, value in xi.items():
            if name not in own or own[name].shape != value.shape:
                raise PullbackError(
                    f"The module has no parameter {name!r} of shape {tuple(value.shape)}",
                    f"its parameters are { {n: tuple(p.shape) for n, p in own.items()} }",
                    "Use names and shapes of model.named_parameters()",
                )
        return dict(xi)
    if isinstance(xi, Mapping):
        return dict(xi)
    require(isinstance(xi, Tensor), "ξ", xi, "Pass a tensor or a dict of tensors")
    return {_NAME: xi}  # pyright: ignore[reportReturnType]


def _matrices(given: Any, restore: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """z (1, n) ↦ g (1, n, n), checked: square and symmetric."""

    def matrices(z: Tensor) -> Tensor:
        g = given if isinstance(given, Tensor) else given(restore(z))
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

    return matrices
