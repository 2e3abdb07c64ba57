"""How a K-FAC optimizer's step ends: taken without waiting where possible, counted and reported."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ...._core.errors import PullbackError
from ....steps import QuadraticModel
from ...checks import refuse_sparse
from ..blocks.damping import Adaptive
from ..blocks.ranks import Ranks
from ..info import KFACInfo
from ..source import ObjectiveSource, Source
from ..statistics.sums import Key
from . import steady
from .control import Control
from .learning import Learning
from .look import Look, finite, refuse_none
from .steady import Steady


class Moving(Learning):
    """From gradients to moved parameters, and what is said about it."""

    param_groups: list[dict[str, Any]]
    state: Any
    kl_clip: float | None
    rule: QuadraticModel | None
    _names: dict[int, str]
    _shapes: dict[str, Any]
    _info: KFACInfo
    _steady: Steady
    _look: Look | None
    _ranks: Ranks

    def _forget(self) -> None:
        raise NotImplementedError

    def _take(self, source: Source, *, told: bool) -> Any:
        """One step; `told` says whether the forward pass knew that statistics are due."""
        loss = source.evaluate()
        self._owing = type(source) is Source and not told and self._due()
        names = self._active()
        low = self._ranks.low(self.curvature.inverses, self._by_name)
        learning, found = self._gatherer.pool.calls > 0 or self._due(), None
        if not learning and not low and self._steadily(source, names):
            return loss
        if learning and not low:
            done, found = self._learn_steadily(source, names)
            if done:
                return loss
        params: Any = {n: self._by_name[n] for own in names for n in own}
        look = Look(source.loss, finite([p.grad for p in params.values()]), low)
        if reason := look.reason():
            return self._rejected(reason, loss)
        taken = self._learn(source.found() if found is None else found)
        # corrected eigenvalues belong to the old eigenbases: new ones serve from the next step on
        self._invert(taken and not self.ekfac)
        low = look.low()
        if learning and not low and not self.ekfac and self._steadily(source, names, taken=taken):
            return loss
        directions = self.curvature.precondition(self._by_name, params, low)
        optimizer: Any = self
        control = Control(optimizer, params, directions, source)
        accepted, reason = control.move()
        if self.ekfac:
            self._invert(taken)
        self._done(accepted, reason, taken, control.ratio, *control.factors, len(low))
        return loss

    def _done(self, accepted: bool, reason: str, taken: bool, *control: Any) -> None:
        self._memory["steps"] += 1
        owing = self._owing and not self._gatherer.pool.calls and not taken
        self._forget()
        self._gatherer.due = self._due() or owing or self._gatherer.lacking
        self._info = KFACInfo(
            accepted, reason, self._memory["damping"], taken, self._notes(), *control
        )

    def _steadily(
        self, source: Source, names: list[list[str]], *, taken: bool | None = None
    ) -> bool:
        """The move without waiting for the device, where that is possible.

        The device moves nothing by itself if it must not; `_settle` takes notice later. `names`
        are those of parameters with a gradient, per param group; `taken` says whether statistics
        were taken, on a step where they were due.
        """
        if not self._unattended(source):
            return False
        look = self._steady.step(
            self.curvature, self._by_name, names, self.param_groups, self.state, self.kl_clip,
            source.loss,
        )  # fmt: skip
        if look is None:
            return False
        if taken is None:
            self._skipped = False
        self._done(True, "", bool(taken))
        self._look = look
        return True

    def _unattended(self, source: Source) -> bool:
        """Whether a step's outcome is of no consequence for what the host does next."""
        lost = source.loss is not None and not isfinite(source.loss)
        if lost or self.rule is not None or isinstance(self.damping, Adaptive):
            return False
        return "again" not in self._memory and self.curvature.complete

    def _learn_steadily(
        self, source: Source, names: list[list[str]]
    ) -> tuple[bool, dict[Key, dict[str, Tensor]] | None]:
        """The move and statistics without waiting, and what was gathered where that cannot be.

        Statistics of gradients that move nothing are left, which the move itself finds out.
        """
        gathered = self._gatherer.pool.sums and not isinstance(source, ObjectiveSource)
        some = [self._by_name[own[0]] for own in names if own]
        if not gathered or not self._unattended(source) or not steady.usable(some):
            return False, None
        found = self._gathered()
        unsure = self._unsure_of(found)
        if unsure is None or not self._steadily(source, names, taken=True):
            return False, found
        assert self._look is not None
        self._learn_unsure(unsure, self._look.good)
        return True, None

    @property
    def statistics_due(self) -> bool:
        """Whether the next forward pass gives statistics.

        Between them forward and backward passes may be replayed from a CUDA graph, if they fill the
        same gradients.
        """
        return self._gatherer._wanted()

    @property
    def info(self) -> KFACInfo:
        """What the last step did."""
        self._settle()
        return self._info

    def _settle(self) -> None:
        """Take notice of a step that moved nothing or learned nothing, if the last one did so."""
        look, self._look = self._look, None
        reason = "" if look is None else look.reason()
        learned = self._settle_statistics(not reason)
        if not reason and not learned:
            self._info = replace(self._info, taken=False, notes=self._notes())
        if reason:
            self._memory["steps"] -= 1
            self._gatherer.due = self._due() or self._gatherer.lacking
            self._info = KFACInfo(False, reason, self._memory["damping"])

    def _rejected(self, reason: str, loss: Any) -> Any:
        self._forget()
        self._info = KFACInfo(False, reason, self._memory["damping"])
        return loss

    def _active(self) -> list[list[str]]:
        """The names of the parameters with a gradient, per param group."""
        out, shapes, names, strided = [], self._shapes, self._names, torch.strided
        for group in self.param_groups:
            own = []
            for p in group["params"]:
                gradient = p.grad
                if gradient is None or not p.requires_grad or not p.numel():
                    continue
                name = names[id(p)]
                if gradient.layout is not strided:
                    refuse_sparse(name, gradient)
                if p.shape != shapes[name]:
                    raise PullbackError(
                        f"Parameter {name!r} changed its shape",
                        f"it was {tuple(shapes[name])}, and is {tuple(p.shape)} now",
                        "Build the optimizer again after changing the model",
                    )
                own.append(name)
            out.append(own)
        refuse_none([n for own in out for n in own])
        return out
