"""A condition's residual at points, as a function of the derivatives of the fields there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ...maps import Scheme
from ...maps.jets import Index, Jet, Unsupported
from ...maps.jets import nested as nested_derivatives
from ..problem import conditions
from ..problem.conditions import Condition
from ..problem.fields import Field, View
from ..problem.problem import Problem
from .sites import Sites
from .trial import Trial

#: (site, field, derivative), where None stands for the Laplacian
Key = tuple[int, str, Index | None]


Fields = Mapping[Key, Tensor]


#: gives the values (N,) of a field's derivative at a site
Values = Callable[[int, str, Index | None], Tensor]


class LocalResidual:
    """A residual F at points as a function of the fields' derivatives c there.

    Unknown coefficients have their initial values unless others are given.

    Attributes:
        scheme: the derivatives that it needs, which a dry run finds.
        keys: those that it asks for, by site and field.
    """

    def __init__(
        self,
        problem: Problem,
        condition: Condition,
        sites: Sites,
        unknowns: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._problem, self._condition, self._sites = problem, condition, sites
        x = sites[0].x
        self._unknowns = unknowns or {n: x.new_tensor(v) for n, v in problem.unknowns.items()}
        self._columns = problem.columns(x)
        self._known: dict[int, Tensor] = {}  # values that do not depend on the network
        self.asked: set[Index | None] = set()
        self.dry_run()
        self.scheme = problem.coordinates.scheme(self.asked)
        wanted = sorted(self.asked, key=lambda i: (i is None, len(i or ()), i))  # Laplacian last
        places = range(len(sites))
        self.keys: list[Key] = [(s, f, i) for s in places for f in problem.fields for i in wanted]

    def evaluate(self, values: Values, unknowns: Mapping[str, Tensor] | None = None) -> Tensor:
        """F, (N, R), of derivatives that are asked for one by one."""
        fields = [
            {
                name: Field(partial(values, s, name), self._problem.coordinates, points.normals)
                for name in self._problem.fields
            }
            for s, points in enumerate(self._sites)
        ]
        unknowns = self._unknowns if unknowns is None else unknowns
        view = View(fields, self._sites[0], self._columns, unknowns, self._known)
        return _columns(self._condition, _residual(self._condition, view), len(self._sites[0]))

    def dry_run(
        self, shift: Tensor | float = 0.0, unknowns: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """F of made-up values; which derivatives it asks for is noted in `asked`."""
        x = self._sites[0].x
        made_up = torch.linspace(0.3, 0.7, len(x), dtype=x.dtype, device=x.device) + shift

        def values(site: int, field: str, index: Index | None) -> Tensor:
            self.asked.add(index)
            each = 7 if index is None else len(index) + 3 * sum(index)  # every derivative its own
            return made_up + 0.01 * each

        found = self.evaluate(values, unknowns)
        if not self.asked:
            raise PullbackError(
                f"The condition {self._condition.name!r} does not depend on the network",
                "its residual uses no field",
                f"Use {', '.join(self._problem.fields)} or a derivative of it in the residual",
            )
        return found

    def picker(self, channels: Any) -> Values:
        """The derivatives out of the channels (T, S, N, m) that a network's jets carry."""
        scheme, space = self.scheme, self._problem.coordinates.space
        at = self._problem.fields.index

        def pick(site: int, field: str, index: Index | None) -> Tensor:
            if index is None and scheme.laplacian:
                return channels[-1, site, :, at(field)]
            order = space * 2 if index is None else index
            return channels[scheme.position[order], site, :, at(field)]

        return pick

    def fields(self, trial: Trial) -> Fields:
        """The derivatives of a network, (N,) each."""
        found = derivatives(trial, torch.stack([p.x for p in self._sites]), self.scheme)
        pick = self.picker(found)
        return {key: pick(*key) for key in self.keys}

    def __call__(self, c: Fields) -> Tensor:
        """F, (N, R)."""
        return self.evaluate(lambda *key: c[key])

    def slopes(self, c: Fields) -> tuple[Tensor, dict[Key, Tensor]]:
        """F and ∂F/∂c, (N, R) by key."""
        leaves = {k: v.detach().clone().requires_grad_() for k, v in c.items()}
        with torch.enable_grad():
            values = self(leaves)
        columns = [_gradients(column, list(leaves.values())) for column in values.unbind(1)]
        found = {k: torch.stack([x[i] for x in columns], 1) for i, k in enumerate(leaves)}
        return values.detach(), found

    def affine(self, c: Fields) -> bool:
        """Whether the slopes at c are those at other values."""
        other = {k: 1.7 * v + 0.3 * v.abs().mean() + 0.1 for k, v in c.items()}
        here, there = self.slopes(c)[1], self.slopes(other)[1]
        return all(torch.allclose(here[k], there[k]) for k in c)


def _gradients(column: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not column.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(column.sum(), leaves, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)
    ]


@torch.no_grad()
def derivatives(network: nn.Module, x: Tensor, scheme: Scheme) -> Tensor:
    """The network's derivatives at places x (S, N, d), as channels (T, S, N, m)."""
    points = x.flatten(0, 1)
    try:
        found = network(Jet.input(points, scheme)).full().stacked()
    except (Unsupported, TypeError, AttributeError, AssertionError, ValueError, IndexError):
        found = nested_derivatives(network, points, scheme)
    return found.unflatten(1, x.shape[:2])


#: what torch says of values taken out of its transforms: by numpy, or by a graph of their own
_FOREIGN = ("numpy()", "data pointer", "requires_grad_()", "functorch", "does not require grad")


def _residual(condition: Condition, view: View) -> Any:
    """The condition's residual; refused where it leaves torch, or differentiates by itself."""
    try:
        return condition.residual(view)
    except RuntimeError as error:
        said = str(error).split("\n")[0].split(". ")[0]
        if isinstance(error, PullbackError) or not any(word in said for word in _FOREIGN):
            raise
        raise PullbackError(
            f"The residual of {condition.name!r} cannot be differentiated by the network",
            f"it uses numpy or autograd on its arguments ({said})",
            "Give what does not depend on the network by name: Problem(..., sources={'f': "
            "function of the coordinates}), and take f as an argument",
        ) from error


def fingerprint(problem: Problem, condition: Condition, sites: Sites) -> list[Any]:
    """What tells one condition from another: derivatives, weight, and made-up residuals."""
    local = LocalResidual(problem, condition, sites)
    found = local.dry_run().detach().double()
    values: list[Any] = [f"{v:.9e}" for v in found.mean(0).tolist()]
    indices = sorted(list(index) for index in local.asked if index is not None)
    weight = "balanced" if condition.balanced else condition.weight
    values += [condition.value] if isinstance(condition, conditions.Integral) else []
    return [indices, None in local.asked, weight, *values]


def refuse_coupled(problem: Problem, condition: Condition, sites: Sites) -> int:
    """What must vanish at a point may depend on the fields at that point alone.

    Returns:
        How many residuals there are at the points.
    """
    half = len(sites[0]) // 2
    shift = torch.zeros_like(sites[0].x[:, 0])
    shift[half:] = 0.1
    local = LocalResidual(problem, condition, sites)
    one, two = local.dry_run(), local.dry_run(shift)
    if not torch.equal(one[:half].nan_to_num(), two[:half].nan_to_num()):
        raise PullbackError(
            f"The residual of {condition.name!r} at one point depends on other points",
            "it takes a mean, sum or extremum over them",
            "State what holds at a point, and means and integrals by Integral(lambda u: …, value)",
        )
    return one.shape[1] if condition.whole else one.numel()


@torch.enable_grad()
def refuse_unused(problem: Problem, sites: Mapping[str, Sites]) -> None:
    """An unknown coefficient must be in some residual, or it would stay where it began."""
    leaves = {n: torch.tensor(v).double().requires_grad_() for n, v in problem.unknowns.items()}
    idle = set(leaves)
    for c in problem.conditions:
        found = LocalResidual(problem, c, sites[c.name]).dry_run(unknowns=leaves)
        if leaves and found.requires_grad:
            slopes = torch.autograd.grad(found.sum(), list(leaves.values()), allow_unused=True)
            idle -= {n for n, g in zip(leaves, slopes, strict=True) if g is not None}
    if idle:
        raise PullbackError(
            f"The unknown {min(idle)!r} is in no residual",
            "it would keep its initial value",
            f"Name it among an equation's arguments, lambda u, {min(idle)}: …, or leave it out",
        )


def _columns(condition: Condition, found: Any, n: int) -> Tensor:
    """The residuals as (N, R)."""
    columns = []
    for item in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(item, Field):
            item = item.value
        shape = tuple(item.shape) if isinstance(item, Tensor) else type(item).__name__
        if isinstance(item, Tensor) and not item.is_floating_point():
            raise PullbackError(
                f"The residual of {condition.name!r} is not a real number",
                f"its dtype is {item.dtype}",
                "Return what must vanish, not whether it does",
            )
        if shape == (n, n) and n > 1:
            raise PullbackError(
                f"The residual of {condition.name!r} has one value for every pair of points",
                f"shape ({n}, {n}), as (N,) with (N, 1) broadcasts to",
                "Use coordinates by name, (N,) each, or index points[:, i]",
            )
        if not isinstance(item, Tensor) or item.ndim not in (1, 2) or len(item) != n:
            raise PullbackError(
                f"The residual of {condition.name!r} is not one number per point",
                f"got {shape} for {n} points",
                "Return values of shape (N,), or several of these in a tuple; one number for the "
                "whole domain is what Integral(…) is for",
            )
        columns += item.unbind(1) if item.ndim == 2 else [item]
    if not columns:
        raise PullbackError(
            f"The residual of {condition.name!r} is empty", "it returned nothing", "Return (N,)"
        )
    return columns[0][:, None] if len(columns) == 1 else torch.stack(columns, -1)
