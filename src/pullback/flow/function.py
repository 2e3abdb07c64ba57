"""A plain map φ with a loss on its values, as a field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from ..metrics import Custom, Euclidean, Metric
from .field import ClosureField

Start = Tensor | Mapping[str, Tensor]


class Wrapped(nn.Module):
    """φ as a module: the coordinates are its parameters, the values its output.

    Entries of z that a matrix may couple are one sample, (1, n).
    """

    def __init__(self, phi: Callable[..., Tensor], start: Start, whole: bool) -> None:
        super().__init__()
        named = {"xi": start} if isinstance(start, Tensor) else dict(start)
        for name, value in named.items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
                raise PullbackError(
                    f"The start {name!r} is not usable",
                    f"got {value!r}",
                    "Pass real, non-empty floating-point tensors",
                )
        self.names = tuple(named)
        self.single, self.whole, self.phi = isinstance(start, Tensor), whole, phi
        self.shape: torch.Size | None = None
        self.coordinates = nn.ParameterList([v.detach().clone() for v in named.values()])

    def forward(self) -> Tensor:
        """z as the metric sees it."""
        named = dict(zip(self.names, self.coordinates, strict=True))
        z = self.phi(named["xi"] if self.single else named)
        if not isinstance(z, Tensor) or not z.is_floating_point() or not z.numel():
            raise PullbackError(
                "φ does not give a point of Z",
                f"got {type(z).__name__}",
                "Return one real, non-empty floating-point tensor",
            )
        if z.dtype != torch.float64:
            raise PullbackError(
                "A flow needs float64",
                f"φ gives {z.dtype}, whose round-off is far above what the integrator's error "
                "control works with",
                "Keep the dtype of the coordinates in φ",
            )
        self.shape = z.shape
        return z.reshape(1, -1) if self.whole else z.reshape(-1, 1) if z.ndim < 2 else z

    def restore(self, z: Tensor) -> Tensor:
        """Back to φ's own shape."""
        return z if self.shape is None else z.reshape(self.shape)


class FunctionField(ClosureField):
    """θ' = −G⁺∇(L∘φ) for φ: Ξ → (Z, g) and L on Z."""

    def __init__(
        self,
        phi: Callable[..., Tensor],
        loss: Callable[[Tensor], Tensor],
        start: Start,
        kind: str,
        *,
        metric: Any = None,
        **options: Any,
    ) -> None:
        whole = not isinstance(metric, Metric)
        self._wrapped = Wrapped(phi, start, whole)
        if kind == "natural":
            options["metric"] = self._metric(metric)
        super().__init__(self._wrapped, lambda: self._total(loss), kind, **options)
        self.model = None  # φ has no other inputs

    def _total(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        return loss(self._wrapped.restore(self._wrapped()))

    def _metric(self, metric: Any) -> Metric:
        if metric is None:
            return Euclidean()
        if isinstance(metric, Metric):
            return metric
        if isinstance(metric, Tensor):
            return Custom(lambda z: metric.to(z)[None])
        if callable(metric):
            matrix: Callable[[Tensor], Any] = metric
            return Custom(lambda z: matrix(self._wrapped.restore(z))[None])
        raise PullbackError(
            "The metric is not usable",
            f"got {metric!r}",
            "Pass a matrix over the entries of z, a function z -> matrix, or a metric object",
        )

    def values(self, flat: Tensor) -> Tensor:
        """φ(ξ), in its own shape."""
        with self.host.at(flat), torch.no_grad():
            return self._wrapped.restore(self._wrapped()).clone()  # φ may return ξ itself

    def like(self, flat: Tensor) -> Any:
        pieces = list(self.space.split(flat).values())
        return (
            pieces[0]
            if self._wrapped.single
            else dict(zip(self._wrapped.names, pieces, strict=True))
        )
