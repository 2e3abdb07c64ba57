"""A solved problem: the network, its error, its history, and pictures of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._core.errors import PullbackError
from . import checkpoint
from .history import History
from .measure import Yardstick
from .networks import Slabs
from .problem import Problem


class Solution:
    """What `solve` found.

    Attributes:
        problem, network: what was solved, and with what.
        history: losses, errors and times along the way.
        unknowns: the coefficients that were found.
        stopped: why it ended.
        loss: of the network as it is, at the points of the last step.
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
        loss: float = float("nan"),
        spectrum: Tensor | None = None,
        nested: str = "",
    ) -> None:
        self.problem, self.network, self.history = problem, network, history
        self.unknowns = dict(unknowns or {})
        self.stopped, self.spectrum, self.nested, self.loss = stopped, spectrum, nested, loss

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """u at points (N, d): (N, m)."""
        dim = self.problem.domain.dim
        if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != dim or x.is_complex():
            got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise PullbackError(
                "These are no points of the solution",
                f"got {got} in {dim} dimension{'s' * (dim > 1)}",
                f"Pass a real tensor of shape (N, {dim})",
            )
        return self.network(x.to(next(self.network.parameters())))

    @property
    def error(self) -> float:
        """The relative L² error, all fields together."""
        return Yardstick(self.problem, next(self.network.parameters())).error(self.network)

    @property
    def errors(self) -> dict[str, float]:
        """The relative L² error of each field."""
        return Yardstick(self.problem, next(self.network.parameters())).errors(self.network)

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
                "loss": self.loss,
                "edges": getattr(self.network, "edges", None),
                "nested": self.nested,
                "spectrum": self.spectrum,
            },
        )

    @classmethod
    def load(cls, path: str | Path, problem: Problem, network: nn.Module) -> Solution:
        """What `save` wrote, for the same problem and a network of the same architecture.

        A solution in slabs of time is given one of their networks, and copies it.
        """
        state = checkpoint.load(Path(path), {"problem": problem.name})
        if state["edges"] is not None:
            count = len(state["edges"]) - 1
            network = Slabs([copy.deepcopy(network) for _ in range(count)], state["edges"])
        checkpoint.restore(Path(path), network, state["network"])
        return cls(
            problem,
            network,
            History.from_dict(state["history"]),
            unknowns=state["unknowns"],
            stopped=state["stopped"],
            loss=state["loss"],
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
