"""Samples that stand elsewhere than on axis 0 inside the model: found, and not guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.maps.layers.layout import Layout, told
from pullback.optim.kfac.statistics import measure
from pullback.testing import assert_close
from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


#: how a model may turn (N, T, ·) over for its layers, and back
TURNED: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "first": (lambda h: h, lambda h, n: h),
    "second": (lambda h: h.transpose(0, 1), lambda h, n: h.transpose(0, 1)),
    "folded": (lambda h: h.flatten(0, 1), lambda h, n: h.unflatten(0, (n, -1))),
    "folded-last": (
        lambda h: h.transpose(0, 1).flatten(0, 1),
        lambda h, n: h.unflatten(0, (-1, n)).transpose(0, 1),
    ),
}


class Turned(nn.Module):
    """Layers on all places at once, whose mean is classified."""

    def __init__(self, how: str, *layers: nn.Module, channels: bool = False) -> None:
        super().__init__()
        self.there, self.back = TURNED[how]
        self.layers, self.last, self.channels = nn.Sequential(*layers), nn.Linear(4, 3), channels

    def forward(self, x: Tensor) -> Tensor:
        h = self.there(x)
        if self.channels:  # what stands before the features goes into one axis
            lead = h.shape[:-1]
            h = self.layers(h.reshape(-1, 4, 1)).reshape(*lead, 4)
        else:
            h = self.layers(h)
        return self.last(self.back(torch.tanh(h), len(x)).square().mean(1))


def layers(kind: str) -> list[nn.Module]:
    torch.manual_seed(1)
    norms = {"LayerNorm": nn.LayerNorm(4), "RMSNorm": nn.RMSNorm(4), "PReLU": nn.PReLU()}
    return [nn.Linear(4, 4), norms[kind]] if kind in norms else [nn.Linear(4, 4)]


def taken(model: nn.Module, x: Tensor, steps: int = 1, **options: Any) -> pb.KFAC:
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0, **options)
    for _ in range(steps):
        opt.zero_grad()
        F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
        opt.step()
    opt.close()
    return opt


@pytest.mark.parametrize("how", ["second", "folded", "folded-last"])
@pytest.mark.parametrize("shape", [(6, 4), (5, 5), (2, 2), (1, 4)])
@pytest.mark.parametrize("kind", ["reduce", "ekfac", "LayerNorm", "RMSNorm"])
def test_it_does_not_matter_where_samples_stand(
    kind: str, shape: tuple[int, int], how: str
) -> None:
    options = {"reduce": {"sharing": "reduce"}, "ekfac": {"ekfac": True, "steps": 3}}.get(kind, {})
    x, grams = torch.randn(*shape, 4) + 0.5, []
    for own in ("first", how):
        torch.manual_seed(2)
        opt = taken(Turned(own, *layers(kind)), x, **options)
        grams.append(opt.gram().dense())
        assert not any("not known" in row.reason for row in opt.coverage())
    assert_close(grams[1], grams[0], 1e-12, how)


@pytest.mark.parametrize("how", ["second", "folded", "folded-last"])
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (3, 4)])
def test_exact_covectors_are_of_single_positions(shape: tuple[int, int], how: str) -> None:
    """The first one is of position 0, which stands in one place wherever the samples are."""
    x, grams = torch.randn(*shape, 4) + 0.5, []
    y = torch.arange(x[..., 0].numel()) % 4
    for own in ("first", how):
        torch.manual_seed(2)
        model = Turned(own, *layers("LayerNorm"))
        model.forward = lambda x, m=model: m.back(m.layers(m.there(x)), len(x))  # a class each
        opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0, fisher="exact")
        F.cross_entropy(model(x).flatten(0, 1), y).backward()
        opt.step()
        opt.close()
        grams.append(opt.gram().dense())
    assert_close(grams[1], grams[0], 1e-12, how)


@pytest.mark.parametrize("how", ["folded", "folded-last"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.Identity])
def test_images_in_one_axis(norm: Callable[[int], nn.Module], how: str) -> None:
    """Frames of films, say; a batch normalization lets others feel them, but less."""
    x = torch.randn(12, 3, 4)
    model = Turned(how, nn.Conv1d(4, 4, 1), norm(4), channels=True)
    opt = taken(model, x, sharing="reduce")
    assert not any("not known" in row.reason for row in opt.coverage())
    key = next(k for k in opt.curvature.averages if k.names[0] == "layers.0.weight")
    side = opt.curvature.averages[key].corrected()["Conv.last.inputs"]
    rows = F.pad(x.mean(1), (0, 1), value=1.0)
    assert_close(side[0], rows.T @ rows / 12, 1e-12, "means over the frames of a film")


class Routed(nn.Module):
    """Some places of all samples in one row after another, as experts see them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        some = torch.arange(h[..., 0].numel()) % 5 < 3
        flat = h.flatten(0, 1)
        flat = flat + torch.zeros_like(flat).index_put((some,), torch.tanh(self.expert(flat[some])))
        return self.last(flat.view(h.shape).mean(1))


@pytest.mark.parametrize("options", [{"sharing": "reduce"}, {"ekfac": True}])
def test_what_is_not_known_is_said(options: dict[str, Any]) -> None:
    x = torch.randn(7, 3, 4)
    torch.manual_seed(0)
    opt = taken(Routed(), x, steps=3, **options)
    said = {row.name for row in opt.coverage() if "not known" in row.reason}
    assert said == {"expert.weight", "expert.bias"}
    torch.manual_seed(0)
    plain = taken(Routed(), x, steps=3)
    keys = [k for k in plain.curvature.averages if k.names[0] == "expert.weight"]
    got, want = (p.curvature.corrected(keys[0]).dense() for p in (opt, plain))
    assert_close(got, want, 1e-12, "every place on its own")
    assert not any("not known" in row.reason for row in plain.coverage())


def test_another_number_of_samples_later() -> None:
    torch.manual_seed(2)
    model = Turned("folded", *layers("LayerNorm"))
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0, sharing="reduce")
    for n in (6, 4, 1):
        x = torch.randn(n, 3, 4)
        opt.zero_grad()
        F.cross_entropy(model(x), torch.arange(n) % 3).backward()
        opt.step()
    other = Turned("first", *layers("LayerNorm"))
    other.load_state_dict(model.state_dict())
    want = taken(other, x, sharing="reduce").gram().dense()
    assert_close(opt.gram().dense(), want, 1e-12, "one film")


@pytest.mark.parametrize("how", ["second", "folded", "folded-last"])
@pytest.mark.parametrize("first", [(6, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("kind", ["reduce", "LayerNorm"])
def test_a_first_pass_that_could_not_tell(kind: str, first: tuple[int, int], how: str) -> None:
    """One place each, or one sample: where the samples stand is seen in the next pass only."""
    options: dict[str, Any] = {"sharing": "reduce"} if kind == "reduce" else {}
    model = Turned(how, *layers(kind))
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0, **options)
    for shape in (first, (6, 3)):
        torch.manual_seed(7)
        x = torch.randn(*shape, 4)
        opt.zero_grad()
        before = {n: v.clone() for n, v in model.state_dict().items()}
        F.cross_entropy(model(x), torch.arange(len(x)) % 3).backward()
        opt._gatherer._generator = None  # the same targets
        opt.step()
    other = Turned("first", *layers(kind))
    other.load_state_dict(before)
    want = taken(other, x, **options).gram().dense()
    assert_close(opt.gram().dense(), want, 1e-12, "films, after pictures")


def test_told() -> None:
    chosen = torch.tensor([1, 0, 1, 0]) > 0
    delta = torch.randn(4, 4, 3) * chosen[:, None, None]
    assert told(delta, chosen, 1) == Layout("first", 4)
    assert told(delta.transpose(0, 1), chosen, 1) == Layout("second", 4)
    assert told(delta.flatten(0, 1), chosen, 1) == Layout("folded", 4)
    assert told(delta.transpose(0, 1).flatten(0, 1), chosen, 1) == Layout("folded-last", 4)
    alone = torch.zeros(4, 4, 3)
    alone[2, chosen] = 1.0  # one place of each: on axis 0 but one of those chosen would be there
    assert told(alone, chosen, 1) == Layout("second", 4)
    assert told(torch.randn(4, 4, 3), chosen, 1) is None
    assert told(torch.zeros(4, 3), chosen, 1) is None
    assert told(torch.randn(7, 3), chosen, 1) is None


class Wandering(nn.Module):
    """A layer before a number of operations that may be another each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, count: int) -> Tensor:
        z = self.layer(x)
        for _ in range(count):
            z = z * 1.0
        return z


def test_so_many_ways_through_a_network_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_WAYS", 3)
    model = Wandering()
    with pb.KFAC(model, 0.1, likelihood=pb.likelihoods.MSE(), statistics_every=1) as opt:
        for count in (1, 2, 3, 4, 5, 1):
            opt.zero_grad()
            model(torch.randn(8, 3), count).square().mean().backward()
            opt.step()
            assert opt.info.taken
        assert len(opt._gatherer._measure._known) == 3
        assert {row.block for row in opt.coverage()} == {"kronecker (2 ⊗ 4)"}
