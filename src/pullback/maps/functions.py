"""What functions do with a parameter, written down as the layer that torch has for it.

`F.linear(x, w)` is a use of a linear layer whoever calls it, and so are `x @ w.T`, an `einsum` or a
`bmm` with a stack of experts. A `FunctionMode` sees the calls of a forward pass, recognizes views
and copies of parameters by where their entries lie, and gives every use to the recorder with a
module that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .layers.directed import NormalizedUse
from .layers.product import Multiplication, ProductUse, TurnedProduct

if TYPE_CHECKING:
    from .record import Recorder

#: what is noted of a call, by the function's name
USES: dict[str, Callable[..., Tensor | None]] = {}


def use(*names: str) -> Callable[[Any], Any]:
    """Enter what is noted of calls of these functions: (mode, result, *arguments) -> result."""

    def enter(function: Any) -> Any:
        for name in names:
            USES[name] = function
        return function

    return enter


@dataclass(frozen=True)
class Entries:
    """The entries of a parameter that a tensor holds: entry i is at offset + Σ stride·i."""

    parameter: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    #: a gathered tensor: which slice of the parameter each place of axis 0 has
    index: Tensor | None = None

    @classmethod
    def of(cls, parameter: Tensor) -> Entries:
        """All of them."""
        size = tuple(parameter.shape)
        return cls(parameter, size, _contiguous(size))

    @property
    def whole(self) -> bool:
        """Whether it is the parameter, perhaps with other axes of length 1 or axes merged."""
        same = self.offset == 0 and prod(self.size) == self.parameter.numel()
        return same and self.index is None and self.dense

    @property
    def dense(self) -> bool:
        """Whether the entries lie one after the other."""
        pairs = zip(self.size, self.stride, _contiguous(self.size), strict=True)
        return all(n == 1 or one == two for n, one, two in pairs)


@dataclass(frozen=True)
class Direction:
    """What weight normalization makes of v and g: g v/‖v‖, with a length per slice along `dim`."""

    direction: Tensor
    length: Tensor
    dim: int


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(size[i + 1 :]) for i in range(len(size)))


class FunctionMode(TorchFunctionMode):
    """Gives the uses of parameters by functions to a listener."""

    def __init__(self, listener: Recorder) -> None:
        super().__init__()
        self.listener = listener
        #: copies and the like with their version, held so that no others get their place in memory
        self._derived: dict[int, tuple[Tensor, int, Entries | Direction]] = {}

    def __exit__(self, *exc: Any) -> None:
        self._derived.clear()
        super().__exit__(*exc)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        noted = USES.get(getattr(func, "__name__", ""))
        if noted is None or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        found = noted(self, out, *args, **kwargs)
        if found is None:
            return out
        return found

    # --- parameters -------------------------------------------------------------------------

    def entries(self, t: Any) -> Entries | None:
        """Which entries of a parameter a tensor holds, or None."""
        if not isinstance(t, Tensor) or not t.requires_grad:
            return None
        if self.listener.parameter(t):
            return Entries.of(t)
        if (known := self._known(t)) is not None:
            if isinstance(known, Entries):
                return known
            return None
        if t._base is None or not t._base.is_contiguous():
            return None
        base = self.entries(t._base)
        if base is None or not base.dense or base.index is not None:
            return None
        offset = base.offset + int(t.storage_offset() - t._base.storage_offset())
        return Entries(base.parameter, tuple(t.shape), t.stride(), offset)

    def whole(self, t: Any) -> Tensor | None:
        """The parameter that a tensor is, or None."""
        found = self.entries(t)
        if found is not None and found.whole:
            return found.parameter
        return None

    def weight(self, t: Any) -> Tensor | Direction | None:
        """The same, or what weight normalization made it of."""
        known = self._known(t)
        if isinstance(known, Direction):
            return known
        return self.whole(t)

    def derive(self, out: Tensor, source: Entries | Direction) -> None:
        """Note a tensor that holds these entries, or was made of a direction."""
        self._derived[id(out)] = out, out._version, source

    def _known(self, t: Any) -> Entries | Direction | None:
        """What a tensor was derived from, unless it was changed since."""
        _, version, source = self._derived.get(id(t), (None, None, None))
        if source is not None and version == t._version:
            return source
        return None

    # --- uses -------------------------------------------------------------------------------

    def note(
        self,
        kind: type[nn.Module],
        x: Tensor,
        out: Tensor,
        held: Mapping[str, Any],
        **settings: Any,
    ) -> Tensor:
        """Write down a use of a module of torch's own with these parameters and settings."""
        own = held.get("weight")
        known = dict(held)
        if isinstance(own, Direction):
            turned = own
        else:
            turned = None
        if turned is not None:
            known["weight"] = turned.direction

        def make() -> nn.Module:
            module = kind.__new__(kind)
            nn.Module.__init__(module)
            module.__dict__.update(settings, _parameters=known)
            if turned is None:
                return module
            return NormalizedUse(module, turned.length, turned.dim)

        key = (kind, *map(id, known.values()), turned is None, *settings.values())
        try:
            hash(key)
        except TypeError:  # settings with tensors
            key = None
        return self.listener.note(key, make, x, out)

    def product(
        self,
        out: Tensor,
        weight: Any,
        x: Any,
        letters: tuple[str, str, str],
        bias: Any = None,
        index: Tensor | None = None,
    ) -> Tensor | None:
        """Note out = Σ weight · x (+ bias), by the letters of weight, x and out as in `einsum`."""
        entries = self.entries(weight)
        if entries is None or not isinstance(x, Tensor) or self.entries(x) is not None:
            return None
        given = Multiplication.read(entries, letters, index)
        if given is None:
            return None
        shift = self.entries(bias)
        own = entries.parameter
        many = given.form[0]
        held: dict[str, Tensor | None] = {"weight": own, "bias": None}
        if shift is not None and shift.dense and shift.parameter.numel() == many * given.form[1]:
            start = given.first * given.form[1]
            fits = prod(shift.size) == given.used * given.form[1] and shift.offset == start
            held["bias"] = shift.parameter if fits and given.index is None else None
        if given.plain and entries.whole and own.ndim == 2:
            return self.note(nn.Linear, x, out, held)
        if given.turned:
            kind = TurnedProduct
        else:
            kind = ProductUse
        if given.index is not None:
            key = None
        else:
            key = (kind, *map(id, held.values()), given)
        seen = given.inputs(x).detach()
        return self.listener.note(key, lambda: kind(held, given), seen, out)
