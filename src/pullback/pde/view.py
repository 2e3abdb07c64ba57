"""What conditions see at their points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .fields import Field, call, names
from .sampling import Points

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
