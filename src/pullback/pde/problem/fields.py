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
        """Return the derivative that names stand for together.

        >>> Coordinates(("x", "t")).parse("xt", "x")
        (0, 0, 1)
        """
        index: list[int] = []
        for text in texts:
            axes = _split_names(text, self.names)
            if axes is None:
                raise UnknownDerivative(
                    f"There is no derivative {text!r}",
                    f"the coordinates are {', '.join(self.names)}",
                    "Write coordinates one after the other, as in u.xx or u.xt; or u.laplacian, "
                    "u.grad, u.normal",
                )
            index += axes
        return tuple(sorted(index))

    def scheme(self, asked: set[Index | None]) -> Scheme:
        """Return the channels to carry; None is the Laplacian, in one dimension a derivative."""
        indices = {index for index in asked if index is not None}
        if None not in asked:
            return Scheme.of(indices)
        if len(self.space) > 1:
            return Scheme.of(indices, self.space)
        return Scheme.of(indices | {self.space * 2})


@lru_cache(maxsize=4096)
def _split_names(text: str, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the axes whose names make up the text, None if there are none.

    Longer names are tried first: x10 before x1.
    """
    if not text:
        return ()
    for axis in sorted(range(len(names)), key=lambda i: -len(names[i])):
        if text.startswith(names[axis]):
            later_axes = _split_names(text[len(names[axis]) :], names)
            if later_axes is not None:
                return (axis, *later_axes)
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
        self._channel = channel
        self._coordinates = coordinates
        self._normals = normals

    @property
    def value(self) -> Tensor:
        """u itself, (N,)."""
        return self._channel(())

    @property
    def laplacian(self) -> Tensor:
        """Σ over space of the second derivatives."""
        self._space_axes("u.laplacian")
        return self._channel(None)

    @property
    def grad(self) -> Tensor:
        """The first derivatives in space, (N, d)."""
        return torch.stack([self._channel((i,)) for i in self._space_axes("u.grad")], -1)

    def _space_axes(self, what: str) -> tuple[int, ...]:
        """Return the axes of space; raise if there are none."""
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
        axes = self._space_axes("u.normal")
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
        plain_args, plain_kwargs = tree_map(_as_tensor, (args, kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def scale_field(field: Field, factor: float) -> Field:
    """Return a field times a number, with its derivatives."""
    return Field(lambda index: factor * field._channel(index), field._coordinates, field._normals)


def _as_tensor(value: Any) -> Any:
    """Return the value of a field; anything else as it is."""
    if isinstance(value, Field):
        return value.value
    return value


def _forward_method(name: str) -> None:
    """Give `Field` an operator of its value."""

    def method(self: Field, *args: Any) -> Any:
        return getattr(self.value, name)(*map(_as_tensor, args))

    setattr(Field, name, method)


for _operator in ("add", "sub", "mul", "truediv", "pow"):
    _forward_method(f"__{_operator}__")
    _forward_method(f"__r{_operator}__")
for _operator in ("neg", "pos", "abs", "getitem", "lt", "le", "gt", "ge", "eq", "ne"):
    _forward_method(f"__{_operator}__")
Field.__hash__ = object.__hash__

#: what `parameter_names` has for a function that takes any keyword
ANY_NAME = "**"


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters, with "**" if it takes any keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # `call_by_name` refuses it
        return set()
    return {ANY_NAME if p.kind is p.VAR_KEYWORD else p.name for p in parameters}


def call_by_name(function: Callable[..., Any], offered: Mapping[str, Any], what: str) -> Any:
    """Call a function with those of the offered things that its parameters name.

    Args:
        function: of fields, coordinates, unknowns or sources.
        offered: all that it may name.
        what: the function is, for errors.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise PullbackError(
            f"{what} does not name its arguments",
            f"{function!r} is built in",
            "Wrap it: lambda x: torch.sin(x)",
        ) from None
    arguments = {}
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            return function(**offered)
        _refuse_parameter(parameter, offered, what)
        if parameter.name in offered:
            arguments[parameter.name] = offered[parameter.name]
    try:
        return function(**arguments)
    except (TypeError, ValueError) as error:
        error.add_note(f"{what} gets tensors of many points: write torch.sin, not math.sin")
        raise


def _refuse_parameter(parameter: inspect.Parameter, offered: Mapping[str, Any], what: str) -> None:
    """Raise for a parameter that has no name, or names something that is not offered."""
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise PullbackError(
            f"{what} takes {parameter.name!r} by position only",
            "arguments are found by their names",
            "Leave out the / in its signature",
        )
    is_required = parameter.default is inspect.Parameter.empty
    is_variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
    if parameter.name not in offered and (is_required or is_variadic):
        raise PullbackError(
            f"{what} asks for {parameter.name!r}",
            f"there are {', '.join(offered)}",
            "Name its arguments after fields, coordinates or unknowns",
        )


Value = float | Tensor | Callable[..., Any]


@dataclass
class View:
    """What a condition sees: fields (per site), coordinates, normals, unknown coefficients.

    Attributes:
        fields: by name, for each site.
        points: of the first site.
        coordinates: and sources, by name, (N,) each.
        unknowns: coefficients by name.
        known_values: of functions that depend on no field and no unknown, by the id of the
            function. They are evaluated once per set of points: a spline of scipy or a gradient by
            autograd cannot be differentiated through.
    """

    fields: Sequence[Mapping[str, Field]]
    points: Points
    coordinates: Mapping[str, Tensor]
    unknowns: Mapping[str, Tensor]
    known_values: dict[int, Tensor]

    def field(self, name: str | None, site: int = 0) -> Field:
        """Return the named field, or the only one."""
        fields = self.fields[site]
        if name is None and len(fields) == 1:
            return next(iter(fields.values()))
        if name is None or name not in fields:
            what = f"There is no field {name!r}"
            if name is None:
                what = "The condition must say which field it is for"
            raise PullbackError(
                what, f"the problem's fields are {', '.join(fields)}", "Pass field="
            )
        return fields[name]

    @property
    def arguments(self) -> dict[str, Any]:
        """All that a function may name."""
        offered = {**self.fields[0], **self.coordinates, **self.unknowns, "points": self.points.x}
        if self.points.normals is not None:
            offered["normals"] = self.points.normals
        return offered

    def value(self, value: Value, what: str) -> Tensor:
        """Return a number, values at the points, or those of a function of what is offered."""
        if not callable(value) or self._depends_on_solution(value):
            return self._compute(value, what)
        if id(value) not in self.known_values:
            with torch.enable_grad():
                self.known_values[id(value)] = self._compute(value, what).detach()
        return self.known_values[id(value)]

    def evaluate(self, function: Callable[..., Any], what: str) -> Tensor:
        """Return the values of a function of what is offered, (N,)."""
        values = self.value(call_by_name(function, self.arguments, what), what)
        return values.expand(len(self.points))

    def _depends_on_solution(self, function: Callable[..., Any]) -> bool:
        """Return True if a function names a field or an unknown, or takes all."""
        changing = {ANY_NAME, *self.fields[0], *self.unknowns}
        return bool(parameter_names(function) & changing)

    def _compute(self, value: Value, what: str) -> Tensor:
        """Return the value as a tensor: () or (N,)."""
        if callable(value):
            value = call_by_name(value, self.arguments, what)
        value = _as_tensor(value)
        x = self.points.x
        try:
            values = torch.as_tensor(value, dtype=x.dtype, device=x.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PullbackError(
                f"{what} is no number", f"got {value!r}", "Return a tensor"
            ) from error
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        values = self.points.take_share_of(values)
        if values.ndim and values.shape != (len(self.points),):
            raise PullbackError(
                f"{what} is not one number per point",
                f"got shape {tuple(values.shape)} for {len(self.points)} points",
                "Give a number, or a function of the coordinates that returns (N,)",
            )
        return values
