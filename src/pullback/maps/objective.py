"""Functions of the parameter dict: any, by torch.func, and named, weighted residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, jvp, vjp, vmap

from .._core.errors import PullbackError, reraise_fatal
from .._core.space import ParameterSpace
from .base import Linearization, Map, Pulled
from .layers import RowsBlock

Function = Callable[[dict[str, Tensor]], Tensor]


class FunctionLinearization(Linearization):
    """z = f(w), (N, *event), with J by forward or reverse mode, whichever side is smaller."""

    def __init__(self, function: Function, params: Mapping[str, Tensor]) -> None:
        self.space = ParameterSpace(params)
        self._source = function
        self._point = {n: p.detach() for n, p in params.items()}
        self._flat = self.space.flatten(self._point)
        self.value = self._evaluate()
        #: entries that one evaluation of f holds at once, roughly
        self.footprint = 64 * self.value.numel()

    def _evaluate(self) -> Tensor:
        try:
            with torch.no_grad():
                return self._source(dict(self._point)).to(self.space.dtype)
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
        try:
            return jvp(self._function, (self._flat,), (v,))[1]
        except (RuntimeError, NotImplementedError) as error:
            reraise_fatal(error)  # else an operation has no forward-mode rule
        # u ↦ Jᵀu is linear, and its own pullback is v ↦ J v
        pull = vjp(self._function, self._flat)[1]
        return vjp(lambda u: pull(u)[0], torch.zeros_like(self.value))[1](v)[0]

    def vjp(self, u: Tensor) -> Tensor:
        return vjp(self._function, self._flat)[1](u)[0]

    def rows(self) -> Tensor:
        """J, (N·|event|, p)."""
        columns = self.columns(self.space.names)
        return torch.cat([columns[name] for name in self.space.names], 1)

    def columns(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the columns (n, numel) of J that belong to these parameters."""
        n = self.value.numel()
        sizes = dict(zip(self.space.names, self.space.sizes, strict=True))
        if sum(sizes[name] for name in names) <= 4 * n:
            # a pushed tangent costs a fraction of a pulled-back covector
            try:
                return {name: self._push_columns(name) for name in names}
            except (RuntimeError, NotImplementedError) as error:
                reraise_fatal(error)  # else an operation has no forward-mode rule
        free = {name: self._point[name] for name in names}
        chunk = self._chunk(sum(sizes[name] for name in names))

        def function(point: dict[str, Tensor]) -> Tensor:
            return self._source({**self._point, **point}).flatten()

        pulled = jacrev(function, chunk_size=chunk)(free)
        return {name: rows.reshape(n, -1).to(self.space.dtype) for name, rows in pulled.items()}

    def _push_columns(self, name: str) -> Tensor:
        """Return the columns of J for one parameter by forward mode; the others are constants."""
        value = self._point[name]
        n = self.value.numel()
        size = value.numel()

        def push(tangent: Tensor) -> Tensor:
            return jvp(lambda w: self._source({**self._point, name: w}), (value,), (tangent,))[1]

        tangents = torch.eye(size, dtype=value.dtype, device=value.device)
        pushed = vmap(push, chunk_size=self._chunk(n))(tangents.view(size, *value.shape))
        return pushed.reshape(size, n).T.to(self.space.dtype)

    def _chunk(self, width: int) -> int:
        """Return how many tangents to push at once, at about 32 intermediate copies of each."""
        return max(1, 2**30 // (32 * width * self._flat.element_size()))

    def pullback(self, covectors: Tensor) -> Pulled:
        columns = self.columns(self.space.names)
        block = RowsBlock({n: self.contract(covectors, rows) for n, rows in columns.items()})
        return Pulled(self.space, (self.value.shape[0], covectors.shape[0]), [block])

    def contract(self, covectors: Tensor, columns: Tensor) -> Tensor:
        """Return Σ_k u_rnk J_nk, (N, R, numel), from columns (N·|event|, numel) of J."""
        u = covectors.flatten(2).to(self.space.dtype)
        if u.shape[0] == u.shape[2] == 1:
            return (u[0] * columns)[:, None]
        return torch.einsum("rnk,nkp->nrp", u, columns.unflatten(0, u.shape[1:]))


Objective = Callable[[dict[str, Tensor]], Any]
#: values (N, ...), and a weight: a number or one per sample
Weighted = tuple[Tensor, Tensor | float]


def read_residuals(output: Any, *, shared: bool = False) -> dict[str, Weighted]:
    """Return the residuals with their weights by name.

    An objective returns a tensor, a pair (tensor, weight), or a dict of these. If it is `shared`
    with other processes, residuals may be empty here.
    """
    if not isinstance(output, Mapping):
        output = {"residual": output}
    named = {name: _read_residual(name, item) for name, item in output.items()}
    if not shared and (not named or any(r.numel() == 0 for r, _ in named.values())):
        raise PullbackError(
            "The objective has an empty residual",
            f"entries: { {n: tuple(r.shape) for n, (r, _) in named.items()} }",
            "Give every residual at least one point",
        )
    return named


def _read_residual(name: str, item: Any) -> Weighted:
    """Return one residual with its weight; raise for what is no real residual."""
    pair = item
    if not isinstance(item, tuple):
        pair = (item, 1.0)
    if len(pair) != 2 or not isinstance(pair[0], Tensor):
        raise PullbackError(
            f"The objective's entry {name!r} is not a residual",
            f"got {type(item).__name__}",
            "Return a tensor, a pair (tensor, weight), or a dict of these",
        )
    if pair[0].is_complex():
        raise PullbackError(
            f"The residual {name!r} is complex",
            "its square is no loss",
            "Return real and imaginary parts (torch.view_as_real)",
        )
    return pair


class ObjectiveMap(Map):
    """w ↦ √(weight) · residual, all entries in one vector of shape (n, 1).

    With reduction "mean" each named residual is averaged over its samples (axis 0) and summed
    over the rest, so that the loss is ½‖z‖² = ½ Σ_k weight_k mean_i |r_ki|².

    Args:
        objective: returns the residuals.
        reduction: "mean" or "sum".
        totals: samples of each residual on all processes; by default those here are all.
        rows: whether there is any residual here.
    """

    def __init__(
        self,
        objective: Objective,
        reduction: str = "mean",
        totals: Mapping[str, int] | None = None,
        rows: int = 1,
    ) -> None:
        self.objective = objective
        self.reduction = reduction
        self.totals = totals
        self.rows = rows

    def count_samples(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return how many samples each residual has on this process."""
        residuals = read_residuals(self.objective(dict(params)), shared=True)
        return {name: len(torch.atleast_1d(value)) for name, (value, _) in residuals.items()}

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        """z: (n, 1)."""
        weighted_residuals = []
        residuals = read_residuals(self.objective(dict(params)), shared=self.totals is not None)
        for name, (residual, user_weight) in residuals.items():
            value = torch.atleast_1d(residual)[:, None].flatten(1)
            weight = _read_weight(name, user_weight, value)
            if self.reduction == "mean":
                weight = weight / self._count_all_samples(name, value)
            weighted_residuals.append((value * weight.sqrt()).flatten())
        return torch.cat(weighted_residuals)[:, None]

    def _count_all_samples(self, name: str, value: Tensor) -> int:
        """Return how many samples a residual has on all processes."""
        if self.totals is None:
            return value.shape[0]
        return self.totals[name]

    def linearize(self, params: Mapping[str, Tensor]) -> FunctionLinearization:
        return FunctionLinearization(self, params)


def _read_weight(name: str, user_weight: Tensor | float, value: Tensor) -> Tensor:
    """Return the weight of a residual (N, ·) as a number or as (N, 1); raise if it does not fit."""
    weight = torch.as_tensor(user_weight, dtype=value.dtype, device=value.device)
    if weight.ndim == 0:
        return weight
    if weight.numel() not in (1, value.shape[0]):
        raise PullbackError(
            f"The weight of residual {name!r} does not fit",
            f"{weight.numel()} weights for {value.shape[0]} samples",
            "Give one number, or one weight per sample",
        )
    return weight.reshape(-1, 1)
