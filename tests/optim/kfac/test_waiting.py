"""Cotangents that wait for others like them, and inputs of one shape: the same statistics."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.maps.layers import conv, lines, patches
from pullback.optim.kfac.statistics import sweep, waiting
from pullback.optim.kfac.statistics.waiting import Waiting


class Bottlenecks(nn.Module):
    """Convolutions without bias around shortcuts, wider than their images have places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1, bias=False)
        self.down = nn.ModuleList(nn.Conv2d(5, 11, 1, bias=i == 1) for i in range(3))
        self.up = nn.ModuleList(nn.Conv2d(11, 5, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(5) for _ in range(3))
        self.grouped = nn.Conv2d(5, 10, 1, groups=5, bias=False)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.tanh(self.stem(x)), 2)
        for down, up, norm in zip(self.down, self.up, self.norms, strict=True):
            x = x + norm(up(torch.tanh(down(x))))
        return self.head(self.grouped(x).mean((2, 3)))


def averages(model: nn.Module, sharing: str, **options: object) -> dict[str, Tensor]:
    opt = pb.KFAC(
        copy.deepcopy(model), 0.01, likelihood=pb.likelihoods.Categorical(), statistics_every=1,
        sharing=sharing, **options,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    made = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(4, 2, 4, 4, generator=made, dtype=torch.float64)
        y = torch.randint(0, 3, (4,), generator=made)
        for part in (x[:2], x[2:]):  # two passes for one step
            (F.cross_entropy(opt.model(part), y[: len(part)]) / 2).backward()
        opt.step()
        assert opt.info.taken
        opt.zero_grad()
    held = opt.curvature.averages.items()
    return {f"{k.names}{n}": t for k, a in held for n, t in a.value.items()}


@pytest.mark.parametrize("most", [0, 300, 2**27])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_the_same_statistics(monkeypatch: pytest.MonkeyPatch, sharing: str, most: int) -> None:
    torch.manual_seed(0)
    model = Bottlenecks().double()
    want = averages(model, sharing)
    for module in (conv, lines, patches):
        monkeypatch.setattr(module, "by_lines", lambda x, groups: groups == 1)
    monkeypatch.setattr(sweep, "waits", lambda x: True)
    monkeypatch.setattr(waiting, "_MOST", most)
    asked: list[int] = []
    formed = conv.Conv.outputs_of

    def watched(self: conv.Conv, deltas: list[Tensor], *rest: object) -> list[Tensor]:
        asked.append(len(deltas))
        return formed(self, deltas, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(conv.Conv, "outputs_of", watched)
    got = averages(model, sharing)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value)
    if sharing == "expand":
        assert max(asked) == (5 if most > 300 else 1), asked
    else:
        assert not asked


def test_none_waits_beside_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_LARGE", 1000)
    layer, held = conv.Conv(), Waiting(conv.Sharing())
    met = [sweep.Met() for _ in range(2)]
    delta = torch.randn(2, 5, 1, 2, dtype=torch.float64)
    held.add(layer, met[0], delta)
    held.make_room(delta)
    assert met[0].outputs is None
    held.make_room(torch.empty(200, dtype=torch.float64))
    torch.testing.assert_close(met[0].outputs, torch.einsum("nchw,ndhw->cd", delta, delta)[None])
    held.add(layer, met[1], 2 * delta)
    held.form()
    assert met[0].outputs is not None
    torch.testing.assert_close(met[1].outputs, 4 * met[0].outputs)
