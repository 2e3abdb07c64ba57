"""What one pass over the data adds up: factors, eigenvalues in given bases, or whole rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .._core.processes import Processes
from .._core.svd import svd
from ..grams.kronecker import EigenBlock
from .capture import FactorSums, GradientBlock
from .forms import BlockForm, make_vector_form
from .spectra import KroneckerBlock, LowRankBlock, SpectralBlock


class DataPass(ABC):
    """Sums over the per-sample gradients of all batches."""

    #: what the progress line says
    title: str

    @abstractmethod
    def add(self, gradients: Sequence[GradientBlock]) -> None:
        """Add the gradients of one batch."""

    @abstractmethod
    def reduce(self, processes: Processes) -> None:
        """Add up, or gather, what all processes have."""

    @abstractmethod
    def state(self) -> dict[str, object]:
        """Return what a checkpoint keeps."""

    @abstractmethod
    def restore(self, state: Mapping[str, object]) -> None:
        """Continue from a checkpoint."""


class FactorPass(DataPass):
    """Kronecker factors of every block."""

    title = "factors"

    def __init__(self) -> None:
        self.sums: dict[BlockForm, FactorSums] = {}

    def add(self, gradients: Sequence[GradientBlock]) -> None:
        for block in gradients:
            sums = block.factor_sums()
            if block.form in self.sums:
                sums = self.sums[block.form] + sums
            self.sums[block.form] = sums

    def reduce(self, processes: Processes) -> None:
        _refuse_different_forms(list(self.sums), processes)
        for form, sums in self.sums.items():
            tensors = [sums.output_factor, sums.input_factor, sums.weight]
            self.sums[form] = FactorSums(*processes.sum(tensors))

    def state(self) -> dict[str, object]:
        return dict(encode_sums(self.sums))

    def restore(self, state: Mapping[str, object]) -> None:
        self.sums = {form: FactorSums(*tensors) for form, tensors in decode_sums(state)}

    def blocks(self, samples: float) -> list[KroneckerBlock]:
        """Return R ⊗ C of every block for the mean over this many samples, diagonalized."""
        blocks = []
        for form, sums in self.sums.items():
            _refuse_overflow(form, sums.output_factor)
            _refuse_overflow(form, sums.input_factor)
            blocks.append(KroneckerBlock.of_pair(form, sums.pair(samples)))
        return blocks


class EigenvaluePass(DataPass):
    """Second moments of the gradients in given eigenbases: the eigenvalues of EK-FAC.

    Without bases (None) they are the diagonal of G.
    """

    title = "eigenvalues"

    def __init__(self, blocks: Sequence[KroneckerBlock] | None) -> None:
        self._bases = None if blocks is None else {block.form: block for block in blocks}
        self.sums: dict[BlockForm, Tensor] = {}

    def add(self, gradients: Sequence[GradientBlock]) -> None:
        for block in gradients:
            basis = self._basis(block.form)
            squares = block.sum_squares(basis.output_basis, basis.input_basis)
            if block.form in self.sums:
                squares = self.sums[block.form] + squares
            self.sums[block.form] = squares

    def _basis(self, form: BlockForm) -> EigenBlock:
        if self._bases is None:
            return EigenBlock(None, None, torch.empty(0))
        return self._bases[form].gram

    def reduce(self, processes: Processes) -> None:
        _refuse_different_forms(list(self.sums), processes)
        totals = processes.sum(list(self.sums.values()))
        self.sums = dict(zip(self.sums, totals, strict=True))

    def state(self) -> dict[str, object]:
        return dict(encode_sums({form: [values] for form, values in self.sums.items()}))

    def restore(self, state: Mapping[str, object]) -> None:
        self.sums = {form: tensors[0] for form, tensors in decode_sums(state)}

    def blocks(self, samples: float) -> list[KroneckerBlock]:
        """Return the blocks with these eigenvalues, for the mean over this many samples."""
        blocks = []
        for form, squares in self.sums.items():
            _refuse_overflow(form, squares)
            basis = self._basis(form)
            rotated = EigenBlock(basis.output_basis, basis.input_basis, squares / samples)
            blocks.append(KroneckerBlock(form, rotated))
        return blocks


@dataclass(frozen=True)
class ExactLimits:
    """Sizes up to which G itself is held."""

    #: parameters up to which G is accumulated as a matrix: 0.5 GiB in float64, and an
    #: eigendecomposition of about two minutes on a CPU
    dense_parameters: int = 8192
    #: entries of all gradients kept otherwise: 4 GiB in float64
    row_entries: int = 2**29


EXACT_LIMITS = ExactLimits()


class RowsPass(DataPass):
    """G as its rows A while these are few, and as a matrix where parameters are fewer.

    An eigendecomposition of G costs p³, and one of A only k²p for k rows.
    """

    title = "gradients"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.form = make_vector_form(sizes)
        self._can_be_dense = self.form.size <= EXACT_LIMITS.dense_parameters
        self._is_dense = False
        #: AᵀA, or panels of A
        self._matrices: list[Tensor] = []

    def add(self, gradients: Sequence[GradientBlock]) -> None:
        (joint,) = gradients
        for panel in joint.panels():
            rows = joint.matrices(panel).reshape(-1, self.form.size)
            if self._is_dense:
                self._matrices[0].addmm_(rows.T, rows)
                continue
            self._matrices.append(rows)
            if self._has_many_rows(sum(map(len, self._matrices))):
                self._multiply_rows()
        self._refuse_many_rows()

    def _has_many_rows(self, count: float) -> bool:
        """Return True if AᵀA is the smaller problem."""
        return self._can_be_dense and 2 * count > self.form.size

    def _multiply_rows(self) -> None:
        rows = torch.cat(self._matrices)
        self._matrices = [rows.T @ rows]
        self._is_dense = True

    def _refuse_many_rows(self) -> None:
        entries = sum(matrix.numel() for matrix in self._matrices)
        if entries > EXACT_LIMITS.row_entries and not self._is_dense:
            raise PullbackError(
                "The exact curvature does not fit into memory",
                f"{sum(map(len, self._matrices))} gradients of {self.form.size} entries were kept",
                'Use structure="ekfac" (and exact_influence with it), fewer samples, or '
                'parameters="last layer"',
            )

    def reduce(self, processes: Processes) -> None:
        # a process that has AᵀA already counts as many rows: len(AᵀA) is the size
        (count,) = processes.sum_numbers([sum(map(len, self._matrices))])
        if self._has_many_rows(count):
            if not self._is_dense:
                self._multiply_rows()
            self._matrices = processes.sum(self._matrices)
        else:
            self._matrices = processes.gather([torch.cat(self._matrices)])

    def state(self) -> dict[str, object]:
        return {"matrices": self._matrices, "is_dense": self._is_dense}

    def restore(self, state: Mapping[str, object]) -> None:
        self._matrices = list(state["matrices"])  # pyright: ignore[reportArgumentType]
        self._is_dense = bool(state["is_dense"])

    def blocks(self, samples: float) -> list[SpectralBlock]:
        """Return G of the mean over this many samples, in its eigenbasis."""
        for matrix in self._matrices:
            _refuse_overflow(self.form, matrix)
        if self._is_dense:
            # in float64: in float32 many equal eigenvalues may keep the decomposition from ending
            values, vectors = torch.linalg.eigh(self._matrices[0].double() / samples)
            dtype = self._matrices[0].dtype
            values = values.clamp(min=0).to(dtype)
            basis = EigenBlock(None, vectors[None].to(dtype), values[None, None])
            return [KroneckerBlock(self.form, basis)]
        rows = torch.cat(self._matrices) / samples**0.5
        decomposition = svd(rows)
        eye = torch.eye(len(decomposition.sigma), dtype=rows.dtype, device=rows.device)
        return [LowRankBlock(self.form, decomposition.combine(eye), decomposition.sigma.square())]


def _refuse_overflow(form: BlockForm, sums: Tensor) -> None:
    """Raise if gradients were not finite, or their squares are too large for the precision."""
    if not bool(torch.isfinite(sums).all()):
        raise PullbackError(
            f"The curvature of {form.names[0]!r} is not finite",
            f"gradients are infinite or NaN, or their squares too large for {sums.dtype}",
            "Look for a square root or a norm of zero in forward, scale the inputs, or convert the "
            "model to float64",
        )


def encode_sums(sums: Mapping[BlockForm, object]) -> list[tuple[str, object]]:
    """Return pairs for a checkpoint: a key, and the fields of a form beside its tensors."""
    pairs = []
    for number, (form, sums_of_block) in enumerate(sums.items()):
        tensors = sums_of_block
        if isinstance(sums_of_block, FactorSums):
            tensors = list(vars(sums_of_block).values())
        pairs.append((str(number), {"form": vars(form), "tensors": tensors}))
    return pairs


def decode_sums(state: Mapping[str, object]) -> list[tuple[BlockForm, list[Tensor]]]:
    """Return the forms and tensors that `encode_sums` wrote."""
    entries: list[dict] = list(state.values())  # pyright: ignore[reportAssignmentType]
    return [(BlockForm(**entry["form"]), entry["tensors"]) for entry in entries]


def _refuse_different_forms(forms: Sequence[BlockForm], processes: Processes) -> None:
    processes.require_same(
        "the blocks of the model",
        {"/".join(form.names): form.shape for form in forms},
        "Give every process the same model and batches that use the same layers",
    )
