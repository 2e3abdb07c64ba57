"""Steps between statistics, which wait for nothing: on a GPU a recorded program, replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...._core.replay import Replay
from ..blocks.curvature import Curvature
from .look import Look
from .program import Program

_LARGEST = 2**24  # entries of all parameters up to which memory for them is kept to be replayed
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
        params = [parameters[n] for own in names for n in own]
        place = (kl_clip, *[p.data_ptr() for p in params])
        program = self._program
        if program is None or place != self._last or not program.fits(names, groups):
            if not usable(params):
                return None
            curvature.follow_all(parameters)
            program = Program(curvature, parameters, names, groups, state, kl_clip)
            self._program = program if self._keeps(place) else None
            if self._program is not None:
                curvature.fixed = True
        program.fill(once=program.entries > _LARGEST)
        if program.entries > _LARGEST:
            program.run()
            program.release()
        elif self._program is None or self._replay.off:
            program.run()
        else:
            self._replay.run(program.options, params[:1], program.run)
        return Look(loss, program.good)

    def _keeps(self, place: tuple[Any, ...]) -> bool:
        """Whether this situation has come back often enough to keep its program."""
        self._alike = self._alike + 1 if place == self._last else 0
        self._last = place
        if self._alike < 1 << min(self._built, _PATIENCE):
            return False
        self._replay, self._alike = Replay(), 0
        self._built += 1
        return True


def usable(params: Sequence[Tensor]) -> bool:
    """Whether one kernel can move them all: on one CUDA device, of one dtype."""
    first = params[0]
    if not first.is_cuda:
        return False
    device, dtype = first.device, first.dtype
    return all(p.dtype == dtype and p.device == device for p in params)
