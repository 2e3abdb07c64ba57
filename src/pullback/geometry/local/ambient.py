"""The function space around a point: sample points, values, metrics and coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.capture import plain
from ..._core.checks import refuse_values
from ..._core.errors import PullbackError, refuse_unknown
from ..._core.factor import Factor, Scaled
from ..._core.space import ParameterSpace
from ...maps import Call, FunctionLinearization, Linearization, ModuleMap
from ...metrics import Euclidean, Metric, MetricFunction, as_metric

Phi = nn.Module | Callable[..., Tensor]
Vector = Tensor | Mapping[str, Tensor]

_NAME = "xi"  # what a single tensor is called inside


class NamedCoordinates:
    """ξ as named tensors; vectors at ξ are flat (p,) inside and like ξ outside.

    Args:
        phi: the map; a module brings its own names.
        xi: a tensor, a dict of tensors, or None for a module's parameters that require gradients.
    """

    def __init__(self, phi: Phi, xi: Vector | None) -> None:
        if not callable(phi):
            raise PullbackError(
                "φ is not a map", f"got {type(phi).__name__}", "Pass a function or an nn.Module"
            )
        self.single = isinstance(xi, Tensor) and not isinstance(phi, nn.Module)
        named = _named(phi, xi)
        for name, value in named.items():
            refuse_values(f"The coordinate {name!r}", value)
        self.point = {n: v.detach() for n, v in named.items()}
        self.space = ParameterSpace(self.point)

    def argument(self, point: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """What φ is called with."""
        return point[_NAME] if self.single else dict(point)

    def flat(self, v: Vector, what: str = "The vector") -> Tensor:
        """The (p,) vector of a tensor shaped like ξ, a flat tensor, or a dict by name."""
        named = dict(v) if isinstance(v, Mapping) else {_NAME: v}
        for value in named.values():
            refuse_values(what, value)
        shapes = {n: tuple(x.shape) for n, x in named.items()}
        given = shapes if isinstance(v, Mapping) else shapes[_NAME]
        if given not in (self.shape, (self.space.size,)):
            raise PullbackError(
                f"{what} does not fit ξ",
                f"got {given}, ξ has {self.shape}",
                "Shape it like ξ, or flatten both",
            )
        if isinstance(v, Mapping):
            return self.space.flatten({n: x.detach().to(self.space.device) for n, x in v.items()})
        return v.detach().reshape(-1).to(self.space.device, self.space.dtype)

    def like(self, flat: Tensor) -> Tensor | dict[str, Tensor]:
        """The flat (p,) vector in the form in which ξ was given."""
        return self.argument(self.space.split(flat))

    def moved(self, flat: Tensor) -> dict[str, Tensor]:
        """ξ + v by name, for a flat v."""
        pieces = self.space.split(flat)
        return {n: w + pieces[n].to(w.dtype) for n, w in self.point.items()}

    @property
    def shape(self) -> object:
        """The shape of ξ, or the shapes by name."""
        named = dict(zip(self.space.names, self.space.shapes, strict=True))
        return named[_NAME] if self.single else named


def _named(phi: Phi, xi: Vector | None) -> dict[str, Tensor]:
    if isinstance(phi, nn.Module):
        own = dict(plain(phi).named_parameters())
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
    if isinstance(xi, Tensor):
        return {_NAME: xi}
    raise PullbackError(
        "ξ is not given", f"got {type(xi).__name__}", "Pass a tensor or a dict of tensors"
    )


MetricLike = Metric | Tensor | Callable[[Tensor], Tensor] | None


class Ambient:
    """φ with its (Z, g): evaluates, linearizes, and gives S with S Sᵀ = g at z.

    Inside, values are samples first, (N, *event), as every metric of the library wants them. A
    matrix g, (n, n), measures all entries of z together: there z is one sample, (1, n).
    """

    def __init__(
        self,
        phi: Phi,
        metric: MetricLike,
        inputs: Any,
        reduction: str | None,
    ) -> None:
        refuse_unknown("reduction", reduction, (None, "mean", "sum"))
        self.module = phi if isinstance(phi, nn.Module) else None
        self.reduction = reduction or ("sum" if self.module is None else "mean")
        self._phi = phi
        self.inputs = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
        given = metric
        if metric is None and self.module is not None:
            given = Euclidean()
        matrix = isinstance(given, Tensor) or (callable(given) and self.module is None)
        #: whether z is one point whose entries g may couple, and not a batch of samples
        self.whole = given is None or (matrix and not isinstance(given, Metric))
        if given is None:
            self.metric: Metric = Euclidean()
        elif self.whole:
            self.metric = MetricFunction(_matrices(given, self.restore))
        else:
            self.metric = as_metric(given)  # pyright: ignore[reportArgumentType]
        self._shape: torch.Size | None = None

    def value(self, coordinates: NamedCoordinates, point: Mapping[str, Tensor]) -> Tensor:
        """φ(ξ), in its own shape."""
        if self.module is None:
            z = self._phi(coordinates.argument(point))
        else:
            z = self._map().call_with(point, *self.inputs)
        if not isinstance(z, Tensor) or not z.is_floating_point() or z.numel() == 0:
            got = f"{z.dtype} {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
            raise PullbackError(
                "φ does not give a point of Z",
                f"got {got}",
                "Return one real, non-empty floating-point tensor",
            )
        return z

    def linearize(self, coordinates: NamedCoordinates) -> Linearization:
        """φ at ξ with products by J = dφ_ξ."""
        with torch.no_grad():
            z = self.value(coordinates, coordinates.point)
        self._shape = z.shape
        refuse_values("φ(ξ)", z)
        if self.module is not None and not self.whole:
            return self._map().linearize(coordinates.point)

        def arranged(point: dict[str, Tensor]) -> Tensor:
            return self.arrange(self.value(coordinates, point))

        return FunctionLinearization(arranged, coordinates.point)

    def factor(self, z: Tensor) -> Factor:
        """S with S Sᵀ = g, at values as arranged inside."""
        inputs = next((x for x in self.inputs if isinstance(x, Tensor)), None)
        try:
            factor = self.metric.factor(z, inputs=inputs)
        except (RuntimeError, TypeError, IndexError) as error:
            if isinstance(error, PullbackError):
                raise
            raise PullbackError(
                "The metric could not be evaluated", f"it raised {error!r}", "Check it at φ(ξ)"
            ) from error
        if self.whole or self.reduction == "sum":
            return factor
        return Scaled(factor, 1.0 / self.metric.samples(z), tuple(z.shape[1:]))

    def arrange(self, z: Tensor) -> Tensor:
        """Values, or a vector at them, from φ's own shape to the one inside."""
        if self.whole:
            return z.reshape(1, -1)
        return z.reshape(-1, 1) if z.ndim < 2 else z

    def restore(self, z: Tensor) -> Tensor:
        """Back to φ's own shape."""
        return z if self._shape is None else z.reshape(self._shape)

    def vector(self, v: Tensor, value: Tensor, what: str) -> Tensor:
        """A tangent vector or covector at z, in φ's own shape or flat, as arranged inside."""
        refuse_values(what, v)
        shapes = ((value.numel(),), tuple(self._shape or ()), tuple(value.shape))
        if tuple(v.shape) not in shapes:
            raise PullbackError(
                f"{what} does not fit φ(ξ)",
                f"got {tuple(v.shape)}, φ(ξ) has {tuple(self._shape or ())}",
                "Shape it like φ(ξ)",
            )
        return v.detach().to(value).reshape(value.shape)

    def _map(self) -> ModuleMap:
        if self.module is None or not self.inputs:
            raise PullbackError(
                "The module has nothing to be evaluated at",
                "no inputs were given, and a module's point of Z is its outputs on them",
                "Pass inputs=x",
            )
        return ModuleMap(self.module, Call.of(*self.inputs))


def _matrices(given: Any, restore: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """z (1, n) ↦ g (1, n, n), checked: square and symmetric."""

    def matrices(z: Tensor) -> Tensor:
        g = given if isinstance(given, Tensor) else given(restore(z))
        n = z.shape[1]
        refuse_values("The metric", g, (n, n))
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
