r"""A fitted curvature G: products, solves, determinants, samples and a table of its blocks.

G is the mean over the data of J_nᵀ M_n J_n, where M_n is the Fisher metric of sample n, added up
over its positions. Vectors are flat, (..., p), in the order of `Curvature.space`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from .. import likelihoods
from .._core.capture import unwrap_model
from .._core.checks import require_number
from .._core.errors import PullbackError
from .._core.space import ParameterSpace
from ..grams.kronecker import Pair
from ..likelihoods import Likelihood
from ..solvers import Relative
from .checks import Fingerprint, refuse_changed, refuse_differences, refuse_random_layers
from .forms import BlockForm
from .spectra import KroneckerBlock, SpectralBlock, SpectralFunction, restore_block

#: a number that is added to G, or a multiple of each block's mean eigenvalue
Damping = float | Relative


class CurvatureStructure(Enum):
    """In which form G is held."""

    EKFAC = "ekfac"
    KFAC = "kfac"
    DIAGONAL = "diagonal"
    EXACT = "exact"


@dataclass(frozen=True)
class TableRow:
    """What one parameter got, and why."""

    parameter: str
    shape: tuple[int, ...]
    block: str
    reason: str


@dataclass(frozen=True)
class Table:
    """One row per parameter, and how the metric of the outputs was formed."""

    rows: tuple[TableRow, ...]
    metric: str

    def __str__(self) -> str:
        cells = [(row.parameter, str(row.shape), row.block, row.reason) for row in self.rows]
        cells.insert(0, ("parameter", "shape", "block", "reason"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [_align_cells(cell, widths) for cell in cells]
        return "\n".join([f"metric of the outputs: {self.metric}", *lines])


def _align_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()


@dataclass(frozen=True)
class DataTotals:
    """Sums over the data that were fitted.

    Attributes:
        samples: N.
        loss: Σ −log p(y|z), up to constants in z.
        outputs: entries of all outputs.
    """

    samples: float = 0.0
    loss: float = 0.0
    outputs: float = 0.0

    def plus(self, samples: float, loss: float, outputs: float) -> DataTotals:
        """Return the totals with one more batch."""
        return DataTotals(self.samples + samples, self.loss + loss, self.outputs + outputs)


@dataclass(frozen=True, eq=False, repr=False)
class Curvature:
    """G of a model at fixed parameters, made by `pullback.curvature.fit`.

    Attributes:
        model: the network, whose parameters must not change while this object is used.
        likelihood: what the outputs are parameters of.
        structure: in which form G is held.
        space: names, shapes and order of the parameters.
        blocks: G, block by block.
        totals: how many samples were fitted, and their loss.
        table: what each parameter got.
        output: which tensor of a structured output is z.
    """

    model: nn.Module
    likelihood: Likelihood
    structure: CurvatureStructure
    space: ParameterSpace
    blocks: tuple[SpectralBlock, ...]
    totals: DataTotals
    table: Table
    fingerprint: Fingerprint
    output: Any = None
    #: what was established about the model's structure, for later linearizations
    plans: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return (
            f"Curvature({self.structure.value!r} of {type(self.model).__name__}, "
            f"{self.space.size} parameters in {len(self.blocks)} blocks, "
            f"{self.samples:.0f} samples, {type(self.likelihood).__name__})"
        )

    @property
    def samples(self) -> float:
        """N, the number of samples that G is the mean over."""
        return self.totals.samples

    @property
    def forms(self) -> list[BlockForm]:
        """How the parameters of each block stand in matrices."""
        return [block.form for block in self.blocks]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters that G acts on, by name."""
        by_name = dict(self.model.named_parameters())
        return {name: by_name[name] for name in self.space.names}

    def check_model(self) -> None:
        """Raise if the model has changed since the fit, or has become random."""
        refuse_changed(self.model, self.fingerprint)
        refuse_random_layers(self.model)
        self.check_precision()

    def check_precision(self) -> None:
        """Raise if the model was converted to another dtype than that of the fit."""
        fitted = self.blocks[0].eigenvalues().dtype
        present = ParameterSpace(self.parameters).dtype
        if fitted != present:
            raise PullbackError(
                "The model has another precision than its curvature",
                f"parameters are {present}, the curvature was fitted in {fitted}",
                "Convert the model back, or fit again",
            )

    def apply(self, functions: Callable[[SpectralBlock], SpectralFunction], v: Tensor) -> Tensor:
        """Return f(G) v with a function of the eigenvalues for each block: (..., p)."""
        if v.shape[-1:] != (self.space.size,):
            raise PullbackError(
                "The vector does not fit the curvature",
                f"its shape is {tuple(v.shape)}",
                f"Pass flat vectors of {self.space.size} entries, in the order of curvature.space",
            )
        pieces = {name: piece.flatten(v.ndim - 1) for name, piece in self.space.split(v).items()}
        moved: dict[str, Tensor] = {}
        for block in self.blocks:
            matrices = block.form.gather(pieces)
            moved.update(block.form.scatter(block.apply(functions(block), matrices)))
        return torch.cat([moved[name] for name in self.space.names], -1)

    def matvec(self, v: Tensor) -> Tensor:
        """Return G v for v of shape (..., p)."""
        return self.apply(lambda block: lambda values: values, v)

    def solve(self, v: Tensor, damping: Damping) -> Tensor:
        """Return (G + damping)⁻¹ v; without damping (0) the pseudo-inverse G⁺ v."""
        return self.apply(lambda block: invert(resolve_block_damping(block, damping)), v)

    def logdet(self, damping: Damping) -> Tensor:
        """Return log det(G + damping).

        Raises:
            PullbackError: if there is no damping and G is singular up to rounding.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.space.device)
        for block in self.blocks:
            values = block.eigenvalues()
            number = resolve_block_damping(block, damping)
            if number == 0:
                _refuse_singular(block, values)
            total = total + (values.double() + number).log().sum()
        return total

    def sample(
        self, count: int, damping: Damping, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return draws from the normal distribution with covariance (G + damping)⁻¹: (count, p)."""
        require_number("The number of draws", count, whole=True)
        shape = (count, self.space.size)
        noise = torch.randn(shape, generator=generator, dtype=self.space.dtype,
                            device=self.space.device)  # fmt: skip
        return self.apply(lambda block: invert_root(resolve_block_damping(block, damping)), noise)

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of G, largest first: (p,)."""
        values = torch.cat([block.eigenvalues() for block in self.blocks])
        return values.sort(descending=True).values

    def factors(self, parameter: str) -> Pair:
        """Return the output factor R and the input factor C of the block of a parameter.

        G of a weight (O, I) is about R ⊗ C, with R (groups, O, O) and C (groups, I, I); a bias is
        one more column of C. Factors that are diagonal have shape (groups, n).
        """
        for block in self.blocks:
            if parameter in block.form.names and isinstance(block, KroneckerBlock):
                return block.factors()
        raise PullbackError(
            f"There are no Kronecker factors of {parameter!r}",
            f"the curvature is {self.structure.value!r} of {len(self.space.names)} parameters",
            'Fit with structure="kfac" or "ekfac", and give a name of curvature.space.names',
        )

    def save(self, path: str | Path) -> None:
        """Write G to a file that `pullback.curvature.load` reads; the model is not in it."""
        torch.save(
            {
                "structure": self.structure.value,
                "likelihood": _describe_likelihood(self.likelihood),
                "parameters": self.space.names,
                "forms": [asdict(form) for form in self.forms],
                "blocks": [block.tensors() for block in self.blocks],
                "totals": asdict(self.totals),
                "metric": self.table.metric,
                "rows": [asdict(row) for row in self.table.rows],
                "fingerprint": self.fingerprint.sums,
            },
            path,
        )


def load(
    path: str | Path,
    model: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    output: Any = None,
) -> Curvature:
    """Return a curvature that was saved, for the model that it was fitted to.

    Args:
        path: the file.
        model: the same network, with the parameters of the fit.
        likelihood: needed if it is a class of your own; otherwise the file names it.
        output: as for `fit`.

    Raises:
        PullbackError: if the model's parameters or buffers are others than those of the fit.
    """
    model = unwrap_model(model)
    parameters = dict(model.named_parameters())
    present = Fingerprint.of(model)
    device = torch.device("cpu")
    if parameters:
        device = next(iter(parameters.values())).device
    state = _read_file(path, device)
    fingerprint = Fingerprint(state["fingerprint"])
    refuse_differences(fingerprint, present)
    forms = [BlockForm(**_restore_tuples(form)) for form in state["forms"]]
    pairs = zip(forms, state["blocks"], strict=True)
    rows = [TableRow(**_restore_tuples(row)) for row in state["rows"]]
    curvature = Curvature(
        model=model,
        likelihood=_restore_likelihood(state["likelihood"], likelihood),
        structure=CurvatureStructure(state["structure"]),
        space=ParameterSpace({name: parameters[name] for name in state["parameters"]}),
        blocks=tuple(restore_block(form, tensors) for form, tensors in pairs),
        totals=DataTotals(**state["totals"]),
        table=Table(tuple(rows), state["metric"]),
        fingerprint=fingerprint,
        output=output,
    )
    curvature.check_precision()
    return curvature


def _read_file(path: str | Path, device: torch.device) -> dict[str, Any]:
    """Return what `Curvature.save` wrote, and refuse other files."""
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError as error:
        raise PullbackError(
            f"There is no file {path}",
            f"looked in {Path.cwd()}",
            "Check the path, or write the file by curvature.save(path)",
        ) from error
    except (UnpicklingError, EOFError, KeyError, RuntimeError) as error:
        raise _make_foreign_file_error(path) from error
    if not isinstance(state, dict) or "fingerprint" not in state:
        raise _make_foreign_file_error(path)
    return state


def _make_foreign_file_error(path: str | Path) -> PullbackError:
    return PullbackError(
        "The file is not a curvature",
        f"{path} was not written by Curvature.save, or not to its end",
        "Save the curvature again",
    )


def _restore_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields as a dataclass had them before `asdict` and a file."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}


def _describe_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    return {"kind": type(likelihood).__name__, "options": likelihood.constructor_arguments()}


def _restore_likelihood(saved: dict[str, Any], user_value: Likelihood | None) -> Likelihood:
    if user_value is not None:
        return user_value
    likelihood_class = getattr(likelihoods, saved["kind"], None)
    if likelihood_class is None:
        raise PullbackError(
            f"The likelihood {saved['kind']} is not known",
            "it is not one of pullback.likelihoods",
            "Pass load(..., likelihood=...)",
        )
    return likelihood_class(**saved["options"])


def resolve_block_damping(block: SpectralBlock, damping: Damping) -> float:
    """Return the number that is added to the eigenvalues of a block."""
    if isinstance(damping, Relative):
        return damping.value * block.mean_eigenvalue()
    require_number("The damping", damping)
    return float(damping)


def _find_smallest_inverted(values: Tensor) -> Tensor:
    """Return the eigenvalue up to which others are zero but for rounding."""
    return 32 * torch.finfo(values.dtype).eps * values.amax()


def _refuse_singular(block: SpectralBlock, values: Tensor) -> None:
    zeros = int((values <= _find_smallest_inverted(values)).sum())
    if zeros:
        raise PullbackError(
            "The determinant of a singular curvature is zero",
            f"{zeros} of {len(values)} eigenvalues of the block of {block.form.names[0]!r} are "
            "zero up to rounding",
            "Give a damping above zero",
        )


def invert(damping: float) -> SpectralFunction:
    """Return s ↦ 1/(s + damping); without damping, 1/s above rounding and 0 below it."""

    def function(values: Tensor) -> Tensor:
        if damping > 0:
            return 1 / (values + damping)
        return torch.where(values > _find_smallest_inverted(values), 1 / values, 0.0)

    return function


def invert_root(damping: float) -> SpectralFunction:
    """Return s ↦ 1/√(s + damping)."""

    def function(values: Tensor) -> Tensor:
        return invert(damping)(values).sqrt()

    return function
