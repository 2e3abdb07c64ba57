r"""Fit a curvature to a finished model: one pass over the data, or two for EK-FAC."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .._core.capture import unwrap_model
from .._core.checks import require_number
from .._core.errors import PullbackError, describe_value, refuse_unknown, require
from .._core.groups import find_processes
from .._core.processes import Processes
from .._core.space import ParameterSpace
from ..likelihoods import Likelihood, from_loss
from .capture import BatchTangent, CoverageRow, make_call
from .checkpoint import Checkpoint, PassState, refuse_fewer_batches
from .checks import (
    Fingerprint,
    find_last_layer,
    refuse_inference_mode,
    refuse_nonfinite,
    refuse_other_outputs,
    refuse_random_layers,
    select_parameters,
)
from .curvature import Curvature, CurvatureStructure, DataTotals, Table, TableRow
from .data import (
    Batch,
    explain_memory,
    iterate_batches,
    refuse_iterator,
    refuse_shuffled,
    sample_losses,
)
from .forms import BlockForm
from .passes import DataPass, EigenvaluePass, FactorPass, RowsPass
from .progress import ProgressLine
from .spectra import SpectralBlock

LAST_LAYER = "last layer"


@dataclass(frozen=True)
class FitLimits:
    """Sizes of a fit."""

    #: outputs per sample up to which all columns of the metric's root are pulled back. The cost of
    #: a pass grows with them; ten classes are exact, and the tokens of a text are drawn.
    exact_outputs: int = 16
    #: samples of a batch where the data are one pair of tensors
    batch_samples: int = 256
    #: entries of all columns of a batch, 1 GiB in float32; layers hold several times as much
    column_entries: int = 2**28


FIT_LIMITS = FitLimits()


@dataclass(frozen=True)
class FisherColumns:
    """Covectors u with mean Σ uuᵀ = M, the Fisher metric of every sample.

    Attributes:
        likelihood: whose Fisher metric it is.
        draws: how many outcomes are drawn per sample; None for all columns of the metric's root
            where there are few outputs, and one draw elsewhere.
        seed: of the draws. Batch k of a process always gets the same ones.
        exact_outputs: outputs per sample that are few; None where any number is.
    """

    likelihood: Likelihood
    draws: int | None
    seed: int
    exact_outputs: int | None

    def is_exact(self, outputs: Tensor) -> bool:
        """Return True if all columns of the root are pulled back."""
        if self.draws is not None:
            return False
        return self.exact_outputs is None or outputs[0].numel() <= self.exact_outputs

    def describe(self, outputs: Tensor) -> str:
        """Return how the metric is formed, in words."""
        if self.is_exact(outputs):
            return f"exact, {outputs[0].numel()} columns per sample"
        return f"Monte Carlo, {self.draws or 1} draws per sample"

    def covectors(self, outputs: Tensor, loss_gradient: Tensor, seed: int) -> Tensor:
        """Return u of shape (R, N, *event); entries that the loss ignores are zero."""
        if self.is_exact(outputs):
            _refuse_many_columns(outputs)
            columns = self.likelihood.factor(outputs).covectors(outputs)
        else:
            columns = self._draw(outputs, seed)
        mask = self.likelihood.counted(outputs, loss_gradient)
        return columns if mask is None else columns * mask

    def _draw(self, outputs: Tensor, seed: int) -> Tensor:
        count = self.draws or 1
        generator = torch.Generator(outputs.device).manual_seed(seed)
        scores = [self.likelihood.score(outputs, generator) for _ in range(count)]
        return torch.stack(scores) / count**0.5


def _refuse_many_columns(outputs: Tensor) -> None:
    """Raise if the columns of a batch, one per output of a sample, do not fit into memory."""
    columns = outputs[0].numel()
    if columns * outputs.numel() <= FIT_LIMITS.column_entries:
        return
    remedy = "Give draws=1 for an estimate from drawn outcomes"
    fitting = FIT_LIMITS.column_entries // columns**2
    if fitting:
        remedy = f"Use batches of {fitting} samples, or give draws=1 for an estimate"
    raise PullbackError(
        "The exact metric does not fit into memory",
        f"{len(outputs)} samples have {columns} outputs each, and one column per output",
        remedy,
    )


class Fitter:
    """The passes of one fit over one model and loader."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, Tensor],
        columns: FisherColumns,
        output: Any,
        processes: Processes,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.columns = columns
        self.output = output
        self.processes = processes
        self.space = ParameterSpace(parameters)
        self.plans: dict[Any, Any] = {}
        self.coverage: list[CoverageRow] = []
        self.metric = ""
        self._is_checked = False

    def linearize(self, batch: Batch) -> BatchTangent:
        """Return the model linearized at a batch, with finite outputs."""
        tangent = BatchTangent(self.model, self.parameters, batch.inputs, self.output, self.plans)
        refuse_nonfinite("The model's outputs", tangent.outputs)
        if not self._is_checked:
            repeated = BatchTangent(
                self.model, self.parameters, batch.inputs, self.output, self.plans
            )
            refuse_other_outputs(tangent.outputs, repeated.outputs)
            self._is_checked = True
        return tangent

    def add_batch(
        self,
        data_pass: DataPass,
        batch: Batch,
        number: int,
        forms: Sequence[BlockForm] | None,
        totals: DataTotals,
    ) -> DataTotals:
        """Add one batch to a pass, and return the totals with it."""
        tangent = self.linearize(batch)
        outputs = tangent.outputs
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            loss = sample_losses(self.columns.likelihood, leaf, batch.targets).sum()
            (gradient,) = torch.autograd.grad(loss, leaf)
        refuse_nonfinite("The losses", loss.detach())
        # large primes: batches and processes have draws of their own
        seed = self.columns.seed + 7919 * number + 104729 * self.processes.rank
        covectors = self.columns.covectors(outputs, gradient, seed)
        data_pass.add(tangent.gradients(covectors, forms))
        self._describe(tangent)
        return totals.plus(len(outputs), float(loss.detach()), outputs.numel())

    def _describe(self, tangent: BatchTangent) -> None:
        """Note what the table of the curvature says."""
        self.coverage = tangent.coverage
        self.metric = self.columns.describe(tangent.outputs)

    def describe_first_batch(self, batches: Iterator[Batch]) -> None:
        """Note what the table says where every pass was complete in a checkpoint."""
        for batch in batches:
            tangent = self.linearize(batch)
            tangent.gradients(torch.ones_like(tangent.outputs)[None])
            self._describe(tangent)
            return


def run_pass(
    fitter: Fitter,
    data_pass: DataPass,
    batches: Callable[[], Iterator[Batch]],
    forms: Sequence[BlockForm] | None,
    checkpoint: Checkpoint,
    line: ProgressLine,
) -> DataTotals:
    """Add all batches of all processes to a pass, from a checkpoint on where there is one."""
    state = checkpoint.restore(data_pass)
    if state.is_complete:
        return state.totals
    with fitter.processes.raise_together("fit its share of the curvature"):
        read = 0
        for number, batch in enumerate(batches()):
            read = number + 1
            if number < state.batches:
                continue
            with explain_memory(batch):
                totals = fitter.add_batch(data_pass, batch, number, forms, state.totals)
            state = PassState(number + 1, totals)
            line.update(state.batches, int(totals.samples))
            checkpoint.write(data_pass, state)
        refuse_fewer_batches(read, state.batches)
        _refuse_no_data(state, data_pass)
    line.close(state.batches, int(state.totals.samples))
    data_pass.reduce(fitter.processes)
    sums = [state.totals.samples, state.totals.loss, state.totals.outputs]
    totals = DataTotals(*fitter.processes.sum_numbers(sums))
    checkpoint.write(data_pass, PassState(state.batches, totals, is_complete=True))
    return totals


def _refuse_no_data(state: PassState, data_pass: DataPass) -> None:
    if not state.totals.samples:
        raise PullbackError(
            "There are no data to fit",
            f"the loader was empty in the pass over {data_pass.title}",
            "Give a loader that yields batches on every pass, not an exhausted iterator",
        )


def fit(
    model: nn.Module,
    loader: Any,
    *,
    likelihood: Likelihood | Callable[..., Tensor],
    structure: str | CurvatureStructure = "ekfac",
    output: Any = None,
    group: ProcessGroup | None = None,
    parameters: Sequence[str] | str | None = None,
    draws: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
) -> Curvature:
    r"""Return the curvature G of a model, the mean over the data of Jᵀ M J by sample.

    M is the Fisher metric of the likelihood, added up over the positions of a sample. A sample is
    one entry of the first axis: an image, or a whole sequence.

    Args:
        model: in evaluation mode; any layers.
        loader: yields (inputs, targets), or is one such pair. It is read once, and a second time
            for "ekfac". Inputs are a tensor, a tuple of arguments or a mapping of keywords. With
            several processes each gives its own share of the data.
        likelihood: what the outputs are parameters of, such as `Categorical()`; or a loss of torch,
            such as `nn.CrossEntropyLoss()`, whose classes are on axis 1.
        structure: "kfac" for Kronecker factors per layer; "ekfac" for their eigenbases with the
            second moments of the gradients as eigenvalues; "diagonal"; "exact" for all of G, in
            the space of parameters or of samples.
        output: which tensor of a structured output is z: a key, an index or a function.
        group: the processes that share the data.
        parameters: names, or "last layer"; by default all that require gradients.
        draws: outcomes drawn per sample. By default all columns of the metric's root with "exact",
            and where a sample has at most 16 outputs; elsewhere one draw.
        seed: of the draws.
        checkpoint: a file from which an interrupted fit goes on. The loader must yield the same
            batches in the same order.
        progress: whether to write a line on stderr; by default on terminals.

    Raises:
        PullbackError: if the model is random, the loader is empty or yields no pairs, outputs or
            losses are not finite, or memory runs out.
    """
    require(isinstance(model, nn.Module), "The model", model, "Call fit(model, loader, ...)")
    chosen_structure = _resolve_structure(structure)
    chosen_likelihood = _resolve_likelihood(likelihood)
    if draws is not None:
        require_number("The number of draws", draws, least=1, whole=True)
    if checkpoint is not None:
        refuse_shuffled(loader, "a fit that goes on would count some samples twice")
    processes = find_processes(model, group, "curvature.fit")
    network = unwrap_model(model)
    refuse_random_layers(network)
    refuse_inference_mode()
    fingerprint = Fingerprint.of(network)
    selected = select_parameters(network, None)
    device = next(iter(selected.values())).device

    def batches() -> Iterator[Batch]:
        return iterate_batches(loader, device, FIT_LIMITS.batch_samples)

    if parameters == LAST_LAYER:
        refuse_iterator(loader, "a batch of it would be spent on finding the last layer")
    names = _resolve_names(network, parameters, batches)
    exact_outputs = FIT_LIMITS.exact_outputs
    if chosen_structure is CurvatureStructure.EXACT:
        exact_outputs = None
    columns = FisherColumns(chosen_likelihood, draws, seed, exact_outputs)
    fitter = Fitter(network, select_parameters(network, names), columns, output, processes)
    key = f"{chosen_structure.value} {columns} {fitter.space.names} {fingerprint.sums}"
    saved = Checkpoint(checkpoint, f"{key} {processes.size}", processes)

    def run(data_pass: DataPass, forms: Sequence[BlockForm] | None) -> DataTotals:
        total = len(loader) if isinstance(loader, Sized) and not isinstance(loader, tuple) else None
        line = ProgressLine(data_pass.title, total, progress)
        return run_pass(fitter, data_pass, batches, forms, saved, line)

    blocks, totals = _run_structure(chosen_structure, fitter, run)
    if not fitter.metric:
        fitter.describe_first_batch(batches())
    saved.remove()
    return Curvature(
        model=network,
        likelihood=chosen_likelihood,
        structure=chosen_structure,
        space=fitter.space,
        blocks=tuple(blocks),
        totals=totals,
        table=_make_table(fitter, blocks),
        fingerprint=fingerprint,
        output=output,
        plans=fitter.plans,
    )


def _resolve_structure(structure: str | CurvatureStructure) -> CurvatureStructure:
    if isinstance(structure, CurvatureStructure):
        return structure
    refuse_unknown("structure", structure, [member.value for member in CurvatureStructure])
    return CurvatureStructure(structure)


def _resolve_likelihood(likelihood: Any) -> Likelihood:
    """Return a likelihood, or that of a loss of torch."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, type) or not callable(likelihood):
        raise PullbackError(
            "This is not a likelihood",
            f"got {describe_value(likelihood)}",
            "Pass an object of pb.likelihoods: Categorical() for a cross entropy (classes on the "
            "last axis), Gaussian() for a squared error, Bernoulli() or Poisson()",
        )
    loss: Callable[..., Any] = likelihood
    return from_loss(loss)


def _resolve_names(
    model: nn.Module,
    parameters: Sequence[str] | str | None,
    batches: Callable[[], Iterator[Batch]],
) -> list[str] | None:
    """Return the names of the parameters that the user chose; None for all."""
    if parameters is None:
        return None
    if isinstance(parameters, str):
        refuse_unknown("choice of parameters", parameters, [LAST_LAYER])
        first = next(batches(), None)
        if first is None:
            raise PullbackError("There are no data to fit", "the loader is empty", "Give batches")
        return find_last_layer(model, make_call(first.inputs))
    return list(parameters)


def _run_structure(
    structure: CurvatureStructure,
    fitter: Fitter,
    run: Callable[[DataPass, Sequence[BlockForm] | None], DataTotals],
) -> tuple[Sequence[SpectralBlock], DataTotals]:
    """Run the passes that a structure takes, and return its blocks and the totals."""
    if structure is CurvatureStructure.EXACT:
        sizes = dict(zip(fitter.space.names, fitter.space.sizes, strict=True))
        rows = RowsPass(sizes)
        totals = run(rows, [rows.form])
        return rows.blocks(totals.samples), totals
    if structure is CurvatureStructure.DIAGONAL:
        diagonal = EigenvaluePass(None)
        totals = run(diagonal, None)
        return diagonal.blocks(totals.samples), totals
    factors = FactorPass()
    totals = run(factors, None)
    blocks = factors.blocks(totals.samples)
    if structure is CurvatureStructure.KFAC:
        return blocks, totals
    eigenvalues = EigenvaluePass(blocks)
    second_totals = run(eigenvalues, [block.form for block in blocks])
    if second_totals.samples != totals.samples:
        raise PullbackError(
            "The two passes saw different data",
            f"the first had {totals.samples:.0f} samples, the second {second_totals.samples:.0f}",
            "Give a loader that yields the same samples every time it is read",
        )
    return eigenvalues.blocks(totals.samples), totals


def _make_table(fitter: Fitter, blocks: Sequence[SpectralBlock]) -> Table:
    """Return a row for each parameter: the form of its block, and the reason for it."""
    reasons = {row.name: row.reason for row in fitter.coverage}
    descriptions: dict[str, str] = {}
    for block in blocks:
        descriptions.update(dict.fromkeys(block.form.names, block.describe()))
        if not bool(block.eigenvalues().any()):
            reasons.update(dict.fromkeys(block.form.names, "the outputs do not depend on it"))
    rows = []
    for name, shape in zip(fitter.space.names, fitter.space.shapes, strict=True):
        reason = reasons.get(name, "known layer")
        rows.append(TableRow(name, tuple(shape), descriptions[name], reason))
    return Table(tuple(rows), fitter.metric)
