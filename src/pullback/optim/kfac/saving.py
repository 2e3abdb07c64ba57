"""A K-FAC optimizer's state: saved, loaded, copied and pickled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from ..._core.errors import PullbackError
from .blocks.curvature import Curvature
from .info import KFACInfo
from .statistics.gather import Gatherer
from .stepping.steady import Steady

MEMORY = "pullback"
#: what belongs to hooks, to the model's objects or to the device
_APART = ("_gatherer", "_ranks", "_names", "_by_name", "_look", "_steady")


class Saving(Optimizer):
    """Everything that resuming to the same bits takes."""

    curvature: Curvature
    ekfac: bool
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
        """Resume to the same bits."""
        if MEMORY not in state_dict.get("state", {}):
            raise PullbackError(
                "The saved state is not KFAC's",
                "it holds no averages",
                "Load what KFAC.state_dict() gave",
            )
        self._settle()
        super().load_state_dict(dict(state_dict))
        memory = copy.deepcopy(state_dict["state"][MEMORY])
        self.curvature.load_state_dict(memory.pop("curvature"))
        self._gatherer.load_state_dict(memory.pop("gathered"))
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
