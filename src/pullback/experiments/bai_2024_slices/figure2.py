"""The seven-layer network of the paper: slice SGD beside SGD, over epochs and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..framework.check import Check
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.results import Results
from ..framework.tabular import Table
from ..learning.data import DataSet
from ..learning.precision import tensor_cores
from ..learning.training import fit
from .checks import claims, table
from .law import RATES, law
from .methods import METHODS, Method
from .networks import DIGITS_WIDTHS, PAPER_WIDTHS, load, mlp

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = "Bai, Rosenberg and Xu (2024), Generalized Tangent Kernel"
_SEARCH_SEED = 100


@dataclass(frozen=True, kw_only=True)
class Figure2(Experiment):
    """CIFAR-10 and the paper's network; the quick version is a narrow one on digits.

    Methods with rates to choose from are tried on a seed of their own, with a tenth of the
    training images held out, by the best accuracy on these.

    Attributes:
        held, quick_held: which claims held in the full and in the quick runs.
        widths, epochs, batch, lr: of the full version.
        searched: epochs of a trial.
    """

    held: Sequence[bool]
    quick_held: Sequence[bool]
    widths: Sequence[int] = PAPER_WIDTHS
    epochs: int = 200
    batch: int = 128
    lr: float = 0.01
    searched: int = 15
    paper: str = PAPER
    seeds: Sequence[int] = tuple(range(5))
    quick_seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "dataset": "digits" if quick else "cifar10",
            "widths": list(DIGITS_WIDTHS if quick else self.widths),
            "epochs": 24 if quick else self.epochs,
            "batch": 32 if quick else self.batch,
            "lr": 0.1 if quick else self.lr,
            "level": 0.9 if quick else 0.5,
            "searched": 0 if quick else self.searched,
            "law": list(RATES),
            "precision": "float32, on CUDA with TF32 products and captured steps",
            "methods": {m.name: m.described() for m in METHODS},
        }

    def items(self, quick: bool) -> list[Item]:
        out = [Item(("law",), law, once=True)]
        for m in METHODS:
            for rate in () if quick else m.rates:
                work = partial(self._tried, m, rate)
                out.append(Item(_trial(m, rate), work, once=True, resumable=True))
            out.append(Item((m.name,), partial(self._chosen, m), resumable=True))
        return out

    def _tried(self, method: Method, rate: float, context: Context) -> Record:
        torch.manual_seed(_SEARCH_SEED)
        config = self.config(context.quick)
        kept = _held_out(load(config["dataset"], str(context.device)))
        context = replace(context, seed=_SEARCH_SEED)
        record = self._train(method, rate, kept, self.searched, context)
        return {"rate": rate, "score": max(record["test accuracy"])}

    def _chosen(self, method: Method, context: Context) -> Record:
        config = self.config(context.quick)
        rate = config["lr"]
        if context.quick:
            rate = method.quick or rate
        elif method.rates:
            tried = [context.done.once(*_trial(method, r)) for r in method.rates]
            rate = max(tried, key=lambda t: t["score"])["rate"]
        images = load(config["dataset"], str(context.device))
        return {"rate": rate, **self._train(method, rate, images, config["epochs"], context)}

    def _train(
        self, method: Method, rate: float, images: DataSet, epochs: int, context: Context
    ) -> Record:
        config = self.config(context.quick)
        model = mlp(*config["widths"]).to(context.device)
        with tensor_cores(context.device):
            return fit(
                model, method.build(model, rate), images, F.cross_entropy, context,
                epochs=epochs, batch=config["batch"], graphed=True,
            )  # fmt: skip

    def line(self, record: Record) -> str:
        if "one step" in record:
            return f"after one step {record['one step']:.0e}"
        if "score" in record:
            return f"accuracy {record['score']:.3f}"
        loss, accuracy = record["train loss"][-1], record["test accuracy"][-1]
        return f"lr {record['rate']:g}, loss {loss:.3f}, test accuracy {accuracy:.3f}"

    def _found(self, results: Results) -> dict[str, list[Record]]:
        return {m.name: results.of(m.name) for m in METHODS}

    def judge(self, results: Results) -> list[Check]:
        held = self.quick_held if results.quick else self.held
        level = self.config(results.quick)["level"]
        return claims(self._found(results), results.once("law"), level, held)

    def tables(self, results: Results) -> list[Table]:
        return [table(self._found(results), self.config(results.quick)["level"])]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        from .figure import curves  # matplotlib is slow to import

        where = "digits" if results.quick else "CIFAR-10"
        title = f"Seven-layer ReLU network on {where}, {len(results.seeds)} seeds: mean ± deviation"
        return {"": curves(self._found(results), title)}


def _trial(method: Method, rate: float) -> tuple[str, ...]:
    return ("search", method.name, f"{rate:g}")


def _held_out(images: DataSet) -> DataSet:
    """A tenth of the training images in the place of the test set."""
    n = math.ceil(0.9 * len(images.x))
    x, y = images.x, images.y
    return DataSet(x[:n], y[:n], x[n:], y[n:], images.classes)
