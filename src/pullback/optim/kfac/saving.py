"""A K-FAC optimizer's state: saved, loaded, copied and pickled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..._core.errors import PullbackError
from .blocks.curvature import Curvature
from .info import KFACInfo
from .statistics.gather import Gatherer
from .stepping.steady import Steady

MEMORY = "pullback"
#: what is saved there
_PARTS = ("steps", "taken", "damping", "curvature", "gathered")
#: what belongs to hooks, to the model's objects or to the device
_APART = ("_gatherer", "_ranks", "_names", "_by_name", "_look", "_steady")


class Saving(Optimizer):
    """Everything that resuming to the same bits takes."""

    curvature: Curvature
    ekfac: bool
    _by_name: Any
    _closed: bool
    _gatherer: Gatherer
    _info: KFACInfo
    _memory: Any
    _steady: Steady

    def _settle(self) -> None:
        raise NotImplementedError

    def _register(self) -> None:
        raise NotImplementedError

    def _choose(self) -> None:
        raise NotImplementedError

    def _due(self) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """All but the hooks: a copy or a pickle brings its model along."""
        self._settle()
        own = {n: v for n, v in vars(self).items() if n not in _APART}
        own.pop("step", None)  # a scheduler counts calls by a function of its own
        return {**own, "gathered": self._gatherer.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        gathered = state.pop("gathered", None)
        info = state.pop("_info", None)
        super().__setstate__(state)
        if gathered is not None:
            self._register()
            self._choose()
            self._gatherer.load_state_dict(gathered)
            self._resume()
            self._info = info

    def state_dict(self) -> dict[str, Any]:
        """Param groups, momentum, averages, inverses and the draws' random state."""
        self._settle()
        out = super().state_dict()
        memory = {
            **self._memory,
            "curvature": self.curvature.state_dict(),
            "gathered": self._gatherer.state_dict(),
        }
        out["state"] = {**out["state"], MEMORY: copy.deepcopy(memory)}
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Resume to the same bits; a state that cannot be used changes nothing."""
        memory = copy.deepcopy(memory_of(state_dict, self._gatherer.state_dict()))
        gathered = memory.pop("gathered")
        curvature = curvature_of(memory.pop("curvature"), self._by_name)
        self._settle()
        try:
            super().load_state_dict(dict(state_dict))
        except (ValueError, KeyError) as error:
            raise _foreign(f"its param groups differ ({error})") from error
        self.curvature = curvature
        self._gatherer.load_state_dict(gathered)
        self.state[MEMORY] = memory  # pyright: ignore[reportArgumentType]
        self._resume()

    def _resume(self) -> None:
        self._steady = Steady()
        if self.ekfac:
            self._gatherer.bases = self.curvature.inverses
        self._gatherer.settle()
        self._gatherer.due = self._due()
        if self._closed:
            self.close()


def memory_of(state: Any, gathered: Mapping[str, Any]) -> dict[str, Any]:
    """What `KFAC.state_dict()` holds beside the param groups, if all of it is there.

    Args:
        state: what the user gave.
        gathered: what a state of the statistics has.
    """
    try:
        memory = dict(state["state"][MEMORY])
        missing = [n for n in _PARTS if n not in memory]
        missing += [n for n in gathered if n not in memory.get("gathered", gathered)]
    except (KeyError, TypeError, ValueError) as error:
        raise PullbackError(
            "The saved state is not KFAC's",
            "it holds no averages",
            "Load what KFAC.state_dict() gave",
        ) from error
    if missing:
        raise PullbackError(
            "The saved state is not whole",
            f"{', '.join(missing)} is not in it",
            "Load what KFAC.state_dict() gave, as it was",
        )
    return memory


def curvature_of(state: Any, parameters: Mapping[str, Tensor]) -> Curvature:
    """The blocks of a saved state, if they are those of these parameters."""
    out = Curvature()
    try:
        out.load_state_dict(state)
        sizes = {key: prod(out.shape(key)[0]) for key in out.averages}
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise PullbackError(
            "The saved state is not whole",
            f"its averages cannot be read ({error!r})",
            "Load what KFAC.state_dict() gave, as it was",
        ) from error
    for key, size in sizes.items():
        for name in key.names:
            if name not in parameters:
                raise _foreign(f"it knows a parameter {name!r}, which the model lacks")
        held = sum(parameters[n].numel() for n in key.names)
        if held != size:
            raise _foreign(f"{' and '.join(key.names)} had {size} entries, and have {held} now")
    return out


def _foreign(why: str) -> PullbackError:
    return PullbackError(
        "The saved state is that of another network",
        why,
        "Load it into the optimizer of a model that was built in the same way",
    )
