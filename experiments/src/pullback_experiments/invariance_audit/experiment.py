"""The experiment: every optimizer of the table, audited on two networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from pullback.geometry.charts.transformations import standard
from pullback.geometry.invariance.audit import audit
from pullback.geometry.invariance.optimizers import Contender, optimizers
from pullback.symmetry import SliceSGD

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.results import Results
from ..framework.tabular import Table
from .checks import KFAC, SLICED, Found, claims, worst

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
_SAMPLES, _STEPS = 64, 5


def contenders(net: str) -> list[Contender]:
    """Those of the geometry's table, and SliceSGD where units may be rescaled."""
    first, *rest = optimizers()
    sliced = Contender(
        SLICED,
        lambda m: SliceSGD(m, lr=0.02, momentum=0.9),
        "SGD from the one point of a rescaling orbit that lies on the slice; it refuses twins "
        "whose units cannot be rescaled",
    )
    return [first, sliced, *rest] if net == "leaky" else [first, *rest]


@dataclass(frozen=True, kw_only=True)
class InvarianceAudit(Experiment):
    """Twelve optimizers under eight transformations.

    Attributes:
        pairs: a network of `NETS` and one of its `contenders`, each.
    """

    name: str = "invariance-audit"
    paper: str = PAPER
    figure: str = "Definitions 5 and 6, Theorem 2"
    claim: str = "the natural gradient's update of the function does not depend on coordinates"
    about: str = _ABOUT
    seeds: Sequence[int] = tuple(range(5))
    pairs: Sequence[tuple[str, Contender]] = field(
        default_factory=lambda: [(net, c) for net in NETS for c in contenders(net)]
    )

    def smoke(self) -> Self:
        some = [(net, c) for net, c in self.pairs if net == "tanh" and c.name in ("SGD", KFAC[0])]
        return replace(self, judged=False, pairs=some)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "samples": _SAMPLES,
            "steps": _STEPS,
            "methods": {c.name: c.about for c in contenders("leaky")},
            "transformations": {t.name: t.about for t in standard()},
        }

    def items(self, quick: bool) -> list[Item]:
        return [
            Item((net, contender.name), partial(_work, net, contender))
            for net, contender in self.pairs
        ]

    def judge(self, results: Results) -> list[Check]:
        return claims(self._found(results))

    def draw(self, results: Results) -> dict[str, Figure]:
        from pullback.geometry.invariance.figure import grid  # matplotlib is slow to import

        found = self._found(results)
        return {net: grid(worst(found, net)) for net in self._nets}

    def tables(self, results: Results) -> list[Table]:
        found, out = self._found(results), []
        for net in self._nets:
            told = worst(found, net)
            columns = list(dict.fromkeys(t for _, t in told))
            rows = []
            for name in dict.fromkeys(o for o, _ in told):
                cells = [told[name, t] for t in columns]
                rows.append([name, *(None if c is None else f"{c[0]} {c[1]}" for c in cells)])
            out.append(Table(["optimizer", *columns], rows, f"On a {net} network", text=7))
        return out

    @property
    def _nets(self) -> list[str]:
        return list(dict.fromkeys(net for net, _ in self.pairs))

    def _found(self, results: Results) -> Found:
        return {
            (net, c.name): [row for one in results.of(net, c.name) for row in one["rows"]]
            for net, c in self.pairs
        }


def _work(net: str, contender: Contender, context: Context) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(context.seed)
    model, teacher = (_network(NETS[net], generator) for _ in range(2))
    x = _normal((_SAMPLES, 4), generator) @ _normal((4, 4), generator) + 0.5
    with torch.no_grad():
        y = teacher(x) + 0.1 * _normal((_SAMPLES, 2), generator)
    probes = _normal((50, 4), generator).to(context.device)
    batch = x.to(context.device), y.to(context.device)
    found = audit(contender, model.to(context.device), batch, steps=_STEPS, probes=probes)
    return {"rows": found.records()}


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
