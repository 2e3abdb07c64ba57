r"""What every parameter of a model is for, from the structure that one forward pass shows.

A matrix optimizer must know more than shapes. A table of embeddings has the shape of a matrix and
is none; a depthwise filter has four axes and is a vector per channel; one weight may hold the
matrices of queries, keys and values. `find_roles` runs the model once, records which layer or
function uses each parameter, and follows how the outputs of the weights are split.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from .._core.capture import Call, unwrap_model
from .._core.errors import PullbackError
from .._core.graph import collect_reachable_nodes, refuse_reentrant
from .layers import Compound, describe_layer, find_layer
from .layers.product import MatrixProduct, ProductUse
from .layers.weight_norm import WeightNormUse
from .output_parts import TRANSPOSED_CONVOLUTIONS, ComputedWeight
from .proof import NO_LAYER
from .record import Entry, ForwardRecord, ModelLayers, find_factor_layer
from .unknown_uses import describe_unknown_uses

#: entries of a structured output that are not what the model computes for its caller
_SIDE_OUTPUTS = ("loss", "past_key_values", "hidden_states", "attentions", "cache_params")


#: nodes of products of matrices
_PRODUCTS = ("MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddmmBackward0")


class Role(StrEnum):
    """What a parameter is for. The values are stable: checkpoints and tables hold them."""

    #: a matrix, or several one below the other, between a layer's inputs and outputs
    MATRIX = "matrix"
    #: the filters of a convolution; a row is one output channel
    CONVOLUTION = "convolution"
    #: a stack of matrices along the first axes, each with inputs of its own
    EXPERTS = "experts"
    #: a table whose rows are looked up
    EMBEDDING = "embedding"
    #: a matrix, or filters, that gives the model's output
    HEAD = "head"
    #: biases, gains, depthwise filters, and all that no product of matrices uses
    VECTOR = "vector"


#: roles of weights whose outputs are followed
_MATRIX_ROLES = (Role.MATRIX, Role.CONVOLUTION, Role.EXPERTS)


@dataclass(frozen=True)
class ParameterRole:
    """The role of one parameter.

    Attributes:
        name: in `model.named_parameters()`.
        role: what it is for.
        split: the row counts of the independent matrices that the parameter holds along
            `split_axis`: `(rows,)` for a single matrix, `(n, n, n)` for fused queries, keys and
            values, and empty for embeddings and vectors.
        split_axis: the axis of the parameter that counts rows, that is outputs: 0 for `nn.Linear`,
            1 for `x @ w`. Where rows take several axes, as heads and their features may in an
            `einsum`, it is one of them, and `split` counts all rows.
        reason: what shows the role, in words.
        is_used: whether the forward pass used the parameter.
        is_computed_from: whether a layer's weight is computed from it, so that it has no block.
        is_normalized: whether its length has no effect, because all that it gives is normalized.
    """

    name: str
    role: Role
    split: tuple[int, ...]
    split_axis: int
    reason: str
    is_used: bool = True
    is_computed_from: bool = False
    is_normalized: bool = False


def find_roles(model: nn.Module, call: Call) -> list[ParameterRole]:
    """Return the role of every parameter, from one forward pass of the model.

    The model's parameters, buffers, gradients, mode and the random state stay as they are. Frozen
    parameters have roles too.

    Raises:
        PullbackError: for parameters without a shape yet, and where a reentrant checkpoint hides
            what the pass does.
    """
    module = unwrap_model(model)
    leaves = _copy_parameters(module)
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    swapped = _reparametrize_module(module, {**leaves, **buffers}, tie_weights=True)
    with torch.enable_grad(), call.replay_context(), swapped:
        record = ForwardRecord(ModelLayers(module, find_factor_layer), leaves)
        record.follow_outputs()
        with record:
            result = module(*call.args, **call.kwargs)
        for output in _list_differentiable_tensors(result):
            refuse_reentrant(output)
        return assign_roles(module, record, result, leaves)


def _copy_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters as leaves of a graph of their own, by name."""
    out = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise PullbackError(
                f"Parameter {name!r} has no shape yet",
                "its lazy module makes it at the first forward pass",
                "Call the model once before",
            )
        if parameter.is_floating_point() or parameter.is_complex():
            out[name] = parameter.detach().requires_grad_()
    return out


def assign_roles(
    model: nn.Module, record: ForwardRecord, result: Any, parameters: Mapping[str, Tensor]
) -> list[ParameterRole]:
    """Return the roles from a recorded pass and the `result` that it gave.

    The graph of the pass must still be there, and the record must have followed its outputs.
    `parameters` are the tensors that the pass used.
    """
    assert record.outputs is not None
    uses = _group_uses(record)
    inner_roles = _find_inner_roles(record)
    heads = _find_heads(record, result)
    row_sets = record.outputs.collect_parts()
    normalized = record.outputs.normalized.list_weights(result)
    computed: dict[str, ComputedWeight] = {}
    for weight in record.outputs.computed:
        computed |= dict.fromkeys(weight.parameters, weight)
    known = uses.keys() | inner_roles.keys() | computed.keys()
    others = {name: p for name, p in parameters.items() if name not in known}
    unknown = describe_unknown_uses(result, others, record.outputs.vmapped)
    by_module = _RolesByModule(model)
    roles = []
    for name, parameter in parameters.items():
        if name in uses:
            role = _assign_from_uses(name, parameter, uses[name], row_sets.get(name, []), heads)
        elif name in inner_roles:
            role = inner_roles[name]
        elif name in computed:
            rows_used_together = row_sets.get(name, [])
            role = _describe_weight_source(
                name, parameter, computed[name], rows_used_together, name in heads
            )
        elif name in unknown:
            role = by_module.describe_unknown(name, parameter, unknown[name])
        else:
            role = by_module.describe_unused(name, parameter)
        if name in normalized and role.role in _MATRIX_ROLES:
            role = replace(role, is_normalized=True)
        roles.append(role)
    return roles


def _group_uses(record: ForwardRecord) -> dict[str, list[_Use]]:
    """Return the uses of each parameter by layers and functions."""
    uses: dict[str, list[_Use]] = {}
    for entry in record.entries:
        for parameter_key, name in entry.names.items():
            if name is not None:
                uses.setdefault(name, []).append(_Use(entry, parameter_key))
    return uses


@dataclass(frozen=True)
class _Use:
    """One use of a parameter by a layer, as its "weight", "bias" or under another key."""

    entry: Entry
    parameter_key: str

    @property
    def module(self) -> nn.Module:
        module = self.entry.module
        if isinstance(module, WeightNormUse):
            return module.inner
        return module

    @property
    def layer_name(self) -> str:
        """Return the layer in words."""
        return describe_layer(self.module)

    @property
    def is_matrix(self) -> bool:
        return self.entry.layer.curvature == "kronecker" and self.parameter_key == "weight"

    @property
    def is_lookup(self) -> bool:
        return self.entry.layer.one_hot

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.module, nn.modules.conv._ConvNd)


def _assign_from_uses(
    name: str, parameter: Tensor, uses: Sequence[_Use], row_sets: Sequence[Sequence[int]],
    heads: Collection[str],
) -> ParameterRole:  # fmt: skip
    """Return the role of a parameter that known layers use."""
    if any(use.is_lookup for use in uses):
        reason = "its rows are looked up"
        if name in heads:
            reason += ", and it is tied to the head"
        return ParameterRole(name, Role.EMBEDDING, (), 0, reason)
    layer_name = uses[0].layer_name
    matrices = [use for use in uses if use.is_matrix]
    if not matrices:
        reason = f"{uses[0].parameter_key} of {layer_name}"
        return ParameterRole(name, Role.VECTOR, (), 0, reason)
    return _assign_from_matrices(
        name, parameter, matrices, row_sets, f"weight of {layer_name}", name in heads
    )


def _assign_from_matrices(
    name: str, parameter: Tensor, uses: Sequence[_Use], row_sets: Sequence[Sequence[int]],
    reason: str, is_head: bool,
) -> ParameterRole:  # fmt: skip
    """Return the role of a parameter that is used as a matrix, as filters or as a stack."""
    convolutions = [use.module for use in uses if use.is_convolution]
    if convolutions:
        filters = _Filters.of(convolutions[0])
        return _describe_filters(name, parameter, filters, row_sets, is_head)
    products = [use.module.product for use in uses if isinstance(use.module, ProductUse)]
    if not products:
        return _describe_matrix(name, parameter, None, row_sets, reason, is_head)
    if len(products) == len(uses) and products[0].form[0] > 1:
        return _describe_stack(name, parameter, products[0], row_sets)
    return _describe_matrix(name, parameter, products[0], row_sets, reason, is_head)


def _describe_matrix(
    name: str, parameter: Tensor, product: MatrixProduct | None, row_sets: Sequence[Sequence[int]],
    reason: str, is_head: bool,
) -> ParameterRole:  # fmt: skip
    """Return the role of a single matrix, or of several one below the other."""
    axis = 0
    rows = parameter.shape[0]
    if product is not None:
        rows = product.form[1]
        is_column = parameter.ndim == 2 and len(parameter) != rows  # (n, 1) is held as (1, n)
        if product.is_transposed or is_column:
            axis = parameter.ndim - 1
    split, remark = _find_split(row_sets, rows)
    reason += remark
    if is_head:
        return ParameterRole(name, Role.HEAD, split, axis, f"it gives the output; {reason}")
    return ParameterRole(name, Role.MATRIX, split, axis, reason)


@dataclass(frozen=True)
class _Filters:
    """The convolution whose filters a parameter holds."""

    #: the layer or function in words
    description: str
    groups: int
    is_transposed: bool

    @classmethod
    def of(cls, module: Any) -> _Filters:
        """Return the description of a convolution layer's filters."""
        is_transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
        return cls(f"filters of {type(module).__name__}", module.groups, is_transposed)


def _describe_filters(
    name: str, parameter: Tensor, filters: _Filters, row_sets: Sequence[Sequence[int]],
    is_head: bool,
) -> ParameterRole:  # fmt: skip
    """Return the role of a convolution's filters; depthwise ones are vectors."""
    groups = filters.groups
    if filters.is_transposed:
        axis = 1
        rows = parameter.shape[1]
        inputs = parameter.shape[0] // groups
    else:
        axis = 0
        rows = parameter.shape[0] // groups
        inputs = parameter.shape[1]
    if groups > 1 and (inputs == 1 or rows == 1):
        return ParameterRole(name, Role.VECTOR, (), 0, f"depthwise {filters.description}")
    remark = ""
    if groups > 1:
        if axis == 0:
            split = (rows,) * groups
        else:
            split = (rows,)
        remark = f", {groups} groups"
    else:
        split, remark = _find_split(row_sets, rows)
    reason = f"{filters.description}{remark}"
    if is_head:
        return ParameterRole(name, Role.HEAD, split, axis, f"it gives the output; {reason}")
    return ParameterRole(name, Role.CONVOLUTION, split, axis, reason)


def _describe_stack(
    name: str, parameter: Tensor, product: Any, row_sets: Sequence[Sequence[int]]
) -> ParameterRole:
    """Return the role of a parameter with several matrices, each used with inputs of its own.

    Slices of a matrix, each used by itself, are matrices; vectors stay vectors.
    """
    count, rows, columns = product.form
    if parameter.ndim == 2:  # slices of one weight, each used by itself
        if product.is_transposed:
            size = columns
        else:
            size = rows
        reason = f"{count} matrices that are used one by one"
        return ParameterRole(name, Role.MATRIX, (size,) * count, 0, reason)
    if min(rows, columns) == 1:
        return ParameterRole(name, Role.VECTOR, (), 0, f"a stack of {count} vectors")
    split, remark = _find_split(row_sets, rows)
    if product.is_transposed:
        axis = parameter.ndim - 1
    else:
        axis = parameter.ndim - 2
    return ParameterRole(name, Role.EXPERTS, split, axis, f"a stack of {count} matrices{remark}")


def _find_split(row_sets: Sequence[Sequence[int]], rows: int) -> tuple[tuple[int, ...], str]:
    """Return the row counts of the matrices that a weight holds, and a remark for the reason.

    Each of `row_sets` has the rows that are used together. They must be neighbouring rows, at least
    two of them: a single row is no matrix.
    """
    if len(row_sets) <= 1:
        return (rows,), ""
    if any(row_set[-1] - row_set[0] + 1 != len(row_set) for row_set in row_sets):
        return (rows,), f"; its rows belong to {len(row_sets)} matrices by turns, and are not split"
    counts = tuple(map(len, row_sets))
    if row_sets[0][0] != 0 or sum(counts) != rows or min(counts) < 2:
        return (rows,), ""
    return counts, f", whose output is split in {len(row_sets)}"


def _find_inner_roles(record: ForwardRecord) -> dict[str, ParameterRole]:
    """Return the roles of the weights and biases inside attention and recurrent layers."""
    out: dict[str, ParameterRole] = {}
    for call in record.compounds:
        for weight, bias, groups in call.compound.list_affine_maps(call.module):
            for tensor, is_weight in ((weight, True), (bias, False)):
                name = record.name(tensor)
                if tensor is not None and name is not None:
                    out[name] = _describe_inner_map(name, tensor, call.module, groups, is_weight)
    return out


def _describe_inner_map(
    name: str, tensor: Tensor, module: nn.Module, groups: int, is_weight: bool
) -> ParameterRole:
    """Return the role of a weight or bias inside a compound layer.

    The weight of a recurrent layer holds a matrix for each gate, others `groups` matrices.
    """
    layer_name = type(module).__name__
    if not is_weight:
        return ParameterRole(name, Role.VECTOR, (), 0, f"bias in {layer_name}")
    rows = tensor.shape[0]
    count = groups
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        # each gate has a nonlinearity of its own: i, f, g, o of the LSTM, r, z, n of the GRU
        count = max(1, rows // int(module.hidden_size))
    split = (rows // count,) * count
    if count > 1:
        reason = f"{count} matrices in {layer_name}"
    else:
        reason = f"matrix in {layer_name}"
    return ParameterRole(name, Role.MATRIX, split, 0, reason)


def _describe_weight_source(
    name: str, parameter: Tensor, weight: ComputedWeight, row_sets: Sequence[Sequence[int]],
    is_head: bool,
) -> ParameterRole:  # fmt: skip
    """Return the role of a parameter from which a layer's weight is computed.

    One of the weight's own shape is the head if the weight is; smaller ones are matrices.
    """
    is_whole = tuple(parameter.shape) == weight.shape
    is_head = is_head and is_whole
    if parameter.ndim < 2 or (min(parameter.flatten(1).shape) == 1 and not is_head):
        return ParameterRole(name, Role.VECTOR, (), 0, "a part of a computed weight")
    reason = f"the weight of {weight.function} is computed from it"
    if weight.function == "linear":
        if not is_whole:
            row_sets = []
        role = _describe_matrix(name, parameter, None, row_sets, reason, is_head)
    elif is_whole:
        description = f"filters from which the weight of {weight.function} is computed"
        is_transposed = weight.function in TRANSPOSED_CONVOLUTIONS
        filters = _Filters(description, weight.groups, is_transposed)
        role = _describe_filters(name, parameter, filters, row_sets, is_head)
    else:
        role = ParameterRole(name, Role.CONVOLUTION, (len(parameter),), 0, reason)
    return replace(role, is_computed_from=True)


class _RolesByModule:
    """Roles of parameters that no known layer used in the pass, from the module that holds them."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, tuple[nn.Module, str]] = {}
        for module in model.modules():
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    self._owners.setdefault(id(tensor), (module, key))

    def describe_unknown(self, name: str, parameter: Tensor, use: str) -> ParameterRole:
        """Return the role of a parameter that is used, and by no known layer.

        A table of embeddings stays one, whatever is done with its rows.
        """
        module, _ = self._owners.get(id(parameter), (None, ""))
        role = Role.VECTOR
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            role = Role.EMBEDDING
        return ParameterRole(name, role, (), 0, f"{NO_LAYER}: {use}", is_used=False)

    def describe_unused(self, name: str, parameter: Tensor) -> ParameterRole:
        """Return a role with the reason that the pass did not show it."""
        module, key = self._owners.get(id(parameter), (nn.Identity(), ""))
        layer = find_layer(module, object)
        if layer is None:
            return ParameterRole(
                name, Role.VECTOR, (), 0, _explain_unknown(parameter), is_used=False
            )
        if isinstance(layer, Compound):
            role = _describe_unused_inner_map(name, parameter, module, layer)
        elif layer.curvature != "kronecker" or key != "weight":
            role = ParameterRole(name, Role.VECTOR, (), 0, "")
        elif layer.one_hot:
            role = ParameterRole(name, Role.EMBEDDING, (), 0, "")
        elif isinstance(module, nn.modules.conv._ConvNd):
            role = _describe_filters(name, parameter, _Filters.of(module), [], is_head=False)
        else:
            role = ParameterRole(name, Role.MATRIX, (parameter.shape[0],), 0, "")
        remark = f"by its module, {type(module).__name__}: this pass did not use it"
        return replace(role, reason=remark, is_used=False)


def _describe_unused_inner_map(
    name: str, parameter: Tensor, module: nn.Module, layer: Compound
) -> ParameterRole:
    """Return the role of a parameter of a compound layer that the pass did not use."""
    for weight, _, groups in layer.list_affine_maps(module):
        if weight is parameter:
            return _describe_inner_map(name, parameter, module, groups, is_weight=True)
    return _describe_inner_map(name, parameter, module, 1, is_weight=False)


def _explain_unknown(parameter: Tensor) -> str:
    """Return the reason for the role of a parameter whose module is not known."""
    if parameter.ndim < 2:
        return "a vector"
    return "no product of matrices with it was seen"


def _find_heads(record: ForwardRecord, result: Any) -> set[str]:
    """Return the weights that give the model's output.

    They are the first that a walk down the graph meets, if none of them stands below another: the
    output of a residual network without a head is a sum over all of its blocks.
    """
    weights = _map_nodes_to_weights(record)
    heads: set[str] = set()
    for tensor in _select_main_outputs(result):
        reached = collect_reachable_nodes(
            tensor.grad_fn, lambda node: [] if node in weights else _list_next_nodes(node)
        )
        first = reached & {*weights}
        if any(_multiplies_activations(node) for node in reached - first):
            continue  # similarities of two encoders
        if not any(first & _collect_nodes_below(node) for node in first):
            for node in first:
                heads.update(weights[node])
    return heads


def _map_nodes_to_weights(record: ForwardRecord) -> dict[Any, Collection[str]]:
    """Return the names of weights, or of what they are computed from, by their output's node.

    There are no names for frozen weights and for those in compound layers.
    """
    assert record.outputs is not None
    nodes: dict[Any, Collection[str]] = dict.fromkeys(record.untrained_nodes, ())
    for weight in record.outputs.computed:
        nodes[weight.node] = weight.parameters
    for entry in record.entries:
        name = entry.names.get("weight")
        if entry.layer.curvature == "kronecker" and name is not None:
            nodes[entry.edge.node] = (name,)
    for call in record.compounds:
        nodes.update((edge.node, ()) for edge in call.edges if edge is not None)
    return nodes


def _multiplies_activations(node: Any) -> bool:
    """Return True if a node is a product of two computed matrices."""
    below = [following for following in _list_next_nodes(node) if following is not None]
    return node is not None and node.name() in _PRODUCTS and len(below) > 1


def _list_next_nodes(node: Any) -> list[Any]:
    return [following for following, _ in node.next_functions]


def _collect_nodes_below(node: Any) -> set[Any]:
    reached: set[Any] = set()
    for following in _list_next_nodes(node):
        reached |= collect_reachable_nodes(following)
    return reached


def _select_main_outputs(result: Any) -> list[Tensor]:
    """Return the tensors that a caller uses: logits where something is called so."""
    if is_dataclass(result) and not isinstance(result, Mapping):
        result = vars(result)
    if isinstance(result, Mapping):
        result = _select_main_entries(result)
    elif hasattr(result, "logits"):
        result = result.logits
    return _list_differentiable_tensors(result)


def _list_differentiable_tensors(tree: Any) -> list[Tensor]:
    tensors = [t for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    return [t for t in tensors if t.grad_fn is not None]


def _select_main_entries(result: Mapping[Any, Any]) -> list[Any]:
    """Return the logits of a structured output, or all entries but known side outputs."""
    logits = [value for key, value in result.items() if "logits" in str(key)]
    if logits:
        return logits
    return [value for key, value in result.items() if key not in _SIDE_OUTPUTS]
