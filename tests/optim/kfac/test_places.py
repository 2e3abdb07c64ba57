"""Which places of a layer count where the loss ignores some of the output's: hooks and loops."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.maps.layers.moments import counted, means
from pullback.optim.kfac.statistics import sweep
from pullback.testing import assert_close
from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Attending(nn.Module):
    """Causal attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))
        self.last = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        scores = self.q(h) @ self.k(h).mT
        later = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
        mixed = self.out(torch.softmax(scores.masked_fill(later, -inf), -1) @ self.v(h))
        return self.last(torch.tanh(h + mixed))


class Translating(nn.Module):
    """A decoder that looks at an encoder, whose places are others, some of them padding."""

    def __init__(self, length: int, padding: int = 0) -> None:
        super().__init__()
        self.source = torch.randn(4, length, 3)
        ends = length - torch.tensor([0, padding, padding, padding // 2])
        self.padding = torch.arange(length) >= ends[:, None]
        self.encoder, self.words, self.last = nn.Linear(3, 6), nn.Embedding(7, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        memory, h = torch.tanh(self.encoder(self.source)), self.words(x)
        scores = (h @ memory.mT).masked_fill(self.padding[:, None], -inf)
        return self.last(torch.tanh(h + torch.softmax(scores, -1) @ memory))


class Pixels(nn.Module):
    """A class for every pixel; below, images of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
        self.same, self.last = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(torch.tanh(self.down(x))))
        return self.last(torch.tanh(self.same(h))).movedim(1, -1)


class Images(nn.Module):
    """A class for every image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv1d(2, 4, 3, padding=1), nn.ConvTranspose1d(4, 3, 2)
        self.last = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.up(torch.relu(self.conv(x)))).amax(2))


def tokens() -> Tensor:
    return torch.randint(0, 7, (4, 6))


def prompts() -> Tensor:
    """The first two positions, and what one sample has at the end."""
    keep = torch.arange(6).expand(4, 6) > 1
    return keep & ~((torch.arange(4) == 2)[:, None] & (torch.arange(6) > 3))


def some_ends() -> Tensor:
    """All of two samples, not all of the others."""
    return torch.arange(6) < torch.tensor([6, 6, 4, 5])[:, None]


def left_out() -> Tensor:
    """One image as a whole, and most of another one."""
    keep = torch.ones(4, 6, 6) > 0
    keep[0], keep[1, 1:] = False, False
    return keep


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "prompts": (Attending, tokens, prompts),
    "encoder of the same length": (lambda: Translating(6), tokens, lambda: ~prompts()),
    "encoder of another length": (lambda: Translating(5), tokens, prompts),
    "padded sources": (lambda: Translating(9, 4), tokens, prompts),
    "padded sources, sentences without padding": (lambda: Translating(9, 4), tokens, some_ends),
    "pixels": (Pixels, lambda: torch.randn(4, 2, 6, 6), left_out),
    "images": (Images, lambda: torch.randn(4, 2, 6), lambda: torch.arange(4) != 1),
}


def taken(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> pb.KFAC:
    opt = o.optimizer(model, "categorical", **options)
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    opt.step()
    opt.close()
    return opt


def input_sides(model: nn.Module, x: Tensor, keep: Tensor) -> dict[str, Tensor]:
    """mean aaᵀ over the places that are kept or feel a covector of the kept ones, by weight."""
    z, uses = o.watched(model, x)
    found: dict[str, Tensor] = {}
    names = {id(p): n for n, p in model.named_parameters()}
    columns = [c for c in o.columns(z, "categorical") if bool((c * keep[..., None]).any())]
    for use in uses:
        felt: Tensor | float = 0.0
        for c in columns:
            (delta,) = torch.autograd.grad(z, use.out, c, retain_graph=True)
            felt = felt + o.cotangents(use.module, use.x, delta).abs().sum((2, 3))
        mask = torch.as_tensor(felt) > 0  # (N, T)
        if keep.ndim == 1:  # samples, with all of their places
            mask = keep[:, None] | mask.any(1, keepdim=True).expand(mask.shape)
        elif keep.shape[1:].numel() == mask.shape[1] and keep.shape[1:] == _places(use):
            mask = mask | keep.flatten(1)
        else:  # other places: those of samples of which nothing is ignored
            mask = mask | keep.flatten(1).all(1)[:, None]
        a = o.inputs(use.module, use.x) * mask[:, :, None, None]
        found[names[id(use.module.weight)]] = o.moments(a) / mask.sum()
    return found


def _places(use: o.Use) -> tuple[int, ...]:
    """Those that share the weight."""
    if isinstance(use.module, o.TRANSPOSED):
        return tuple(use.x.shape[2:])
    return tuple(use.out.shape[2:] if isinstance(use.module, o.CONVS) else use.out.shape[1:-1])


def held(opt: pb.KFAC) -> dict[str, Tensor]:
    """The same as the optimizer has it, without the homogeneous coordinate."""
    out = {}
    for key, average in opt.curvature.averages.items():
        for tag, side in average.corrected().items():
            if tag.endswith("inputs") and not key.bias:
                side = torch.diag_embed(side) if side.ndim == 2 else side
                out[key.names[0]] = side[:, :-1, :-1] if key.joint else side
    return out


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("fisher", ["exact", "mc", "empirical"])
@pytest.mark.parametrize("case", CASES)
def test_places_count_where_kept_or_with_a_cotangent(
    case: str, fisher: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, draw, mask = CASES[case]
    model, x, keep = make(), draw(), mask()
    y = torch.randint(0, 5, keep.shape).masked_fill(~keep, -100)
    want = input_sides(model, x, keep)
    if waits:
        monkeypatch.setattr(sweep, "waits", lambda x: True)
    got = held(taken(model, x, y, fisher=fisher))
    assert got.keys() == want.keys()
    for name, side in want.items():
        assert_close(got[name], side, 1e-12, name)


def test_words_of_a_prompt_are_learned_from() -> None:
    x = torch.cat([torch.randint(5, 7, (4, 2)), torch.randint(0, 5, (4, 4))], 1)
    y = torch.randint(0, 5, (4, 6)).masked_fill(torch.arange(6) < 2, -100)
    side = held(taken(Attending(), x, y))["words.weight"][0].diagonal()
    assert_close(side, torch.bincount(x.flatten(), minlength=7) / 24, 1e-12, "all of them count")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_changes_nothing(sharing: str) -> None:
    model, x, y = Attending(), tokens(), torch.randint(0, 5, (4, 6))
    longer = torch.cat([x, torch.zeros(4, 9, dtype=torch.long)], 1)
    ignored = torch.cat([y, torch.full((4, 9), -100)], 1)
    want = taken(model, x, y, sharing=sharing).gram().dense()
    got = taken(model, longer, ignored, sharing=sharing).gram().dense()
    assert_close(got, want, 1e-12, "padded")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_ignored_samples_change_nothing(sharing: str) -> None:
    model, x, y = Images(), torch.randn(4, 2, 6), torch.randint(0, 5, (4,))
    more, ignored = torch.randn(3, 2, 6), torch.full((3,), -100)
    want = taken(model, x, y, sharing=sharing).gram().dense()
    got = taken(model, torch.cat([more, x]), torch.cat([ignored, y]), sharing=sharing)
    assert_close(got.gram().dense(), want, 1e-12, "three more images")


def test_an_ignored_target_leaves_out_none_but_its_samples_padded_sources() -> None:
    """They count where nothing is ignored: nobody looks at cotangents then."""
    model, x, y = Translating(9, 4), tokens(), torch.randint(0, 5, (4, 6))
    every = model.source.flatten(0, 1)
    side = held(taken(model, x, y))["encoder.weight"][0]
    assert_close(side, every.T @ every / len(every), 1e-12, "all of them")
    y[1, 3] = -100
    counts = ~(model.padding & (torch.arange(4) == 1)[:, None])
    some = model.source[counts]
    side = held(taken(model, x, y))["encoder.weight"][0]
    assert_close(side, some.T @ some / len(some), 1e-12, "without the second sample's padding")


def test_counted() -> None:
    delta = torch.zeros(3, 2, 4)
    delta[0, 1, 2], delta[2, 0, 3] = 1e-300, torch.nan
    felt = torch.tensor([[0, 1], [0, 0], [1, 0]]) > 0
    keep = torch.tensor([0, 1, 0]) > 0
    assert torch.equal(counted(delta, keep), felt | keep[:, None])
    assert torch.equal(counted(delta, felt), felt)
    assert torch.equal(counted(delta.mT, felt, 1), felt)
    assert torch.equal(counted(delta, felt.T), felt)  # other places
    assert counted(torch.zeros(3, 2, 4), felt.T).all()  # which nobody tells apart
    longer = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]) > 0  # of the same samples
    assert torch.equal(counted(delta, longer), felt | keep[:, None])
    assert torch.equal(counted(delta.movedim(0, 1), longer.T), (felt | keep[:, None]).T)
    longer = longer[:, [0, 1, 2, 2]]
    assert torch.equal(counted(delta.movedim(0, 1), longer), (felt | keep[:, None]).T)  # turned
    assert counted(delta, torch.ones(3, 5) > 0).all()


def test_means() -> None:
    x, keep = torch.randn(3, 4, 2), torch.tensor([[1, 0, 1, 0], [0] * 4, [1] * 4]) > 0
    mean, some = means(x, keep)
    assert some is not None
    assert some.tolist() == [True, False, True]
    want = torch.stack([x[0, ::2].mean(0), torch.zeros(2), x[2].mean(0)])
    torch.testing.assert_close(mean, want)
    assert means(x, None)[1] is None


class Sparse(nn.Module):
    """A layer that is called with what `rows` picks, which may be nothing."""

    def __init__(self, layer: nn.Module, turn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), layer, nn.Linear(4, 5)
        self.turn, self.rows = turn, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        seen = self.layer(self.turn(h[: self.rows]))
        return self.last(torch.cat([h[: self.rows] + seen.flatten(1), h[self.rows :]]))


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor]]] = {
    "Linear": (lambda: nn.Linear(4, 4), lambda h: h),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 1), lambda h: h[:, :, None]),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 4, 1), lambda h: h[:, :, None]),
    "LayerNorm": (lambda: nn.LayerNorm(4), lambda h: h),
    "Embedding": (lambda: nn.Embedding(3, 4), lambda h: torch.zeros(len(h), dtype=torch.long)),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("order", [(0, 5), (5, 0), (0, 0)])
def test_a_layer_without_rows(layer: str, order: tuple[int, int]) -> None:
    make, turn = LAYERS[layer]
    model = Sparse(make(), turn)
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0)
    x, y = torch.randn(6, 3), torch.arange(6) % 5
    for rows in order:
        model.rows = rows
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
        assert opt.info.taken
        assert not opt.info.notes
    kind = "gradient" if order == (0, 0) else "units" if layer == "LayerNorm" else "kronecker"
    blocks = [row.block for row in opt.coverage() if row.name.startswith("layer")]
    assert all(block.startswith(kind) for block in blocks)


class Late(nn.Module):
    """A weight that is used outside of its layer as well, from some time on."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.last(h + F.linear(h, self.inner.weight) if self.late else h)


def test_a_second_use_outside_of_the_layer_is_noticed_when_it_comes() -> None:
    model, x, y = Late(), torch.randn(6, 3), torch.arange(6) % 4
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0)
    for late, block in ((False, "kronecker"), (True, "diagonal"), (False, "kronecker")):
        model.late = late
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        rows = {row.name: row for row in opt.coverage()}
        assert rows["inner.weight"].block.startswith(block)
        assert ("outside" in rows["inner.weight"].reason) == late
        assert rows["last.weight"].block.startswith("kronecker")


class Turned(nn.Module):
    """Samples second inside, one label for each sample or for each place."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head, self.pooled = nn.Linear(4, 5), nn.Linear(5, 3), pooled
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x.transpose(0, 1)))
        return self.head(y.mean(0) if self.pooled else y.transpose(0, 1))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("places", [3, 5])
def test_as_many_places_as_samples(places: int, pooled: bool) -> None:
    """An ignored sample is as good as none, wherever the layers inside have the samples."""
    torch.manual_seed(1)
    x, y = torch.randn(5, places, 4).double(), torch.tensor([0, 1, -100, 1, 2])
    x[2] *= 10
    found = []
    for some in (slice(None), y >= 0):
        model = Turned(pooled)
        opt = pb.KFAC(model, 0.0, likelihood=pb.likelihoods.Categorical(), fisher="exact")
        z, target = model(x[some]), y[some]
        target = target if pooled else target[:, None].expand(z.shape[:2])
        F.cross_entropy(z.flatten(0, -2), target.flatten()).backward()
        opt.step()
        found.append(opt.gram().dense())
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-11)


def test_samples_fitted_to_certainty_all_count() -> None:
    torch.manual_seed(0)
    head = nn.Linear(5, 3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), head)
    with torch.no_grad():
        head.weight.mul_(1000)
    x = torch.randn(6, 4)
    opt = pb.KFAC(model, 0.1, likelihood=pb.likelihoods.Categorical())
    F.cross_entropy(model(x), model(x).argmax(-1)).backward()
    opt.step()
    assert opt.info.taken
