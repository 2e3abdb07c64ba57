"""Weights whose length has no effect, since all that they give is normalized.

Twice as large filters before a batch norm give the same network. `NormalizedWeights` follows
*multiples* of weights through one forward pass: tensors that are multiplied by a power of λ where
the weight is multiplied by λ > 0. A parameter is a multiple of itself, and products of multiples,
views, pools and ReLUs of them are multiples again. A normalization by the statistics of its input
takes the length out, but for its `eps`, which is to be small. Whatever else reads a multiple may
depend on the length.

The functions that are called show what is done with a multiple, and the autograd graph shows
whether something else was done too, by a custom function or in compiled code. What is computed
without gradients is followed as well: it must not come back into what has gradients. Only Python
numbers that were read from tensors escape.

A weight that is not found has the usual steps: before a normalization by hand, with a large `eps`,
or by a custom function, as `SyncBatchNorm` is among several processes, or where weight norm makes
the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from .unknown_uses import find_users

#: functions that copy entries, perhaps to another dtype
_COPIES = frozenset(
    ("to", "float", "double", "half", "bfloat16", "type_as", "clone", "contiguous")
)  # fmt: skip
_AXES = ("1d", "2d", "3d")
_MAX_POOLS = frozenset(map("".join, product(("max_pool", "adaptive_max_pool"), _AXES)))
_OTHER_POOLS = map("".join, product(("avg_pool", "adaptive_avg_pool", "lp_pool"), _AXES))
#: functions that pool each channel by itself
POOLS = _MAX_POOLS | frozenset(_OTHER_POOLS)
_ELEMENTWISE = frozenset(("relu", "relu_", "leaky_relu", "leaky_relu_", "neg", "__neg__", "abs"))
_DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d"))
#: functions of one tensor that give a multiple of a multiple
_HOMOGENEOUS = (
    _COPIES
    | POOLS
    | _ELEMENTWISE
    | _DROPOUTS
    | frozenset(
        ("sum", "mean", "view", "reshape", "view_as", "reshape_as", "flatten", "unflatten",
         "ravel", "squeeze", "unsqueeze", "split", "split_with_sizes", "chunk", "tensor_split",
         "unbind", "__getitem__", "select", "narrow", "index_select", "transpose", "swapaxes",
         "permute", "movedim", "moveaxis", "t", "__get__", "expand", "expand_as", "repeat", "roll",
         "flip")
    )
)  # fmt: skip
#: functions that read the shape or the dtype of a second tensor, and none of its entries
_AS_ANOTHER = frozenset(("view_as", "reshape_as", "expand_as", "type_as", "to"))
#: functions with a weight as second argument and a bias as third
_LAYERS = frozenset(map("".join, product(("conv", "conv_transpose"), _AXES))) | {"linear"}
#: products of their tensors
_PRODUCTS = frozenset(
    ("mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__",
     "__itruediv__", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "einsum")
)  # fmt: skip
#: functions that put tensors side by side
_JOINS = frozenset(("cat", "concat"))
#: normalizations that subtract the mean of each channel and divide by its deviation
_CHANNEL_NORMS = frozenset(("batch_norm", "instance_norm"))
#: all normalizations, with the position of `eps` among their arguments
_EPS_POSITIONS = {
    "batch_norm": 7,
    "instance_norm": 7,
    "group_norm": 4,
    "layer_norm": 4,
    "rms_norm": 3,
    "normalize": 3,
}
#: functions of each channel by itself
_OF_CHANNELS = _COPIES | POOLS | _ELEMENTWISE | _DROPOUTS
#: those of them that add a number to their results where it is added to their argument
_KEEPING_BIASES = _COPIES | _MAX_POOLS


@dataclass(frozen=True)
class _Limits:
    """Bounds of what counts as a normalization."""

    #: of `eps`. Usual ones are at most 1e-3 (EfficientNet, Inception). Beside a larger one the mean
    #: squares or lengths that are divided by may be small, and the length of the weight then counts
    eps: float = 1e-3


_LIMITS = _Limits()


@dataclass(frozen=True, eq=False)
class _Multiple:
    """What is known of a tensor that is a multiple of weights.

    The channels are those of axis 1.
    """

    weights: frozenset[str]
    #: whether only each channel by itself is a multiple, by a power of its own
    is_by_channel: bool = False
    #: whether a number was added to each channel
    has_bias: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the tensor is a multiple whatever is done with its channels."""
        return not self.is_by_channel and not self.has_bias


@dataclass(frozen=True)
class _Call:
    """A call of a function."""

    name: str
    args: Any
    kwargs: Mapping[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return the argument of this name, which may also stand at this position."""
        if name in self.kwargs:
            return self.kwargs[name]
        if len(self.args) > position:
            return self.args[position]
        return default

    @property
    def is_normalization(self) -> bool:
        """True for a normalization by the statistics of its input alone.

        Running statistics, and an `eps` that is not small beside those of the input, do not grow
        with the weight.
        """
        if self.name not in _EPS_POSITIONS or not self._has_small_eps:
            return False
        if self.name == "batch_norm":
            return bool(self.get(5, "training", False))
        if self.name == "instance_norm":
            return bool(self.get(5, "use_input_stats", True))
        return True

    @property
    def _has_small_eps(self) -> bool:
        """True if the `eps` of a normalization is the default or a small number."""
        eps = self.get(_EPS_POSITIONS[self.name], "eps")
        return eps is None or (isinstance(eps, (int, float)) and eps <= _LIMITS.eps)

    @property
    def is_homogeneous(self) -> bool:
        """True for a function that gives a multiple of a multiple, or of several ones."""
        if self.kwargs.get("rounding_mode") is not None:
            return False
        return self.name in _HOMOGENEOUS or self.name in _PRODUCTS

    def keeps_channels(self, source: _Multiple, output: Tensor) -> bool:
        """Return True for a function that gives a multiple of one whose channels differ."""
        if self.name in POOLS and output.ndim != int(self.name[-2]) + 2:
            return False  # axis 1 is one of positions
        if source.has_bias:
            return self.name in _KEEPING_BIASES
        return self.name in _OF_CHANNELS

    def joins_channels(self, output: Tensor) -> bool:
        """Return True for a function that puts the channels of tensors side by side."""
        return self.name in _JOINS and self.get(1, "dim", 0) in (1, 1 - output.ndim)

    def adds_to_channels(self, output: Tensor) -> bool:
        """Return True if the bias of a layer's function is one number for each entry of axis 1."""
        if self.name == "linear":
            return output.ndim == 2
        return output.ndim == self.get(1, "weight").ndim


class NormalizedWeights:
    """Finds the weights whose length has no effect on what one forward pass computes.

    Args:
        names: of the parameters, by `id`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._multiples: Any = WeakTensorKeyDictionary()
        #: the weights that tensors without gradients were computed from
        self._detached: Any = WeakTensorKeyDictionary()
        #: weights of which a multiple was normalized, and those of which one was read otherwise
        self._normalized: set[str] = set()
        self._unnormalized: set[str] = set()
        #: multiples that no function has read so far
        self._unread: set[_Multiple] = set()
        #: the weights of which a node of the graph gives a multiple
        self._weights_by_node: dict[Any, frozenset[str]] = {}
        #: pairs of a node and one below it that were put there by functions that `follow` has seen
        self._known_edges: set[tuple[Any, Any]] = set()

    def list_nodes(self, args: Any, kwargs: Mapping[str, Any]) -> set[Any]:
        """Return the nodes of the tensors that a function is about to be called with.

        Those of parameters are known by their variables. To ask for one here would add a node to
        the graph, whose nodes are counted.
        """
        arguments = _list_arguments(args, kwargs)
        return {tensor.grad_fn for tensor in arguments if tensor.grad_fn is not None}

    def follow(
        self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any, nodes: set[Any]
    ) -> None:
        """Note what a function did with multiples; `nodes` are those of `list_nodes`."""
        results = _list_tensors(result)
        if not results and name != "__setitem__":
            return  # a shape, say
        arguments = _list_arguments(args, kwargs)
        if name in _AS_ANOTHER:
            arguments = arguments[:1]
        multiples = [m for m in map(self._find_multiple, arguments) if m is not None]
        weights = _unite(multiples)
        detached = frozenset[str]().union(*(self._detached.get(t, ()) for t in arguments))
        if name == "__setitem__":
            self._unnormalized |= weights | detached
            self._unread.difference_update(multiples)
            return
        if not any(t.requires_grad for t in results):
            self._follow_detached(name, arguments, results, weights | detached)
            return
        self._unnormalized |= detached
        if not multiples:
            return
        self._unread.difference_update(multiples)
        inner_nodes = self._add_edges(results, nodes)
        call = _Call(name, args, kwargs)
        if call.is_normalization:
            self._note_normalization(call, multiples)
            return
        self._weights_by_node.update(dict.fromkeys(inner_nodes, weights))
        if name in _LAYERS:
            self._note_layer(call, results)
        else:
            self._note_other(call, multiples, results)

    def list_weights(self, result: Any) -> set[str]:
        """Return the weights whose multiples were all normalized, from what the pass returned.

        The graph of the pass must still be there.
        """
        unnormalized = self._unnormalized | _unite(self._unread)
        for tensor in _list_tensors(result):
            unnormalized |= self._weights_by_node.get(tensor.grad_fn, frozenset())
            unnormalized |= self._detached.get(tensor, frozenset())
        for node, users in find_users(result).items():
            weights = self._weights_by_node.get(node)
            if weights and any((user, node) not in self._known_edges for user in users):
                unnormalized |= weights
        return self._normalized - unnormalized

    def _find_multiple(self, tensor: Any) -> _Multiple | None:
        """Return what is known of a tensor; None if it is no multiple of a weight."""
        if not isinstance(tensor, Tensor):
            return None
        name = self._names.get(id(tensor))
        if name is not None and tensor not in self._multiples:
            self._multiples[tensor] = _Multiple(frozenset({name}))
        return self._multiples.get(tensor)

    def _follow_detached(
        self, name: str, arguments: list[Tensor], results: list[Tensor], weights: frozenset[str]
    ) -> None:
        """Note tensors without gradients that were computed from multiples."""
        if not weights:
            return
        is_in_place = name.endswith("_") and not name.endswith("__")
        if is_in_place and arguments[0] in self._detached:
            self._unnormalized |= weights  # it may share its memory with a multiple
        self._detached.update(dict.fromkeys(results, weights))

    def _add_edges(self, results: Iterable[Tensor], below: set[Any]) -> set[Any]:
        """Note the edges that a function put into the graph, down to the nodes of its arguments.

        Return the nodes between those of its results and of its arguments.
        """
        stack = [t.grad_fn for t in results if t.grad_fn is not None and t.grad_fn not in below]
        result_nodes = {*stack}
        visited = {*stack}
        while stack:
            node = stack.pop()
            for next_node, _ in node.next_functions:
                if next_node is None:
                    continue
                self._known_edges.add((node, next_node))
                name = self._names.get(id(getattr(next_node, "variable", None)))
                if name is not None:
                    self._weights_by_node[next_node] = frozenset({name})
                elif next_node not in below and next_node not in visited:
                    visited.add(next_node)
                    stack.append(next_node)
        return visited - result_nodes

    def _note_normalization(self, call: _Call, multiples: Iterable[_Multiple]) -> None:
        """Note that the input of a normalization loses its length; gains and biases do not."""
        source = self._find_multiple(call.get(0, "input"))
        self._unnormalized |= _unite(m for m in multiples if m is not source)
        if source is None:
            return
        if source.is_whole or call.name in _CHANNEL_NORMS:
            self._normalized |= source.weights
        else:
            self._unnormalized |= source.weights

    def _note_layer(self, call: _Call, results: Sequence[Tensor]) -> None:
        """Note the product of an input and a weight, perhaps with a bias."""
        bias = call.get(2, "bias")
        weights = set[str]()
        for source in map(self._find_multiple, (call.get(0, "input"), call.get(1, "weight"))):
            if source is not None and source.is_whole:
                weights |= source.weights
            elif source is not None:
                self._unnormalized |= source.weights
        bias_source = self._find_multiple(bias)
        if bias_source is not None:
            self._unnormalized |= bias_source.weights
        if bias is None or call.adds_to_channels(results[0]):
            self._add_multiples(results, _Multiple(frozenset(weights), has_bias=bias is not None))
        else:
            self._unnormalized |= weights

    def _note_other(
        self, call: _Call, multiples: Sequence[_Multiple], results: Sequence[Tensor]
    ) -> None:
        """Note a function that has no weight of its own."""
        weights = _unite(multiples)
        is_whole = all(multiple.is_whole for multiple in multiples)
        if call.joins_channels(results[0]):
            has_bias = any(multiple.has_bias for multiple in multiples)
            self._add_multiples(results, _Multiple(weights, is_by_channel=True, has_bias=has_bias))
        elif is_whole and call.is_homogeneous:
            self._add_multiples(results, _Multiple(weights))
        elif len(multiples) == 1 and call.keeps_channels(multiples[0], results[0]):
            self._add_multiples(results, multiples[0])
        else:
            self._unnormalized |= weights

    def _add_multiples(self, tensors: Iterable[Tensor], multiple: _Multiple) -> None:
        """Note results of a function, each of which is to be read."""
        for tensor in tensors:
            self._multiples[tensor] = replace(multiple)
            self._unread.add(self._multiples[tensor])
            self._weights_by_node[tensor.grad_fn] = multiple.weights


def _unite(multiples: Iterable[_Multiple]) -> frozenset[str]:
    """Return the weights of all these multiples."""
    return frozenset[str]().union(*(multiple.weights for multiple in multiples))


def _list_arguments(args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a function."""
    tensors: list[Tensor] = []
    for argument in (*args, *kwargs.values()):
        tensors += _list_tensors(argument)
    return tensors


def _list_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a nested argument or result."""
    if isinstance(tree, Tensor):
        return [tree]
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
