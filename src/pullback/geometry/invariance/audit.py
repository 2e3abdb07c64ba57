"""The invariance audit: an optimizer in two coordinates, and whether it does the same.

A model φ(w) and its twin ψ = φ∘f start from the same function, θ₀ = f⁻¹(w₀). Both take a step of
the same optimizer. Of the notions of van Oostrum, Müller and Ay (2023),

    Definition 5, on the model:            dψ·O(ψ, θ) = dφ·O(φ, w)   compares functions,
    Definition 6, on the parameter space:  df·O(ψ, θ) = O(φ, w)      compares w₁ with f(θ₁).

Definitions speak of directions; an audit takes steps, at several sizes η, so that what is
left as η → 0 is the direction's mismatch, and what holds at every η holds for trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._core.capture import select_output
from ..._core.checks import require_number
from ..._core.errors import PullbackError, require, reraise_fatal
from ..._core.space import relative_tolerance
from ..charts.diffeomorphism import Diffeomorphism
from ..charts.transformations import Transformation, Twin, as_transformation, standard
from ..local.ambient import require_scalar_loss
from .run import AuditData, Loss, Make, duplicate, refuse_infinite, seed_generators
from .table import Audit, AuditRow, Skipped
from .trial import Contender, OptimizerTrial, as_contenders


def check_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs x and targets y; raise unless they are two tensors with samples."""
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not all(isinstance(t, Tensor) for t in batch):
        raise PullbackError(
            "The batch is no pair of tensors",
            f"got {type(batch).__name__}",
            "Give (x, y), inputs and targets",
        )
    x, y = batch
    if not x.numel() or not len(x):
        raise PullbackError("The batch is empty", f"x has shape {tuple(x.shape)}", "Give samples")
    return x, y


def check_sizes(sizes: Sequence[float], steps: int) -> tuple[float, ...]:
    """Return the distinct sizes, largest first; raise unless at least two are usable."""
    distinct = {float(size) for size in sizes}
    is_usable = len(distinct) >= 2 and all(0 < size < math.inf for size in distinct)
    remedy = "Use at least two different multiples of the lr, such as (1, 0.1, 0.01)"
    require(is_usable, "The list of step sizes", list(sizes), remedy)
    require_number("The number of steps", steps, whole=True)
    return tuple(sorted(distinct, reverse=True))


def check_model(model: nn.Module, setting: AuditData) -> None:
    """Raise for models that are not deterministic, or whose loss is not finite."""
    remedy = "Pass an nn.Module; it is copied for every run"
    require(isinstance(model, nn.Module), "The model", model, remedy)
    if not any(p.requires_grad for p in model.parameters()):
        raise PullbackError(
            "There is nothing to optimize",
            "no parameter requires a gradient",
            "Unfreeze at least one parameter",
        )
    outputs = _evaluate(model, setting.x, setting.seed)
    other_outputs = _evaluate(model, setting.x, setting.seed + 1)
    if not torch.equal(outputs, other_outputs) and bool(torch.isfinite(outputs).all()):
        raise PullbackError(
            "The model is not deterministic",
            "two calls on the same inputs differ, as with dropout in training mode",
            "Call model.eval(), or set the dropout to zero",
        )
    if "probes" in setting.points:
        try:
            _evaluate(model, setting.points["probes"], setting.seed)
        except RuntimeError as error:
            reraise_fatal(error)
            raise PullbackError(
                "The model cannot be evaluated at the probes",
                str(error).splitlines()[0],
                "Give inputs of the shape of the batch's",
            ) from error
    with torch.no_grad(), seed_generators(setting.seed, setting.x.device):
        loss = setting.loss(outputs, setting.y)
        require_scalar_loss(loss)
        refuse_infinite(loss)


def check_twin(model: nn.Module, twin: Twin, setting: AuditData, name: str) -> None:
    """Raise where the twin does not compute the model's function from the start."""
    outputs = _evaluate(model, setting.x, setting.seed)
    twin_outputs = _evaluate(twin.model, setting.x, setting.seed)
    limit = relative_tolerance(outputs.dtype, 10) * float(outputs.norm())
    has_shape = outputs.shape == twin_outputs.shape
    if not has_shape or not float((outputs - twin_outputs).norm()) <= limit:
        raise PullbackError(
            f"The twin of {name!r} is another function",
            "its outputs on the batch are not the model's",
            "Use layers as modules, and what stands between them as the transformation needs it",
        )


def _evaluate(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    """Return the outputs of a copy of the model, under this seed."""
    with torch.no_grad(), seed_generators(seed, x.device):
        return select_output(duplicate(model)(x), None)


SIZES = (1.0, 0.1, 0.01, 0.001)
Optimizers = Make | Contender | Mapping[str, Make] | Sequence[Make | Contender]


def half_square_or_cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """½‖z − y‖² for real targets, cross-entropy for classes; a mean over samples."""
    if y.is_floating_point():
        if z.shape != y.shape:
            raise PullbackError(
                "The targets do not fit the outputs",
                f"shapes {tuple(y.shape)} and {tuple(z.shape)} would be broadcast",
                "Give targets of the outputs' shape, or a loss_fn of your own",
            )
        return 0.5 * (z - y).square().sum() / len(z)
    return F.cross_entropy(z, y)


def audit(
    make_optimizer: Optimizers,
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    transformations: Iterable[Any] | Mapping[str, Any] | None = None,
    *,
    steps: int = 5,
    sizes: Sequence[float] = SIZES,
    loss_fn: Loss | None = None,
    probes: Tensor | None = None,
    seed: int = 0,
) -> Audit:
    r"""Return a table of which transformations of a model leave an optimizer's update unchanged.

    For each transformation the optimizer takes one step from the start at each size, and `steps`
    steps at its own lr. Every run has a fresh optimizer on a copy, under the same seed.

    Args:
        make_optimizer: model ↦ optimizer (torch's or ours), or a list of optimizers that step
            together; a dict of several to be compared; or `Contender`s. Step sizes are set by `lr`
            in its param groups; closures are given to all.
        model: which is never changed.
        batch: (x, y).
        transformations: `transformations.*` or diffeomorphisms w = f(θ), as a list or a dict by
            name; by default those of `standard()` that go with the model.
        steps: how many steps of full size.
        sizes: multiples of the optimizer's lr for one small step.
        loss_fn: (outputs, y) ↦ scalar; by default ½‖z − y‖² or cross-entropy, means over samples.
        probes: other inputs at which functions are compared too.
        seed: of torch's generators in every run.

    Returns:
        An `Audit`: rows with verdicts, `str()`, `records()`.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <...>
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    >>> x, y = torch.randn(9, 2).double(), torch.randn(9, 1).double()
    >>> found = audit(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), net, (x, y))
    >>> str(found.row("neuron permutation").verdict), str(found.row("elementwise").verdict)
    ('exact', 'not invariant')
    """
    x, y = check_batch(batch)
    distinct_sizes = check_sizes(sizes, steps)
    setting = AuditData(x, y, loss_fn or half_square_or_cross_entropy, probes, seed)
    check_model(model, setting)
    contenders = as_contenders(make_optimizer)
    # a standard transformation that does not go with the model is skipped; one asked for raises
    may_skip = transformations is None
    twins, errors = _make_twins(_collect_transformations(transformations), model, setting)
    if errors and not may_skip:
        raise next(iter(errors.values()))
    skipped: list[Skipped] = []
    for name, error in errors.items():
        skipped += [_skip(contender, name, error) for contender in contenders]
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters())
    rows: list[AuditRow] = []
    for contender in contenders:
        trial = OptimizerTrial(model, contender, setting, distinct_sizes, steps, eps)
        for result in _compare_twins(trial, twins, may_skip=may_skip):
            if isinstance(result, AuditRow):
                rows.append(result)
            else:
                skipped.append(result)
    return Audit(tuple(rows), tuple(skipped))


def _compare_twins(
    trial: OptimizerTrial, twins: Mapping[str, Twin], *, may_skip: bool
) -> Iterator[AuditRow | Skipped]:
    """Yield a row for each twin, or why the optimizer does not run on it."""
    for name, twin in twins.items():
        try:
            yield trial.compare(name, twin)
        except PullbackError as error:
            if not may_skip:
                raise
            yield _skip(trial.contender, name, error)


def _make_twins(
    transformations: Mapping[str, Transformation], model: nn.Module, setting: AuditData
) -> tuple[dict[str, Twin], dict[str, PullbackError]]:
    """Return the model's twins by name, and why others cannot be made."""
    twins: dict[str, Twin] = {}
    errors: dict[str, PullbackError] = {}
    for name, transformation in transformations.items():
        try:
            twin = transformation.twin(model, setting.x)
            check_twin(model, twin, setting, name)
        except PullbackError as error:
            errors[name] = error
        else:
            twins[name] = twin
    return twins, errors


def _skip(contender: Contender, transformation: str, error: PullbackError) -> Skipped:
    return Skipped(contender.name, transformation, f"{error.what}: {error.why}")


def _collect_transformations(
    transformations: Iterable[Any] | Mapping[str, Any] | None,
) -> dict[str, Transformation]:
    """Return transformations by name; a name that occurs twice gets a number."""
    if transformations is None:
        return {t.name: t for t in standard()}
    if isinstance(transformations, Mapping):
        return {str(n): as_transformation(t, str(n)) for n, t in transformations.items()}
    if isinstance(transformations, (Transformation, Diffeomorphism)):
        transformations = [transformations]
    by_name: dict[str, Transformation] = {}
    for transformation in map(as_transformation, transformations):
        name = transformation.name
        number = 2
        while name in by_name:
            name = f"{transformation.name} {number}"
            number += 1
        by_name[name] = transformation
    return by_name
