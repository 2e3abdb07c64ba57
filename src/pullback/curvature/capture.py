r"""Gradients by sample, block by block: the one file of this package that reads `pullback.maps`.

A batch is linearized once. Covectors u of its outputs z are pulled back to gradients Jᵀu of each
sample. Layers keep them as inputs ā and output cotangents δ, of which the gradient is
V = Σ_t δ_t ⊗ ā_t over the positions t (tokens, pixels) that share the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from ..grams.kronecker import Pair
from ..maps import Call, ModuleMap
from ..maps.layers import AffineBlock, Block
from .forms import BlockForm, make_parameter_form


@dataclass(frozen=True)
class Limits:
    """Sizes at which per-sample gradients and factors are held in another way."""

    #: longest side of a Kronecker factor that is a full matrix. Its eigenvectors take 256 MiB and
    #: about 10 s on a CPU at this length; the cost is cubic, so longer sides are diagonals.
    longest_factor: int = 8192
    #: entries of gradients formed at once: 128 MiB in float32, of which a laptop holds several
    panel_entries: int = 2**25
    #: the same on a GPU, 1 GiB: smaller products do not fill it
    cuda_panel_entries: int = 2**28


LIMITS = Limits()


@dataclass
class FactorSums:
    """Sums over samples from which a Kronecker pair follows.

    Attributes:
        output_factor: Σ δδᵀ over samples, covectors and positions, (G, O, O) or diagonal (G, O).
        input_factor: Σ āāᵀ over samples and positions, (G, I, I) or diagonal (G, I).
        weight: what the input factor is divided by: the number of positions, or Σ‖V‖² where both
            factors are partial traces.
    """

    output_factor: Tensor
    input_factor: Tensor
    weight: Tensor

    def __add__(self, other: FactorSums) -> FactorSums:
        return FactorSums(
            self.output_factor + other.output_factor,
            self.input_factor + other.input_factor,
            self.weight + other.weight,
        )

    def pair(self, samples: float) -> Pair:
        """Return the Kronecker product of the mean over this many samples."""
        dtype = self.input_factor.dtype
        # a parameter that no output depends on has weight 0: its factor stays 0
        weight = self.weight.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        return Pair(self.output_factor / samples, self.input_factor / weight)


@dataclass(frozen=True)
class BatchShape:
    """Samples and covectors per sample of one pull-back, and where they are."""

    samples: int
    covectors: int
    is_cuda: bool


@dataclass(frozen=True)
class PositionFactors:
    """V = Σ_t δ_t ā_tᵀ by its parts.

    Attributes:
        inputs: ā, (n, G, T, I).
        cotangents: δ, (n, R, G, T, O).
    """

    inputs: Tensor
    cotangents: Tensor

    @property
    def positions(self) -> int:
        """T, the number of positions."""
        return self.inputs.shape[2]


class GradientBlock:
    """Gradients V (N, R, G, O, I) of N samples with R covectors each, formed when asked for."""

    def __init__(self, form: BlockForm, blocks: Sequence[Block], shape: BatchShape) -> None:
        self.form = form
        self.shape = shape
        self._blocks = blocks

    @property
    def samples(self) -> int:
        """N, the number of samples."""
        return self.shape.samples

    def matrices(self, panel: slice) -> Tensor:
        """Return V of the samples in a slice, (n, R, G, O, I)."""
        rows: dict[str, Tensor] = {}
        for block in self._blocks:
            rows.update(block.narrow(panel.start, panel.stop).rows())
        return self.form.gather(rows)

    def position_factors(self, panel: slice) -> PositionFactors | None:
        """Return ā and δ of the samples in a slice, or None where V has no such parts."""
        return None

    def rotate(
        self, output_basis: Tensor | None, input_basis: Tensor | None, panel: slice
    ) -> Tensor:
        """Return UᵀVW of the samples in a slice, with the bases U and W of outputs and inputs.

        None stands for the identity.
        """
        matrices = self.matrices(panel)
        if output_basis is not None:
            matrices = output_basis.mT @ matrices
        if input_basis is not None:
            matrices = matrices @ input_basis
        return matrices

    def panels(self) -> Iterator[slice]:
        """Yield slices of samples whose gradients fit into the limit of one panel."""
        entries = self.shape.covectors * self.form.size
        limit = LIMITS.panel_entries
        if self.shape.is_cuda:
            limit = LIMITS.cuda_panel_entries
        height = max(1, limit // max(1, entries))
        for start in range(0, self.samples, height):
            yield slice(start, min(start + height, self.samples))

    def factor_sums(self) -> FactorSums:
        r"""Return the factors with the partial traces of Σ vec(V)vec(V)ᵀ.

        They are Σ VVᵀ and Σ VᵀV / Σ‖V‖²; for a vector, O = 1, their product is the sum itself.
        """
        panel_sums = [
            _sum_partial_traces(self.matrices(panel).flatten(0, 1)) for panel in self.panels()
        ]
        total = panel_sums[0]
        for sums in panel_sums[1:]:
            total = total + sums
        return total

    def sum_squares(self, output_basis: Tensor | None, input_basis: Tensor | None) -> Tensor:
        """Return Σ (UᵀVW)² over samples and covectors, entry by entry: (G, O, I)."""
        panel_sums = [
            self.rotate(output_basis, input_basis, panel).square().sum((0, 1))
            for panel in self.panels()
        ]
        return torch.stack(panel_sums).sum(0)


def _sum_partial_traces(matrices: Tensor) -> FactorSums:
    """Return the partial traces of (M, G, O, I), long sides as diagonals."""
    _, _, rows, columns = matrices.shape
    squares = matrices.square()
    if rows > LIMITS.longest_factor:
        output_factor = squares.sum((0, 3))
    else:
        by_row = matrices.permute(1, 2, 0, 3).flatten(2)  # (G, O, M·I)
        output_factor = by_row @ by_row.mT
    if columns > LIMITS.longest_factor:
        input_factor = squares.sum((0, 2))
    else:
        by_column = matrices.transpose(0, 1).flatten(1, 2)  # (G, M·O, I)
        input_factor = by_column.mT @ by_column
    return FactorSums(output_factor, input_factor, squares.sum(dtype=torch.float64))


class AffineGradients(GradientBlock):
    """Gradients of a layer z = W a + b, from its inputs and output cotangents."""

    def __init__(self, form: BlockForm, block: AffineBlock, shape: BatchShape) -> None:
        super().__init__(form, [block], shape)
        self._affine = block

    def factor_sums(self) -> FactorSums:
        """Return Σ δδᵀ and Σ āāᵀ, where every position counts as a sample."""
        output_factor, mean_input = self._affine.sides(LIMITS.longest_factor)
        positions = torch.tensor(
            float(self.samples * self._affine.shape[2]), dtype=torch.float64
        ).to(mean_input.device)
        return FactorSums(output_factor, mean_input * positions.to(mean_input.dtype), positions)

    def sum_squares(self, output_basis: Tensor | None, input_basis: Tensor | None) -> Tensor:
        return self._affine.squares(output_basis, input_basis)

    def rotate(
        self, output_basis: Tensor | None, input_basis: Tensor | None, panel: slice
    ) -> Tensor:
        if not self._should_rotate_factors():
            return super().rotate(output_basis, input_basis, panel)
        factors = self.position_factors(panel)
        inputs = factors.inputs
        cotangents = factors.cotangents
        if output_basis is not None:
            cotangents = cotangents @ output_basis
        if input_basis is not None:
            inputs = inputs @ input_basis
        return torch.einsum("nrgto,ngti->nrgoi", cotangents, inputs)

    def position_factors(self, panel: slice) -> PositionFactors:
        narrowed: Any = self._affine.narrow(panel.start, panel.stop)
        return PositionFactors(*narrowed.factors())

    def _should_rotate_factors(self) -> bool:
        """Return True if rotating ā and δ at all positions is cheaper than rotating V."""
        positions = self._affine.shape[2]
        _, rows, columns = self.form.shape
        by_factors = positions * (self.shape.covectors * rows**2 + columns**2)
        by_matrices = self.shape.covectors * rows * columns * (rows + columns)
        return by_factors <= by_matrices


@dataclass(frozen=True)
class CoverageRow:
    """A parameter, and why it has the block that it has."""

    name: str
    reason: str


class BatchTangent:
    """A model linearized at one batch.

    Args:
        model: the network.
        parameters: those whose gradients are formed, by name.
        inputs: what a loader yields before the targets: a tensor, a tuple of arguments, or a
            mapping of keyword arguments.
        output: which tensor of a structured output is z.
        plans: what was established about the model's structure, kept between batches.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        inputs: Any,
        output: Any,
        plans: dict[Any, Any],
    ) -> None:
        module_map = ModuleMap(model, make_call(inputs), output=output, plans=plans)
        self._linear = module_map.linearize(parameters)
        if not self._linear.graph.requires_grad:
            raise PullbackError(
                "The output does not depend on the parameters",
                "its graph has none of them",
                "Check output=, and detach() and torch.no_grad() in forward",
            )
        self._shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        #: z, (N, *event)
        self.outputs = self._linear.value
        #: filled by `gradients`
        self.coverage: list[CoverageRow] = []

    def gradients(
        self, covectors: Tensor, forms: Sequence[BlockForm] | None = None
    ) -> list[GradientBlock]:
        """Return Jᵀu of every sample for covectors u (R, N, *event), block by block.

        With `forms` the blocks are these, in this order.
        """
        pulled = self._linear.pullback(covectors)
        self.coverage = [CoverageRow(row.name, row.reason) for row in pulled.coverage]
        shape = BatchShape(*pulled.shape, covectors.is_cuda)
        gradients: list[GradientBlock] = []
        for block in pulled.blocks.values():
            gradients += self._make_gradient_blocks(block, shape)
        if forms is None:
            return gradients
        return _regroup(gradients, forms, pulled.blocks.values())

    def _make_gradient_blocks(self, block: Block, shape: BatchShape) -> list[GradientBlock]:
        if isinstance(block, AffineBlock) and block.weight is not None:
            form = self._make_affine_form(block)
            return [AffineGradients(form, block, shape)]
        forms = [make_parameter_form(name, self._shapes[name]) for name in block.names]
        return [GradientBlock(form, [block], shape) for form in forms]

    def _make_affine_form(self, block: AffineBlock) -> BlockForm:
        """Return the form of the block of a linear map, with its bias as a column if it has one."""
        sizes = tuple(torch.Size(self._shapes[name]).numel() for name in block.names)
        groups = block.shape[1]
        columns = block.shape[3]
        has_bias = len(block.names) > 1
        return BlockForm(
            block.names,
            sizes,
            groups,
            sizes[0] // (groups * columns),
            columns + int(has_bias),
            has_bias,
            block.is_transposed,
        )

    def directional_derivative(self, direction: Tensor) -> Tensor:
        """Return J v for a flat v (p,): (N, *event)."""
        try:
            return self._linear.jvp(direction)
        except PullbackError as error:
            remedy = 'Use influence(), with fit(structure="exact") where all of G is wanted'
            raise PullbackError(error.what, error.why, remedy) from error

    def summed_gradient(self, covector: Tensor) -> Tensor:
        """Return Jᵀu for u (N, *event), added up over the samples: (p,)."""
        return self._linear.vjp(covector)


def _regroup(
    gradients: Sequence[GradientBlock], forms: Sequence[BlockForm], blocks: Iterable[Block]
) -> list[GradientBlock]:
    """Return blocks of the given forms, joined by name where the batch has others."""
    by_form = {gradient.form: gradient for gradient in gradients}
    holders: dict[str, Block] = {}
    for block in blocks:
        holders.update(dict.fromkeys(block.names, block))
    regrouped = []
    for form in forms:
        if form in by_form:
            regrouped.append(by_form[form])
            continue
        holding = list(dict.fromkeys(holders[name] for name in form.names))
        regrouped.append(GradientBlock(form, holding, gradients[0].shape))
    return regrouped


def make_call(inputs: Any) -> Call:
    """Return the call that a loader's inputs stand for."""
    if isinstance(inputs, Mapping):
        return Call.of(**inputs)
    if isinstance(inputs, (tuple, list)):
        return Call.of(*inputs)
    return Call.of(inputs)
