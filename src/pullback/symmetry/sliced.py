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
from .descent.retractor import Retractor, Schedule, is_idle
from .descent.sweeps import Follower
from .descent.transport import find_powers, list_followers, rescale_curvature
from .find import read_scalings
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
        _refuse_optimizer(optimizer)
        if model is None:
            model = getattr(optimizer, "model", None)
        scalings, model = read_scalings(symmetry, model)
        self.optimizer = optimizer
        self._powers = {**find_powers(optimizer), **(transport or {})}
        self._schedule = {"steps": 0}
        #: whether the inner optimizer has taken a step or loaded a state
        self._has_started = False
        #: torch's constructor calls `add_param_group`, which must not reach the inner optimizer
        self._is_constructed = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._is_constructed = True
        self.param_groups = optimizer.param_groups
        self._retractor = Retractor(
            model,
            scalings,
            slice,
            Schedule(every, sweeps, captured),
            returns_log_scales=isinstance(optimizer, KFAC),
        )
        self._retractor.set_optimized(self.param_groups)
        _refuse_foreign_parameters(self._retractor)
        #: the retraction at construction: how far the parameters were away, and dead units
        self.start: Retraction | None = self.retract_()

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """By parameter: the inner optimizer's state, and the number of steps, which all share.

        It is empty as long as the inner optimizer has yet to create its own.
        """
        inner = self.optimizer.state
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        if self._has_started or inner:
            for p in self._list_parameters():
                state[p] = self._make_state(inner.get(p, {}), p)
        return state

    @state.setter
    def state(self, value: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Leave the state to the inner optimizer: torch's constructor sets an empty one."""

    def _list_parameters(self) -> list[Tensor]:
        parameters = []
        for group in self.param_groups:
            parameters.extend(group["params"])
        return parameters

    def _make_state(self, inner: Any, p: Tensor) -> dict[str, Any]:
        """Return the state of a parameter, with the inner optimizer's."""
        # torch's full_state_dict reads the device off a tensor that has an axis.
        return {"optimizer": inner, "slice": dict(self._schedule), "device": p.new_empty(0)}

    @property
    def slice(self) -> Slice | None:
        """Return the slice; None if all scalings involve frozen parameters."""
        self._retractor.refresh()
        return self._retractor.slice

    def retract_(self) -> Retraction | None:
        """Retract parameters and state to the slice, to round-off."""
        self._retractor.refresh()
        retraction = self._retractor.retract_(self._list_followers())
        if retraction is not None:
            self._rescale_curvature(torch.cat(retraction.scales))
        return retraction

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take the inner optimizer's step and retract; return what the inner step returns.

        With all rates and gradients zero, nothing changes, once the inner optimizer has its state.
        """
        changes_nothing = closure is None and not options and is_idle(self.param_groups)
        if changes_nothing and self.state:
            return None
        arguments = () if closure is None else (closure,)
        result = self.optimizer.step(*arguments, **options)
        self._has_started = True
        if changes_nothing:
            return result
        self._retractor.refresh()
        self._schedule["steps"] += 1
        steps = self._schedule["steps"]
        if self._retractor.should_retract(steps):
            with torch.no_grad():
                self._rescale_curvature(
                    self._retractor.retract_by_sweeps(steps, self._list_followers())
                )
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_constructed:
            self.optimizer.add_param_group(param_group)
            self._retractor.set_optimized(self.param_groups)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with the number of steps beside the state of each parameter."""
        state_dict = self.optimizer.state_dict()
        keys = []
        for group in state_dict["param_groups"]:
            keys.extend(group["params"])
        inner = state_dict["state"]
        state = dict(inner)
        for key, p in zip(keys, self._list_parameters(), strict=True):
            state[key] = self._make_state(inner.get(key, {}), p)
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume to the same bits; the state of the inner optimizer alone begins on the slice."""
        if "slice_steps" in state_dict["param_groups"][0]:
            raise PullbackError(
                "The saved state is of an older version",
                "steps were counted in a param group then",
                "Load what Sliced.state_dict() of this version gave, or start anew",
            )
        inner = {}
        schedules = []
        for key, saved in state_dict["state"].items():
            if isinstance(saved, dict) and "slice" in saved:
                schedules.append(saved["slice"])
                saved = saved.get("optimizer", {})
            if saved != {}:
                inner[key] = saved
        self.optimizer.load_state_dict({**state_dict, "state": inner})
        self.param_groups = self.optimizer.param_groups
        self._has_started = True
        self._schedule = shared_numbers({"steps": 0}, schedules)

    def __getstate__(self) -> dict[str, Any]:
        raise PullbackError(
            "A Sliced optimizer cannot be copied or pickled",
            "it would lose its model",
            "Save state_dict(), and build it anew",
        )

    def __repr__(self) -> str:
        return f"Sliced({self.optimizer!r}, slice={type(self.slice).__name__})"

    def _rescale_curvature(self, log_scales: Tensor | None) -> None:
        """Rescale K-FAC's averages and inverses after parameters were scaled by these, (U,)."""
        slice = self._retractor.slice
        if log_scales is None or slice is None or not isinstance(self.optimizer, KFAC):
            return
        rescale_curvature(self.optimizer.blocks, self._retractor.named, slice.units, log_scales)

    def _list_followers(self) -> dict[str, list[Follower]]:
        """Return the tensors of the inner optimizer's state that are scaled with parameters."""
        if self._retractor.slice is None:
            return {}
        followers = {}
        for name in self._retractor.slice.units.names:
            p = self._retractor.named[name]
            if p in self.optimizer.state:
                followers[name] = list_followers(self.optimizer.state[p], p, self._powers)
        return followers


def _refuse_optimizer(optimizer: Any) -> None:
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


def _refuse_foreign_parameters(retractor: Retractor) -> None:
    """Raise where the optimizer moves none of the model's parameters."""
    if retractor.optimized.isdisjoint(id(p) for p in retractor.named.values()):
        raise PullbackError(
            "The optimizer's parameters are not the model's",
            "it moves none of the parameters that the symmetry scales",
            "Pass the symmetry of the model that the optimizer was built for",
        )
