"""Coordinates ξ as the user holds them: a tensor, a dict of tensors, or a module's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..._core.capture import plain
from ..._core.errors import PullbackError
from ..._core.space import ParameterSpace

Phi = nn.Module | Callable[..., Tensor]
Vector = Tensor | Mapping[str, Tensor]

_NAME = "xi"  # what a single tensor is called inside


class Coordinates:
    """ξ as named tensors; vectors at ξ are flat (p,) inside and like ξ outside.

    Args:
        phi: the map; a module brings its own names.
        xi: a tensor, a dict of tensors, or None for a module's parameters that require gradients.
    """

    def __init__(self, phi: Phi, xi: Vector | None) -> None:
        if not callable(phi):
            raise PullbackError(
                "φ is not a map", f"got {type(phi).__name__}", "Pass a function or an nn.Module"
            )
        self.single = isinstance(xi, Tensor) and not isinstance(phi, nn.Module)
        named = _named(phi, xi)
        for name, value in named.items():
            _refuse(name, value)
        self.point = {n: v.detach() for n, v in named.items()}
        self.space = ParameterSpace(self.point)

    def argument(self, point: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """What φ is called with."""
        return point[_NAME] if self.single else dict(point)

    def flat(self, v: Vector, what: str = "The vector") -> Tensor:
        """The (p,) vector of a tensor shaped like ξ, a flat tensor, or a dict by name."""
        if isinstance(v, Mapping):
            given = {n: tuple(x.shape) for n, x in v.items()}
            wanted = dict(zip(self.space.names, self.space.shapes, strict=True))
            if self.single or given != wanted:
                raise _misfit(what, given, self.shape)
            flat = self.space.flatten({n: x.detach().to(self.space.device) for n, x in v.items()})
            return _finite(flat, what)
        if isinstance(v, Tensor) and (v.is_complex() or v.is_meta):
            kind = "on the meta device" if v.is_meta else f"of {v.dtype}"
            raise PullbackError(f"{what} is not usable", f"it is {kind}", "Pass real numbers")
        wanted = (self.shape, (self.space.size,)) if self.single else ((self.space.size,),)
        if not isinstance(v, Tensor) or tuple(v.shape) not in wanted:
            raise _misfit(what, tuple(getattr(v, "shape", ())), self.shape)
        return _finite(v.detach().reshape(-1).to(self.space.device, self.space.dtype), what)

    def like(self, flat: Tensor) -> Tensor | dict[str, Tensor]:
        """The flat (p,) vector in the form in which ξ was given."""
        return self.argument(self.space.split(flat))

    def moved(self, flat: Tensor) -> dict[str, Tensor]:
        """ξ + v by name, for a flat v."""
        pieces = self.space.split(flat)
        return {n: w + pieces[n].to(w.dtype) for n, w in self.point.items()}

    @property
    def shape(self) -> object:
        """The shape of ξ, or the shapes by name."""
        named = dict(zip(self.space.names, self.space.shapes, strict=True))
        return named[_NAME] if self.single else named


def _named(phi: Phi, xi: Vector | None) -> dict[str, Tensor]:
    if isinstance(phi, nn.Module):
        own = dict(plain(phi).named_parameters())
        if xi is None:
            return {n: p for n, p in own.items() if p.requires_grad}
        if not isinstance(xi, Mapping):
            raise PullbackError(
                "ξ of a module is not given by name",
                f"got {type(xi).__name__}",
                "Pass None for the module's own parameters, or a dict of tensors by name",
            )
        for name, value in xi.items():
            if name not in own or own[name].shape != value.shape:
                raise PullbackError(
                    f"The module has no parameter {name!r} of shape {tuple(value.shape)}",
                    f"its parameters are { {n: tuple(p.shape) for n, p in own.items()} }",
                    "Use names and shapes of model.named_parameters()",
                )
        return dict(xi)
    if isinstance(xi, Mapping):
        return dict(xi)
    if isinstance(xi, Tensor):
        return {_NAME: xi}
    raise PullbackError(
        "ξ is not given", f"got {type(xi).__name__}", "Pass a tensor or a dict of tensors"
    )


def _refuse(name: str, value: Tensor) -> None:
    what = f"The coordinates {name!r} are not usable"
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise PullbackError(what, f"got {kind}", "Pass real floating-point tensors")
    if value.is_meta:
        raise PullbackError(what, "they are on the meta device", "Pass tensors that hold numbers")
    if value.numel() == 0:
        raise PullbackError(what, f"the shape {tuple(value.shape)} is empty", "Give at least one")
    if not bool(torch.isfinite(value).all()):
        raise PullbackError(what, "some are NaN or infinite", "Look at finite points only")


def _finite(v: Tensor, what: str) -> Tensor:
    if bool(torch.isfinite(v).all()):
        return v
    raise PullbackError(f"{what} is not finite", "it has NaN or infinite entries", "Check it")


def _misfit(what: str, got: object, wanted: object) -> PullbackError:
    return PullbackError(
        f"{what} does not fit ξ", f"got {got}, ξ has {wanted}", "Shape it like ξ, or flatten both"
    )
