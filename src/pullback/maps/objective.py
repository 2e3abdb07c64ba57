"""A function of the parameter dict that returns named, weighted residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from .._core.errors import PullbackError, reraise_fatal
from .._core.space import ParameterSpace
from .base import Linearization, Map, Pulled
from .layers import RowsBlock


@dataclass(frozen=True)
class Residual:
    """One named residual: values (N, ...) and a weight, a number or one per sample."""

    value: Tensor
    weight: Tensor | float = 1.0


Objective = Callable[[dict[str, Tensor]], Any]


def residuals(output: Any) -> dict[str, Residual]:
    """The objective's return value in one form: tensor, (tensor, weight), Residual, or a dict."""
    if not isinstance(output, Mapping):
        output = {"residual": output}
    named = {}
    for name, item in output.items():
        if isinstance(item, tuple):
            item = Residual(*item)
        elif isinstance(item, Tensor):
            item = Residual(item)
        if not isinstance(item, Residual) or not isinstance(item.value, Tensor):
            raise PullbackError(
                f"The objective's entry {name!r} is not a residual",
                f"got {type(item).__name__}",
                "Return a tensor, a pair (tensor, weight), or a dict of these",
            )
        if item.value.is_complex():
            raise PullbackError(
                f"The residual {name!r} is complex",
                "its square is no loss",
                "Return real and imaginary parts (torch.view_as_real)",
            )
        named[name] = item
    if not named or any(r.value.numel() == 0 for r in named.values()):
        raise PullbackError(
            "The objective has an empty residual",
            f"entries: { {n: tuple(r.value.shape) for n, r in named.items()} }",
            "Give every residual at least one point",
        )
    return named


class ObjectiveMap(Map):
    """w ↦ √(weight) · residual, all entries in one vector of shape (n, 1).

    With reduction "mean" each named residual is averaged over its samples (axis 0) and summed
    over the rest, so that the loss is ½‖z‖² = ½ Σ_k weight_k mean_i |r_ki|².
    """

    def __init__(self, objective: Objective, reduction: str = "mean") -> None:
        self.objective, self.reduction = objective, reduction

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """z: (n, 1)."""
        pieces = []
        for name, residual in residuals(self.objective(dict(params))).items():
            value = residual.value
            value = (
                value.reshape(1, 1)
                if value.ndim == 0
                else value.flatten(1)
                if value.ndim > 1
                else value[:, None]
            )
            weight = torch.as_tensor(residual.weight, dtype=value.dtype, device=value.device)
            if weight.ndim > 0:
                if weight.numel() not in (1, value.shape[0]):
                    raise PullbackError(
                        f"The weight of residual {name!r} does not fit",
                        f"{weight.numel()} weights for {value.shape[0]} samples",
                        "Give one number, or one weight per sample",
                    )
                weight = weight.reshape(-1, 1)
            if self.reduction == "mean":
                weight = weight / value.shape[0]
            pieces.append((value * weight.sqrt()).flatten())
        return torch.cat(pieces)[:, None]

    def linearize(self, params: Mapping[str, Tensor]) -> ObjectiveLinearization:
        return ObjectiveLinearization(self, params)


class ObjectiveLinearization(Linearization):
    """Residuals and their Jacobian, by forward or reverse mode, whichever side is smaller."""

    def __init__(self, source: ObjectiveMap, params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self._source = source
        self._point = {n: p.detach() for n, p in params.items()}
        self._flat = self.space.flatten(self._point)
        try:
            with torch.no_grad():
                self.value = source(self._point).to(self.space.dtype)
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise PullbackError(
                "The objective calls torch.autograd",
                "it is itself differentiated by torch.func, which cannot see through that",
                "Take its derivatives with torch.func (grad, vjp, jvp, jacrev)",
            ) from error

    def _function(self, flat: Tensor) -> Tensor:
        point = {n: v.to(self._point[n].dtype) for n, v in self.space.split(flat).items()}
        return self._source(point).to(self.space.dtype)

    def jvp(self, v: Tensor) -> Tensor:
        return jvp(self._function, (self._flat,), (v,))[1]

    def vjp(self, u: Tensor) -> Tensor:
        return vjp(self._function, self._flat)[1](u)[0]

    def rows(self) -> Tensor:
        """J, (n, p)."""
        n, p = self.value.numel(), self.space.size
        if p <= 4 * n:  # a pushed tangent costs a fraction of a pulled-back covector
            try:
                return torch.cat([self._columns(name) for name in self.space.names], 1)
            except (RuntimeError, NotImplementedError) as error:
                reraise_fatal(error)  # else an operation has no forward-mode rule
        chunk = self._chunk(p)
        return jacrev(self._function, chunk_size=chunk)(self._flat).reshape(n, p)

    def _columns(self, name: str) -> Tensor:
        """The columns of J for one parameter: the others stay constants in the push."""
        value, n = self._point[name], self.value.numel()
        size = value.numel()

        def push(tangent: Tensor) -> Tensor:
            return jvp(lambda w: self._source({**self._point, name: w}), (value,), (tangent,))[1]

        tangents = torch.eye(size, dtype=value.dtype, device=value.device)
        pushed = vmap(push, chunk_size=self._chunk(n))(tangents.view(size, *value.shape))
        return pushed.reshape(size, n).T.to(self.space.dtype)

    def _chunk(self, width: int) -> int:
        """How many tangents to push at once, at about 32 intermediate copies of each."""
        return max(1, 2**30 // (32 * width * self._flat.element_size()))

    def pullback(self, covectors: Tensor) -> Pulled:
        rows = torch.einsum("rnk,np->nrp", covectors.to(self.space.dtype), self.rows())
        index = self.space.index()
        block = RowsBlock({name: rows[..., s] for name, s in index.items()})
        return Pulled(self.space, (rows.shape[0], rows.shape[1]), [block])
