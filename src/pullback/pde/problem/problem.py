"""A PDE problem: a domain, conditions, fields, unknown coefficients and what is known of u."""

from __future__ import annotations

import copy
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.errors import PullbackError
from ..arguments import is_number, require
from ..domains import Domain
from .conditions import Condition
from .fields import Coordinates, call_by_name

#: attributes that a problem keeps without its functions
_PLAIN_ATTRIBUTES = {"domain", "fields", "unknowns", "free", "name", "coordinates"}


class Problem:
    """Fields u on a domain for which the conditions hold.

    Args:
        domain: where u lives; its coordinate names are the derivatives' names.
        conditions: what must hold.
        fields: names of the network's outputs.
        unknowns: coefficients to find, with initial values; residuals take them by name.
        sources: functions of coordinates by name (or `points`) that residuals take by these names.
            They are evaluated once per set of points, so any code will do: numpy, scipy, autograd.
        exact: the solution, a function of coordinates by name (or `points`): (N,) for one field,
            a tuple for several.
        reference: the same as a function of points (N, d) that returns (N, m).
        free: fields that are determined only up to a constant (a pressure).
        name: what reports call it.
    """

    #: whether the network is to satisfy conditions that are not in the loss
    hard: bool = False

    def __init__(
        self,
        domain: Domain,
        conditions: Sequence[Condition],
        *,
        fields: Sequence[str] = ("u",),
        unknowns: Mapping[str, float] | None = None,
        sources: Mapping[str, Callable[..., Any]] | None = None,
        exact: Callable[..., Any] | None = None,
        reference: Callable[[Tensor], Tensor] | None = None,
        free: Sequence[str] = (),
        name: str = "PDE",
    ) -> None:
        _check_types(domain, conditions, fields, free)
        self.domain = domain
        self.fields = tuple(fields)
        self.conditions = _name_uniquely(conditions)
        self.unknowns = _check_unknowns({} if unknowns is None else unknowns)
        self.sources = _check_sources({} if sources is None else sources)
        for what, solution in {"exact": exact, "reference": reference}.items():
            usable = solution is None or callable(solution)
            require(usable, f"The solution {what}=", solution, "Pass a function, or None")
        self.exact = exact
        self.reference = reference
        self.free = tuple(free)
        self.name = name
        self._check_conditions()
        self._check_names()
        self.coordinates = Coordinates(tuple(domain.names))

    def _check_conditions(self) -> None:
        """Raise unless there is an equation or an energy."""
        if not self.conditions:
            raise PullbackError(
                "The problem has no conditions",
                "there is nothing to solve",
                "Pass at least one, such as Equation(lambda u: u.laplacian + 1)",
            )
        if not any(condition.states_problem for condition in self.conditions):
            raise PullbackError(
                "The problem has no equation",
                f"its conditions are {', '.join(c.name for c in self.conditions)}",
                "Add an Equation(...) or an Energy(...)",
            )

    def _check_names(self) -> None:
        """Raise if a name stands for two things."""
        choice = {"fields": self.fields, "free": self.free}
        usable = bool(self.fields) and set(self.free) <= set(self.fields)
        require(usable, "The choice of fields", choice, "Name a field, and in free= only fields")
        names = [*self.fields, *self.domain.names, *self.unknowns, *self.sources]
        names += ["points", "normals"]
        ambiguous = {name for name in names if names.count(name) > 1}
        if ambiguous:
            raise PullbackError(
                f"The name {min(ambiguous)!r} stands for two things",
                "fields, coordinates and unknowns share the arguments of residuals",
                "Rename one of them",
            )

    @property
    def known(self) -> bool:
        """Return True if the solution can be compared with something."""
        return self.exact is not None or self.reference is not None

    def truth(self, x: Tensor) -> Tensor:
        """Return the known solution at points (N, d): (N, m)."""
        values = torch.as_tensor(self._evaluate_truth(x), dtype=x.dtype, device=x.device)
        if not values.ndim:
            values = values.expand(len(x))
        if values.ndim == 1:
            values = values[:, None]
        if values.shape != (len(x), len(self.fields)):
            raise PullbackError(
                f"The known solution of {self.name} has the wrong shape",
                f"got {tuple(values.shape)} for {len(x)} points and {len(self.fields)} fields",
                "Return (N,) for one field, a tuple of these for several",
            )
        return values

    def _evaluate_truth(self, x: Tensor) -> Any:
        """Return what the function of the known solution gives; several fields are stacked."""
        if self.exact is None and self.reference is None:
            raise PullbackError(
                f"No solution of {self.name} is known",
                "the problem has neither an exact solution nor a reference",
                "Pass exact= or reference=",
            )
        if self.exact is None:
            assert self.reference is not None
            return self.reference(x)
        values = call_by_name(self.exact, self._offer_coordinates(x), "The exact solution")
        if not isinstance(values, (tuple, list)):
            return values
        columns = [torch.as_tensor(value, dtype=x.dtype, device=x.device) for value in values]
        return torch.stack([column.expand(len(x)) for column in columns], -1)

    def columns(self, x: Tensor) -> dict[str, Tensor]:
        """Return coordinates and sources by name, (N,) each."""
        columns = self._coordinates(x)
        columns |= {name: self._evaluate_source(name, x) for name in self.sources}
        return columns

    def _coordinates(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.domain.names, x.unbind(-1), strict=True))

    def _offer_coordinates(self, x: Tensor) -> dict[str, Tensor]:
        """Return all that a function of coordinates may name."""
        return {"points": x, **self._coordinates(x)}

    def _evaluate_source(self, name: str, x: Tensor) -> Tensor:
        """Return a source at points (N, d): (N,)."""
        what = f"The source {name!r}"
        with torch.enable_grad():
            source = call_by_name(self.sources[name], self._offer_coordinates(x.detach()), what)
        values = torch.as_tensor(source)
        require(not values.is_complex(), what, values.dtype, "Return real numbers")
        values = torch.as_tensor(source, dtype=x.dtype, device=x.device).detach()
        if values.ndim and values.shape != (len(x),):
            raise PullbackError(
                f"{what} is not one number per point",
                f"got shape {tuple(values.shape)} for {len(x)} points",
                "Return values of shape (N,)",
            )
        return values.expand(len(x))

    def restrict(self, domain: Domain, conditions: Sequence[Condition]) -> Problem:
        """Return the same problem on a part of the domain, with other conditions."""
        return Problem(
            domain,
            conditions,
            fields=self.fields,
            unknowns=self.unknowns,
            sources=self.sources,
            exact=self.exact,
            reference=self.reference,
            free=self.free,
            name=self.name,
        )

    def without_functions(self) -> Problem:
        """Return domain, fields and names, without the functions that make up the problem."""
        stripped = Problem.__new__(Problem)
        vars(stripped).update({k: v for k, v in vars(self).items() if k in _PLAIN_ATTRIBUTES})
        stripped.conditions = ()
        stripped.exact = None
        stripped.reference = None
        stripped.sources = {}
        return stripped

    def __repr__(self) -> str:
        return f"{self.name}({self.domain!r}, {', '.join(c.name for c in self.conditions)})"


def _check_types(domain: object, conditions: object, fields: object, free: object) -> None:
    """Raise for what is no domain, no list of conditions, no list of names."""
    require(isinstance(domain, Domain), "The domain", domain, "Pass a Box, Disk, SpaceTime…")
    listed = isinstance(conditions, (list, tuple))
    require(listed, "conditions", conditions, "Pass a list: [Equation(…), Dirichlet(…)]")
    for condition in conditions:  # pyright: ignore[reportGeneralTypeIssues]
        usable = isinstance(condition, Condition)
        require(usable, "A condition that is none", condition, "Use Equation(…)")
    for what, names in {"fields": fields, "free": free}.items():
        usable = isinstance(names, (list, tuple)) and all(map(_is_name, names))
        require(usable, what, names, f'Pass names that residuals can have: {what}=("u", "p")')


def _name_uniquely(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return copies whose names differ, because points and reports go by names."""
    names: set[str] = set()
    copies = tuple(copy.copy(condition) for condition in conditions)
    for condition in copies:
        plain_name = condition.name
        count = 1
        while condition.name in names:
            count += 1
            condition.name = f"{plain_name} {count}"
        names.add(condition.name)
    return copies


def _check_unknowns(unknowns: object) -> dict[str, float]:
    """Return numbers by names that residuals can have; they become entries of a ParameterDict."""
    remedy = 'Pass finite numbers by name: unknowns={"k": 1.0}'
    if not isinstance(unknowns, Mapping):
        raise PullbackError("unknowns is not usable", f"got {unknowns!r}", remedy)
    reserved = nn.ParameterDict()
    for name, value in unknowns.items():
        usable = _is_name(name) and not hasattr(reserved, name)
        require(usable, "The name of an unknown", name, "Use another identifier, such as 'k'")
        require(is_number(value), f"The initial value of {name!r}", value, remedy)
    return dict(unknowns)


def _check_sources(sources: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return functions by names that residuals can have."""
    checked = dict(sources)
    for name, source in checked.items():
        usable = _is_name(name) and callable(source)
        require(usable, f"The source {name!r}", source, "Pass a function: sources={'f': f}")
    return checked


def _is_name(name: object) -> bool:
    """Return True for a string that can name an argument."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
