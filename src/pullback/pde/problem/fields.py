"""Fields with readable derivatives, `u.t + u * u.x - nu * u.xx`, and what conditions see."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..._core.errors import PullbackError
from ...maps import Scheme
from ...maps.jets import Index
from ..domains.sampling import Points

_RESERVED = {"value", "laplacian", "grad", "normal", "d", "points"}


class UnknownDerivative(PullbackError, AttributeError):
    """A name that is no derivative."""


@dataclass(frozen=True)
class Coordinates:
    """Names of the axes; time is the axis called t, the others are space."""

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        bad = [n for n in self.names if n in _RESERVED or not n.isidentifier()]
        if bad:
            raise PullbackError(
                f"The coordinate name {bad[0]!r} cannot be used",
                "derivatives are attributes of a field, and it would hide one or is no identifier",
                "Use names such as x, y, z, t or x1, x2, …",
            )

    @cached_property
    def space(self) -> tuple[int, ...]:
        """The axes other than time."""
        return tuple(i for i, n in enumerate(self.names) if n != "t")

    def parse(self, *texts: str) -> Index:
        """The derivative that names stand for together.

        >>> Coordinates(("x", "t")).parse("xt", "x")
        (0, 0, 1)
        """
        axes: list[int] = []
        for text in texts:
            found = _tokens(text, self.names)
            if found is None:
                raise UnknownDerivative(
                    f"There is no derivative {text!r}",
                    f"the coordinates are {', '.join(self.names)}",
                    "Write coordinates one after the other, as in u.xx or u.xt; or u.laplacian, "
                    "u.grad, u.normal",
                )
            axes += found
        return tuple(sorted(axes))

    def scheme(self, asked: set[Index | None]) -> Scheme:
        """The channels to carry; None is the Laplacian, which in one axis is a derivative."""
        indices = {index for index in asked if index is not None}
        if None not in asked:
            return Scheme.of(indices)
        if len(self.space) > 1:
            return Scheme.of(indices, self.space)
        return Scheme.of(indices | {self.space * 2})


@lru_cache(maxsize=4096)
def _tokens(text: str, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """The axes whose names make up the text; longer names are tried first (x1 before x10's x1)."""
    if not text:
        return ()
    for i in sorted(range(len(names)), key=lambda i: -len(names[i])):
        if text.startswith(names[i]):
            rest = _tokens(text[len(names[i]) :], names)
            if rest is not None:
                return (i, *rest)
    return None


#: gives the values (N,) of a derivative; None stands for the Laplacian
Channel = Callable[[Index | None], Tensor]


class Field:
    """One component u of the network at the points, (N,), with its derivatives as attributes.

    `u.x`, `u.xt` are partial derivatives by coordinate names, `u.laplacian` and `u.grad` (N, d)
    those in space, `u.normal` the outward one on a boundary, `u.d("x1", "x1")` spells a name out.
    In arithmetic and in torch's functions the field is its value.
    """

    def __init__(
        self, channel: Channel, coordinates: Coordinates, normals: Tensor | None = None
    ) -> None:
        self._channel, self._coordinates, self._normals = channel, coordinates, normals

    @property
    def value(self) -> Tensor:
        """u itself, (N,)."""
        return self._channel(())

    @property
    def laplacian(self) -> Tensor:
        """Σ over space of the second derivatives."""
        self._axes("u.laplacian")
        return self._channel(None)

    @property
    def grad(self) -> Tensor:
        """The first derivatives in space, (N, d)."""
        return torch.stack([self._channel((i,)) for i in self._axes("u.grad")], -1)

    def _axes(self, what: str) -> tuple[int, ...]:
        """The axes of space, if there are any."""
        axes = self._coordinates.space
        if not axes:
            raise PullbackError(
                f"There is no {what} here",
                "it is a derivative in space, and the only coordinate is t",
                "Write u.t or u.tt, or give the coordinate another name",
            )
        return axes

    @property
    def normal(self) -> Tensor:
        """∂u/∂n = n·∇u."""
        if self._normals is None:
            raise PullbackError(
                "There is no outward normal here",
                "the condition's region is no boundary",
                "Use u.normal on a boundary, or name the derivative you mean",
            )
        axes = self._axes("u.normal")
        others = [i for i in range(len(self._coordinates.names)) if i not in axes]
        if others and bool(self._normals[:, others].any()):
            raise PullbackError(
                "The outward normal points along time here",
                "u.normal is a derivative in space",
                "Write u.t, or use a part of the boundary in space",
            )
        return (self._normals[:, list(axes)] * self.grad).sum(-1)

    def d(self, *names: str) -> Tensor:
        """The derivative along the named coordinates."""
        return self._channel(self._coordinates.parse(*names))

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._channel(self._coordinates.parse(name))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = tree_map(lambda a: a.value if isinstance(a, Field) else a, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def _forward(name: str) -> None:
    def method(self: Field, *args: Any) -> Any:
        plain = [a.value if isinstance(a, Field) else a for a in args]
        return getattr(self.value, name)(*plain)

    setattr(Field, name, method)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    _forward(f"__{_name}__")
    _forward(f"__r{_name}__")
for _name in ("neg", "pos", "abs", "getitem", "lt", "le", "gt", "ge", "eq", "ne"):
    _forward(f"__{_name}__")
Field.__hash__ = object.__hash__


def names(function: Callable[..., Any]) -> set[str]:
    """The names of its parameters, with "**" where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # `call` refuses it
        return set()
    return {"**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def call(function: Callable[..., Any], offered: Mapping[str, Any], what: str) -> Any:
    """The function of those offered things that its parameters name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise PullbackError(
            f"{what} does not name its arguments",
            f"{function!r} is built in",
            "Wrap it: lambda x: torch.sin(x)",
        ) from None
    kinds = inspect.Parameter
    given = {}
    for parameter in parameters:
        if parameter.kind is kinds.VAR_KEYWORD:
            return function(**offered)
        if parameter.kind is kinds.POSITIONAL_ONLY:
            raise PullbackError(
                f"{what} takes {parameter.name!r} by position only",
                "arguments are found by their names",
                "Leave out the / in its signature",
            )
        if parameter.name in offered:
            given[parameter.name] = offered[parameter.name]
        elif parameter.default is kinds.empty or parameter.kind is kinds.VAR_POSITIONAL:
            raise PullbackError(
                f"{what} asks for {parameter.name!r}",
                f"there are {', '.join(offered)}",
                "Name its arguments after fields, coordinates or unknowns",
            )
    return function(**given)


Value = float | Tensor | Callable[..., Any]


@dataclass
class View:
    """What a condition sees: fields (per site), coordinates, normals, unknown coefficients.

    Values that depend on none of the fields and unknowns are evaluated once per set of points, in
    `known`: a spline of scipy or a gradient by autograd cannot be differentiated through.
    """

    fields: Sequence[Mapping[str, Field]]
    points: Points
    coordinates: Mapping[str, Tensor]
    unknowns: Mapping[str, Tensor]
    known: dict[int, Tensor]

    def field(self, name: str | None, site: int = 0) -> Field:
        """The named field, or the only one."""
        here = self.fields[site]
        if name is None and len(here) == 1:
            return next(iter(here.values()))
        if name is None or name not in here:
            raise PullbackError(
                "The condition must say which field it is for"
                if name is None
                else f"There is no field {name!r}",
                f"the problem's fields are {', '.join(here)}",
                "Pass field=",
            )
        return here[name]

    @property
    def offered(self) -> dict[str, Any]:
        """All that a function may name."""
        return {
            **self.fields[0],
            **self.coordinates,
            **self.unknowns,
            "points": self.points.x,
            **({} if self.points.normals is None else {"normals": self.points.normals}),
        }

    def value(self, value: Value, what: str) -> Tensor:
        """A number, values at the points, or a function of what is offered."""
        if not callable(value) or names(value) & {"**", *self.fields[0], *self.unknowns}:
            return self._evaluated(value, what)
        if id(value) not in self.known:
            with torch.enable_grad():
                self.known[id(value)] = self._evaluated(value, what).detach()
        return self.known[id(value)]

    def _evaluated(self, value: Value, what: str) -> Tensor:
        found = call(value, self.offered, what) if callable(value) else value
        if isinstance(found, Field):
            found = found.value
        x = self.points.x
        try:
            found = torch.as_tensor(found, dtype=x.dtype, device=x.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PullbackError(
                f"{what} is no number", f"got {found!r}", "Return a tensor"
            ) from error
        found = found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found
        found = self.points.own(found)
        if found.ndim and found.shape != (len(self.points),):
            raise PullbackError(
                f"{what} is not one number per point",
                f"got shape {tuple(found.shape)} for {len(self.points)} points",
                "Give a number, or a function of the coordinates that returns (N,)",
            )
        return found
