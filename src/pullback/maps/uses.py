"""The functions that use parameters, by name, and the modules that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from inspect import Signature, signature
from math import prod
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import Direction, FunctionMode, use
from .layers.product import Multiplication
from .layers.scale import Gain

#: functions whose result has the same entries
_COPIES = ("to", "contiguous", "clone", "float", "double", "half", "bfloat16", "type", "type_as")
_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@use(*_COPIES)
def _copy(mode: FunctionMode, out: Tensor, source: Any, *args: Any, **kwargs: Any) -> None:
    entries = mode.entries(source)
    if entries is not None and out is not source and out.shape == source.shape:
        mode.derive(out, entries)


@use("linear")
def _linear(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None
) -> Tensor | None:
    if weight.ndim == 2 and mode.entries(weight) is not None:
        lead = ascii_letters[2 : 1 + input.ndim]
        return mode.product(out, weight, input, ("ab", f"{lead}b", f"{lead}a"), bias)
    own = mode.weight(weight)
    shift = mode.whole(bias)
    if own is None and shift is None:
        return None
    return mode.note(nn.Linear, input, out, {"weight": weight if own is None else own,
                                             "bias": shift})  # fmt: skip


@use("_weight_norm")
def _weight_norm(mode: FunctionMode, out: Tensor, v: Tensor, g: Tensor, dim: int = 0) -> None:
    if mode.whole(v) is v:  # g may follow another rule
        mode.derive(out, Direction(v, g, dim))


@use("matmul", "mm", "bmm", "__matmul__")
def _matmul(mode: FunctionMode, out: Tensor, input: Any, mat2: Any = None, **names: Any) -> Any:
    return _times(mode, out, input, names.get("other", mat2))


def _times(mode: FunctionMode, out: Tensor, one: Any, two: Any, bias: Any = None) -> Tensor | None:
    """Note a product of matrices, of which one is a parameter."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor) or min(one.ndim, two.ndim) < 2:
        return None
    batch = ascii_letters[3 : 1 + max(one.ndim, two.ndim)]
    left, right = (batch[len(batch) + 2 - t.ndim :] for t in (one, two))
    names = f"{left}ab", f"{right}bc"
    return _contraction(mode, out, (one, two), names, f"{batch}ac", bias, spread=True)


@use("addmm", "baddbmm")
def _addmm(
    mode: FunctionMode, out: Tensor, input: Any, one: Any = None, two: Any = None, **names: Any
) -> Tensor | None:
    if names.get("beta", 1) != 1 or names.get("alpha", 1) != 1:
        return None
    one = names.get("mat1", names.get("batch1", one))
    two = names.get("mat2", names.get("batch2", two))
    return _times(mode, out, one, two, input)


@use("einsum")
def _einsum(mode: FunctionMode, out: Tensor, equation: Any, *operands: Any) -> Tensor | None:
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = (*operands[0],)
    if not isinstance(equation, str) or len(operands) < 2:
        return None
    left, arrow, result = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if not arrow or len(names) != len(operands):
        return None
    free = [a for a in ascii_letters if a not in equation]
    for k, (name, t) in enumerate(zip(names, operands, strict=True)):
        more = t.ndim - len(name.replace("...", ""))
        names[k] = name.replace("...", "".join(free[:more]))
        if "..." in name:
            result = result.replace("...", "".join(free[:more]))
    if any(len(n) != t.ndim for n, t in zip(names, operands, strict=True)):
        return None
    return _contraction(mode, out, operands, names, result)


def _contraction(
    mode: FunctionMode, out: Tensor, operands: Sequence[Tensor], names: Sequence[str], result: str,
    bias: Any = None, *, spread: bool = False,
) -> Tensor | None:  # fmt: skip
    """Note a sum of products by the letters of their axes, of which one factor is a parameter.

    A bias is that of the last factor. With `spread`, or where matrices cannot be read off without,
    the others are expanded along axes of the parameter that they lack: all matrices meet all.
    """
    found = [k for k, t in enumerate(operands) if mode.entries(t) is not None]
    if not found or (len(operands) > 2 and len(found) > 1):
        return None
    k = found[-1]
    w = operands[k]
    own = names[k]
    rest = [i for i in range(len(operands)) if i != k]
    x = operands[rest[0]]
    other = names[rest[0]]
    if len(rest) > 1:  # their product is what the parameter meets
        other = "".join(dict.fromkeys("".join(names[i] for i in rest)))
        given = ",".join(names[i] for i in rest)
        x = torch.einsum(f"{given}->{other}", *(operands[i].detach() for i in rest))
    entries = mode.entries(w)
    assert entries is not None
    if spread or Multiplication.read(entries, (own, other, result), None) is None:
        stacked = own[:-2] or ("" if spread else own[:1])
        sizes = {a: n for a, n in zip(stacked, w.shape, strict=False) if a in result and n > 1}
        lacking = [a for a in sizes if a not in other]
        x = x.expand(*(sizes[a] for a in lacking), *x.shape)
        other = "".join(lacking) + other
        x = x.expand(
            [sizes.get(a, n) if n == 1 else n for a, n in zip(other, x.shape, strict=True)]
        )
    last = k == len(operands) - 1
    return mode.product(out, w, x, (own, other, result), bias if last else None)


@use("inner")
def _inner(mode: FunctionMode, out: Tensor, input: Tensor, other: Tensor) -> Tensor | None:
    return _tensordot(mode, out, input, other, ([-1], [-1]))


@use("tensordot")
def _tensordot(
    mode: FunctionMode, made: Tensor, a: Tensor, b: Tensor, dims: Any = 2, **names: Any
) -> Tensor | None:
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    if not isinstance(dims, (tuple, list)) or not a.ndim or not b.ndim:
        return None
    pairs = [[d % t.ndim for d in some] for t, some in zip((a, b), dims, strict=True)]
    one = ascii_letters[: a.ndim]
    two = list(ascii_letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(*pairs, strict=True):
        two[j] = one[i]
    result = "".join(t for t in (*one, *two) if (t in one) != (t in two))
    return _contraction(mode, made, (a, b), (one, "".join(two)), result)


@use("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def _grouped(
    mode: FunctionMode, out: Tensor, mat_a: Tensor, mat_b: Tensor, *args: Any, **names: Any
) -> Tensor | None:
    offsets = names.get("offs", args[0] if args else None)
    if offsets is None or mat_a.ndim != 2 or mat_b.ndim != 3:
        return None
    rows = torch.arange(len(mat_a), device=mat_a.device, dtype=offsets.dtype)
    index = torch.searchsorted(offsets, rows, right=True).clamp(max=len(mat_b) - 1)
    return mode.product(out, mat_b, mat_a, ("abc", "db", "dc"), index=index)


@use("conv1d", "conv2d", "conv3d")
def _conv(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    own = mode.weight(weight)
    shift = mode.whole(bias)
    if own is None and shift is None:
        return None
    dims = weight.ndim - 2
    kernel = tuple(weight.shape[2:])
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


@use("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
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
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims // len(value))


@use("embedding")
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


@use("__getitem__", "index_select")
def _gather(
    mode: FunctionMode, out: Tensor, source: Tensor, index: Any, *rest: Any
) -> Tensor | None:
    if rest:  # index_select(source, dim, index)
        if index != 0:
            return None
        index = rest[0]
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, Tensor):
        entries = mode.entries(source)
    else:
        entries = None
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


def _norm(
    kind: type[nn.Module], call: Signature, mode: FunctionMode, out: Tensor,
    *args: Any, **names: Any,
) -> Tensor | None:  # fmt: skip
    """Note a normalization, whose other arguments are the module's attributes."""
    try:
        given = call.bind(*args, **names)
    except TypeError:  # a function of that name with other arguments
        return None
    given.apply_defaults()
    settings: dict[str, Any] = given.arguments
    settings = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    x = settings.pop("input")
    own = {role: mode.whole(settings.pop(role, None)) for role in ("weight", "bias")}
    if all(parameter is None for parameter in own.values()):
        return None
    return mode.note(kind, x, out, own, **settings)


for _function, _kind in (
    (F.layer_norm, nn.LayerNorm), (F.rms_norm, nn.RMSNorm), (F.group_norm, nn.GroupNorm),
    (F.batch_norm, nn.BatchNorm2d),
):  # fmt: skip
    use(_function.__name__)(partial(_norm, _kind, signature(_function)))


@use("mul", "multiply")
def _mul(mode: FunctionMode, out: Tensor, one: Any, two: Any = None, **names: Any) -> Tensor | None:
    return _elementwise(mode, out, one, names.get("other", two), "weight")


@use("add", "add_")
def _add(
    mode: FunctionMode, out: Tensor, one: Any, two: Any = None, *, alpha: Any = 1, **names: Any
) -> Tensor | None:
    two = names.get("other", two)
    scalar = next((t for t in (one, two) if isinstance(t, (int, float))), None)
    if scalar is not None:  # a gain 1 + g has the derivatives of g
        if isinstance(one, Tensor):
            source = one
        else:
            source = two
        if alpha == 1 and out is not source and (found := mode.entries(source)) is not None:
            mode.derive(out, found)
        return None
    if alpha == 1:
        return _elementwise(mode, out, one, two, "bias")
    return None


def _elementwise(mode: FunctionMode, out: Tensor, one: Any, two: Any, role: str) -> Tensor | None:
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
        fits = all(n == m for n, m in zip(shape[::-1], out.shape[::-1], strict=False))
        if role == "bias" and fits and len(shape) == 1:
            blank = out.new_zeros(()).detach().expand(*out.shape[:-1], 1)
            return mode.note(nn.Linear, blank, out, {"weight": None, "bias": own})
        if role == "bias" and fits and len(shape) > 1:  # positions that are looked up
            rows = torch.arange(prod(shape[:-1]), device=out.device).view(shape[:-1])
            return _look_up(mode, out, own, rows.expand(out.shape[:-1]))
        if role == "weight":
            seen = x
        else:
            seen = out.new_zeros(())
        seen = seen.detach().expand(out.shape)
        make = partial(Gain, role, own, shape)
        return mode.listener.note((Gain, role, id(own), shape), make, seen, out)
    return None
