"""Which rows of a weight the model uses together, found by following the weight's output.

A fused weight holds several independent matrices one below the other: queries, keys and values, or
the gate and the other half of a gated layer. The model shows it after the product: it splits,
chunks, views or indexes the output, and uses the pieces apart. `OutputParts` follows every output
by a tensor of *row labels*, an integer tensor of the output's shape that says which row of the
weight made an entry. A function that selects or moves entries is applied to the labels as well;
elementwise functions, normalizations, pooling and depthwise convolutions leave them as they are;
every other function *uses* the rows that it gets. Rows used by one function belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from .._core.errors import reraise_fatal
from .layers.product import ProductUse
from .layers.weight_norm import WeightNormUse
from .normalized_weights import POOLS, NormalizedWeights

#: functions that give the same entries in a new shape, row-major
_RESHAPES = frozenset(
    ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "squeeze",
     "unsqueeze")
)  # fmt: skip
#: functions that select or move entries
_SELECTIONS = frozenset(
    ("split", "split_with_sizes", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind",
     "unsafe_chunk", "unsafe_split", "__getitem__", "select", "narrow", "index_select", "transpose",
     "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t", "adjoint", "__get__", "expand",
     "expand_as", "repeat", "tile", "repeat_interleave", "roll", "flip", "diagonal", "unfold")
)  # fmt: skip
#: functions that add entries, whose outputs are linear in those of the weight
_SUMS = frozenset(
    ("add", "sub", "rsub", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__",
     "add_", "sub_")
)  # fmt: skip
#: functions that keep a tensor linear in a weight's output, with factors of other tensors
_LINEAR = _SUMS | frozenset(
    ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "neg",
     "__neg__", "to", "float", "double", "half", "bfloat16", "type_as", "clone", "contiguous")
)  # fmt: skip
#: functions that put tensors side by side
_JOINS = frozenset(("cat", "concat", "concatenate", "stack"))
#: functions whose result has the same entries, and perhaps others beside them
_MOVES = _RESHAPES | _SELECTIONS | _JOINS | {"pad"}
#: functions whose result mixes entries, whatever its shape
_CONTRACTIONS = frozenset(
    ("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm",
     "addbmm", "einsum", "tensordot", "inner", "grouped_mm", "_grouped_mm", "conv1d", "conv2d",
     "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "lstm", "gru",
     "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
     "scaled_dot_product_attention", "multi_head_attention_forward")
)  # fmt: skip
_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
#: transposed convolutions, whose weights have inputs first
TRANSPOSED_CONVOLUTIONS = frozenset(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
#: functions with a weight as second argument, which a parametrization may have made
_WEIGHTED = frozenset(("linear",)) | _CONVOLUTIONS | TRANSPOSED_CONVOLUTIONS
#: the label of entries that no row made: padding, and what was put beside a weight's output
_NO_ROW = -1


@dataclass(frozen=True)
class _Limits:
    """Bounds of the memory that labels take."""

    #: labels are not copied beyond this many: a convolution's feature maps, merged with channels,
    #: would take 512 MiB of integers
    copied: int = 2**26


_LIMITS = _Limits()


@dataclass(eq=False)
class RowLabels:
    """The rows of weights that made the entries of one tensor."""

    #: names of the weights; several where outputs of one shape were added
    weights: frozenset[str]
    #: of the tensor's shape, on the CPU
    labels: Tensor
    #: whether the tensor is linear in the weights' outputs: no activation was applied so far
    is_linear: bool = True
    #: whether a part or a copy of the tensor went on
    is_followed: bool = False
    #: whether a function used all of it
    is_used: bool = False

    @property
    def rows(self) -> list[int]:
        """The rows that occur, in order."""
        labels = _narrow_expanded_axes(self.labels).unique()
        return labels[labels != _NO_ROW].tolist()


@dataclass(frozen=True)
class ComputedWeight:
    """A weight that was computed from parameters before a layer's function used it."""

    function: str
    shape: tuple[int, ...]
    #: of a convolution
    groups: int
    parameters: frozenset[str]
    #: of the function's output in the graph
    node: Any


class OutputParts(TorchFunctionMode):
    """A context of one forward pass in which outputs of weights are followed.

    A recorder calls `follow_output` for each use of a weight.

    Args:
        names: of the parameters, by `id`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._by_tensor: Any = WeakTensorKeyDictionary()
        self._all_labels: list[RowLabels] = []
        #: whether a recorder has labelled the output of the function that was called last
        self._is_recorded = False
        #: weights that no recorder knows, since they were computed from parameters
        self.computed: list[ComputedWeight] = []
        #: names of parameters that a function inside of `torch.vmap` used as a weight
        self.vmapped: set[str] = set()
        #: finds the weights whose length has no effect
        self.normalized = NormalizedWeights(names)

    def follow_output(self, weight: str | None, module: nn.Module, output: Tensor) -> None:
        """Label the output of a weight's use by its rows, and follow it from here on.

        The module is the one that uses the weight, or that represents such a function.
        """
        axes = list_row_axes(module, output.ndim)
        if weight is None or not axes or not output.numel():
            return
        self._set_initial_labels(frozenset({weight}), output, axes)
        self._is_recorded = True

    def collect_parts(self) -> dict[str, list[list[int]]]:
        """Return, by weight, its rows in groups that are used together, each row in one group.

        A tensor that no function uses, such as an output of the model or a copy in a cache, makes a
        group of rows that are used nowhere else.
        """
        used = _collect_rows(labels for labels in self._all_labels if labels.is_used)
        unused = _collect_rows(
            labels for labels in self._all_labels if not labels.is_used and not labels.is_followed
        )
        return {
            weight: _merge_groups(used.get(weight, []), unused.get(weight, []))
            for weight in used.keys() | unused.keys()
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._is_recorded = False
        nodes = self.normalized.list_nodes(args, kwargs)
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        self.normalized.follow(name, args, kwargs, result, nodes)
        self._pass_on_labels(name, func, args, kwargs, result)
        if name in _WEIGHTED and not self._is_recorded:
            self._follow_computed_weight(name, args, kwargs, result)
        return result

    def _pass_on_labels(self, name: str, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Give the labels of a function's arguments to its result, or mark them as used."""
        arguments = _list_tensors((args, kwargs))
        sources = self._find_labels(arguments)
        if not sources:
            return
        results = _list_tensors(result)
        if name != "__setitem__" and not any(t.requires_grad for t in results):
            return  # a shape, an index, a detached copy
        if name == "glu":
            self._use_halves(args, kwargs, sources)
            return
        labels = None
        if _is_depthwise(name, args, kwargs):
            weight = _get_second_argument(args, kwargs, "weight", None)
            labels = _find_channel_labels(sources, results[0], weight.ndim - 2)
        elif name in POOLS and len(results) == 1:
            labels = _find_channel_labels(sources, results[0], int(name[-2]))
        elif _is_rearrangement(name, args):
            labels = self._relabel(name, func, args, kwargs, results, arguments)
        elif not self._is_recorded and name not in _CONTRACTIONS:
            labels = self._derive_labels(name, func, args, kwargs, results, arguments)
        if labels is None:
            _mark_used(sources)
            return
        _mark_followed(sources)
        for tensor, row_labels in zip(results, labels, strict=True):
            self._all_labels.append(row_labels)
            self._by_tensor[tensor] = row_labels

    def _find_labels(self, tensors: Iterable[Tensor]) -> list[RowLabels]:
        """Return the labels of those tensors that have any."""
        return [self._by_tensor[t] for t in tensors if t in self._by_tensor]

    def _derive_labels(
        self, name: str, func: Any, args: Any, kwargs: Any, results: list[Tensor],
        arguments: list[Tensor],
    ) -> list[RowLabels] | None:  # fmt: skip
        """Return the labels of a function's results; None where it mixes rows."""
        if name in _MOVES:
            return self._relabel(name, func, args, kwargs, results, arguments)
        if len(results) != 1:
            return None
        sources = self._find_labels(arguments)
        is_linear = name in _LINEAR and all(source.is_linear for source in sources)
        if is_linear and name in _SUMS and _have_different_rows(sources):
            self._join_summed_rows(sources)
            sources = sources[:1]
        labels = _find_common_labels(sources, results[0].shape)
        if labels is None:
            return None
        labels.is_linear = is_linear
        return [labels]

    def _join_summed_rows(self, sources: Sequence[RowLabels]) -> None:
        """Mark rows of one weight that are added as used together: they belong to one matrix.

        A rotary embedding adds odd rows to even ones.
        """
        joined = torch.cat([_narrow_expanded_axes(source.labels).flatten() for source in sources])
        self._all_labels.append(RowLabels(sources[0].weights, joined, is_used=True))

    def _use_halves(self, args: Any, kwargs: Any, sources: Sequence[RowLabels]) -> None:
        """Mark the two halves that a gated linear unit multiplies as used, each by itself."""
        dim = _get_second_argument(args, kwargs, "dim", -1)
        if len(sources) != 1 or not isinstance(dim, int):
            _mark_used(sources)
            return
        _mark_followed(sources)
        for half in sources[0].labels.chunk(2, dim):
            self._all_labels.append(RowLabels(sources[0].weights, half, is_used=True))

    def _relabel(
        self, name: str, func: Any, args: Any, kwargs: Any, results: list[Tensor],
        arguments: list[Tensor],
    ) -> list[RowLabels] | None:  # fmt: skip
        """Return the labels, selected or moved as the function does it with the entries.

        None where that is not possible.
        """
        sources = self._find_labels(arguments)
        weights = sources[0].weights
        if any(source.weights != weights for source in sources):
            return None
        try:
            if name in _RESHAPES:
                labels = [_reshape_labels(sources[0].labels, results[0].shape)]
            else:
                labels = self._call_with_labels(name, func, args, kwargs)
        except Exception as error:  # an index on another device, or a view as another dtype
            reraise_fatal(error)
            return None
        if [t.shape for t in labels] != [t.shape for t in results]:
            return None
        is_linear = all(source.is_linear for source in sources)
        return [RowLabels(weights, t, is_linear) for t in labels]

    def _call_with_labels(self, name: str, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return what the function makes of the labels in the place of the tensors."""

        def swap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value in self._by_tensor:
                return self._by_tensor[value].labels
            if name in _JOINS:
                return torch.tensor(_NO_ROW, dtype=torch.int32).expand(value.shape)
            return value

        labels_args, labels_kwargs = pytree.tree_map(swap, (args, kwargs))
        if name == "pad":
            return [_pad_labels(*labels_args, **labels_kwargs)]
        return _list_tensors(func(*labels_args, **labels_kwargs))

    def _follow_computed_weight(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Follow the result of a function whose weight was computed from parameters."""
        weight = _get_second_argument(args, kwargs, "weight", None)
        if isinstance(weight, Tensor) and is_batchedtensor(weight):
            self._add_vmapped((args, kwargs))
            return
        if not isinstance(weight, Tensor) or weight.grad_fn is None:
            return
        below = frozenset(self._find_parameters_below(weight))
        if not below:
            return
        groups = _get_groups(args, kwargs)
        shape = tuple(weight.shape)
        self.computed.append(ComputedWeight(name, shape, groups, below, result.grad_fn))
        if _is_depthwise(name, args, kwargs):
            return
        if name == "linear":
            axis = -1
        else:
            axis = 1 - weight.ndim
        if result.ndim >= -axis and result.numel():
            self._set_initial_labels(below, result, (axis,))

    def _add_vmapped(self, arguments: Any) -> None:
        """Add the parameters that are arguments of a function inside of `torch.vmap`."""
        for tensor in _list_tensors(arguments):
            unbatched = tensor
            while is_batchedtensor(unbatched):
                unbatched = get_unwrapped(unbatched)
            name = self._names.get(id(unbatched))
            if name is not None:
                self.vmapped.add(name)

    def _find_parameters_below(self, weight: Tensor) -> Iterable[str]:
        """Yield the names of the parameters that a weight was computed from."""
        visited: set[Any] = set()
        nodes: list[Any] = [weight.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            name = self._names.get(id(getattr(node, "variable", None)))
            if name is not None:
                yield name
            nodes.extend(below for below, _ in node.next_functions)

    def _set_initial_labels(
        self, weights: frozenset[str], output: Tensor, axes: Sequence[int]
    ) -> None:
        """Label an output by the rows that its `axes` count, whatever it was labelled before."""
        labels = RowLabels(weights, _make_initial_labels(output, axes))
        if output in self._by_tensor:  # a function inside of a module, which shows it again
            self._by_tensor[output].is_followed = True
        self._all_labels.append(labels)
        self._by_tensor[output] = labels


def list_row_axes(module: nn.Module, ndim: int) -> tuple[int, ...]:
    """Return the axes of an output that count rows of the module's weight, the slowest first.

    Empty for a module whose output does not have a row of its weight behind each entry, and for a
    depthwise convolution, which has no matrix.
    """
    if isinstance(module, WeightNormUse):
        return list_row_axes(module.inner, ndim)
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.out_channels > 1:
        return ()
    if isinstance(module, nn.modules.conv._ConvNd):
        return (-1 - len(module.kernel_size),)
    if isinstance(module, ProductUse):
        order = module.product.output_order
        return order[len(order) - module.product.row_axes :]
    if isinstance(module, nn.Linear) and module._parameters.get("weight") is not None:
        return (-1,)
    return ()


def merge_overlapping(row_sets: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return disjoint sets of rows: sets that have a row in common become one."""
    merged: list[set[int]] = []
    for rows in set(map(frozenset, row_sets)):
        union = set(rows)
        disjoint = []
        for other in merged:
            if other & union:
                union |= other
            else:
                disjoint.append(other)
        merged = [*disjoint, union]
    return sorted(sorted(rows) for rows in merged if rows)


def _collect_rows(all_labels: Iterable[RowLabels]) -> dict[str, list[list[int]]]:
    """Return, by weight, the rows of each tensor."""
    rows_of_weights: dict[str, list[list[int]]] = {}
    for labels in all_labels:
        for weight in labels.weights:
            rows_of_weights.setdefault(weight, []).append(labels.rows)
    return rows_of_weights


def _merge_groups(
    used: Sequence[Sequence[int]], unused: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the groups of rows, with those of unused tensors whose rows are used nowhere else."""
    used_rows = {row for rows in used for row in rows}
    others = [rows for rows in unused if used_rows.isdisjoint(rows)]
    return merge_overlapping([*used, *others])


def _make_initial_labels(output: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the number of the row at each entry, expanded along the other axes."""
    sizes = [output.shape[axis] for axis in axes]
    rows = torch.arange(prod(sizes), dtype=torch.int32).view(sizes)
    # put the axes in the order that the output has them in, then spread over all of its axes
    order = sorted(range(len(axes)), key=lambda i: axes[i] % output.ndim)
    shape = [1] * output.ndim
    for axis, size in zip(axes, sizes, strict=True):
        shape[axis] = size
    return rows.permute(order).reshape(shape).expand(output.shape)


def _narrow_expanded_axes(labels: Tensor) -> Tensor:
    """Return the labels with length 1 along every axis along which they were expanded."""
    for axis, stride in enumerate(labels.stride()):
        if stride == 0 and labels.shape[axis] > 1:
            labels = labels.narrow(axis, 0, 1)
    return labels


def _reshape_labels(labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the labels in another shape; raise if that needs a copy which is too large."""
    try:
        return labels.view(shape)
    except RuntimeError:
        if labels.numel() > _LIMITS.copied:
            raise
        return labels.reshape(shape)


def _pad_labels(labels: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> Tensor:
    """Return the labels of what `F.pad` returns; constant padding has no row."""
    if mode != "constant":
        return F.pad(labels, pad, mode)
    return F.pad(labels, pad, value=_NO_ROW)


def _find_common_labels(sources: Sequence[RowLabels], shape: Sequence[int]) -> RowLabels | None:
    """Return the labels of what is computed entry by entry from these tensors.

    None where entries of different rows meet.
    """
    first = sources[0]
    if any(source.labels.shape != shape for source in sources):
        return None
    if all(_are_equal(source.labels, first.labels) for source in sources[1:]):
        weights = frozenset[str]().union(*(source.weights for source in sources))
        return RowLabels(weights, first.labels)
    # a rotary embedding adds to a tensor its own entries in another order
    if all(_have_same_rows(source, first) for source in sources[1:]):
        return RowLabels(first.weights, first.labels)
    return None


def _is_depthwise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a convolution that makes each channel from one channel of its input."""
    if name not in _CONVOLUTIONS:
        return False
    weight = _get_second_argument(args, kwargs, "weight", None)
    groups = _get_groups(args, kwargs)
    return 1 < groups == weight.shape[0] and weight.shape[1] == 1


def _is_rearrangement(name: str, args: Sequence[Any]) -> bool:
    """Return True for an `einsum` of one tensor that brings its axes into another order."""
    if name != "einsum" or len(args) != 2 or not isinstance(args[1], Tensor):
        return False
    before, arrow, after = args[0].replace(" ", "").partition("->")
    return bool(arrow) and len({*before}) == len(before) and sorted(before) == sorted(after)


def _get_groups(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the number of groups from the arguments of a convolution."""
    if "groups" in kwargs:
        return kwargs["groups"]
    if len(args) > 6:
        return args[6]
    return 1


def _find_channel_labels(
    sources: Sequence[RowLabels], result: Tensor, position_axes: int
) -> list[RowLabels] | None:
    """Return the labels of what is made channel by channel, by pooling or a depthwise convolution.

    None where several tensors have labels, or where a channel's entries come from several rows.
    The last `position_axes` axes are those of positions.
    """
    source = sources[0]
    if len(sources) > 1 or source.labels.ndim != result.ndim:
        return None
    labels = _narrow_expanded_axes(source.labels)
    positions = range(-position_axes, 0)
    of_channels = labels.amax([*positions], keepdim=True)  # _NO_ROW, of padding, is below all rows
    if not bool(((labels == of_channels) | (labels == _NO_ROW)).all()):
        return None
    return [RowLabels(source.weights, of_channels.expand(result.shape), source.is_linear)]


def _have_same_rows(one: RowLabels, two: RowLabels) -> bool:
    """Return True if two tensors come from the same rows of the same weights, in any order."""
    return one.weights == two.weights and one.rows == two.rows


def _have_different_rows(sources: Sequence[RowLabels]) -> bool:
    """Return True if tensors of one shape come from different rows of one weight."""
    first = sources[0]
    if any(s.weights != first.weights or s.labels.shape != first.labels.shape for s in sources):
        return False
    return any(source.rows != first.rows for source in sources)


def _list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _get_second_argument(args: Any, kwargs: Any, name: str, default: Any) -> Any:
    """Return the argument of this name, which may also be the second one by position."""
    if name in kwargs:
        return kwargs[name]
    if len(args) > 1:
        return args[1]
    return default


def _are_equal(one: Tensor, two: Tensor) -> bool:
    if one is two:
        return True
    one = _narrow_expanded_axes(one)
    two = _narrow_expanded_axes(two)
    return one.shape == two.shape and torch.equal(one, two)


def _mark_used(sources: Iterable[RowLabels]) -> None:
    for source in sources:
        source.is_used = True


def _mark_followed(sources: Iterable[RowLabels]) -> None:
    for source in sources:
        source.is_followed = True
