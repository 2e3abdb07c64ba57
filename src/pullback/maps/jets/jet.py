"""A tensor with its derivatives in the inputs, and the rows Σ_t δ_t ⊗ ā_t of small layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scheme import Scheme


class Unsupported(Exception):
    """An operation without a rule for jets."""


@dataclass(frozen=True)
class LinearUse:
    """One use of a linear layer: the jets of its input and output; a bias adds to the value."""

    weight: str | None
    bias: str | None
    input: Jet
    output: Jet

    @property
    def channels(self) -> list[Tensor]:
        """The channels (B, …, I) of the input whose output was computed."""
        channels = self.input.channels(self.output.computed_flags)
        return [x.detach().expand(self.input.shape) for x in channels]


@dataclass
class Tape:
    """A record of the linear layers that a jet passes.

    Attributes:
        names: of the parameters, by id.
        points: how many there are; a layer that sees another number is not recorded.
    """

    names: dict[int, str]
    points: int
    uses: list[LinearUse] = field(default_factory=list)


Rule = Callable[..., Any]
RULES: dict[Any, Rule] = {}


def rule(*functions: Any):
    """Decorator: the function says how these functions of torch act on jets."""

    def enter(act: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, act))
        return act

    return enter


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the rule of a function of torch gives; raise `Unsupported` without a rule."""
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
    """Tensors, each computed when it is first read.

    Derivatives that the last layers carry but no residual reads are never computed: in a shallow
    network with a Laplacian, all first derivatives behind the activation.
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
    def computed_flags(self) -> tuple[bool, ...]:
        """For each tensor, True if it was computed."""
        return tuple(isinstance(cell, Tensor) for cell in self._cells)


_OF_VALUE = ("shape", "ndim", "dim", "size", "dtype", "device", "requires_grad")


class Jet:
    """A value, its first derivatives (m, *shape) and the higher ones, in the scheme's order.

    Modules see an ordinary tensor of the value's shape: torch's functions are sent to the rules of
    this package. Derivatives may be functions, which are called when they are first read. `affine`
    says that all derivatives above the first vanish.
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
        """Return the jet of the coordinates: ∂_i x = e_i, and higher derivatives vanish."""
        axes = [index[0] for index in scheme.indices[scheme.first]]
        units = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[axes]
        # the same at all points: one copy, until an operation tells the points apart
        zeros = [torch.zeros_like(x[:1])] * (len(scheme) - 1 - len(axes))
        return cls(x, units[:, None], zeros, scheme, affine=True)

    def record_on(self, tape: Tape | None) -> Jet:
        """Return this jet with a tape that records the linear layers it will pass."""
        return Jet(self.value, self.first, self.higher, self.scheme, tape, self.affine)

    def expand_channels(self) -> Jet:
        """Return the jet with all channels in the value's shape."""
        return self.map_channels(lambda x, n: x.expand(*x.shape[:n], *self.value.shape))

    def replace_channels(
        self, value: Tensor, first: Cell, higher: Iterable[Cell], affine: bool = False
    ) -> Jet:
        """Return a jet of the same scheme and tape with other channels."""
        return Jet(value, first, higher, self.scheme, self.tape, affine)

    def map_channels(
        self, op: Callable[..., Tensor], *others: Jet, value: Tensor | None = None
    ) -> Jet:
        """Return the jet whose channels are `op` of the channels of one or several jets.

        `op` must be linear. Its last argument is the number of axes in front of the value's: 1 for
        the first derivatives, else 0. A `value` replaces the value's channel.
        """
        jets = (self, *others)
        if value is None:
            value = op(*(j.value for j in jets), 0)
        higher = [lambda i=i: op(*(j.higher[i] for j in jets), 0) for i in range(len(self.higher))]
        affine = all(j.affine for j in jets)
        return self.replace_channels(value, lambda: op(*(j.first for j in jets), 1), higher, affine)

    def channel(self, i: int) -> Tensor:
        """Return one channel by its position in the scheme."""
        m = self.scheme.first.stop - 1
        if i == 0:
            return self.value
        if i <= m:
            return self.first[i - 1]
        return self.higher[i - 1 - m]

    @property
    def computed_flags(self) -> tuple[bool, ...]:
        """Which channels were computed: first derivatives together, then each higher one."""
        return (*self._first.computed_flags, *self.higher.computed_flags)

    def tensors(self, selected: tuple[bool, ...] | None = None) -> list[Tensor]:
        """Return the value, first derivatives in one tensor and higher ones.

        `selected` says which, in the order of `computed`; by default those computed so far.
        """
        if selected is None:
            selected = self.computed_flags
        out = [self.value]
        if selected[0]:
            out.append(self.first)
        out.extend(self.higher[i] for i, is_selected in enumerate(selected[1:]) if is_selected)
        return out

    def channels(self, selected: tuple[bool, ...] | None = None) -> list[Tensor]:
        """Return the same tensors, with the first derivatives one by one."""
        if selected is None:
            selected = self.computed_flags
        value, *derivatives = self.tensors(selected)
        if not selected[0]:
            return [value, *derivatives]
        first, *higher = derivatives
        return [value, *first.unbind(), *higher]

    def stack_channels(self) -> Tensor:
        """Return all channels, (T, *shape)."""
        channels = self.channels((True,) * len(self.computed_flags))
        return torch.stack([x.expand(self.shape) for x in channels])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _apply(func, *args, **(kwargs or {}))

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        """Return the value's shape and dtype, or a tensor's method: jet.sin() is torch.sin(jet)."""
        if name in _OF_VALUE:
            return getattr(self.value, name)
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(Tensor, name, None)
        if method not in RULES:
            raise Unsupported(f"Tensor.{name}")
        return partial(_apply, method, self)

    def __getitem__(self, index: Any) -> Jet:
        if not isinstance(index, tuple):
            index = (index,)
        if not all(_is_basic_index(i) for i in index):
            return self._gather(index)
        indexed_axes = sum(i is not None and i is not Ellipsis for i in index)
        keeps_points = index[:1] == (slice(None),) or (
            index[:1] == (Ellipsis,) and indexed_axes < self.ndim
        )
        jet = self
        if not keeps_points:
            jet = self.expand_channels()
        return jet.map_channels(lambda x, front: x[(slice(None),) * front + index])

    def _gather(self, index: tuple[Any, ...]) -> Jet:
        """Return the entries at an index with tensors or lists.

        Axes of several index tensors move to the front, so the first derivatives are indexed one
        by one. All channels are computed at once, because the tensors may change afterwards.
        """
        jet = self.expand_channels()
        value = jet.value[index]
        first = value.new_zeros(0, *value.shape)
        if len(jet.first):
            first = torch.stack([x[index] for x in jet.first])
        return self.replace_channels(value, first, [h[index] for h in jet.higher])


def _is_basic_index(index: Any) -> bool:
    """Return True for an index that gives a view of a tensor."""
    return index is None or index is Ellipsis or isinstance(index, (int, slice))


def _define_operator(name: str) -> None:
    """Let an operator act by the rule of the tensor's method; without a rule it is refused.

    Python has wrong defaults for some: == by identity, += by a new name.
    """

    def method(self: Jet, *args: Any) -> Any:
        return _apply(getattr(Tensor, name, name), self, *args)

    setattr(Jet, name, method)


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    for _prefix in ("", "r", "i"):
        _define_operator(f"__{_prefix}{_name}__")
for _name in ("neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "bool", "setitem"):
    _define_operator(f"__{_name}__")


#: cotangents (S·N, …, O) for each of R covectors and T channels
Deltas = Sequence[Sequence[Tensor]]

_PASSES = 16  # passes over the entries that take as long as a batch of tiny matrix products


def should_loop_over_features(use: LinearUse, deltas: Deltas, sites: int) -> bool:
    """Return True if the layer is so narrow on one side that a loop over it is fastest."""
    delta = deltas[0][0]
    passes = len(deltas[0]) * sites * min(delta.shape[-1], use.input.shape[-1])
    return delta.ndim == 2 and passes <= _PASSES and not delta.is_cuda


class _ChannelTerm(NamedTuple):
    """One term of Σ_t δ_t ⊗ a_t: cotangents (N, R, O) and inputs (N, I) of a channel and site."""

    channel: int
    delta: Tensor
    input: Tensor


def write_rows(
    use: LinearUse, deltas: Deltas, sites: int, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Write the rows of one use of a layer to weight (N, R, O·I) and bias (N, R, O)."""
    terms = _list_terms(use, deltas, sites)
    if bias is not None:
        for term in terms:
            if term.channel == 0:
                bias += term.delta
    if weight is not None and terms:
        out = weight.unflatten(-1, (deltas[0][0].shape[-1], use.input.shape[-1]))
        if use.input.shape[-1] <= out.shape[-2]:
            _write_by_input(terms, out)
        else:
            _write_by_output(terms, out)


def _list_terms(use: LinearUse, deltas: Deltas, sites: int) -> list[_ChannelTerm]:
    """Return the terms of the rows, without channels whose cotangents are all zero."""
    terms = []
    for t, a in enumerate(use.channels):
        by_covector = [channels[t] for channels in deltas]
        if all(delta.stride() == (0, 0) for delta in by_covector):  # zeros are one number, expanded
            continue
        if len(by_covector) == 1:
            delta = by_covector[0][:, None]
        else:
            delta = torch.stack(by_covector, 1)
        for pair in zip(delta.chunk(sites), a.chunk(sites), strict=True):
            terms.append(_ChannelTerm(t, *pair))
    return terms


def _write_by_input(terms: Sequence[_ChannelTerm], out: Tensor) -> None:
    """Write Σ_t δ_t ⊗ a_t to `out` (N, R, O, I), one input feature after the other."""
    first, *others = terms
    for k in range(out.shape[-1]):
        total = first.delta * first.input[:, None, k, None]
        for term in others:
            total.addcmul_(term.delta, term.input[:, None, k, None])
        out[..., k].copy_(total)


def _write_by_output(terms: Sequence[_ChannelTerm], out: Tensor) -> None:
    """Write Σ_t δ_t ⊗ a_t to `out` (N, R, O, I), one output feature after the other."""
    first, *others = terms
    for k in range(out.shape[-2]):
        total = first.delta[..., k, None] * first.input[:, None]
        for term in others:
            total.addcmul_(term.delta[..., k, None], term.input[:, None])
        out[:, :, k].copy_(total)
