r"""How an optimizer's state moves when parameters are rescaled, w ← αw.

Gradients are covectors, g ← g/α. What averages them moves alike, averages of their squares with
1/α², and what is measured in units of the parameter with α.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer, RMSprop

from ..._core.errors import PullbackError

#: the power of α that each kind of state is multiplied by, by the names that torch's optimizers use
POWERS: dict[str, int] = {
    # averages of gradients
    "momentum_buffer": -1,
    "exp_avg": -1,
    "grad_avg": -1,
    "exp_inf": -1,
    "prev": -1,
    # averages of squared gradients
    "exp_avg_sq": -2,
    "max_exp_avg_sq": -2,
    "square_avg": -2,
    "sum": -2,
    # in units of the parameter
    "ax": 1,
    "step_size": 1,
    "momentum": 1,
    "acc_delta": 2,
}


def powers_of(optimizer: Optimizer) -> dict[str, int]:
    """The powers of an optimizer's own state."""
    if isinstance(optimizer, RMSprop):  # whose buffer holds gradients over their own size
        return {**POWERS, "momentum_buffer": 0}
    return dict(POWERS)


def followers(
    state: Mapping[str, object], w: Tensor, powers: Mapping[str, int]
) -> list[tuple[Tensor, int]]:
    """The tensors of a parameter's state that are shaped like it, with their powers."""
    found = []
    for name, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            continue
        if value.ndim == 0 and (w.ndim or name not in powers):
            continue  # a counter
        if value.shape != w.shape:
            _refuse_shape(name, value, w, powers)
            continue
        if name not in powers:
            raise PullbackError(
                f"It is not known how the optimizer's state {name!r} is rescaled",
                "it has the shape of the parameter and is none of torch's own",
                f'Say so: transport={{"{name}": -1}} for an average of gradients, -2 for one of '
                "their squares, 1 for what is measured like the parameter, 0 to leave it",
            )
        if powers[name]:
            found.append((value, powers[name]))
    return found


def _refuse_shape(name: str, value: Tensor, w: Tensor, powers: Mapping[str, int]) -> None:
    """Raise for state of another shape, unless it is said to stay as it is."""
    if powers.get(name) != 0:
        raise PullbackError(
            f"The optimizer's state {name!r} cannot be rescaled",
            f"it is {tuple(value.shape)} for a parameter {tuple(w.shape)}: factors of an average, "
            "whose units are not told apart",
            f'Use Adam, or leave it as it is: transport={{"{name}": 0}}',
        )
