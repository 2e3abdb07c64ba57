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
from .conditions import Condition, Equation
from .conditions import Energy as EnergyCondition
from .fields import Coordinates, call

_OUTLINE = {"domain", "fields", "unknowns", "free", "name", "coordinates"}


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
        _check_given(domain, conditions, fields, free)
        self.domain, self.fields = domain, tuple(fields)
        # copies: names are made unique here
        self.conditions = tuple(map(copy.copy, conditions))
        self.unknowns = _checked_unknowns({} if unknowns is None else unknowns)
        self.sources = {} if sources is None else dict(sources)
        for called, source in self.sources.items():
            usable = _is_name(called) and callable(source)
            require(usable, f"The source {called!r}", source, "Pass a function: sources={'f': f}")
        for what, known in {"exact": exact, "reference": reference}.items():
            usable = known is None or callable(known)
            require(usable, f"The solution {what}=", known, "Pass a function, or None")
        self.exact, self.reference = exact, reference
        self.free, self.name = tuple(free), name
        self._check()
        self.coordinates = Coordinates(tuple(domain.names))

    def _check(self) -> None:
        named = {"fields": self.fields, "free": self.free}
        usable = bool(self.fields) and set(self.free) <= set(self.fields)
        require(usable, "The choice of fields", named, "Name a field, and in free= only fields")
        if not self.conditions:
            raise PullbackError(
                "The problem has no conditions",
                "there is nothing to solve",
                "Pass at least one, such as Equation(lambda u: u.laplacian + 1)",
            )
        if not any(isinstance(c, (Equation, EnergyCondition)) for c in self.conditions):
            raise PullbackError(
                "The problem has no equation",
                f"its conditions are {', '.join(c.name for c in self.conditions)}",
                "Add an Equation(...) or an Energy(...)",
            )
        names = [*self.fields, *self.domain.names, *self.unknowns, *self.sources]
        names += ["points", "normals"]
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise PullbackError(
                f"The name {min(twice)!r} stands for two things",
                "fields, coordinates and unknowns share the arguments of residuals",
                "Rename one of them",
            )
        seen: set[str] = set()
        for condition in self.conditions:  # points and reports go by names
            plain, count = condition.name, 1
            while condition.name in seen:
                count += 1
                condition.name = f"{plain} {count}"
            seen.add(condition.name)

    @property
    def known(self) -> bool:
        """Whether the solution can be compared with something."""
        return self.exact is not None or self.reference is not None

    def truth(self, x: Tensor) -> Tensor:
        """The known solution at points (N, d): (N, m)."""
        if self.exact is not None:
            offered = {"points": x, **self._coordinates(x)}
            found = call(self.exact, offered, "The exact solution")
            if isinstance(found, (tuple, list)):
                each = [torch.as_tensor(f, dtype=x.dtype, device=x.device) for f in found]
                found = torch.stack([f.expand(len(x)) for f in each], -1)
        elif self.reference is not None:
            found = self.reference(x)
        else:
            raise PullbackError(
                f"No solution of {self.name} is known",
                "the problem has neither an exact solution nor a reference",
                "Pass exact= or reference=",
            )
        found = torch.as_tensor(found, dtype=x.dtype, device=x.device)
        found = found.expand(len(x)) if not found.ndim else found
        found = found[:, None] if found.ndim == 1 else found
        if found.shape != (len(x), len(self.fields)):
            raise PullbackError(
                f"The known solution of {self.name} has the wrong shape",
                f"got {tuple(found.shape)} for {len(x)} points and {len(self.fields)} fields",
                "Return (N,) for one field, a tuple of these for several",
            )
        return found

    def columns(self, x: Tensor) -> dict[str, Tensor]:
        """Coordinates and sources by name, (N,) each."""
        return {**self._coordinates(x), **{n: self._source(n, x) for n in self.sources}}

    def _coordinates(self, x: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.domain.names, x.unbind(-1), strict=True))

    def _source(self, name: str, x: Tensor) -> Tensor:
        """A source at points (N, d): (N,)."""
        with torch.enable_grad():
            x = x.detach()
            offered = {"points": x, **self._coordinates(x)}
            found = call(self.sources[name], offered, f"The source {name!r}")
        found = torch.as_tensor(found, dtype=x.dtype, device=x.device).detach()
        if found.ndim and found.shape != (len(x),):
            raise PullbackError(
                f"The source {name!r} is not one number per point",
                f"got shape {tuple(found.shape)} for {len(x)} points",
                "Return values of shape (N,)",
            )
        return found.expand(len(x))

    def restricted(self, domain: Domain, conditions: Sequence[Condition]) -> Problem:
        """The same problem on a part of the domain, with other conditions."""
        kept = ("fields", "unknowns", "sources", "exact", "reference", "free", "name")
        return Problem(domain, conditions, **{k: getattr(self, k) for k in kept})

    def outline(self) -> Problem:
        """Domain, fields and names, without the functions that make up the problem."""
        out = Problem.__new__(Problem)
        vars(out).update({k: v for k, v in vars(self).items() if k in _OUTLINE})
        out.conditions, out.exact, out.reference, out.sources = (), None, None, {}
        return out

    def __repr__(self) -> str:
        return f"{self.name}({self.domain!r}, {', '.join(c.name for c in self.conditions)})"


def _check_given(domain: object, conditions: object, fields: object, free: object) -> None:
    """Refuse what is no domain, no list of conditions, no list of names."""
    require(isinstance(domain, Domain), "The domain", domain, "Pass a Box, Disk, SpaceTime…")
    listed = isinstance(conditions, (list, tuple))
    require(listed, "conditions", conditions, "Pass a list: [Equation(…), Dirichlet(…)]")
    for c in conditions:  # pyright: ignore[reportGeneralTypeIssues]
        require(isinstance(c, Condition), "A condition that is none", c, "Use Equation(…)")
    for what, names in {"fields": fields, "free": free}.items():
        usable = isinstance(names, (list, tuple)) and all(map(_is_name, names))
        require(usable, what, names, f'Pass names that residuals can have: {what}=("u", "p")')


def _checked_unknowns(unknowns: object) -> dict[str, float]:
    """Numbers by names that residuals can have; they become entries of a ParameterDict."""
    remedy = 'Pass finite numbers by name: unknowns={"k": 1.0}'
    if not isinstance(unknowns, Mapping):
        raise PullbackError("unknowns is not usable", f"got {unknowns!r}", remedy)
    taken = nn.ParameterDict()
    for name, value in unknowns.items():
        usable = _is_name(name) and not hasattr(taken, name)
        require(usable, "The name of an unknown", name, "Use another identifier, such as 'k'")
        require(is_number(value), f"The initial value of {name!r}", value, remedy)
    return dict(unknowns)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
