"""What is recorded of each function that uses parameters, and the modules that represent them.

A function registered by `@use(names)` is called after each function of these names, with the mode,
the result and the arguments of the call. These are positional or named as the caller wrote them, so
that its arguments have the names that torch gives them. It records the use (`_note_...`), or which
entries of a parameter the result holds (`_follow_...`). It returns the output that replaces the
result, None where it recorded no use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Signature, signature
from math import prod
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import FunctionMode, NormalizedWeight, use
from .layers.contraction import Letters, read_product
from .layers.embedding import BagUse
from .layers.entries import ParameterEntries
from .layers.scale import Gain

#: functions whose result has the same entries
_SAME_ENTRIES = (
    "to",
    "contiguous",
    "clone",
    "float",
    "double",
    "half",
    "bfloat16",
    "type",
    "type_as",
)


def _embedding_arguments(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> None:  # fmt: skip
    """Take the arguments of `torch.embedding`, which has no signature of its own."""


_TORCH_EMBEDDING = signature(_embedding_arguments)
_EMBEDDING = signature(F.embedding)
_BAG_ARGUMENTS = signature(F.embedding_bag)
_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


@use(*_SAME_ENTRIES)
def _follow_copy(mode: FunctionMode, out: Tensor, input: Any, *args: Any, **kwargs: Any) -> None:
    """Record that a copy of a parameter stands for the parameter."""
    entries = mode.find_entries(input)
    if entries is not None and out is not input and out.shape == input.shape:
        mode.derive(out, entries)


@use("_weight_norm")
def _follow_weight_norm(
    mode: FunctionMode, out: Tensor, v: Tensor, g: Tensor, dim: int = 0
) -> None:
    """Record that the result is the weight g v/‖v‖ of parameters g and v."""
    if mode.find_parameter(v) is v:  # g may follow another rule
        mode.derive(out, NormalizedWeight(v, g, dim))


# --- products of matrices -----------------------------------------------------------------------


@use("linear")
def _note_linear(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None
) -> Tensor | None:
    """Record a linear layer, whose weight may be some entries of a parameter."""
    if weight.ndim == 2 and mode.find_entries(weight) is not None:
        lead = ascii_letters[2 : 1 + input.ndim]
        return mode.note_product(out, weight, input, Letters("ab", f"{lead}b", f"{lead}a"), bias)
    source = mode.find_weight(weight)
    shift = mode.find_parameter(bias)
    if source is None and shift is None:
        return None
    if source is None:
        source = weight
    return mode.note(nn.Linear, input, out, {"weight": source, "bias": shift})


@use("bilinear")
def _note_bilinear(
    mode: FunctionMode, out: Tensor, input1: Tensor, input2: Tensor, weight: Tensor,
    bias: Any = None,
) -> Tensor | None:  # fmt: skip
    """Record a linear layer of all products of both inputs' features: z = W vec(x yᵀ) + b."""
    if mode.find_parameter(weight) is None:
        return None
    products = input1.detach()[..., :, None] * input2.detach()[..., None, :]
    lead = ascii_letters[3 : 1 + products.ndim]
    return mode.note_product(out, weight, products, Letters("abc", f"{lead}bc", f"{lead}a"), bias)


@use("matmul", "mm", "bmm", "__matmul__")
def _note_matmul(
    mode: FunctionMode, out: Tensor, input: Any, mat2: Any = None, **named: Any
) -> Tensor | None:
    """Record a product of matrices."""
    return _note_matrix_product(mode, out, input, named.get("other", mat2))


@use("addmm", "baddbmm")
def _note_addmm(
    mode: FunctionMode, out: Tensor, input: Any, left: Any = None, right: Any = None, **named: Any
) -> Tensor | None:
    """Record a product of matrices with a bias, unless either has a factor."""
    if named.get("beta", 1) != 1 or named.get("alpha", 1) != 1:
        return None
    left = named.get("mat1", named.get("batch1", left))
    right = named.get("mat2", named.get("batch2", right))
    return _note_matrix_product(mode, out, left, right, input)


def _note_matrix_product(
    mode: FunctionMode, out: Tensor, left: Any, right: Any, bias: Any = None
) -> Tensor | None:
    """Record a product of matrices, if one of them is a parameter."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return None
    if min(left.ndim, right.ndim) < 2:
        return None
    batch = ascii_letters[3 : 1 + max(left.ndim, right.ndim)]
    left_batch = batch[len(batch) + 2 - left.ndim :]
    right_batch = batch[len(batch) + 2 - right.ndim :]
    axes = (f"{left_batch}ab", f"{right_batch}bc")
    contraction = _Contraction((left, right), axes, f"{batch}ac", bias)
    return _note_contraction(mode, out, contraction, is_broadcast=True)


@use("einsum")
def _note_einsum(mode: FunctionMode, out: Tensor, equation: Any, *operands: Any) -> Tensor | None:
    """Record a sum of products."""
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = (*operands[0],)
    contraction = _read_equation(equation, operands)
    if contraction is None:
        return None
    return _note_contraction(mode, out, contraction)


def _read_equation(equation: Any, operands: Sequence[Tensor]) -> _Contraction | None:
    """Return the contraction, with letters for the axes that "..." stands for, too.

    The last of these axes is the same for all operands, as in broadcasting. None for a single
    operand, and for equations without "->" or that do not fit the operands.
    """
    if not isinstance(equation, str) or len(operands) < 2:
        return None
    left, arrow, result = equation.replace(" ", "").partition("->")
    axes = left.split(",")
    if not arrow or len(axes) != len(operands):
        return None
    free = "".join(letter for letter in ascii_letters if letter not in equation)
    hidden_counts = []
    for operand_axes, tensor in zip(axes, operands, strict=True):
        hidden_count = tensor.ndim - len(operand_axes.replace("...", ""))
        if hidden_count < 0 or (hidden_count > 0 and "..." not in operand_axes):
            return None
        hidden_counts.append(hidden_count)
    hidden = free[: max(hidden_counts)]
    for k, hidden_count in enumerate(hidden_counts):
        axes[k] = axes[k].replace("...", hidden[len(hidden) - hidden_count :])
    return _Contraction(operands, axes, result.replace("...", hidden))


@use("inner")
def _note_inner(mode: FunctionMode, out: Tensor, input: Tensor, other: Tensor) -> Tensor | None:
    """Record the products of all rows."""
    return _note_tensordot(mode, out, input, other, ([-1], [-1]))


@use("tensordot")
def _note_tensordot(
    mode: FunctionMode, product: Tensor, a: Tensor, b: Tensor, dims: Any = 2, **named: Any
) -> Tensor | None:
    """Record a sum of products over pairs of axes."""
    # The result is not called `out`: torch passes an argument of that name.
    if isinstance(dims, int):
        dims = range(a.ndim - dims, a.ndim), range(dims)
    if not isinstance(dims, (tuple, list)) or not a.ndim or not b.ndim:
        return None
    a_letters = ascii_letters[: a.ndim]
    b_letters = list(ascii_letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(*dims, strict=True):
        b_letters[j] = a_letters[i]
    letters = (*a_letters, *b_letters)
    result = "".join(t for t in letters if (t in a_letters) != (t in b_letters))
    contraction = _Contraction((a, b), (a_letters, "".join(b_letters)), result)
    return _note_contraction(mode, product, contraction)


@dataclass(frozen=True)
class _Contraction:
    """A sum of products, with a letter for each axis as in `einsum`.

    Attributes:
        operands: the factors.
        axes: a string of letters for each of them.
        result: the letters of the result.
        bias: what is added, which belongs to the last operand.
    """

    operands: Sequence[Tensor]
    axes: Sequence[str]
    result: str
    bias: Any = None


def _note_contraction(
    mode: FunctionMode, out: Tensor, contraction: _Contraction, *, is_broadcast: bool = False
) -> Tensor | None:
    """Record a sum of products, if one factor is a parameter.

    The other factors, multiplied, are the input x of the parameter's matrices. A stack of matrices
    meets all inputs if `is_broadcast`, if the result begins with the parameter's first axis (as
    for experts), or if matrices cannot be read off otherwise. Then x is expanded along the axes of
    the stack that it lacks.
    """
    operands = contraction.operands
    k = _find_weight_operand(mode, operands)
    if k is None:
        return None
    weight = operands[k]
    weight_axes = contraction.axes[k]
    x, x_axes = _multiply_others(contraction, k)
    entries = mode.find_entries(weight)
    assert entries is not None
    letters = Letters(weight_axes, x_axes, contraction.result)
    begins_with_stack = weight.ndim > 2 and contraction.result.startswith(weight_axes[0])
    if is_broadcast:
        x, letters = _expand_over_stack(x, letters, weight, weight_axes[:-2])
    elif begins_with_stack or read_product(entries, letters, None) is None:
        # matrices of many rows are tried first, where rows take several axes
        first_axis = _expand_over_stack(x, letters, weight, weight_axes[:1])
        if weight.ndim > 3 and read_product(entries, first_axis[1], None) is None:
            x, letters = _expand_over_stack(x, letters, weight, weight_axes[:-2])
        else:
            x, letters = first_axis
    bias = None
    if k == len(operands) - 1:
        bias = contraction.bias
    return mode.note_product(out, weight, x, letters, bias)


def _find_weight_operand(mode: FunctionMode, operands: Sequence[Tensor]) -> int | None:
    """Return which factor is the parameter: the last one of two, or the only one of several."""
    weights = [k for k, t in enumerate(operands) if mode.find_entries(t) is not None]
    if not weights or (len(operands) > 2 and len(weights) > 1):
        return None
    return weights[-1]


def _expand_over_stack(
    x: Tensor, letters: Letters, weight: Tensor, stack_axes: str
) -> tuple[Tensor, Letters]:
    """Return the input and all letters, where each matrix of a stack meets the whole input."""
    sizes = _select_sizes(stack_axes, weight, letters.output)
    x, input_axes = _expand_input(x, letters.input, sizes)
    return x, Letters(letters.weight, input_axes, letters.output)


def _select_sizes(letters: str, weight: Tensor, result: str) -> dict[str, int]:
    """Return, by letter, the sizes above 1 of leading axes of the weight that are in the result."""
    sizes = {}
    for letter, size in zip(letters, weight.shape, strict=False):
        if letter in result and size > 1:
            sizes[letter] = size
    return sizes


def _multiply_others(contraction: _Contraction, weight: int) -> tuple[Tensor, str]:
    """Return the product of all factors but the weight, with its letters: the weight's input."""
    others = [i for i in range(len(contraction.operands)) if i != weight]
    if len(others) == 1:
        return contraction.operands[others[0]], contraction.axes[others[0]]
    axes = [contraction.axes[i] for i in others]
    product = "".join(dict.fromkeys("".join(axes)))
    tensors = [contraction.operands[i].detach() for i in others]
    return torch.einsum(f"{','.join(axes)}->{product}", *tensors), product


def _expand_input(x: Tensor, axes: str, sizes: dict[str, int]) -> tuple[Tensor, str]:
    """Return the input and its letters, expanded along axes that it lacks or has with length 1."""
    lacking = [letter for letter in sizes if letter not in axes]
    x = x.expand(*(sizes[letter] for letter in lacking), *x.shape)
    axes = "".join(lacking) + axes
    lengths = []
    for letter, length in zip(axes, x.shape, strict=True):
        if length == 1:
            length = sizes.get(letter, length)
        lengths.append(length)
    return x.expand(lengths), axes


@use("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
def _note_grouped_product(
    mode: FunctionMode, out: Tensor, mat_a: Tensor, mat_b: Tensor, *args: Any, **named: Any
) -> Tensor | None:
    """Record products of groups of rows with one matrix of a stack each."""
    offsets = named.get("offs", args[0] if args else None)
    if offsets is None or mat_a.ndim != 2 or mat_b.ndim != 3:
        return None
    rows = torch.arange(len(mat_a), device=mat_a.device, dtype=offsets.dtype)
    index = torch.searchsorted(offsets, rows, right=True).clamp(max=len(mat_b) - 1)
    return mode.note_product(out, mat_b, mat_a, Letters("abc", "db", "dc"), index=index)


# --- convolutions -------------------------------------------------------------------------------


@use("conv1d", "conv2d", "conv3d")
def _note_convolution(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    """Record a convolution."""
    source = mode.find_weight(weight)
    shift = mode.find_parameter(bias)
    if source is None and shift is None:
        return None
    if source is None:
        source = weight
    dims = weight.ndim - 2
    kernel = tuple(weight.shape[2:])
    dilation = _repeat_for_axes(dilation, dims)
    if not isinstance(padding, str):
        padding = _repeat_for_axes(padding, dims)
    return mode.note(
        _CONVOLUTIONS[dims], input, out, {"weight": source, "bias": shift},
        kernel_size=kernel, stride=_repeat_for_axes(stride, dims), dilation=dilation, groups=groups,
        padding_mode="zeros", padding=padding, in_channels=weight.shape[1] * groups,
        out_channels=weight.shape[0],
        _reversed_padding_repeated_twice=_list_reversed_padding(padding, kernel, dilation),
    )  # fmt: skip


def _list_reversed_padding(
    padding: str | tuple[int, ...], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the padding before and after, of the last axis first, as `F.pad` takes it."""
    if padding == "valid":
        return (0,) * (2 * len(kernel))
    out: list[int] = []
    for axis in reversed(range(len(kernel))):
        if isinstance(padding, str):  # "same"
            total = dilation[axis] * (kernel[axis] - 1)
            out += [total // 2, total - total // 2]
        else:
            out += [padding[axis], padding[axis]]
    return tuple(out)


@use("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _note_transposed_convolution(
    mode: FunctionMode, out: Tensor, input: Tensor, weight: Tensor, bias: Any = None,
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor | None:  # fmt: skip
    """Record a transposed convolution."""
    parameter = mode.find_parameter(weight)
    if parameter is None:
        return None
    dims = weight.ndim - 2
    return mode.note(
        _TRANSPOSED[dims], input, out, {"weight": parameter, "bias": mode.find_parameter(bias)},
        kernel_size=tuple(weight.shape[2:]), stride=_repeat_for_axes(stride, dims), groups=groups,
        padding=_repeat_for_axes(padding, dims), dilation=_repeat_for_axes(dilation, dims),
        padding_mode="zeros", output_padding=_repeat_for_axes(output_padding, dims),
        in_channels=weight.shape[0], out_channels=weight.shape[1] * groups,
    )  # fmt: skip


def _repeat_for_axes(value: Any, dims: int) -> tuple[int, ...]:
    """Return a number per axis, from one for all axes or one for each."""
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims // len(value))


# --- tables -------------------------------------------------------------------------------------


@use("embedding")
def _note_embedding(mode: FunctionMode, out: Tensor, *args: Any, **named: Any) -> Tensor | None:
    """Record rows of a table, looked up by `F.embedding` or by `torch.embedding`.

    Where the gradient is scaled by frequency or sparse it is none of a plain look-up.
    """
    if "indices" in named or (args and args[0].is_floating_point()):
        options = _bind(_TORCH_EMBEDDING, args, named)
        index = options["indices"]
        padding = options["padding_idx"]
        if padding < 0:  # stands for none
            padding = None
    else:
        options = _bind(_EMBEDDING, args, named)
        index = options["input"]
        padding = options["padding_idx"]
    table = mode.find_parameter(options["weight"])
    if table is None or options["scale_grad_by_freq"] or options["sparse"]:
        return None
    if padding is not None and padding < 0:
        padding += len(options["weight"])
    return _note_lookup(mode, out, table, index, padding)


def _bind(function: Signature, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those left out."""
    bound = function.bind(*args, **named)
    bound.apply_defaults()
    return dict(bound.arguments)


@use("embedding_bag")
def _note_embedding_bag(
    function_mode: FunctionMode, out: Tensor, /, *args: Any, **named: Any
) -> Tensor | None:
    """Record sums or means over bags; other reductions and weighted bags are left alone."""
    options = _bind(_BAG_ARGUMENTS, args, named)
    table = function_mode.find_parameter(options["weight"])
    has_other_gradient = options["scale_grad_by_freq"] or options["sparse"]
    has_other_sum = options["mode"] not in ("sum", "mean") or options["max_norm"] is not None
    has_weights = options["per_sample_weights"] is not None or options["padding_idx"] is not None
    if table is None or has_other_gradient or has_other_sum or has_weights:
        return None
    index, counts = _pad_bags(options["input"], options["offsets"], options["include_last_offset"])
    is_real = torch.arange(index.shape[1], device=index.device) < counts[:, None]
    weights = is_real.to(out.dtype)
    if options["mode"] == "mean":
        weights = weights / counts.clamp(min=1)[:, None]
    return function_mode.listener.add_function_use(
        None, partial(BagUse, table, weights), index, out
    )


def _pad_bags(
    index: Tensor, offsets: Tensor | None, has_last_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return bags of one length (N, L), padded by index 0, and their lengths before, (N,)."""
    if offsets is None:
        return index, torch.full((len(index),), index.shape[1], device=index.device)
    ends = offsets[1:]
    if not has_last_offset:
        ends = torch.cat([ends, ends.new_tensor([len(index)])])
    starts = offsets[: len(ends)]
    counts = ends - starts
    bags = [index[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return nn.utils.rnn.pad_sequence(bags, batch_first=True), counts


@use("__getitem__")
def _follow_indexing(mode: FunctionMode, out: Tensor, source: Tensor, index: Any) -> Tensor | None:
    """Record rows of a table, or matrices of a stack, that a tensor of row numbers picks."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    return _follow_rows(mode, out, source, index)


@use("index_select")
def _follow_index_select(
    mode: FunctionMode, out: Tensor, input: Tensor, dim: int, index: Tensor
) -> Tensor | None:
    """Record rows of a table, or matrices of a stack, that are picked along the first axis."""
    if dim != 0:
        return None
    return _follow_rows(mode, out, input, index)


def _follow_rows(mode: FunctionMode, out: Tensor, source: Tensor, index: Any) -> Tensor | None:
    """Record rows of a table as looked up, and matrices of a stack for products to come."""
    if not isinstance(index, Tensor) or not index.ndim:
        return None
    if index.is_floating_point() or index.dtype == torch.bool:
        return None
    entries = mode.find_entries(source)
    if entries is None or not entries.is_whole or source.ndim < 2:
        return None
    if source.shape != entries.parameter.shape:
        return None
    if source.ndim == 2:
        return _note_lookup(mode, out, entries.parameter, index)
    if index.ndim == 1:
        mode.derive(out, replace(entries, size=tuple(out.shape), index=index))
    return None


def _note_lookup(
    mode: FunctionMode, out: Tensor, table: Tensor, index: Tensor, padding: int | None = None
) -> Tensor:
    """Record rows of a table that are looked up."""
    width = out.shape[-1]
    return mode.note(
        nn.Embedding, index, out, {"weight": table}, num_embeddings=table.numel() // max(1, width),
        embedding_dim=width, padding_idx=padding,
    )  # fmt: skip


# --- normalizations, gains and shifts -------------------------------------------------------------


def _note_norm(
    module_type: type[nn.Module], function: Signature, mode: FunctionMode, out: Tensor,
    *args: Any, **named: Any,
) -> Tensor | None:  # fmt: skip
    """Record a normalization, whose other arguments are the module's attributes."""
    try:
        settings = _bind(function, args, named)
    except TypeError:  # a function of that name with other arguments
        return None
    for name, value in settings.items():
        if isinstance(value, list):
            settings[name] = tuple(value)
    x = settings.pop("input")
    weight = mode.find_parameter(settings.pop("weight", None))
    bias = mode.find_parameter(settings.pop("bias", None))
    if weight is None and bias is None:
        return None
    return mode.note(module_type, x, out, {"weight": weight, "bias": bias}, **settings)


for _function, _module_type in (
    (F.layer_norm, nn.LayerNorm), (F.rms_norm, nn.RMSNorm), (F.group_norm, nn.GroupNorm),
    (F.batch_norm, nn.BatchNorm2d),
):  # fmt: skip
    use(_function.__name__)(partial(_note_norm, _module_type, signature(_function)))


@use("mul", "multiply")
def _note_mul(mode: FunctionMode, out: Tensor, input: Any, other: Any) -> Tensor | None:
    """Record a gain."""
    return _note_elementwise(mode, out, input, other, "weight")


@use("add", "add_")
def _note_add(
    mode: FunctionMode, out: Tensor, input: Any, other: Any, *, alpha: Any = 1
) -> Tensor | None:
    """Record a shift, or a table of positions; a parameter plus a number stands for the parameter.

    So a gain 1 + g is recorded as g, which has the same derivatives.
    """
    if alpha != 1:
        return None
    if isinstance(input, (int, float)) or isinstance(other, (int, float)):
        source = input if isinstance(input, Tensor) else other
        entries = mode.find_entries(source)
        if out is not source and entries is not None:
            mode.derive(out, entries)
        return None
    return _note_elementwise(mode, out, input, other, "bias")


def _note_elementwise(
    mode: FunctionMode, out: Tensor, input: Any, other: Any, role: str
) -> Tensor | None:
    """Record a gain ("weight") or a shift ("bias") by one of both arguments."""
    for tensor, x in ((input, other), (other, input)):
        entries = mode.find_entries(tensor)
        if entries is None or not isinstance(x, Tensor) or mode.find_entries(x) is not None:
            continue
        shape = tuple(tensor.shape)
        while shape and shape[0] == 1:
            shape = shape[1:]
        if out.ndim <= len(shape):  # no axis of the output counts samples
            return None
        if role == "bias":
            return _note_shift(mode, out, entries, shape)
        if entries.is_whole:
            return _note_gain(mode, out, entries.parameter, shape, x.detach(), role)
    return None


def _note_shift(
    mode: FunctionMode, out: Tensor, entries: ParameterEntries, shape: tuple[int, ...]
) -> Tensor | None:
    """Record a bias, a table of positions or some of its rows, or a shift of some axes."""
    ends_alike = out.shape[out.ndim - len(shape) :] == shape
    if ends_alike and len(shape) > 1:
        return _note_positions(mode, out, entries, shape)
    if not entries.is_whole:
        return None
    if ends_alike and len(shape) == 1:
        blank = out.new_zeros(()).detach().expand(*out.shape[:-1], 1)
        return mode.note(nn.Linear, blank, out, {"weight": None, "bias": entries.parameter})
    return _note_gain(mode, out, entries.parameter, shape, out.new_zeros(()), "bias")


def _note_positions(
    mode: FunctionMode, out: Tensor, entries: ParameterEntries, shape: tuple[int, ...]
) -> Tensor | None:
    """Record positions that are looked up: all rows of a table, or consecutive ones."""
    width = shape[-1]
    is_whole_rows = width == entries.parameter.shape[-1] and entries.offset % width == 0
    if not entries.is_whole and not (is_whole_rows and entries.is_dense and entries.index is None):
        return None
    count = prod(shape[:-1])
    first = entries.offset // width
    rows = torch.arange(first, first + count, device=out.device).view(shape[:-1])
    return _note_lookup(mode, out, entries.parameter, rows.expand(out.shape[:-1]))


def _note_gain(
    mode: FunctionMode, out: Tensor, parameter: Tensor, shape: tuple[int, ...], x: Tensor, role: str
) -> Tensor:
    """Record a product with a parameter, or its sum with one, entry by entry."""
    make = partial(Gain, role, parameter, shape)
    key = (Gain, role, id(parameter), shape)
    return mode.listener.add_function_use(key, make, x.detach().expand(out.shape), out)
