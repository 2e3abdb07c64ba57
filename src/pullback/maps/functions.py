"""What functions do with a parameter, written down as the layer that torch has for it.

`F.linear(x, w)` is a use of a linear layer whoever calls it, and so are `x @ w.T`, an `einsum` or a
`bmm` with a stack of experts. A `FunctionMode` sees the calls of a forward pass, recognizes views
and copies of parameters by where their entries lie, and gives every use to the recorder with a
module that stands for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from string import ascii_letters
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .layers.directed import Directed
from .layers.gain import Gain
from .layers.product import Product, TurnedProduct

#: functions whose result has the same entries
_COPIES = {"to", "contiguous", "clone", "float", "double", "half", "bfloat16", "type", "type_as"}
_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


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


class Listener(Protocol):
    """Who writes uses down."""

    def parameter(self, t: Tensor) -> bool:
        """Whether it is a parameter that takes part."""
        ...

    def note(self, key: Any, make: Callable[[], nn.Module], x: Tensor, output: Tensor) -> Tensor:
        """Write down a use of the module that stands for it; return the output to go on with.

        Uses with the same `key` share the module; None is a key of its own each time.
        """
        ...


class FunctionMode(TorchFunctionMode):
    """Gives the uses of parameters by functions to a listener."""

    def __init__(self, listener: Listener) -> None:
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
        use = _USES.get(getattr(func, "__name__", ""))
        if use is None or not isinstance(out, Tensor) or not out.requires_grad:
            return out
        found = use(self, out, *args, **kwargs)
        return out if found is None else found

    # --- parameters -------------------------------------------------------------------------

    def entries(self, t: Any) -> Entries | None:
        """Which entries of a parameter a tensor holds, or None."""
        if not isinstance(t, Tensor) or not t.requires_grad:
            return None
        if self.listener.parameter(t):
            return Entries.of(t)
        if (known := self._known(t)) is not None:
            return known if isinstance(known, Entries) else None
        if t._base is None or not t._base.is_contiguous():
            return None
        base = self.entries(t._base)
        if base is None or not base.dense or base.index is not None:
            return None
        offset = base.offset + t.storage_offset() - t._base.storage_offset()
        return Entries(base.parameter, tuple(t.shape), t.stride(), offset)

    def whole(self, t: Any) -> Tensor | None:
        """The parameter that a tensor is, or None."""
        found = self.entries(t)
        return found.parameter if found is not None and found.whole else None

    def weight(self, t: Any) -> Tensor | Direction | None:
        """The same, or what weight normalization made it of."""
        known = self._known(t)
        return known if isinstance(known, Direction) else self.whole(t)

    def derive(self, out: Tensor, source: Entries | Direction) -> None:
        """Note a tensor that holds these entries, or was made of a direction."""
        self._derived[id(out)] = out, out._version, source

    def _known(self, t: Any) -> Entries | Direction | None:
        """What a tensor was derived from, unless it was changed since."""
        _, version, source = self._derived.get(id(t), (None, None, None))
        return source if source is not None and version == t._version else None

    # --- uses -------------------------------------------------------------------------------

    def note(
        self, kind: type[nn.Module], x: Tensor, out: Tensor, held: Mapping[str, Any], **settings: Any
    ) -> Tensor:
        """Write down a use of a module of torch's own with these parameters and settings."""

        own, known = held.get("weight"), dict(held)
        turned = own if isinstance(own, Direction) else None
        if turned is not None:
            known["weight"] = turned.direction

        def make() -> nn.Module:
            module = kind.__new__(kind)
            nn.Module.__init__(module)
            module.__dict__.update(settings, _parameters=known)
            return module if turned is None else Directed(module, turned.length, turned.dim)

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
        given = _Product.read(entries, letters, index)
        if given is None:
            return None
        shift = self.entries(bias)
        own, many = entries.parameter, given.form[0]
        held: dict[str, Tensor | None] = {"weight": own, "bias": None}
        if shift is not None and shift.dense and shift.parameter.numel() == many * given.form[1]:
            start = given.first * given.form[1]
            fits = prod(shift.size) == given.used * given.form[1] and shift.offset == start
            held["bias"] = shift.parameter if fits and given.index is None else None
        if given.plain and entries.whole and own.ndim == 2:
            return self.note(nn.Linear, x, out, held)
        kind = TurnedProduct if given.turned else Product

        def make() -> nn.Module:
            return kind(
                held, given.form, first=given.first, used=given.used, order=given.order,
                axes=given.axes, index=given.index,
            )  # fmt: skip

        key = None
        if given.index is None:
            key = (kind, *map(id, held.values()), given.form, given.first, given.order, given.axes)
        return self.listener.note(key, make, given.arranged(x).detach(), out)


@dataclass(frozen=True)
class _Product:
    """A product with matrices in a parameter: which ones, and where the axes of x and out go."""

    form: tuple[int, int, int]
    first: int
    used: int
    turned: bool
    order: tuple[int, ...]
    axes: tuple[int, int]
    index: Tensor | None
    #: axes of x that are added up; then its axes (lead, places, matrices, features), by count
    summed: tuple[int, ...]
    x_order: tuple[int, ...]
    counts: tuple[int, int, int, int]
    #: whether the output's features come last, and those of x
    plain: bool

    @classmethod
    def read(
        cls, entries: Entries, letters: tuple[str, str, str], index: Tensor | None
    ) -> _Product | None:
        """Read a product off; None where a parameter is used in another way than by matrices."""
        w, x, z = letters
        if any(len({*some}) < len(some) for some in letters):
            return None
        axes = dict(zip(w, zip(entries.size, entries.stride, strict=True), strict=True))
        if index is not None or entries.index is not None:  # axis 0 is picked by place
            index = entries.index if index is None else index
            if entries.index is not None and w[0] not in z[:1]:
                return None
            axes.pop(w[0])
        shared = {a for a, (n, s) in axes.items() if a in x and a in z and (n == 1 or s == 0)}
        axes = {a: pair for a, pair in axes.items() if a not in shared}  # expanded to these
        if any(a not in x and a not in z for a in axes):
            return None
        picked = sorted((a for a in axes if a in x and a in z), key=lambda a: -axes[a][1])
        outer = sorted((a for a in axes if a not in x), key=lambda a: -axes[a][1])
        inner = sorted((a for a in axes if a not in z), key=lambda a: -axes[a][1])
        found = _matrices(entries, *([axes[a] for a in some] for some in (picked, outer, inner)))
        if found is None:
            return None
        form, first, used, turned = found
        if index is not None and (first or picked):
            return None
        lead = 0
        while lead < len(z) and z[lead] in x and z[lead] not in axes:
            lead += 1
        rest = [a for a in z[lead:] if a not in axes]
        if any(a not in x for a in rest):  # the weight was expanded along it
            return None
        tail = [*rest, *picked, *outer]
        order = tuple(z.index(a) - len(z) for a in tail)
        x_order = tuple(x.index(a) for a in [*z[:lead], *rest, *picked, *inner])
        summed = tuple(i for i, a in enumerate(x) if a not in z and a not in axes)
        counts = (lead, len(rest), len(picked), len(inner))
        plain = not turned and form[0] == 1 and index is None
        plain = plain and order == (-1,) and x_order == tuple(range(len(x)))
        if index is not None and len(rest) + lead > 1:
            index = index.view(-1, *[1] * (len(rest) + lead - 1))
        return cls(form, first, used, turned, order, (len(picked), len(outer)), index, summed,
                   x_order, counts, plain)  # fmt: skip

    def arranged(self, x: Tensor) -> Tensor:
        """Bring x to (*lead, places, matrices, features)."""
        if self.summed:
            x = x.sum(self.summed, keepdim=True)
        x = x.permute(*self.x_order, *self.summed)
        sizes, (lead, rest, picked, _) = x.shape, self.counts
        t, m = prod(sizes[lead : lead + rest]), prod(sizes[lead + rest : lead + rest + picked])
        return x.reshape(*sizes[:lead], t, m, -1)


def _matrices(
    entries: Entries, picked: Sequence[Any], outer: Sequence[Any], inner: Sequence[Any]
) -> tuple[tuple[int, int, int], int, int, bool] | None:
    """Form (G, O, I), first matrix, how many, and whether turned; None if they are no matrices."""
    merged = [_merged(some) for some in (picked, outer, inner)]
    if any(m is None for m in merged):
        return None
    (used, apart), (o, down), (i, along) = merged  # pyright: ignore[reportGeneralTypeIssues]
    if (i == 1 or along == 1) and (o == 1 or down == i):
        turned = False
    elif (o == 1 or down == 1) and (i == 1 or along == o):
        turned = True
    else:
        return None
    size, total = o * i, entries.parameter.numel()
    if not size or (used > 1 and apart != size) or entries.offset % size or total % size:
        return None
    return (total // size, o, i), entries.offset // size, used, turned


def _merged(axes: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Length and stride of several axes as one."""
    axes = [pair for pair in axes if pair[0] != 1]
    if any(s != n * t for (_, s), (n, t) in zip(axes, axes[1:], strict=False)):
        return None
    return (prod(n for n, _ in axes), axes[-1][1]) if axes else (1, 1)


# --- functions, by name -------------------------------------------------------------------------

_USES: dict[str, Callable[..., Tensor | None]] = {}


def _use(*names: str) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        _USES.update(dict.fromkeys(names, function))
        return function

    return enter


@_use(*_COPIES)
def _copy(mode: FunctionMode, out: Tensor, source: Any, *args: Any, **kwargs: Any) -> None:
    entries = mode.entries(source)
    if entries is not None and out is not source and out.shape == source.shape:
        mode.derive(out, entries)


@_use("linear")
def _linear(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None
) -> Tensor | None:
    if weight.ndim == 2 and mode.entries(weight) is not None:
        lead = ascii_letters[2 : 1 + input.ndim]
        return mode.product(out, weight, input, ("ab", f"{lead}b", f"{lead}a"), bias)
    own, shift = mode.weight(weight), mode.whole(bias)
    if own is None and shift is None:
        return None
    return mode.note(nn.Linear, input, out, {"weight": weight if own is None else own,
                                             "bias": shift})  # fmt: skip


@_use("_weight_norm")
def _weight_norm(mode: FunctionMode, out: Tensor, v: Tensor, g: Tensor, dim: int = 0) -> None:
    own, length = mode.whole(v), mode.whole(g)
    if own is not None and own is v and length is not None:
        mode.derive(out, Direction(own, length, dim))


@_use("matmul", "mm", "bmm", "__matmul__")
def _matmul(mode: FunctionMode, out: Tensor, input: Any, mat2: Any = None, **names: Any) -> Any:
    return _times(mode, out, input, names.get("other", mat2))


def _times(mode: FunctionMode, out: Tensor, one: Any, two: Any, bias: Any = None) -> Tensor | None:
    """Note a product of matrices, of which one is a parameter."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or min(one.ndim, two.ndim) < 2:
        return None
    batch = ascii_letters[3 : 1 + max(one.ndim, two.ndim)]
    letters = [batch[len(batch) + 2 - t.ndim :] for t in (one, two)]
    result = f"{batch}ac"
    if mode.entries(two) is not None:
        x, given = one, (f"{letters[1]}bc", f"{letters[0]}ab", result)
        return mode.product(out, *_spread(two, x, given), bias)
    if mode.entries(one) is not None:
        x, given = two, (f"{letters[0]}ab", f"{letters[1]}bc", result)
        return mode.product(out, *_spread(one, x, given))
    return None


def _spread(w: Tensor, x: Tensor, letters: tuple[str, str, str]) -> Any:
    """Expand x along the axes of w that it lacks: every matrix then has the same places."""
    sizes = dict(zip(letters[0], w.shape, strict=True))
    lacking = [a for a in letters[0][:-2] if a not in letters[1] and sizes[a] > 1]
    x = x.expand(*(sizes[a] for a in lacking), *x.shape)
    names = "".join(lacking) + letters[1]
    x = x.expand(*(sizes.get(a, n) if n == 1 and a in letters[0][:-2] else n
                   for a, n in zip(names, x.shape, strict=True)))  # fmt: skip
    return w, x, (letters[0], names, letters[2])


@_use("addmm", "baddbmm")
def _addmm(
    mode: FunctionMode, out: Tensor, input: Any, one: Any = None, two: Any = None, **names: Any
) -> Tensor | None:
    if names.get("beta", 1) != 1 or names.get("alpha", 1) != 1:
        return None
    one = names.get("mat1", names.get("batch1", one))
    two = names.get("mat2", names.get("batch2", two))
    return _times(mode, out, one, two, input)


@_use("einsum")
def _einsum(mode: FunctionMode, out: Tensor, equation: Any, *operands: Any) -> Tensor | None:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = (*operands[0],)
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if not arrow or len(names) != 2:
        return None
    free = [a for a in ascii_letters if a not in equation]
    for k, (name, t) in enumerate(zip(names, operands, strict=True)):
        more = t.ndim - len(name.replace("...", ""))
        names[k] = name.replace("...", "".join(free[:more]))
        if "..." in name:
            result = result.replace("...", "".join(free[:more]))
    if any(len(n) != t.ndim for n, t in zip(names, operands, strict=True)):
        return None
    for k in (1, 0):
        entries = mode.entries(operands[k])
        if entries is not None:
            w, x = operands[k], operands[1 - k]
            given = (names[k], names[1 - k], result)
            sizes = dict(zip(names[k], entries.size, strict=True))
            if _Product.read(entries, given, None) is None:  # every matrix meets the same places
                first = names[k][0]
                if first in result and first not in names[1 - k]:
                    x = x.expand(sizes[first], *x.shape)
                    given = (names[k], first + names[1 - k], result)
            return mode.product(out, w, x, given)
    return None


@_use("grouped_mm", "_grouped_mm")
def _grouped(
    mode: FunctionMode, out: Tensor, mat_a: Tensor, mat_b: Tensor, *args: Any, **names: Any
) -> Tensor | None:
    offsets = names.get("offs", args[0] if args else None)
    if offsets is None or mat_a.ndim != 2 or mat_b.ndim != 3:
        return None
    rows = torch.arange(len(mat_a), device=mat_a.device, dtype=offsets.dtype)
    index = torch.searchsorted(offsets, rows, right=True).clamp(max=len(mat_b) - 1)
    return mode.product(out, mat_b, mat_a, ("abc", "db", "dc"), index=index)


@_use("grouped_mm_fallback")
def _grouped_fallback(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, offs: Tensor
) -> Tensor | None:
    return _grouped(mode, out, input, weight, offs)


@_use("conv1d", "conv2d", "conv3d")
def _conv(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    own, shift = mode.weight(weight), mode.whole(bias)
    if own is None and shift is None:
        return None
    dims, kernel = weight.ndim - 2, tuple(weight.shape[2:])
    stride, dilation = (_each(v, dims) for v in (stride, dilation))
    if padding == "same":
        sides = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2)
                 for k, d in zip(kernel, dilation, strict=True)]  # fmt: skip
    else:
        sides = [(p, p) for p in _each(0 if padding == "valid" else padding, dims)]
    return mode.note(
        _CONVS[dims], input, out, {"weight": weight if own is None else own, "bias": shift},
        kernel_size=kernel, stride=stride, dilation=dilation, groups=groups, padding_mode="zeros",
        padding=padding if isinstance(padding, str) else _each(padding, dims),
        in_channels=weight.shape[1] * groups, out_channels=weight.shape[0],
        _reversed_padding_repeated_twice=tuple(p for side in sides[::-1] for p in side),
    )  # fmt: skip


@_use("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None,
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor | None:  # fmt: skip
    own = mode.whole(weight)
    if own is None:
        return None
    dims = weight.ndim - 2
    return mode.note(
        _TRANSPOSED[dims], input, out, {"weight": own, "bias": mode.whole(bias)},
        kernel_size=tuple(weight.shape[2:]), stride=_each(stride, dims), groups=groups,
        padding=_each(padding, dims), dilation=_each(dilation, dims), padding_mode="zeros",
        output_padding=_each(output_padding, dims), in_channels=weight.shape[0],
        out_channels=weight.shape[1] * groups,
    )  # fmt: skip


def _each(value: Any, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value) * (dims // len(value))


@_use("embedding")
def _embedding(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, padding_idx: int | None = None,
    *args: Any, **names: Any,
) -> Tensor | None:  # fmt: skip
    if input.is_floating_point():  # torch.embedding has them the other way round
        input, weight = weight, input
    own = mode.whole(weight)
    scaled = any(args[2:]) or names.get("scale_grad_by_freq") or names.get("sparse")
    if own is None or scaled:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return _look_up(mode, out, own, input, padding_idx)


def _look_up(
    mode: FunctionMode, out: Tensor, own: Tensor, index: Tensor, padding: int | None = None
) -> Tensor:
    """Note rows of a table that are looked up."""
    width = out.shape[-1]
    return mode.note(
        nn.Embedding, index, out, {"weight": own}, num_embeddings=own.numel() // max(1, width),
        embedding_dim=width, padding_idx=padding,
    )  # fmt: skip


@_use("__getitem__", "index_select")
def _gather(
    mode: FunctionMode, out: Tensor, source: Tensor, index: Any, *rest: Any
) -> Tensor | None:
    if rest:  # index_select(source, dim, index)
        if index != 0:
            return None
        index = rest[0]
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    entries = mode.entries(source) if isinstance(index, Tensor) else None
    if entries is None or not isinstance(index, Tensor) or index.is_floating_point():
        return None
    if index.dtype == torch.bool or not index.ndim or not entries.whole or source.ndim < 2:
        return None
    if source.shape != entries.parameter.shape:
        return None
    if source.ndim == 2:
        return _look_up(mode, out, entries.parameter, index)
    if index.ndim == 1:  # matrices, for products to come
        mode.derive(out, replace(entries, size=tuple(out.shape), index=index))
    return None


@_use("layer_norm")
def _layer_norm(
    mode: FunctionMode, out: Tensor, input: Tensor, normalized_shape: Any, weight: Any = None,
    bias: Any = None, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    shape = tuple(normalized_shape)
    return _norm(mode, nn.LayerNorm, input, out, weight, bias, normalized_shape=shape, eps=eps)


@_use("rms_norm")
def _rms_norm(
    mode: FunctionMode, out: Tensor, input: Tensor, normalized_shape: Any, weight: Any = None,
    eps: float | None = None,
) -> Tensor | None:  # fmt: skip
    shape = tuple(normalized_shape)
    return _norm(mode, nn.RMSNorm, input, out, weight, None, normalized_shape=shape, eps=eps)


@_use("group_norm")
def _group_norm(
    mode: FunctionMode, out: Tensor, input: Tensor, num_groups: int, weight: Any = None,
    bias: Any = None, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    return _norm(mode, nn.GroupNorm, input, out, weight, bias, num_groups=num_groups, eps=eps)


@_use("batch_norm")
def _batch_norm(
    mode: FunctionMode, out: Tensor, input: Tensor, running_mean: Any, running_var: Any,
    weight: Any = None, bias: Any = None, training: bool = False, momentum: float = 0.1,
    eps: float = 1e-5, *args: Any,
) -> Tensor | None:  # fmt: skip
    return _norm(
        mode, nn.BatchNorm2d, input, out, weight, bias, running_mean=running_mean,
        running_var=running_var, training=training, eps=eps,
    )  # fmt: skip


def _norm(
    mode: FunctionMode, kind: type[nn.Module], x: Tensor, out: Tensor, weight: Any, bias: Any,
    **settings: Any,
) -> Tensor | None:  # fmt: skip
    own = {"weight": mode.whole(weight), "bias": mode.whole(bias)}
    if all(t is None for t in own.values()):
        return None
    return mode.note(kind, x, out, own, **settings)


@_use("mul", "multiply")
def _mul(mode: FunctionMode, out: Tensor, one: Any, two: Any = None, **names: Any) -> Tensor | None:
    return _elementwise(mode, out, one, names.get("other", two), "weight")


@_use("add", "add_")
def _add(
    mode: FunctionMode, out: Tensor, one: Any, two: Any = None, *, alpha: Any = 1, **names: Any
) -> Tensor | None:
    two = names.get("other", two)
    scalar = next((t for t in (one, two) if isinstance(t, (int, float))), None)
    if scalar is not None:  # a gain 1 + g has the derivatives of g
        source = one if isinstance(one, Tensor) else two
        if alpha == 1 and out is not source and (found := mode.entries(source)) is not None:
            mode.derive(out, found)
        return None
    return _elementwise(mode, out, one, two, "bias") if alpha == 1 else None


def _elementwise(
    mode: FunctionMode, out: Tensor, one: Any, two: Any, role: str
) -> Tensor | None:
    """Note a gain or a shift."""
    for g, x in ((one, two), (two, one)):
        own = mode.whole(g)
        if own is None or not isinstance(x, Tensor) or mode.entries(x) is not None:
            continue
        shape = tuple(g.shape)
        while shape and shape[0] == 1:
            shape = shape[1:]
        if out.ndim <= len(shape):  # nothing counts samples
            return None
        if role == "bias" and any(n != m for n, m in zip(shape[::-1], out.shape[::-1], strict=False)):
            return _gain(mode, out, x, own, shape, role)
        if role == "bias" and len(shape) == 1:
            blank = out.new_zeros(()).detach().expand(*out.shape[:-1], 1)
            return mode.note(nn.Linear, blank, out, {"weight": None, "bias": own})
        if role == "bias" and len(shape) > 1:  # positions that are looked up
            rows = torch.arange(prod(shape[:-1]), device=out.device).view(shape[:-1])
            return _look_up(mode, out, own, rows.expand(out.shape[:-1]))
        return _gain(mode, out, x, own, shape, role)
    return None


def _gain(
    mode: FunctionMode, out: Tensor, x: Tensor, own: Tensor, shape: tuple[int, ...], role: str
) -> Tensor:
    def make() -> nn.Module:
        return Gain(role, own, shape)

    seen = x.detach() if role == "weight" else out.new_zeros(()).detach()
    seen = seen.expand(out.shape)
    return mode.listener.note((Gain, role, id(own), shape), make, seen, out)
