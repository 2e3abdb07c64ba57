"""Any torch optimizer on a slice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._core.errors import PullbackError
from ..optim.kfac import KFAC
from ..steps.memory import shared_numbers
from .descent.keeper import Keeper, idle
from .descent.transport import followers, powers_of, rescale_curvature
from .find import scalings_of
from .slices import Retraction, Slice


class Sliced(Optimizer):
    r"""Take another optimizer's steps, and return along the orbit to a slice after them.

    The function stays as it is, the scales of the weights stay sound, and the optimizer's state is
    transported: under w ← αw averages of gradients go with 1/α, averages of their squares with
    1/α², and the factors of `KFAC` as second moments of activations and cotangents do. Parameter
    groups and gradients are the inner optimizer's own; schedulers may be given either. Its state
    is saved under "optimizer", beside the number of steps; a state dict of the inner optimizer
    alone can be loaded too.

    Args:
        optimizer: torch's or another, such as Adam.
        symmetry: what `symmetry.find(model, x)` returned, or the model itself. May be left out
            where the optimizer knows its model, as ours do.
        slice: "balanced" (every unit takes in what it gives out), "layer-balanced" or "equal-norm".
        every: retract after every `every` steps.
        sweeps: for "balanced": None balances every other layer after each step, n balances all
            layers, n times.
        captured: how many steps are recorded in one CUDA graph, if any are: see `SliceSGD`.
        transport: powers of α by name, for state that torch's optimizers do not have.
        model: the module, where `symmetry` is a list of scalings.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        symmetry: Any = None,
        slice: str = "balanced",
        *,
        every: int = 1,
        sweeps: int | None = None,
        captured: int | None = None,
        transport: Mapping[str, int] | None = None,
        model: Any = None,
    ) -> None:
        _refuse(optimizer)
        if model is None:
            model = getattr(optimizer, "model", None)
        scalings, model = scalings_of(symmetry, model)
        self.optimizer = optimizer
        self._powers = {**powers_of(optimizer), **(transport or {})}
        self._schedule = {"steps": 0}
        self._ready = self._started = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._ready = True
        self.param_groups = optimizer.param_groups
        self._keeper = Keeper(
            model, scalings, slice, every, sweeps, captured, watched=isinstance(optimizer, KFAC)
        )
        self._keeper.own(self.param_groups)
        _refuse_strangers(self._keeper)
        #: what the retraction at construction met: how far away, and dead units
        self.start: Retraction | None = self.retract_()

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """By parameter: the inner optimizer's state, and the number of steps, which all share.

        It is empty as long as the inner optimizer has yet to create its own.
        """
        inner, out = self.optimizer.state, defaultdict(dict)
        if self._started or inner:
            for p in (p for group in self.param_groups for p in group["params"]):
                out[p] = self._saved(inner.get(p, {}), p)
        return out

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Leave the state to the inner optimizer: torch's constructor sets an empty one."""

    def _saved(self, inner: Any, p: Tensor) -> dict[str, Any]:
        # torch's full_state_dict reads the device off a tensor that has an axis
        return {"optimizer": inner, "slice": dict(self._schedule), "device": p.new_empty(0)}

    @property
    def slice(self) -> Slice | None:
        """Where the parameters are; None where all scalings touch frozen parameters."""
        self._keeper.refresh()
        return self._keeper.slice

    def retract_(self) -> Retraction | None:
        """Bring parameters and state to the slice to round-off, now."""
        self._keeper.refresh()
        done = self._keeper.retract_(self._followers())
        if done is not None:
            self._follow(torch.cat(done.scales))
        return done

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The inner optimizer's step and the retraction; returns what the former returns.

        With all rates and gradients zero, nothing changes, once the inner optimizer has its state.
        """
        still = closure is None and not options and idle(self.param_groups)
        if still and self.state:
            return None
        given = () if closure is None else (closure,)
        result = self.optimizer.step(*given, **options)
        self._started = True
        if still:
            return result
        self._keeper.refresh()
        self._schedule["steps"] += 1
        steps = self._schedule["steps"]
        if self._keeper.due(steps):
            with torch.no_grad():
                self._follow(self._keeper.run(steps, self._followers()))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._ready:
            self.optimizer.add_param_group(param_group)
            self._keeper.own(self.param_groups)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with the number of steps beside the state of each parameter."""
        out = self.optimizer.state_dict()
        keys = [key for group in out["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        inner = out["state"]
        own = {k: self._saved(inner.get(k, {}), p) for k, p in zip(keys, params, strict=True)}
        return {**out, "state": {**inner, **own}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume to the same bits; the state of the inner optimizer alone begins on the slice."""
        if "slice_steps" in state_dict["param_groups"][0]:
            raise PullbackError(
                "The saved state is of an older version",
                "steps were counted in a param group then",
                "Load what Sliced.state_dict() of this version gave, or start anew",
            )
        inner, schedules = {}, []
        for key, saved in state_dict["state"].items():
            if isinstance(saved, dict) and "slice" in saved:
                schedules.append(saved["slice"])
                saved = saved.get("optimizer", {})
            if saved != {}:
                inner[key] = saved
        self.optimizer.load_state_dict({**state_dict, "state": inner})
        self.param_groups, self._started = self.optimizer.param_groups, True
        self._schedule = shared_numbers({"steps": 0}, schedules)

    def __getstate__(self) -> dict[str, Any]:
        raise PullbackError(
            "A Sliced optimizer cannot be copied or pickled",
            "it would lose its model",
            "Save state_dict(), and build it anew",
        )

    def __repr__(self) -> str:
        return f"Sliced({self.optimizer!r}, slice={type(self.slice).__name__})"

    def _follow(self, t: Tensor | None) -> None:
        """Rescale what K-FAC knows after parameters were multiplied by log-scales t (U,)."""
        found = self._keeper.slice
        if t is not None and found is not None and isinstance(self.optimizer, KFAC):
            rescale_curvature(self.optimizer.blocks, self._keeper.named, found.units, t)

    def _followers(self) -> dict[str, list[tuple[Tensor, int]]]:
        out = {}
        for name in self._keeper.slice.units.names if self._keeper.slice is not None else ():
            p = self._keeper.named[name]
            if p in self.optimizer.state:
                out[name] = followers(self.optimizer.state[p], p, self._powers)
        return out


def _refuse(optimizer: Any) -> None:
    if not isinstance(optimizer, Optimizer):
        raise PullbackError(
            "Sliced needs an optimizer",
            f"got {type(optimizer).__name__}",
            "Pass torch.optim.Adam(model.parameters()), or another",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise PullbackError(
            "LBFGS cannot be put on a slice",
            "its history is one flat vector, which is not transported",
            "Use NaturalGradient(..., retract=slice.retract), or Adam",
        )


def _refuse_strangers(keeper: Keeper) -> None:
    """Raise where the optimizer moves none of the model's parameters."""
    if keeper.optimized.isdisjoint(id(p) for p in keeper.named.values()):
        raise PullbackError(
            "The optimizer's parameters are not the model's",
            "it moves none of the parameters that the symmetry scales",
            "Pass the symmetry of the model that the optimizer was built for",
        )
