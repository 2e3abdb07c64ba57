"""Networks as people write them: both sides of every layer against loops, or against a twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.testing import assert_close
from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class UNet(nn.Module):
    """Two resolutions, a skip connection, transposed on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.down = nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")
        self.up, self.same = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norm(self.one(x)))
        up = self.up(torch.relu(self.down(F.max_pool2d(h, 2))))
        return self.last(F.gelu(self.same(torch.cat([h, up], 1)))).movedim(1, -1)


class Experts(nn.Module):
    """Each position goes to one of three."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.route = nn.Embedding(11, 5), nn.Linear(5, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(3)
        )
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        rows = h.reshape(-1, 5)
        gate, chosen = torch.softmax(self.route(rows), -1).max(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            own = (chosen == i).nonzero().squeeze(1)
            out = out.index_add(0, own, expert(rows[own]) * gate[own, None])
        return self.last(h + out.view_as(h))


class Scaled(nn.Module):
    """A depthwise convolution, then linear layers on channels last, and a gain of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(1, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.norm, self.wide, self.back = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.gain, self.last = nn.Parameter(torch.full((4,), 0.5)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        new = self.back(F.gelu(self.wide(self.norm(self.deep(h).permute(0, 2, 3, 1)))))
        return self.last((h + (new * self.gain).permute(0, 3, 1, 2)).mean((2, 3)))


class Circular(nn.Module):
    """Groups on one axis, padded by what is at the other end."""

    def __init__(self) -> None:
        super().__init__()
        round_about: Any = {"padding": 2, "dilation": 2, "groups": 2, "padding_mode": "circular"}
        self.one = nn.Conv1d(4, 6, 3, **round_about)
        self.two = nn.Conv1d(6, 4, 4, 2, 1, groups=2, padding_mode="replicate", bias=False)
        self.up = nn.ConvTranspose1d(4, 4, 3, 2, 1, output_padding=1, groups=2)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.two(torch.tanh(self.one(x))))
        return self.last(torch.tanh(self.up(h)).mean(2))


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], str]] = {
    "u-net": (UNet, lambda: torch.randn(3, 1, 4, 4), "categorical"),
    "experts": (Experts, lambda: torch.randint(0, 11, (4, 5)), "categorical"),
    "layer scale": (Scaled, lambda: torch.randn(3, 1, 6, 6), "categorical"),
    "circular": (Circular, lambda: torch.randn(5, 4, 9), "euclidean"),
}


def held(opt: pb.KFAC) -> dict[str, tuple[Tensor, Tensor]]:
    """R and C by weight, with the homogeneous coordinate where there is a bias."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, average in opt.curvature.averages.items():
        if key.kind == "kronecker" and not key.bias:
            for tag, side in average.corrected().items():
                side = torch.diag_embed(side) if side.ndim == 2 else side
                found.setdefault(key.names[0], {})[tag.rpartition(".")[2]] = side
    return {n: (sides["outputs"], sides["inputs"]) for n, sides in found.items()}


@pytest.mark.parametrize("name", NETS)
def test_sides(name: str) -> None:
    make, draw, kind = NETS[name]
    model, x = make(), draw()
    want, got = o.factors(model, x, kind=kind), held(o.stepped(model, x, kind=kind))
    assert got.keys() == want.weights.keys()
    for weight, roles in want.weights.items():
        (role,) = roles.values()
        left, right = got[weight]
        joint = right.shape[-1] > role.inputs.shape[-1]
        assert_close(left, role.outputs / want.count, 1e-12, f"R of {weight}")
        assert_close(right, role.input_side(joint), 1e-12, f"C of {weight}")


class Cell(nn.Module):
    """A GRU's step by two linear layers."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        super().__init__()
        (wide, inner), (_, hidden) = like[0].shape, like[1].shape
        self.i, self.h = nn.Linear(inner, wide), nn.Linear(hidden, wide)
        pairs = zip((self.i.weight, self.h.weight, self.i.bias, self.h.bias), like, strict=True)
        for p, value in pairs:
            p.data.copy_(value)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        (ir, iz, new), (hr, hz, old) = self.i(x).chunk(3, -1), self.h(h).chunk(3, -1)
        z = torch.sigmoid(iz + hz)
        return (1 - z) * torch.tanh(new + torch.sigmoid(ir + hr) * old) + z * h


class Translating(nn.Module):
    """An encoder, and a decoder that looks at all of it at every step; lengths differ."""

    def __init__(self, twin: Translating | None = None) -> None:
        super().__init__()
        self.source, self.words = nn.Embedding(9, 4), nn.Embedding(8, 4)
        self.query, self.key = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.score, self.last = nn.Linear(5, 1), nn.Linear(5, 6)
        self.encoder: Any = nn.GRU(4, 5, batch_first=True)
        self.cell: Any = nn.GRUCell(9, 5)
        if twin is not None:
            self.load_state_dict(twin.state_dict())
            self.encoder = Cell([*self.encoder.parameters()])
            self.cell = Cell([*self.cell.parameters()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, seen = torch.zeros(len(x), 5), self.source(x)
        if isinstance(self.encoder, Cell):
            states = [h := self.encoder(step, h) for step in seen.unbind(1)]
            memory = torch.stack(states, 1)
        else:
            memory, last = self.encoder(seen)
            h = last[0]
        keys, out = self.key(memory), []
        for word in self.words(y).unbind(1):
            scores = self.score(torch.tanh(self.query(h)[:, None] + keys))
            context = (torch.softmax(scores, 1) * memory).sum(1)
            h = self.cell(torch.cat([word, context], -1), h)
            out.append(self.last(h))
        return torch.stack(out, 1)


def test_a_recurrent_translator_is_its_twin_by_hand() -> None:
    fused = Translating()
    twin = Translating(fused)
    x, y = torch.randint(0, 9, (3, 4)), torch.randint(0, 8, (3, 3))
    got = held(o.stepped(fused, x, y, kind="categorical"))
    want = held(o.stepped(twin, x, y, kind="categorical"))
    inner = {"weight_ih_l0": "i.weight", "weight_hh_l0": "h.weight"}
    inner |= {"weight_ih": "i.weight", "weight_hh": "h.weight"}
    assert len(got) == len(want) == 10
    for name, sides in got.items():
        layer, _, own = name.rpartition(".")
        for side, other in zip(sides, want[f"{layer}.{inner.get(own, own)}"], strict=True):
            assert_close(side, other, 1e-12, name)


class Stopping(nn.Module):
    """A layer that is cut off now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        h = self.first(x)
        return self.last(torch.tanh(h if whole else h.detach()))


def test_a_pass_that_does_not_use_a_parameter_says_nothing_about_it() -> None:
    model, x = Stopping(), torch.randn(6, 3)
    opt = o.optimizer(model, "euclidean", statistics_every=1, damping=0.1)
    for whole in (False, True, False):
        opt.zero_grad()
        model(x, whole).square().mean().backward()
        opt.step()
        rows = {r.name: (r.block.split()[0], r.reason) for r in opt.coverage()}
        assert rows["last.weight"] == ("kronecker", "Linear")
        if len(opt.curvature.averages) == 1:
            assert rows["first.weight"][0] == "gradient"
            assert "no output seen so far depended on it" in rows["first.weight"][1]
        else:
            assert rows["first.weight"] == ("kronecker", "Linear")
    assert len(opt.curvature.averages) == 2
