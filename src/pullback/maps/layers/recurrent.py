r"""Recurrent layers and cells: `RNN`, `LSTM`, `GRU`, replayed step by step.

With the states h_t, and c_t of the LSTM,

    u_t = W_ih x_t + b_ih,      v_t = W_hh h_{t−1} + b_hh

    RNN    h_t = tanh(u_t + v_t)                                          or relu
    GRU    (r, z) = σ(u_rz + v_rz),  n = tanh(u_n + r ∘ v_n),  h_t = (1 − z) ∘ n + z ∘ h_{t−1}
    LSTM   (i, f, g, o) = (σ, σ, tanh, σ)(u_t + v_t),  c_t = f ∘ c_{t−1} + i ∘ g,
           h_t = W_hr (o ∘ tanh c_t)                                      W_hr only with `proj_size`

the maps u and v have a tap each: their cotangents agree except at the GRU's n. All gates read the
same input, so each map is one group. u_t does not recur: one step of the replay holds all times.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .compound import AffineMap, Compound, Tap
from .registry import register

State = tuple[Tensor, ...]  # (h,), or (h, c) for the LSTM: each (B, ·)


class Recurrence(Compound):
    """One step of a recurrence, and the loop over steps."""

    @abstractmethod
    def cell(self, module: Any, u: Tensor, v: Tensor, state: State) -> State:
        """Return the next state, before the LSTM's projection, from u and v, (P_t, gates)."""

    def state_widths(self, module: Any) -> tuple[int, ...]:
        """Return the width of each tensor of the state."""
        return (module.hidden_size,)

    def sweep(
        self,
        module: Any,
        suffix: str,
        x: Tensor,
        sizes: Sequence[int],
        state: State,
        reverse: bool = False,
        packed: bool = False,
    ) -> tuple[Tensor, State, list[Tap]]:
        """Run one direction of one layer on x (Σ P_t, I), all times in a row, P_t = `sizes`.

        Returns all h_t (Σ P_t, O) in the order of x, the last state, and the taps, whose positions
        have that order too.
        """
        taps = _DirectionTaps(module, suffix)
        u = taps.input(x[None])[0].split(list(sizes))
        times = list(range(len(sizes)))
        if reverse:
            times.reverse()
        outputs: list[Tensor] = [u[0]] * len(sizes)
        for t in times:
            alive = tuple(s[: sizes[t]] for s in state)
            v = taps.hidden(alive[0][None])[0]
            new_state = taps.project(self.cell(module, u[t], v, alive))
            outputs[t] = new_state[0]
            state = _replace_leading(state, new_state)
        grids = []
        if not packed:
            grids = [(len(sizes), sizes[0])]
        finished = [tap.finish(grids, batch_dim=1, backwards=reverse) for tap in taps.all]
        return torch.cat(outputs), state, finished

    def select_outputs(self, module: Any, output: Any) -> list[Tensor]:
        if isinstance(module, nn.RNNCellBase):
            if isinstance(output, Tensor):
                return [output]
            return list(output)
        y, last = output
        if isinstance(y, PackedSequence):
            y = y.data
        if isinstance(last, Tensor):
            return [y, last]
        return [y, *last]

    def replay_steps(
        self, module: Any, input: Tensor | PackedSequence, hx: Tensor | State | None = None
    ) -> tuple[list[Tensor], list[Tap]]:
        if isinstance(hx, Tensor):
            initial = (hx,)
        else:
            initial = hx
        if isinstance(input, PackedSequence):
            return self._replay_packed(module, input, initial)
        if isinstance(module, nn.RNNCellBase):
            return self._replay_cell(module, input, initial)
        return self._replay_padded(module, input, initial)

    def _replay_cell(
        self, module: Any, x: Tensor, initial: State | None
    ) -> tuple[list[Tensor], list[Tap]]:
        """Return the next state of a cell, from x (B, I) or (I), and the taps."""
        is_batched = x.ndim == 2
        if not is_batched:
            x = x[None]
        if initial is None:
            initial = tuple(x.new_zeros(len(x), w) for w in self.state_widths(module))
        elif not is_batched:
            initial = tuple(s[None] for s in initial)
        _, state, taps = self.sweep(module, "", x, [len(x)], initial)
        if not is_batched:
            return [s[0] for s in state], taps
        return list(state), taps

    def _replay_padded(
        self, module: Any, x: Tensor, initial: State | None
    ) -> tuple[list[Tensor], list[Tap]]:
        """Return outputs and last state for x (T, B, I), (B, T, I) or (T, I), and the taps."""
        is_batched = x.ndim == 3
        if not is_batched:
            x = x[:, None]
            if initial is not None:
                initial = tuple(s[:, None] for s in initial)
        elif module.batch_first:
            x = x.transpose(0, 1)
        times, batch = x.shape[:2]
        y, last, taps = self._replay_layers(module, x.flatten(0, 1), [batch] * times, initial)
        y = y.unflatten(0, (times, batch))
        if not is_batched:
            return [y[:, 0], *(s[:, 0] for s in last)], taps
        if module.batch_first:
            y = y.transpose(0, 1)
        return [y, *last], taps

    def _replay_packed(
        self, module: Any, x: PackedSequence, initial: State | None
    ) -> tuple[list[Tensor], list[Tap]]:
        """Return outputs and last state for samples sorted by length, and the taps.

        The samples that have not ended at time t come first.
        """
        if initial is not None and x.sorted_indices is not None:
            initial = tuple(s[:, x.sorted_indices] for s in initial)
        sizes = x.batch_sizes.tolist()
        y, last, taps = self._replay_layers(module, x.data, sizes, initial, packed=True)
        if x.unsorted_indices is not None:
            last = tuple(s[:, x.unsorted_indices] for s in last)
        return [y, *last], taps

    def _replay_layers(
        self,
        module: Any,
        x: Tensor,
        sizes: Sequence[int],
        initial: State | None,
        *,
        packed: bool = False,
    ) -> tuple[Tensor, State, list[Tap]]:
        """Run all layers and directions; states are (layers·directions, B, ·)."""
        directions = 1 + int(module.bidirectional)
        if initial is None:
            lead = (module.num_layers * directions, sizes[0])
            initial = tuple(x.new_zeros(*lead, w) for w in self.state_widths(module))
        last: list[State] = []
        taps: list[Tap] = []
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(directions):
                start = tuple(s[layer * directions + direction] for s in initial)
                suffix = f"_l{layer}{'_reverse' * direction}"
                y, state, direction_taps = self.sweep(
                    module, suffix, x, sizes, start, direction == 1, packed
                )
                outputs.append(y)
                last.append(state)
                taps.extend(direction_taps)
            x = torch.cat(outputs, -1)
        return x, tuple(torch.stack(s) for s in zip(*last, strict=True)), taps

    def list_affine_maps(self, module: Any) -> list[AffineMap]:
        parameters = module._parameters
        maps = []
        for name, weight in parameters.items():
            if name.startswith("weight") and weight is not None:
                bias = parameters.get(name.replace("weight", "bias", 1))
                maps.append(AffineMap(weight, bias, 1))
        return maps

    def describe_omission(self, module: Any) -> str:
        layers = getattr(module, "num_layers", 1)  # a cell has neither layers nor dropout
        has_dropout = layers > 1 and module.training and module.dropout > 0
        if has_dropout:
            return "dropout between layers"
        return ""


class _DirectionTaps:
    """The taps of one direction of one layer: of the input, the state, and the projection."""

    def __init__(self, module: Any, suffix: str) -> None:
        def parameter(name: str) -> Tensor | None:
            return getattr(module, f"{name}{suffix}", None)

        self.input = Tap(parameter("weight_ih"), parameter("bias_ih"))
        self.hidden = Tap(parameter("weight_hh"), parameter("bias_hh"))
        self.all = [self.input, self.hidden]
        self._projection: Tap | None = None
        if parameter("weight_hr") is not None:
            self._projection = Tap(parameter("weight_hr"), None)
            self.all.append(self._projection)

    def project(self, state: State) -> State:
        """Return the state with W_hr applied to h, if the layer has a projection."""
        if self._projection is None:
            return state
        return (self._projection(state[0][None])[0], *state[1:])


def _replace_leading(state: State, new_state: State) -> State:
    """Return the state with its first samples replaced.

    Later samples have ended already or, in reverse, have not begun: their state stays.
    """
    replaced = []
    for old, new in zip(state, new_state, strict=True):
        if len(new) == len(old):
            replaced.append(new)
        else:
            replaced.append(torch.cat([new, old[len(new) :]]))
    return tuple(replaced)


@register(nn.RNN, nn.RNNCell)
class Elman(Recurrence):
    """h = tanh(u + v), or relu."""

    use = "elman"

    def cell(self, module: Any, u: Tensor, v: Tensor, state: State) -> State:
        if module.nonlinearity == "tanh":
            return (torch.tanh(u + v),)
        return (torch.relu(u + v),)


@register(nn.GRU, nn.GRUCell)
class GRU(Recurrence):
    """h = (1 − z) ∘ n + z ∘ h, the gates in the order r, z, n."""

    use = "gru"

    def cell(self, module: Any, u: Tensor, v: Tensor, state: State) -> State:
        u_r, u_z, u_n = u.chunk(3, -1)
        v_r, v_z, v_n = v.chunk(3, -1)
        r = torch.sigmoid(u_r + v_r)
        z = torch.sigmoid(u_z + v_z)
        n = torch.tanh(u_n + r * v_n)
        return (n + z * (state[0] - n),)


@register(nn.LSTM, nn.LSTMCell)
class LSTM(Recurrence):
    """c = f ∘ c + i ∘ g, h = o ∘ tanh c, the gates in the order i, f, g, o."""

    use = "lstm"

    def cell(self, module: Any, u: Tensor, v: Tensor, state: State) -> State:
        i, f, g, o = (u + v).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c

    def state_widths(self, module: Any) -> tuple[int, ...]:
        return getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size
