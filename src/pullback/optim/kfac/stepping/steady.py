"""Steps between statistics, which wait for nothing: on a GPU a recorded program, replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...._core.replay import Replay
from ..blocks.curvature import Curvature
from .look import Look
from .program import Program

_LARGEST = 2**26  # entries of all parameters up to which their gradients are copied to be replayed
_PATIENCE = 10


class Steady:
    """Writes the program down when the same situation comes back, and again when it changes.

    What a program depends on: which parameters have a gradient, where they, their momentum and the
    inverses lie in memory, and the options that are part of kernels. Inverses are renewed in place
    from then on. Each time it has to be written again, more steps are waited for before.
    """

    def __init__(self) -> None:
        self._program: Program | None = None
        self._replay = Replay()
        self._last: tuple[Any, ...] = ()
        self._alike, self._built = 0, 0

    def step(
        self,
        curvature: Curvature,
        parameters: Mapping[str, Tensor],
        names: Sequence[list[str]],
        groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, Any],
        kl_clip: float | None,
        loss: float | None,
    ) -> Look | None:
        """Take the step, if these parameters allow it to be taken without waiting."""
        flat = [n for own in names for n in own]
        params = [parameters[n] for n in flat]
        if not usable(params):
            return None
        program = self._program
        if program is None or not program.fits(names, groups) or not self._same(params, kl_clip):
            curvature.follow_all(parameters)
            program = Program(curvature, parameters, names, groups, state, kl_clip)
            self._program = self._keep(program, curvature, params, kl_clip)
        program.set()
        if self._program is None or self._replay.off or program.entries > _LARGEST:
            program.run()
        else:
            program.fill()
            self._replay.run(program.options, params, program.run_filled)
        return Look(loss, program.good)

    def _same(self, params: Sequence[Tensor], kl_clip: float | None) -> bool:
        return self._last == (kl_clip, *(p.data_ptr() for p in params))

    def _keep(
        self,
        program: Program,
        curvature: Curvature,
        params: Sequence[Tensor],
        kl_clip: float | None,
    ) -> Program | None:
        """The program, once its situation has come back often enough."""
        self._alike = self._alike + 1 if self._same(params, kl_clip) else 0
        self._last = (kl_clip, *(p.data_ptr() for p in params))
        if self._alike < 1 << min(self._built, _PATIENCE):
            return None
        self._replay, self._alike = Replay(), 0
        self._built += 1
        curvature.fixed = True
        return program


def usable(params: Sequence[Tensor]) -> bool:
    """Whether one kernel can move them all: on one CUDA device, of one dtype."""
    first = params[0]
    if not first.is_cuda:
        return False
    device, dtype = first.device, first.dtype
    return all(p.dtype == dtype and p.device == device for p in params)
