r"""Recurrent layers and cells: `RNN`, `LSTM`, `GRU`, replayed step by step.

With the states h_t, and c_t of the LSTM,

    u_t = W_ih x_t + b_ih,      v_t = W_hh h_{t−1} + b_hh

    RNN    h_t = tanh(u_t + v_t)                                          or relu
    GRU    (r, z) = σ(u_rz + v_rz),  n = tanh(u_n + r ∘ v_n),  h_t = (1 − z) ∘ n + z ∘ h_{t−1}
    LSTM   (i, f, g, o) = (σ, σ, tanh, σ)(u_t + v_t),  c_t = f ∘ c_{t−1} + i ∘ g,
           h_t = W_hr (o ∘ tanh c_t)                                      W_hr only with `proj_size`

the maps u and v are tapped apart: their cotangents agree except at the GRU's n. All gates read the
same input, so each map is one group. u_t does not recur: one step of the replay holds all times.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .compound import Compound, Tap
from .registry import register

State = tuple[Tensor, ...]  # (h,), or (h, c) for the LSTM: each (B, ·)


class Recurrence(Compound):
    """One step of a recurrence, and the loop over steps."""

    @abstractmethod
    def cell(self, module: Any, u: Tensor, v: Tensor, state: State) -> State:
        """The next state, before the LSTM's projection; u and v are (P_t, gates)."""

    def widths(self, module: Any) -> tuple[int, ...]:
        """How wide each part of the state is."""
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
        """One direction of one layer: x (Σ P_t, I), packed time after time, P_t = `sizes`.

        Returns all h_t (Σ P_t, O) in the order of x, the last state, and the taps, whose positions
        have that order too.
        """
        found = [getattr(module, f"{name}{suffix}", None) for name in _ROLES]
        ih = Tap(found[0], found[2])
        hh = Tap(found[1], found[3])
        if found[4] is None:
            hr = None
        else:
            hr = Tap(found[4], None)
        u = ih(x[None])[0].split(list(sizes))
        steps = range(len(sizes))
        h: list[Tensor] = [u[0]] * len(sizes)
        for t in reversed(steps) if reverse else steps:
            n = sizes[t]
            now = tuple(s[:n] for s in state)
            new = self.cell(module, u[t], hh(now[0][None])[0], now)
            if hr is not None:
                new = (hr(new[0][None])[0], *new[1:])
            h[t] = new[0]
            # samples past n have ended, or (in reverse) have not begun: their state waits
            pairs = zip(new, state, strict=True)
            state = tuple(a if n == len(b) else torch.cat([a, b[n:]]) for a, b in pairs)
        if hr is None:
            maps = [ih, hh]
        else:
            maps = [ih, hh, hr]
        if packed:
            grids = []
        else:
            grids = [(len(sizes), sizes[0])]
        return torch.cat(h), state, [m.finish(grids, batch_dim=1, backwards=reverse) for m in maps]

    def outputs(self, module: Any, output: Any) -> list[Tensor]:
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

    def steps(
        self, module: Any, input: Tensor | PackedSequence, hx: Tensor | State | None = None
    ) -> tuple[list[Tensor], list[Tap]]:
        if isinstance(hx, Tensor):
            given = (hx,)
        else:
            given = hx
        if isinstance(input, PackedSequence):
            return self._packed(module, input, given)
        if isinstance(module, nn.RNNCellBase):
            return self._cell(module, input, given)
        return self._padded(module, input, given)

    def _cell(self, module: Any, x: Tensor, given: State | None) -> tuple[list[Tensor], list[Tap]]:
        """One step: x (B, I) or (I)."""
        batched = x.ndim == 2
        if not batched:
            x = x[None]
        if given is None:
            given = tuple(x.new_zeros(len(x), w) for w in self.widths(module))
        elif not batched:
            given = tuple(s[None] for s in given)
        _, state, taps = self.sweep(module, "", x, [len(x)], given)
        return [s if batched else s[0] for s in state], taps

    def _padded(
        self, module: Any, x: Tensor, given: State | None
    ) -> tuple[list[Tensor], list[Tap]]:
        """x (T, B, I), (B, T, I) or (T, I)."""
        batched = x.ndim == 3
        if not batched:
            x = x[:, None]
            if given is None:
                given = None
            else:
                given = tuple(s[:, None] for s in given)
        elif module.batch_first:
            x = x.transpose(0, 1)
        times, batch = x.shape[:2]
        y, last, taps = self._layers(module, x.flatten(0, 1), [batch] * times, given)
        y = y.unflatten(0, (times, batch))
        if not batched:
            return [y[:, 0], *(s[:, 0] for s in last)], taps
        return [y.transpose(0, 1) if module.batch_first else y, *last], taps

    def _packed(
        self, module: Any, x: PackedSequence, given: State | None
    ) -> tuple[list[Tensor], list[Tap]]:
        """Samples sorted by length, so that those alive at time t come first."""
        if given is not None and x.sorted_indices is not None:
            given = tuple(s[:, x.sorted_indices] for s in given)
        y, last, taps = self._layers(module, x.data, x.batch_sizes.tolist(), given, packed=True)
        if x.unsorted_indices is not None:
            last = tuple(s[:, x.unsorted_indices] for s in last)
        return [y, *last], taps

    def _layers(
        self,
        module: Any,
        x: Tensor,
        sizes: Sequence[int],
        given: State | None,
        *,
        packed: bool = False,
    ) -> tuple[Tensor, State, list[Tap]]:
        """All layers and directions; states are (layers·directions, B, ·)."""
        if module.bidirectional:
            directions = 2
        else:
            directions = 1
        if given is None:
            lead = (module.num_layers * directions, sizes[0])
            given = tuple(x.new_zeros(*lead, w) for w in self.widths(module))
        last: list[State] = []
        taps: list[Tap] = []
        for layer in range(module.num_layers):
            both = []
            for d in range(directions):
                start = tuple(s[layer * directions + d] for s in given)
                suffix = f"_l{layer}{'_reverse' * d}"
                y, state, found = self.sweep(module, suffix, x, sizes, start, d == 1, packed)
                both.append(y)
                last.append(state)
                taps.extend(found)
            x = torch.cat(both, -1)
        return x, tuple(torch.stack(s) for s in zip(*last, strict=True)), taps

    def maps(self, module: Any) -> list[tuple[Tensor | None, Tensor | None, int]]:
        held = module._parameters
        weights = [n for n, p in held.items() if n.startswith("weight") and p is not None]
        return [(held[n], held.get(n.replace("weight", "bias", 1)), 1) for n in weights]

    def note(self, module: Any) -> str:
        layers = getattr(module, "num_layers", 1)  # a cell has neither layers nor dropout
        drops = layers > 1 and module.training and module.dropout > 0
        if drops:
            return "dropout between layers"
        return ""


_ROLES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


@register(nn.RNN, nn.RNNCell)
class Elman(Recurrence):
    """h = tanh(u + v), or relu."""

    use = "elman"

    def cell(self, module: Any, u: Tensor, v: Tensor, state: State) -> State:
        return (torch.tanh(u + v) if module.nonlinearity == "tanh" else torch.relu(u + v),)


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

    def widths(self, module: Any) -> tuple[int, ...]:
        return getattr(module, "proj_size", 0) or module.hidden_size, module.hidden_size
