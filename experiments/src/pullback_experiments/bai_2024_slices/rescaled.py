"""The same function, badly scaled: which optimizers notice?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F

from pullback import KFAC

from ..framework.check import Check
from ..framework.curves import Chart
from ..framework.experiment import Context, Experiment, Item
from ..framework.plain import Record
from ..framework.quantiles import finite
from ..framework.results import Results
from ..framework.tabular import Table
from ..learning.training import fit
from .charts import rescaled
from .figure2 import PAPER
from .networks import digits
from .rescaled_checks import Ends, claims, table
from .rescaled_methods import METHODS, Method
from .starts import NETWORKS, start

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SEARCH_SEED = 100
#: network, and whether it is trained before it is rescaled
STARTS: Mapping[str, tuple[str, bool]] = {
    "fresh MLP": ("MLP", False),
    "trained MLP": ("MLP", True),
    "fresh conv net": ("conv net", False),
}


@dataclass(frozen=True, kw_only=True)
class Rescaled(Experiment):
    """Digits; each unit is scaled by 10^±size, then the network is trained for some epochs.

    Attributes:
        sizes: 0 is the network as it was.
        epochs, batch: of every run.
        held: which claims held in the full runs.
    """

    sizes: Sequence[int] = (0, 1, 2, 3)
    epochs: int = 5
    batch: int = 64
    held: Sequence[bool] = (True,) * 5
    paper: str = PAPER
    seeds: Sequence[int] = (0, 1, 2)

    def config(self, quick: bool) -> dict[str, Any]:
        return {
            "sizes": list(self.sizes[:: len(self.sizes) - 1] if quick else self.sizes),
            "starts": list(STARTS)[: 1 if quick else None],
            "epochs": self.epochs,
            "batch": self.batch,
            "methods": {m.name: m.described() for m in METHODS},
        }

    def smoke(self) -> Self:
        return replace(self, judged=False, batch=512, epochs=1)

    def items(self, quick: bool) -> list[Item]:
        config, out = self.config(quick), []
        used = {STARTS[name][0] for name in config["starts"]}
        for network in (n for n in NETWORKS if n in used):
            for m in METHODS:
                work = partial(self._search, network, m)
                out.append(Item(("search", network, m.name), work, once=True, resumable=True))
        for name in config["starts"]:
            for m in METHODS:
                for size in config["sizes"]:
                    work = partial(self._chosen, name, m, size)
                    out.append(Item((name, m.name, str(size)), work, resumable=True))
        return out

    def _search(self, network: str, method: Method, context: Context) -> Record:
        """The rate of the lowest mean logarithm of the training loss, on the net as it was."""
        scores = []
        for place, rate in enumerate(method.rates):
            torch.manual_seed(_SEARCH_SEED)
            folder = context.place / str(place)
            here = replace(context, seed=_SEARCH_SEED, place=folder)
            record = self._train(network, False, method, 0, rate, here)
            losses = [finite(v) for v in record["train loss"][1:]]
            scores.append(sum(math.log(max(v, 1e-12)) for v in losses) / len(losses))
        best = min(range(len(scores)), key=scores.__getitem__)
        return {"rate": method.rates[best], "scores": scores}

    def _chosen(self, name: str, method: Method, size: int, context: Context) -> Record:
        network, trained = STARTS[name]
        rate = context.done.once("search", network, method.name)["rate"]
        return self._train(network, trained, method, size, rate, context)

    def _train(
        self, network: str, trained: bool, method: Method, size: int, rate: float, context: Context
    ) -> Record:
        model, symmetry, moved = start(network, trained, size, context.seed, context.device)
        optimizer = method.build(model, symmetry, rate, context.seed)
        images = digits(torch.float64).to(context.device)
        epochs = self.config(context.quick)["epochs"]
        inner = getattr(optimizer, "optimizer", optimizer)
        with inner if isinstance(inner, KFAC) else nullcontext():  # which ends its hooks
            record = fit(
                model, optimizer, images, F.cross_entropy, context,
                epochs=epochs, batch=self.batch,
            )  # fmt: skip
        return {"rate": rate, "moved": moved, **record}

    def line(self, record: Record) -> str:
        if "scores" in record:
            return f"lr {record['rate']:g}"
        return f"loss {record['train loss'][-1]:.3g}"

    def _ends(self, results: Results) -> Ends:
        config = self.config(results.quick)
        return {
            name: {
                m.name: {s: results.of(name, m.name, str(s)) for s in config["sizes"]}
                for m in METHODS
            }
            for name in config["starts"]
        }

    def judge(self, results: Results) -> list[Check]:
        return claims(self._ends(results), self.held)

    def curves(self, results: Results) -> list[Chart]:
        return rescaled(self._ends(results))

    def tables(self, results: Results) -> list[Table]:
        return [table(name, found) for name, found in self._ends(results).items()]

    def draw(self, results: Results) -> Mapping[str, Figure]:
        from .rescaled_figure import draw  # matplotlib is slow to import

        return {"": draw(self._ends(results), len(results.seeds))}
