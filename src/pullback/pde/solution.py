"""A solved problem: the network, its error, its history, and pictures of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint
from .history import History
from .measure import Yardstick
from .problem import Problem


class Solution:
    """What `solve` found.

    Attributes:
        problem, network: what was solved, and with what.
        history: losses, errors and times along the way.
        unknowns: the coefficients that were found.
        stopped: why it ended.
        spectrum: singular values of the weighted residual Jacobian at the end, where computed.
        nested: why derivatives were nested instead of carried forward, or empty.
    """

    def __init__(
        self,
        problem: Problem,
        network: nn.Module,
        history: History,
        *,
        unknowns: dict[str, float] | None = None,
        stopped: str = "",
        spectrum: Tensor | None = None,
        nested: str = "",
    ) -> None:
        self.problem, self.network, self.history = problem, network, history
        self.unknowns = dict(unknowns or {})
        self.stopped, self.spectrum, self.nested = stopped, spectrum, nested

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """u at points (N, d): (N, m)."""
        return self.network(x.to(next(self.network.parameters())))

    @property
    def error(self) -> float:
        """The relative L² error, all fields together."""
        return Yardstick(self.problem, next(self.network.parameters())).error(self.network)

    @property
    def errors(self) -> dict[str, float]:
        """The relative L² error of each field."""
        return Yardstick(self.problem, next(self.network.parameters())).errors(self.network)

    @property
    def loss(self) -> float:
        """The last loss."""
        return self.history.loss[-1] if self.history.loss else float("nan")

    def plot(self, path: str | Path | None = None) -> Any:
        """Solution, error, convergence and spectrum; written to `path` where it is given."""
        from .plots import draw  # matplotlib is slow to import

        return draw(self, path)

    def save(self, path: str | Path) -> None:
        """Parameters, history and spectrum; problem and architecture are code."""
        checkpoint.save(
            Path(path),
            {
                "run": {"problem": self.problem.name},
                "network": self.network.state_dict(),
                "history": self.history.as_dict(),
                "unknowns": self.unknowns,
                "stopped": self.stopped,
                "nested": self.nested,
                "spectrum": self.spectrum,
            },
        )

    @classmethod
    def load(cls, path: str | Path, problem: Problem, network: nn.Module) -> Solution:
        """What `save` wrote, for the same problem and a network of the same architecture."""
        state = checkpoint.load(Path(path), {"problem": problem.name})
        checkpoint.restore(Path(path), network, state["network"])
        return cls(
            problem,
            network,
            History.from_dict(state["history"]),
            unknowns=state["unknowns"],
            stopped=state["stopped"],
            spectrum=state["spectrum"],
            nested=state["nested"],
        )

    def __repr__(self) -> str:
        known = f", error {self.history.error[-1]:.2e}" if self.history.error else ""
        found = "".join(f", {n} = {v:.6g}" for n, v in self.unknowns.items())
        return (
            f"Solution({self.problem.name}: {len(self.history)} steps in "
            f"{self.history.spent:.1f} s, loss {self.loss:.2e}{known}{found}; {self.stopped})"
        )
