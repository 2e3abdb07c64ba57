r"""A recurrent network by hand, and its twin in other affine coordinates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pullback.geometry.charts.affine import Affine, Change, changed, drawn, same


class Recurrent(nn.Module):
    r"""a_t = φ(W a_{t−1} + b + V x_t), y_t = U a_t + c, over (N, T, inputs).

    In a twin, φ is Ωtanh(Φz + τ) + γ, inputs and outputs change inside, and a_0 is given.
    """

    start: Tensor

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.recurrent = nn.Linear(hidden, hidden, dtype=torch.float64)
        self.entry = nn.Linear(inputs, hidden, bias=False, dtype=torch.float64)
        self.exit = nn.Linear(hidden, outputs, dtype=torch.float64)
        self.register_buffer("start", torch.zeros(hidden, dtype=torch.float64))
        self.enter = Affine(same(inputs), -1)
        self.before = Affine(same(hidden), -1)
        self.after = Affine(same(hidden), -1)
        self.leave = Affine(same(outputs), -1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, inputs) -> (N, T, outputs)."""
        a, out = self.start.expand(len(x), -1), []
        for x_t in self.enter(x).unbind(1):
            z = self.recurrent(a) + self.entry(x_t)
            a = self.after(torch.tanh(self.before(z)))
            out.append(self.leave(self.exit(a)))
        return torch.stack(out, 1)


def recurrent_twin(
    model: Recurrent,
    generator: torch.Generator,
    *,
    keep_start: bool = False,
    shift_inputs: bool = False,
) -> Recurrent:
    r"""Random coordinates: W† = Φ⁻¹WΩ⁻¹ and so on, V† = Φ⁻¹VΩ_x⁻¹, and a_0† = Ωa_0 + γ.

    Args:
        model: the network.
        generator: of the coordinates.
        keep_start: leave a_0 as it is, although a_t changes.
        shift_inputs: shift x_t too, and let b† take it up; V has no bias of its own.
    """
    inputs, hidden = model.entry.in_features, model.recurrent.in_features
    entering, state, inner = (drawn(n, generator) for n in (inputs, hidden, hidden))
    leaving = drawn(model.exit.out_features, generator)
    entering = entering if shift_inputs else entering.linear()
    out = Recurrent(inputs, hidden, model.exit.out_features)
    out.recurrent = changed(model.recurrent, state, inner)
    out.entry = changed(model.entry, entering, inner)
    out.exit = changed(model.exit, state, leaving)
    with torch.no_grad():
        out.recurrent.bias.sub_(out.entry.weight @ entering.shift)
    out.enter, out.leave = Affine(entering, -1), Affine(leaving, -1)
    out.before, out.after = Affine(inner, -1), Affine(state, -1)
    out.start = model.start.clone() if keep_start else _at(state, model.start)
    return out


def _at(change: Change, x: Tensor) -> Tensor:
    return change.matrix @ x + change.shift
