"""A tensor with its derivatives in the inputs, and the rows Σ_t δ_t ⊗ ā_t of small layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .scheme import Scheme


class Unsupported(Exception):
    """An operation without a rule for jets."""


@dataclass(frozen=True)
class Used:
    """One use of a linear layer: the channels of its input and output, the bias in the value."""

    weight: str | None
    bias: str | None
    input: Jet
    output: Jet

    @property
    def channels(self) -> list[Tensor]:
        """The input's channels (B, …, I) that went on into the output."""
        found = self.input.channels(self.output.asked)
        return [x.detach().expand(self.input.shape) for x in found]


@dataclass
class Tape:
    """Linear layers met on the way, by the names of their parameters.

    Attributes:
        names: of the parameters, by id.
        points: how many there are; a layer that sees another number is not recorded.
    """

    names: dict[int, str]
    points: int
    uses: list[Used] = field(default_factory=list)


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*functions: Any):
    """Decorator: how these functions of torch act on jets."""

    def enter(act: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, act))
        return act

    return enter


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What the rule of a function of torch says."""
    act = RULES.get(function)
    name = getattr(function, "__name__", str(function))
    if act is None:
        raise Unsupported(name)
    try:
        return act(*args, **kwargs)
    except TypeError as error:  # out=, dtype= and the like
        raise Unsupported(f"{name} with these arguments ({error})") from error


Cell = Tensor | Callable[[], Tensor]


class Cells(Sequence[Tensor]):
    """Tensors, each computed when it is first asked for.

    What the last layers carry but no residual asks for is never computed: of a shallow network
    with a Laplacian all first derivatives behind the activation.
    """

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._cells = list(cells)

    def __len__(self) -> int:
        return len(self._cells)

    def __getitem__(self, i: Any) -> Any:
        cell = self._cells[i]
        if not isinstance(cell, Tensor):
            cell = self._cells[i] = cell()
        return cell

    @property
    def asked(self) -> tuple[bool, ...]:
        """Which of them are there."""
        return tuple(isinstance(cell, Tensor) for cell in self._cells)


_OF_VALUE = ("shape", "ndim", "dim", "size", "dtype", "device", "requires_grad")


class Jet:
    """A value, its first derivatives (m, *shape) and the higher ones, in the scheme's order.

    Modules see an ordinary tensor of the value's shape: torch's functions are sent to the rules of
    this package. Derivatives may be given as functions and are computed on demand. `affine` says
    that all above the first are known to vanish.
    """

    def __init__(
        self,
        value: Tensor,
        first: Cell,
        higher: Iterable[Cell],
        scheme: Scheme,
        tape: Tape | None = None,
        affine: bool = False,
    ) -> None:
        self.value = value
        self._first = Cells([first])
        self.higher = Cells(higher)
        self.scheme = scheme
        self.tape = tape
        self.affine = affine

    @property
    def first(self) -> Tensor:
        """∂_i for the scheme's axes, (m, *shape)."""
        return self._first[0]

    @classmethod
    def input(cls, x: Tensor, scheme: Scheme) -> Jet:
        """The coordinates themselves: ∂_i x = e_i, and nothing above."""
        axes = [index[0] for index in scheme.indices[scheme.first]]
        units = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[axes]
        # the same at every point: held once, until an operation tells the points apart
        zeros = [torch.zeros_like(x[:1])] * (len(scheme) - 1 - len(axes))
        return cls(x, units[:, None], zeros, scheme, affine=True)

    def taped(self, tape: Tape | None) -> Jet:
        """The same jet, with linear layers recorded from here on."""
        return Jet(self.value, self.first, self.higher, self.scheme, tape, self.affine)

    def full(self) -> Jet:
        """Every channel in the value's shape."""
        return self.each(lambda x, n: x.expand(*x.shape[:n], *self.value.shape))

    def like(self, value: Tensor, first: Cell, higher: Iterable[Cell], affine: bool = False) -> Jet:
        """The same kind of jet with other channels."""
        return Jet(value, first, higher, self.scheme, self.tape, affine)

    def each(self, op: Callable[..., Tensor], *others: Jet, value: Tensor | None = None) -> Jet:
        """A linear operation on every channel of one or several jets; the value may be another.

        The last argument of `op` is the number of axes that lie in front.
        """
        jets = (self, *others)
        if value is None:
            value = op(*(j.value for j in jets), 0)
        higher = [lambda i=i: op(*(j.higher[i] for j in jets), 0) for i in range(len(self.higher))]
        affine = all(j.affine for j in jets)
        return self.like(value, lambda: op(*(j.first for j in jets), 1), higher, affine)

    def channel(self, i: int) -> Tensor:
        """One channel, by its position in the scheme."""
        m = self.scheme.first.stop - 1
        if i == 0:
            return self.value
        if i <= m:
            return self.first[i - 1]
        return self.higher[i - 1 - m]

    @property
    def asked(self) -> tuple[bool, ...]:
        """Which channels were computed: first derivatives together, then each higher one."""
        return (*self._first.asked, *self.higher.asked)

    def tensors(self, asked: tuple[bool, ...] | None = None) -> list[Tensor]:
        """Value, first derivatives and higher ones; by default those computed so far."""
        cells = [lambda: self.first, *(lambda i=i: self.higher[i] for i in range(len(self.higher)))]
        wanted = zip(cells, self.asked if asked is None else asked, strict=True)
        return [self.value, *(cell() for cell, yes in wanted if yes)]

    def channels(self, asked: tuple[bool, ...] | None = None) -> list[Tensor]:
        """The same, with the first derivatives one by one."""
        if asked is None:
            asked = self.asked
        value, *rest = self.tensors(asked)
        if asked[0]:
            first = rest.pop(0).unbind()
        else:
            first = ()
        return [value, *first, *rest]

    def stacked(self) -> Tensor:
        """All channels, (T, *shape)."""
        every = self.channels((True,) * len(self.asked))
        return torch.stack([x.expand(self.shape) for x in every])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _apply(func, *args, **(kwargs or {}))

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """What the value says of its form, and methods of tensors: jet.sin() is torch.sin(jet)."""
        if name in _OF_VALUE:
            return getattr(self.value, name)
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(Tensor, name, None)
        if method not in RULES:
            raise Unsupported(f"Tensor.{name}")
        return partial(_apply, method, self)

    def __getitem__(self, index: Any) -> Jet:
        if not (isinstance(index, tuple)):
            index = (index,)
        if not all(i is None or i is Ellipsis or isinstance(i, (int, slice)) for i in index):
            # positions of several tensors move to the front: derivatives must not be in the way
            # and at once: lists and tensors may be changed after their use
            jet = self.full()
            value = jet.value[index]
            first = [x[index] for x in jet.first]
            empty = value.new_zeros(0, *value.shape)
            higher = [h[index] for h in jet.higher]
            return self.like(value, torch.stack(first) if first else empty, higher)
        taken = sum(i is not None and i is not Ellipsis for i in index)
        alike = index[:1] == (slice(None),) or (index[:1] == (Ellipsis,) and taken < self.ndim)
        return (self if alike else self.full()).each(
            lambda x, front: x[(slice(None),) * front + index]
        )


def _operator(name: str) -> None:
    """Let an operator act by the rule of the tensor's method, and refuse it where there is none.

    Python would answer some by itself, wrongly: == by identity, += by a new name.
    """

    def method(self: Jet, *args: Any) -> Any:
        return _apply(getattr(Tensor, name, name), self, *args)

    setattr(Jet, name, method)


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    for _kind in ("", "r", "i"):
        _operator(f"__{_kind}{_name}__")
for _name in ("neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "bool", "setitem"):
    _operator(f"__{_name}__")


#: cotangents (S·N, …, O) for each of R covectors and T channels
Deltas = Sequence[Sequence[Tensor]]

_PASSES = 16  # over the entries, that a batch of tiny matrix products is worth


def prefers_loop(used: Used, deltas: Deltas, sites: int) -> bool:
    """Whether the layer is so narrow on one side that a loop over it is fastest."""
    delta = deltas[0][0]
    passes = len(deltas[0]) * sites * min(delta.shape[-1], used.input.shape[-1])
    return delta.ndim == 2 and passes <= _PASSES and not delta.is_cuda


def write_rows(
    used: Used, deltas: Deltas, sites: int, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Write the rows of one use of a layer to weight (N, R, O·I) and bias (N, R, O)."""
    terms = []
    for t, a in enumerate(used.channels):
        d = [one[t] for one in deltas]
        if any(x.stride() != (0, 0) for x in d):  # which marks zeros
            if len(d) == 1:
                joint = d[0][:, None]
            else:
                joint = torch.stack(d, 1)
            terms += [(t, *pair) for pair in zip(joint.chunk(sites), a.chunk(sites), strict=True)]
    if bias is not None:
        for d in (d for t, d, _ in terms if t == 0):
            bias += d
    if weight is not None and terms:
        out = weight.unflatten(-1, (deltas[0][0].shape[-1], used.input.shape[-1]))
        _outer([d for _, d, _ in terms], [a for _, _, a in terms], out)


def _outer(d: Sequence[Tensor], a: Sequence[Tensor], out: Tensor) -> None:
    """Σ_t d_t ⊗ a_t of (N, R, O) and (N, I) into (N, R, O, I), feature by feature."""
    few = a[0].shape[-1] <= d[0].shape[-1]
    for k in range(min(a[0].shape[-1], d[0].shape[-1])):
        if few:
            pairs = [(delta, x[:, None, k, None]) for delta, x in zip(d, a, strict=True)]
        else:
            pairs = [(delta[..., k, None], x[:, None]) for delta, x in zip(d, a, strict=True)]
        some = pairs[0][0] * pairs[0][1]
        for one, two in pairs[1:]:
            some.addcmul_(one, two)
        (out[..., k] if few else out[:, :, k]).copy_(some)
