"""VGG-16 on CIFAR: the Sobolev natural gradient beside K-FAC, over epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F

from ..framework.check import Check
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from ..learning.precision import tensor_cores
from ..learning.training import fit
from . import images
from .charts import charts
from .checks import LEVELS, Found
from .curves import counted, epochs, final
from .methods import Method
from .networks import vgg16

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = "Bai, Rosenberg and Xu (2024), Generalized Tangent Kernel"
#: the paper's numbers, and from the code it builds on what it leaves open; decay as explained there
SETTINGS: Mapping[str, Any] = {
    "lr": 0.01,
    "damping": 0.03,
    "momentum": 0.9,
    "weight_decay": 0.03,
    "kl_clip": 0.01,
    "ema": 0.95,
    "statistics_every": 10,
    "invert_every": 100,
}


@dataclass(frozen=True, kw_only=True)
class Training(Experiment):
    """VGG-16, 50 epochs of batches of 128 with random crops and flips, for every method.

    Attributes:
        methods: to compare.
        figures: names of methods by what is added to the figure's name.
        claims: (records by method, held) ↦ the claims with their numbers.
        held: which of them held in the full runs.
        dataset: "cifar10", or "cifar100" where `cifar100.npz` is at hand.
        settings: of K-FAC, for all methods.
        epochs, batch: of the full version.
    """

    methods: Sequence[Method]
    figures: Mapping[str, Sequence[str]]
    claims: Callable[[Found, Sequence[bool]], list[Check]]
    held: Sequence[bool]
    dataset: str = "cifar10"
    settings: Mapping[str, Any] = field(default_factory=lambda: dict(SETTINGS))
    epochs: int = 50
    batch: int = 128
    paper: str = PAPER
    seeds: Sequence[int] = (0, 1, 2, 3)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "dataset": images.checked(self.dataset),
            "sheets": 1 if quick else None,
            "narrow": 16 if quick else 1,
            "epochs": 2 if quick else self.epochs,
            "batch": 50 if quick else self.batch,
            "settings": dict(self.settings),
            "precision": "bfloat16 autocast and TF32 products on CUDA, float32 elsewhere",
            "methods": {m.name: m.described() for m in self.methods},
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, dataset="generated")

    def items(self, quick: bool) -> list[Item]:
        config = self.config(quick)
        return [
            Item((m.name,), partial(self._train, m, config), resumable=True) for m in self.methods
        ]

    def _train(self, method: Method, config: Mapping[str, Any], context: Context) -> Record:
        device = context.device
        data = images.load(self.dataset, config["sheets"])
        data = images.shrunk(data.to(device), method.divisor)
        model = vgg16(images.CLASSES[self.dataset], config["narrow"])
        model = model.to(device=device, memory_format=torch.channels_last)  # pyright: ignore
        with (
            method.optimizer(model, context.seed, **self.settings) as optimizer,
            tensor_cores(device),
        ):
            return fit(
                model, optimizer, data, F.cross_entropy, context,
                epochs=config["epochs"], batch=config["batch"], schedule=method.schedule,
                augment=images.CropAndFlip.of(data.x),
                half=torch.bfloat16 if device.type == "cuda" else None,
                evaluated=10_000 if device.type == "cuda" else 500, graphed=True,
            )  # fmt: skip

    def line(self, record: Record) -> str:
        loss, accuracy = record["train loss"][-1], record["test accuracy"][-1]
        return f"training loss {loss:.3f}, test accuracy {accuracy:.3f}"

    def _found(self, results: Results) -> Found:
        return {m.name: results.of(m.name) for m in self.methods}

    def judge(self, results: Results) -> list[Check]:
        return [] if results.quick else self.claims(self._found(results), self.held)

    def draw(self, results: Results) -> dict[str, Figure]:
        from .figure import curves  # matplotlib is slow to import

        found, count = self._found(results), len(results.seeds)
        title = f"VGG-16 on {_set(self.dataset)}, {count} seed{'s' if count > 1 else ''}"
        return {
            part: curves({m: found[m] for m in chosen}, title)
            for part, chosen in self.figures.items()
        }

    def curves(self, results: Results) -> list[Chart]:
        return charts(self._found(results))

    def tables(self, results: Results) -> list[Table]:
        goals = [(m, level) for m, levels in LEVELS.items() for level in levels]
        rows = [
            [
                name,
                *(counted(epochs(runs, m, level)) for m, level in goals),
                f"{final(runs, 'train loss'):.4f}",
                f"{final(runs, 'test loss'):.4f}",
                f"{final(runs, 'test accuracy'):.4f}",
                f"{1e3 * min(r['seconds'][-1] / max(r['step'][-1], 1) for r in runs):.1f}",
            ]
            for name, runs in self._found(results).items()
        ]
        heads = [f"{m} {level:g}" for m, level in goals]
        columns = ["method", *heads, "train loss", "test loss", "test accuracy", "ms/step"]
        count = len(results.seeds)
        over = f"medians over {count} seeds" if count > 1 else "one seed"
        title = f"Epochs to a level, and ends: {over}"
        return [Table(columns, rows, title)]


def _set(name: str) -> str:
    return name.replace("cifar", "CIFAR-")
