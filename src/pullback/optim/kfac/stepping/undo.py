"""A step that looks at the loss again and breaks off there: everything as it was before."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..optimizer import KFAC
    from ..source import Source


class Undo:
    """Parameters, buffers, momentum, counts, averages and inverses, put back after an exception.

    Args:
        optimizer: whose step begins.
        source: where its loss comes from.
    """

    def __init__(self, optimizer: KFAC, source: Source) -> None:
        opt, gatherer = optimizer, optimizer._gatherer
        self._opt, self._source = opt, source
        params = [p for group in opt.param_groups for p in group["params"]]
        self._params = [(p, p.detach().clone()) for p in params]
        self._state = {
            p: {n: v.clone() if isinstance(v, Tensor) else v for n, v in opt.state[p].items()}
            for p in params
            if p in opt.state
        }
        self._memory, self._info = dict(opt._memory), opt._info
        self._gathered, self._due = gatherer.state_dict(), gatherer.due
        learning = gatherer.pool.calls > 0 or opt.statistics_due or opt._due()
        self._curvature = opt.curvature.kept(averages=learning)

    def __enter__(self) -> None:
        return None

    @torch.no_grad()
    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            return
        opt, gatherer = self._opt, self._opt._gatherer
        self._source.restore()
        for p, before in self._params:
            p.copy_(before)
            opt.state.pop(p, None)
        opt.state.update(self._state)
        opt._memory.clear()
        opt._memory.update(self._memory)
        opt._info = self._info
        opt.curvature.restore(self._curvature)
        gatherer.load_state_dict(copy.copy(self._gathered))
        opt._forget()
        gatherer.due = self._due
