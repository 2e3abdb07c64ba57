"""The space (Z, g) a map goes to: how its values are arranged, and the factor of g at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..._core.factor import Factor, Scaled
from ...maps import Call, FunctionLinearization, Linearization, ModuleMap
from ...metrics import Custom, Euclidean, Metric, as_metric
from .coordinates import Coordinates, Phi

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
        if reduction not in (None, "mean", "sum"):
            raise PullbackError(
                f"Unknown reduction {reduction!r}", "g is a sum or a mean", 'Use "mean" or "sum"'
            )
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
            self.metric = Custom(_matrices(given, self.restore))
        else:
            self.metric = as_metric(given)  # pyright: ignore[reportArgumentType]
        self._shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None  # in which φ gives its values

    def value(self, coordinates: Coordinates, point: Mapping[str, Tensor]) -> Tensor:
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

    def linearize(self, coordinates: Coordinates) -> Linearization:
        """φ at ξ with products by J = dφ_ξ."""
        with torch.no_grad():
            z = self.value(coordinates, coordinates.point)
        self._shape, self.dtype = z.shape, z.dtype
        if not bool(torch.isfinite(z).all()):
            raise PullbackError(
                "φ is not finite at ξ", "some of its values are NaN or infinite", "Move ξ"
            )
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
        shapes = ((value.numel(),), tuple(self._shape or ()), tuple(value.shape))
        if not isinstance(v, Tensor) or tuple(v.shape) not in shapes:
            raise PullbackError(
                f"{what} does not fit φ(ξ)",
                f"got {tuple(getattr(v, 'shape', ()))}, φ(ξ) has {tuple(self._shape or ())}",
                "Shape it like φ(ξ)",
            )
        if not bool(torch.isfinite(v).all()):
            raise PullbackError(
                f"{what} is not finite", "it has NaN or infinite entries", "Check it"
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
        if not isinstance(g, Tensor) or tuple(g.shape) != (n, n):
            raise PullbackError(
                "The metric does not fit φ(ξ)",
                f"got {tuple(getattr(g, 'shape', ()))} for a point with {n} entries",
                f"Give one symmetric matrix of shape {(n, n)}",
            )
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
