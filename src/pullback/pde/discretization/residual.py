"""A condition's residual at points, as a function of the derivatives of the fields there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ...maps import Scheme
from ...maps.jets import Index, Jet, Unsupported, differentiate_nested
from ..problem.conditions import Condition
from ..problem.fields import Field, View
from ..problem.problem import Problem
from .sites import Sites
from .trial import Trial

#: (site, field, derivative), where None stands for the Laplacian
Key = tuple[int, str, Index | None]
Derivatives = Mapping[Key, Tensor]
#: gives the values (N,) of a field's derivative at a site
DerivativeLookup = Callable[[int, str, Index | None], Tensor]


class LinearizedResidual(NamedTuple):
    """F and ∂F/∂c at some derivatives c: (N, R), and (N, R) by key."""

    values: Tensor
    slopes: dict[Key, Tensor]


class LocalResidual:
    """A residual F at points as a function of the fields' derivatives c there.

    Unknown coefficients have their initial values unless others are given.

    Attributes:
        indices: derivatives that F asks for, as a dry run finds; None is the Laplacian.
        scheme: the derivatives that a network must carry for these.
        keys: those that F asks for, by site and field.
    """

    def __init__(
        self,
        problem: Problem,
        condition: Condition,
        sites: Sites,
        unknowns: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._problem = problem
        self._condition = condition
        self._sites = sites
        x = sites[0].x
        self._unknowns = unknowns or {n: x.new_tensor(v) for n, v in problem.unknowns.items()}
        self._columns = problem.columns(x)
        self._known_values: dict[int, Tensor] = {}  # those that do not depend on the network
        self.indices: set[Index | None] = set()
        self.dry_run()
        self.scheme = problem.coordinates.scheme(self.indices)
        self.keys = self._list_keys()

    def _list_keys(self) -> list[Key]:
        """Return the keys in order of sites, fields, and derivatives; the Laplacian is last."""
        indices = sorted(self.indices, key=lambda i: (i is None, len(i or ()), i))
        keys: list[Key] = []
        for site in range(len(self._sites)):
            for field in self._problem.fields:
                keys += [(site, field, index) for index in indices]
        return keys

    def evaluate(
        self, lookup: DerivativeLookup, unknowns: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return F, (N, R), of derivatives that are looked up one by one."""
        fields = [
            self._make_fields(partial(lookup, site), points.normals)
            for site, points in enumerate(self._sites)
        ]
        if unknowns is None:
            unknowns = self._unknowns
        view = View(fields, self._sites[0], self._columns, unknowns, self._known_values)
        values = _call_residual(self._condition, view)
        return _stack_columns(self._condition, values, len(self._sites[0]))

    def _make_fields(
        self, lookup: Callable[[str, Index | None], Tensor], normals: Tensor | None
    ) -> dict[str, Field]:
        """Return the fields of one site."""
        coordinates = self._problem.coordinates
        names = self._problem.fields
        return {name: Field(partial(lookup, name), coordinates, normals) for name in names}

    def dry_run(
        self, shift: Tensor | float = 0.0, unknowns: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return F of made-up values, and note in `indices` which derivatives it asks for."""
        x = self._sites[0].x
        made_up = torch.linspace(0.3, 0.7, len(x), dtype=x.dtype, device=x.device) + shift

        def look_up(site: int, field: str, index: Index | None) -> Tensor:
            self.indices.add(index)
            offset = 7  # every derivative has another one
            if index is not None:
                offset = len(index) + 3 * sum(index)
            return made_up + 0.01 * offset

        values = self.evaluate(look_up, unknowns)
        if not self.indices:
            raise PullbackError(
                f"The condition {self._condition.name!r} does not depend on the network",
                "its residual uses no field",
                f"Use {', '.join(self._problem.fields)} or a derivative of it in the residual",
            )
        return values

    def make_lookup(self, channels: Any) -> DerivativeLookup:
        """Return a function that looks derivatives up in a network's channels (T, S, N, m)."""
        scheme = self.scheme
        space = self._problem.coordinates.space
        column_of = self._problem.fields.index

        def look_up(site: int, field: str, index: Index | None) -> Tensor:
            if index is None and scheme.laplacian:
                return channels[-1, site, :, column_of(field)]
            order = space * 2 if index is None else index
            return channels[scheme.position[order], site, :, column_of(field)]

        return look_up

    def differentiate(self, trial: Trial) -> Derivatives:
        """Return the derivatives of a network that F asks for, (N,) each."""
        x = torch.stack([points.x for points in self._sites])
        look_up = self.make_lookup(compute_derivatives(trial, x, self.scheme))
        return {key: look_up(*key) for key in self.keys}

    def __call__(self, derivatives: Derivatives) -> Tensor:
        """Return F, (N, R)."""
        return self.evaluate(lambda *key: derivatives[key])

    @property
    def order(self) -> int:
        """The order of the highest derivative that F asks for; the Laplacian's is 2."""
        return max(2 if index is None else len(index) for index in self.indices)

    def linearize(self, derivatives: Derivatives) -> LinearizedResidual:
        """Return F and its slopes by the derivatives c."""
        leaves = {k: v.detach().clone().requires_grad_() for k, v in derivatives.items()}
        with torch.enable_grad():
            values = self(leaves)
        inputs = list(leaves.values())
        gradients = [_differentiate_sum(column, inputs) for column in values.unbind(1)]
        slopes = {}
        for i, key in enumerate(leaves):
            slopes[key] = torch.stack([column[i] for column in gradients], 1)
        return LinearizedResidual(values.detach(), slopes)

    def is_affine(self, derivatives: Derivatives) -> bool:
        """Return True if the slopes at these values are those at other, made-up values."""
        others = {k: 1.7 * v + 0.3 * v.abs().mean() + 0.1 for k, v in derivatives.items()}
        slopes = self.linearize(derivatives).slopes
        other_slopes = self.linearize(others).slopes
        return all(torch.allclose(slopes[k], other_slopes[k]) for k in derivatives)


def _differentiate_sum(column: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a column's sum, zero for inputs that it does not depend on."""
    if not column.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    gradients = torch.autograd.grad(column.sum(), inputs, retain_graph=True, allow_unused=True)
    pairs = zip(inputs, gradients, strict=True)
    return [torch.zeros_like(x) if gradient is None else gradient for x, gradient in pairs]


@torch.no_grad()
def compute_derivatives(network: nn.Module, x: Tensor, scheme: Scheme) -> Tensor:
    """Return the network's derivatives at sites x (S, N, d), as channels (T, S, N, m).

    A network that jets cannot go through is differentiated by nested automatic differentiation.
    """
    points = x.flatten(0, 1)
    try:
        channels = network(Jet.input(points, scheme)).expand_channels().stack_channels()
    except (Unsupported, TypeError, AttributeError, AssertionError, ValueError, IndexError):
        channels = differentiate_nested(network, points, scheme)
    return channels.unflatten(1, x.shape[:2])


#: what torch says of values taken out of its transforms: by numpy, or by a graph of their own
_FOREIGN = ("numpy()", "data pointer", "requires_grad_()", "functorch", "does not require grad")


def _call_residual(condition: Condition, view: View) -> Any:
    """Return the condition's residual; raise if it leaves torch, or differentiates by itself."""
    try:
        return condition.residual(view)
    except RuntimeError as error:
        message = str(error).split("\n")[0].split(". ")[0]
        is_foreign = any(word in message for word in _FOREIGN)
        if isinstance(error, PullbackError) or not is_foreign:
            raise
        raise PullbackError(
            f"The residual of {condition.name!r} cannot be differentiated by the network",
            f"it uses numpy or autograd on its arguments ({message})",
            "Give what does not depend on the network by name: Problem(..., sources={'f': "
            "function of the coordinates}), and take f as an argument",
        ) from error


def fingerprint(problem: Problem, condition: Condition, sites: Sites) -> list[Any]:
    """Return a list that two conditions share only if they are the same.

    These are its derivatives, its weight, its target, and made-up residuals.
    """
    local = LocalResidual(problem, condition, sites)
    means = local.dry_run().detach().double().mean(0)
    indices = sorted(list(index) for index in local.indices if index is not None)
    weight = "balanced" if condition.balanced else condition.weight
    values: list[Any] = [f"{mean:.9e}" for mean in means.tolist()]
    if condition.target is not None:
        values.append(condition.target)
    return [indices, None in local.indices, weight, *values]


def count_residuals(problem: Problem, condition: Condition, sites: Sites) -> int:
    """Return how many residuals a condition has; raise if one depends on several points.

    Raises:
        PullbackError: if the residual at one point depends on the fields at other points.
    """
    half = len(sites[0]) // 2
    shift = torch.zeros_like(sites[0].x[:, 0])
    shift[half:] = 0.1
    local = LocalResidual(problem, condition, sites)
    values = local.dry_run()
    shifted = local.dry_run(shift)
    if not torch.equal(values[:half].nan_to_num(), shifted[:half].nan_to_num()):
        raise PullbackError(
            f"The residual of {condition.name!r} at one point depends on other points",
            "it takes a mean, sum or extremum over them",
            "State what holds at a point, and means and integrals by Integral(lambda u: …, value)",
        )
    if condition.is_integral:
        return values.shape[1]
    return values.numel()


@torch.enable_grad()
def refuse_unused(problem: Problem, sites: Mapping[str, Sites]) -> None:
    """Raise if an unknown coefficient is in no residual: it would stay where it began."""
    leaves = {n: torch.tensor(v).double().requires_grad_() for n, v in problem.unknowns.items()}
    unused = set(leaves)
    for condition in problem.conditions:
        local = LocalResidual(problem, condition, sites[condition.name])
        values = local.dry_run(unknowns=leaves)
        if leaves and values.requires_grad:
            inputs = list(leaves.values())
            slopes = torch.autograd.grad(values.sum(), inputs, allow_unused=True)
            unused -= {n for n, slope in zip(leaves, slopes, strict=True) if slope is not None}
    if unused:
        name = min(unused)
        raise PullbackError(
            f"The unknown {name!r} is in no residual",
            "it would keep its initial value",
            f"Name it among an equation's arguments, lambda u, {name}: …, or leave it out",
        )


def _stack_columns(condition: Condition, values: Any, n: int) -> Tensor:
    """Return the residuals at n points as (N, R)."""
    items = values if isinstance(values, (list, tuple)) else [values]
    columns: list[Tensor] = []
    for item in items:
        tensor = _check_component(condition, item, n)
        if tensor.ndim == 2:
            columns += tensor.unbind(1)
        else:
            columns.append(tensor)
    if not columns:
        raise PullbackError(
            f"The residual of {condition.name!r} is empty", "it returned nothing", "Return (N,)"
        )
    if len(columns) == 1:
        return columns[0][:, None]
    return torch.stack(columns, -1)


def _check_component(condition: Condition, item: Any, n: int) -> Tensor:
    """Return what a residual gave as a tensor, (N,) or (N, R); raise if it is none."""
    if isinstance(item, Field):
        item = item.value
    remedy = (
        "Return values of shape (N,), or several of these in a tuple; one number for the "
        "whole domain is what Integral(…) is for"
    )
    what = f"The residual of {condition.name!r}"
    if not isinstance(item, Tensor):
        why = f"got {type(item).__name__} for {n} points"
        raise PullbackError(f"{what} is not one number per point", why, remedy)
    if not item.is_floating_point():
        raise PullbackError(
            f"{what} is not a real number",
            f"its dtype is {item.dtype}",
            "Return what must vanish, not whether it does",
        )
    if tuple(item.shape) == (n, n) and n > 1:
        raise PullbackError(
            f"{what} has one value for every pair of points",
            f"shape ({n}, {n}), as (N,) with (N, 1) broadcasts to",
            "Use coordinates by name, (N,) each, or index points[:, i]",
        )
    if item.ndim not in (1, 2) or len(item) != n:
        why = f"got {tuple(item.shape)} for {n} points"
        raise PullbackError(f"{what} is not one number per point", why, remedy)
    return item
