"""The experiment: every optimizer of the table, audited on two networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pullback.geometry.charts.transformations import standard
from pullback.geometry.invariance.audit import audit
from pullback.geometry.invariance.table import THRESHOLDS, Verdict
from pullback.geometry.invariance.trial import Contender
from pullback.symmetry import SliceSGD

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.store import Results
from ..framework.tabular import Table
from .contenders import optimizers
from .figure import grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PAPER = "van Oostrum, Müller and Ay (2023), Invariance Properties of the Natural Gradient"
_ABOUT = (
    "The paper has no experiments; these are ours. Networks 4-6-5-2, 64 samples of a noisy "
    "teacher, float64. Leaky ReLU networks have superfluous parameters, by their rescaling "
    "symmetry; tanh networks have none here."
)
#: without dead units, whose factors would be singular
NETS: Mapping[str, Callable[[], nn.Module]] = {
    "leaky": partial(nn.LeakyReLU, 0.1),
    "tanh": nn.Tanh,
}


def contenders(net: str) -> list[Contender]:
    """Return the optimizers of the table, and SliceSGD where units may be rescaled."""
    first, *others = optimizers()
    sliced = Contender(
        SLICED,
        lambda m: SliceSGD(m, lr=0.02, momentum=0.9),
        "SGD from the one point of a rescaling orbit that lies on the slice; it refuses twins "
        "whose units cannot be rescaled",
    )
    if net == "leaky":
        return [first, sliced, *others]
    return [first, *others]


def _list_pairs() -> list[tuple[str, Contender]]:
    """Return every network with each of its contenders."""
    pairs: list[tuple[str, Contender]] = []
    for net in NETS:
        pairs += [(net, contender) for contender in contenders(net)]
    return pairs


@dataclass(frozen=True, kw_only=True)
class InvarianceAudit(Experiment):
    """Twelve optimizers under eight transformations.

    Attributes:
        samples, steps: of the batch, and of the longest run.
        pairs: a network of `NETS` and one of its `contenders`, each.
    """

    name: str = "invariance-audit"
    paper: str = PAPER
    figure: str = "Definitions 5 and 6, Theorem 2"
    claim: str = "the natural gradient's update of the function does not depend on coordinates"
    about: str = _ABOUT
    seeds: Sequence[int] = tuple(range(5))
    samples: int = 64
    steps: int = 5
    pairs: Sequence[tuple[str, Contender]] = field(default_factory=_list_pairs)

    def smoke(self) -> Self:
        pairs = [(net, c) for net, c in self.pairs if net == "tanh" and c.name in ("SGD", KFAC[0])]
        return replace(self, judged=False, pairs=pairs)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "steps": self.steps,
            "methods": {c.name: c.about for c in contenders("leaky")},
            "transformations": {t.name: t.about for t in standard()},
        }

    def items(self, quick: bool) -> list[Item]:
        return [
            Item(
                (net, contender.name),
                partial(_audit_contender, net, contender, self.samples, self.steps),
            )
            for net, contender in self.pairs
        ]

    def judge(self, results: Results) -> list[Check]:
        return claims(self._group_records(results))

    def draw(self, results: Results) -> dict[str, Figure]:
        records = self._group_records(results)
        return {net: grid(worst(records, net)) for net in self._nets}

    def tables(self, results: Results) -> list[Table]:
        records = self._group_records(results)
        out = []
        for net in self._nets:
            verdicts = worst(records, net)
            columns = list(dict.fromkeys(t for _, t in verdicts))
            rows = []
            for name in dict.fromkeys(o for o, _ in verdicts):
                cells = [verdicts[name, t] for t in columns]
                rows.append([name, *map(_format_cell, cells)])
            out.append(Table(["optimizer", *columns], rows, f"On a {net} network", text=7))
        return out

    @property
    def _nets(self) -> list[str]:
        return list(dict.fromkeys(net for net, _ in self.pairs))

    def _group_records(self, results: Results) -> GroupedRecords:
        records = {}
        for net, contender in self.pairs:
            rows = (record["rows"] for record in results.of(net, contender.name))
            records[net, contender.name] = list(chain.from_iterable(rows))
        return records


def _format_cell(cell: tuple[Verdict, str] | None) -> str | None:
    """Return a verdict with its mismatch in words."""
    if cell is None:
        return None
    return f"{cell[0]} {cell[1]}"


def _audit_contender(
    net: str, contender: Contender, samples: int, steps: int, context: Context
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(context.seed)
    model, teacher = (_network(NETS[net], generator) for _ in range(2))
    x = _normal((samples, 4), generator) @ _normal((4, 4), generator) + 0.5
    with torch.no_grad():
        y = teacher(x) + 0.1 * _normal((samples, 2), generator)
    probes = _normal((50, 4), generator).to(context.device)
    batch = x.to(context.device), y.to(context.device)
    report = audit(contender, model.to(context.device), batch, steps=steps, probes=probes)
    return {"rows": report.records()}


def _network(activation: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """4-6-5-2, with weights large enough for units to differ."""
    sizes = ((4, 6), (6, 5), (5, 2))
    layers = [nn.Linear(*s, dtype=torch.float64) for s in sizes]
    with torch.no_grad():
        for layer in layers:
            weight = _normal(tuple(layer.weight.shape), generator)
            layer.weight.copy_(1.2 * weight / layer.in_features**0.5)
            layer.bias.copy_(0.3 * _normal(tuple(layer.bias.shape), generator))
    one, two, three = layers
    return nn.Sequential(one, activation(), two, activation(), three)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


Row = Mapping[str, Any]
#: records of all seeds, by network and optimizer
GroupedRecords = Mapping[tuple[str, str], list[Row]]

NATURAL = "NGD, pseudo-inverse"
DAMPED = "NGD, damped"
KFAC = ("K-FAC, undamped", "K-FAC, invariant")
TIKHONOV = "K-FAC, Tikhonov"
RULES = ("K-FAC, eigenbasis", "K-FAC, spectral")
SLICED = "SliceSGD"
PLAIN = ("SGD", "Adam", "L-BFGS", "Muon")
AFFINE = ("input whitening", "per-layer affine", "neuron rescaling")
_RANKS = {str(v): i for i, v in enumerate((Verdict.EXACT, Verdict.FIRST_ORDER))}


NETWORKS = ("leaky", "tanh")


@dataclass(frozen=True)
class _Selection:
    """Chooses audits: of which networks, optimizers and transformations, measured where."""

    networks: tuple[str, ...]
    optimizers: tuple[str, ...]
    transformations: tuple[str, ...] | None = None
    audited_on: str = "batch"

    def rows(self, records: GroupedRecords) -> list[Row]:
        """Return the audits of all seeds."""
        rows: list[Row] = []
        for network in self.networks:
            for optimizer in self.optimizers:
                rows += filter(self._accepts, records[network, optimizer])
        return rows

    def _accepts(self, row: Row) -> bool:
        if row["place"] != self.audited_on:
            return False
        return self.transformations is None or row["transformation"] in self.transformations


def claims(records: GroupedRecords) -> list[Check]:
    """Return a check of each claim of the two papers, and of what they imply for other methods."""
    changes = (*AFFINE, "elementwise")
    rescaling = ("neuron rescaling", "neuron permutation")
    natural = _Selection(NETWORKS, (NATURAL,)).rows(records)
    superfluous = _Selection(("leaky",), (NATURAL,), changes, "parameters").rows(records)
    nonlinear = _Selection(NETWORKS, (NATURAL,), ("elementwise",)).rows(records)
    linear = _Selection(("tanh",), (NATURAL,), AFFINE).rows(records)
    layered = _Selection(NETWORKS, KFAC, AFFINE).rows(records)
    damped = _Selection(NETWORKS, (DAMPED, TIKHONOV), AFFINE).rows(records)
    sliced = _Selection(("leaky",), (SLICED,), rescaling).rows(records)
    whitened = _Selection(("leaky",), (SLICED,), ("input whitening",)).rows(records)
    rotated = _Selection(NETWORKS, RULES, ("input rotation",)).rows(records)
    first_order = _Selection(NETWORKS, PLAIN, changes).rows(records)
    return [
        _check("Theorem 2: on the model the natural gradient is the same in all coordinates",
               natural, {"exact", "first order"}),
        _check("with superfluous parameters it is another vector on the parameter space",
               superfluous, {"not invariant"}),
        _check("finite steps differ under a nonlinear change", nonlinear, {"first order"}),
        _check_agreement("without superfluous parameters a step of any size agrees under affine "
                         "changes", linear),
        _check("K-FAC, undamped or damped invariantly, agrees under affine changes of layers",
               layered, {"exact"}, of_paper=False),
        _check("damping by the identity breaks both", damped, {"not invariant"}, of_paper=False),
        _check("SGD, Adam, L-BFGS and Muon depend on coordinates",
               first_order, {"not invariant"}, of_paper=False),
        _check("SliceSGD does not see how units are scaled or ordered",
               sliced, {"exact"}, of_paper=False),
        _check("and depends on other affine changes as SGD does",
               whitened, {"not invariant"}, of_paper=False),
        _check("K-FAC's eigenbasis and spectral rules do not see turns of the inputs",
               rotated, {"exact"}, of_paper=False),
    ]  # fmt: skip


def format_mismatch(value: float) -> str:
    """Return a mismatch as a short text.

    >>> format_mismatch(0.00034), format_mismatch(float("inf"))
    ('3.4e-4', 'inf')
    """
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    if exponent:
        return f"{mantissa}e{int(exponent)}"
    return mantissa


def _check(claim: str, rows: list[Row], allowed: set[str], *, of_paper: bool = True) -> Check:
    other = [r for r in rows if r["verdict"] not in allowed]
    values = [r["direction"] for r in rows]
    numbers = f"{len(rows) - len(other)} of {len(rows)} audits; mismatch as η → 0 "
    if values:
        numbers += f"{format_mismatch(min(values))} to {format_mismatch(max(values))}"
    else:
        numbers += "unknown"
    return Check(claim, bool(rows) and not other, numbers, of_paper=of_paper)


def _check_agreement(claim: str, rows: list[Row]) -> Check:
    """Check single steps: along a run units saturate, and parameters become superfluous."""
    pairs: list[tuple[float, float]] = []  # mismatch and round-off of a step
    for row in rows:
        sizes = [key.removeprefix("mismatch ") for key in row if "mismatch" in key]
        pairs += [(row[f"mismatch {size}"], row[f"round-off {size}"]) for size in sizes]
    agreements = sum(m <= THRESHOLDS.slack * off for m, off in pairs)
    numbers = f"{agreements} of {len(pairs)} steps"
    if pairs:
        numbers += f"; mismatch up to {format_mismatch(max(m for m, _ in pairs))}"
    return Check(claim, bool(pairs) and agreements == len(pairs), numbers, of_paper=False)


def worst(records: GroupedRecords, net: str) -> dict[tuple[str, str], tuple[Verdict, str] | None]:
    """Return the worst verdict over seeds with the largest mismatch; None if there is none."""
    out: dict[tuple[str, str], tuple[Verdict, str] | None] = {}
    on_net = {name: rows for (where, name), rows in records.items() if where == net}
    for name, rows in on_net.items():
        for transformation in standard():
            audits = [
                r
                for r in rows
                if r["place"] == "batch" and r["transformation"] == transformation.name
            ]
            last = max(audits, key=lambda r: _RANKS.get(r["verdict"], 2), default=None)
            largest = max((r["direction"] for r in audits), default=0.0)
            if last is None:
                verdict = None
            else:
                verdict = (Verdict(last["verdict"]), format_mismatch(largest))
            out[name, transformation.name] = verdict
    return out
