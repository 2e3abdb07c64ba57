"""Which places count where the loss ignores some, and where samples stand inside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pullback as pb
from pullback.testing import assert_close
from tests.optim.kfac import oracle as o
from tests.optim.kfac.common import Experts, Then
from tests.pairs import all_pairs, each_once


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


# --- ignored targets ------------------------------------------------------------------------


class Attending(nn.Module):
    """Causal attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 3)
        self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1) > 0
        scores = (self.q(h) @ self.k(h).mT).masked_fill(later, -inf)
        return self.last(torch.tanh(h + self.out(torch.softmax(scores, -1) @ self.v(h))))


class Translating(nn.Module):
    """A decoder that looks at an encoder, whose places are others, some of them padding."""

    def __init__(self, length: int, padding: int = 0) -> None:
        super().__init__()
        self.source = torch.randn(3, length, 3)
        ends = length - torch.tensor([0, padding, padding // 2])
        self.padding = torch.arange(length) >= ends[:, None]
        self.encoder = nn.Linear(3, 4)
        self.words = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.tanh(self.encoder(self.source))
        h = self.words(x)
        scores = (h @ memory.mT).masked_fill(self.padding[:, None], -inf)
        return self.last(torch.tanh(h + torch.softmax(scores, -1) @ memory))


def images() -> nn.Sequential:
    """A class for every image."""
    below = [nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.ConvTranspose1d(4, 3, 2), nn.ReLU()]
    return nn.Sequential(*below, Then(lambda h: h.amax(2)), nn.Linear(3, 3))


def pixels() -> nn.Sequential:
    """A class for every pixel; below, images of another size."""
    down = nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2)
    up = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2)
    last = nn.Conv2d(4, 3, 3, padding=1)
    return nn.Sequential(down, nn.Tanh(), up, nn.Tanh(), last, Then(lambda h: h.movedim(1, -1)))


def ignored_targets() -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Models, batches, and the positions of the output that are kept."""

    def kept(*rows: str) -> Tensor:
        return torch.tensor([[c == "x" for c in row] for row in rows])

    words = torch.randint(0, 5, (3, 4))
    prompts = kept("--xx", "--xx", "--x-")
    kept_pixels = (
        torch.ones(3, 4, 4) > 0
    )  # pixels: not one image as a whole, nor most of another one
    kept_pixels[0] = False
    kept_pixels[1, 1:] = False
    padded = Translating(6, 3)
    return {
        "prompts": (Attending(), words, prompts),
        "ends": (Attending(), words, kept("xxxx", "xx--", "x---")),
        "encoder of the same length": (Translating(4), words, kept("xx--", "xx--", "xx-x")),
        "encoder of another length": (Translating(5), words, prompts),
        "padded sources": (padded, words, prompts),
        "padded sources, some whole": (padded, words, kept("xxxx", "xxxx", "xx--")),
        "padded sources, all whole": (padded, words, kept("xxxx", "xxxx", "xxxx")),
        "pixels": (pixels(), torch.randn(3, 2, 4, 4), kept_pixels),
        "experts": (Experts(), torch.randn(3, 4, 3), prompts),
        "images": (images(), torch.randn(4, 2, 5), torch.arange(4) != 1),
    }


@pytest.mark.parametrize(
    ("case", "fisher_and_sharing"),
    each_once(
        ignored_targets(), [("exact", "expand"), ("exact", "reduce"), ("empirical", "expand")]
    ),
)
def test_places_count_where_kept_or_felt(case: str, fisher_and_sharing: tuple[str, str]) -> None:
    """A kept position's place, or one that a covector of the kept positions reaches."""
    model, x, keep = ignored_targets()[case]
    covectors = None
    fisher, sharing = fisher_and_sharing
    sharing = "expand" if case == "experts" else sharing  # the same for rows of unknown samples
    y = torch.randint(0, 3, keep.shape).masked_fill(~keep, -100)
    opt = o.stepped(model, x, y=y, kind="categorical", fisher=fisher, sharing=sharing)
    if fisher == "empirical":
        z = model(x)
        total = F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum")
        (slope,) = torch.autograd.grad(total, z)
        sample = torch.arange(len(z)).view(-1, *[1] * (z.ndim - 1))
        covectors = [slope * (sample == n) for n in range(len(z))]
    how: Any = {"kind": "categorical", "keep": keep, "covectors": covectors}
    want = o.kfac(model, x, reduce=sharing == "reduce", **how)
    assert_close(o.gram(opt, model), want, 1e-12, case)


@pytest.mark.parametrize("case", ["prompts", "padded sources"])
def test_the_same_places_count_for_drawn_targets(case: str) -> None:
    """Input sides, up to their scale, are those of the exact Fisher."""
    model, x, keep = ignored_targets()[case]
    how: Any = {"kind": "categorical", "y": torch.zeros(3, 4).long().masked_fill(~keep, -100)}
    mc, exact = (o.stepped(model, x, fisher=f, **how).gram().dense() for f in ("mc", "exact"))
    for name, _ in model.named_children():
        actual, want = (o.input_side(gram, model, name) for gram in (mc, exact))
        assert_close(actual, want, 1e-12, name)


class Causal(nn.Module):
    """What comes after a position does not touch it; layers fused by torch."""

    def __init__(self, layer_name: str, first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)
        self.first = first
        if layer_name.startswith("attention"):
            if "sizes" in layer_name:
                options = {"kdim": 3}
            else:
                options = {}
            self.layer: Any = nn.MultiheadAttention(4, 2, batch_first=first, **options)
        else:
            self.layer = getattr(nn, layer_name.replace("packed", "LSTM"))(4, 4, batch_first=first)
        self.lengths: Tensor | None = None  # of packed sequences

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        if not self.first:
            h = h.transpose(0, 1)
        if isinstance(self.layer, nn.MultiheadAttention):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            k = h[..., : self.layer.kdim]
            h = self.layer(h, k, h, attn_mask=mask, need_weights=False)[0]
        elif self.lengths is not None:
            packed = pack_padded_sequence(h, self.lengths, self.first, enforce_sorted=False)
            h = pad_packed_sequence(self.layer(packed)[0], self.first, total_length=x.shape[1])[0]
        else:
            h = self.layer(h)[0]
        return self.head(h if self.first else h.transpose(0, 1))


@pytest.mark.parametrize(
    ("layer_name", "first"),
    each_once(
        ["by hand", "attention", "attention of own sizes", "LSTM", "GRU", "RNN", "packed"],
        [False, True],
    ),
)
def test_padding_that_the_loss_ignores_changes_nothing(layer_name: str, first: bool) -> None:
    """More of it, or packed sequences that leave it out."""
    model: Any = Attending() if layer_name == "by hand" else Causal(layer_name, first)
    lengths = torch.tensor([1, 3, 2])
    y = torch.arange(9).view(3, 3) % 3
    y = y.masked_fill(torch.arange(3) >= lengths[:, None], -100)
    x = torch.randint(0, 5, (3, 3))
    more = torch.zeros(3, 2).long()
    optimizers = []
    for a, b in ((x, y), (torch.cat([x, more], 1), torch.cat([y, more - 100], 1))):
        how: Any = {"kind": "categorical", "sharing": "expand" if first else "reduce"}
        optimizers.append(o.stepped(model, a, y=b, **how))
        model.lengths = lengths if layer_name == "packed" else None
    assert not [r for r in optimizers[1].coverage() if r.block == "diagonal"]
    assert_close(*(opt.gram().dense() for opt in optimizers), 1e-12, layer_name)


# --- layers that see few rows or none -------------------------------------------------------


class Sparse(nn.Module):
    """A layer that is called with the first `rows`, which may be none."""

    def __init__(self, layer_name: str, *sizes: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layer = getattr(nn, layer_name)(*sizes)
        self.last = nn.Linear(4, 5)
        self.layer_name = layer_name
        self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if "Conv" in self.layer_name:
            rows = h[: self.rows, :, None]
        else:
            rows = h[: self.rows]
        outputs = self.layer(rows[:, 0].long() * 0 if self.layer_name == "Embedding" else rows)
        return self.last(torch.cat([h[: self.rows] + outputs.flatten(1), h[self.rows :]]))


def steps(opt: pb.KFAC, model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        opt.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        opt.step()
        assert opt.info.took_statistics


@pytest.mark.parametrize("order", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize(
    "layer", ["Linear 4 4", "Conv1d 4 4 1", "ConvTranspose1d 4 4 1", "LayerNorm 4", "Embedding 3 4"]
)
def test_a_layer_without_rows_learns_nothing(layer: str, order: tuple[int, int]) -> None:
    name, *sizes = layer.split()
    model = Sparse(name, *map(int, sizes))
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0)
    for rows in order:
        model.rows = rows
        steps(opt, model, [(torch.randn(6, 3), torch.arange(6) % 5)])
        assert not opt.info.notes
    if order == (0, 0):
        block_name = "gradient"
    elif name == "LayerNorm":
        block_name = "units"
    else:
        block_name = "kronecker"
    blocks = [row.block for row in opt.coverage() if row.name.startswith("layer")]
    assert all(block.startswith(block_name) for block in blocks)


def test_a_batch_may_be_all_padding_of_a_table() -> None:
    model = nn.Sequential(nn.Embedding(3, 2, padding_idx=0), nn.Linear(2, 2))
    opt = o.optimizer(model, "categorical", lr=0.1, statistics_every=1)
    y = torch.zeros(2, 4, dtype=torch.long)
    steps(opt, model, [(torch.zeros_like(y), y), (torch.randint(0, 3, (2, 4)), y)])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_samples_fitted_to_certainty_count() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[2].weight.data.mul_(1000)
    x = torch.randn(6, 4)
    opt = o.optimizer(model, "categorical", lr=0.1, fisher="mc")
    steps(opt, model, [(x, model(x).argmax(-1))])


# --- samples that stand elsewhere than on axis 0 --------------------------------------------

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
ELSEWHERE = ["second", "folded", "folded-last"]


class Turned(nn.Module):
    """Layers on all places at once; a class for each place, or one for their mean."""

    def __init__(self, how: str, norm: nn.Module | None = None, pooled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.arrange, self.back = TURNED[how]
        self.layers = nn.Sequential(nn.Linear(4, 4), *([] if norm is None else [norm]))
        self.last = nn.Linear(4, 3)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        h = self.back(torch.tanh(self.layers(self.arrange(x))), len(x))
        return self.last(h.square().mean(1) if self.pooled else h)


WITH: dict[str, tuple[Callable[[], nn.Module | None], dict[str, Any]]] = {
    "reduce": (lambda: None, {"sharing": "reduce"}),
    "ekfac": (lambda: None, {"ekfac": True}),
    "LayerNorm": (lambda: nn.LayerNorm(4), {}),
    "RMSNorm": (lambda: nn.RMSNorm(4), {"joint": False}),
}


def step_through(model: nn.Module, *batches: Tensor, **options: Any) -> pb.KFAC:
    """After statistics of each batch, of which the last one counts."""
    opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0, **options)
    steps(opt, model, [(x, torch.arange(model(x)[..., 0].numel()) % 3) for x in batches])
    opt.close()
    assert not any("not known" in row.reason for row in opt.coverage())
    return opt


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize(
    ("variant", "outputs"),
    each_once(WITH, [((5, 3), True), ((2, 2), True), ((1, 3), True), ((2, 2), False)]),
)
def test_it_does_not_matter_where_samples_stand(
    variant: str, outputs: tuple[tuple[int, int], bool], how: str
) -> None:
    norm, options = WITH[variant]
    shape, pooled = outputs
    batches = [torch.randn(*shape, 4) + 0.5] * (3 if variant == "ekfac" else 1)
    actual, want = (
        step_through(Turned(h, norm(), pooled), *batches, **options).gram().dense()
        for h in (how, "first")
    )
    assert_close(actual, want, 1e-12, how)


@pytest.mark.parametrize(
    ("variant", "before", "how"),
    all_pairs(["reduce", "LayerNorm"], [[(6, 3), (4, 3)], [(6, 1)], [(1, 3)], [(1, 1)]], ELSEWHERE),
)
def test_batches_may_have_other_shapes_later(
    variant: str, before: list[tuple[int, int]], how: str
) -> None:
    """Of one place each, or of one sample, a first batch does not tell where samples stand."""
    norm, options = WITH[variant]
    x = [torch.randn(*shape, 4) for shape in (*before, (6, 3))]
    actual = step_through(Turned(how, norm()), *x, **options).gram().dense()
    assert_close(
        actual, step_through(Turned("first", norm()), x[-1], **options).gram().dense(), 1e-12, how
    )


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("positions", [0, 3, 5])
@pytest.mark.parametrize("pooled", [False, True])
def test_ignored_samples_change_nothing(pooled: bool, positions: int, sharing: str) -> None:
    """Of images, or with as many places as samples, which stand second."""
    if positions:
        model = Turned("second", None, pooled)
    else:
        model = images()
    x = torch.randn(5, positions or 2, 4)
    y = torch.tensor([0, 1, -100, 1, 2])
    x[2] *= 10
    grams = []
    for selected in (slice(None), y >= 0):
        if pooled or not positions:
            target = y[selected]
        else:
            target = y[selected][:, None].expand(-1, positions)
        opt = o.stepped(model, x[selected], y=target, kind="categorical", sharing=sharing)
        grams.append(opt.gram().dense())
    assert_close(*grams, 1e-11, "without it")


@pytest.mark.parametrize("how", ["folded", "folded-last"])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.Identity])
def test_frames_of_films_in_one_axis(norm: Callable[[int], nn.Module], how: str) -> None:
    """A batch normalization lets others feel them, but less."""
    model = Turned(how)
    x = torch.randn(12, 3, 4)
    add_axis = Then(lambda h: h[..., None])
    drop_axis = Then(lambda h: h[..., 0])
    model.layers = nn.Sequential(add_axis, nn.Conv1d(4, 4, 1), norm(4), drop_axis)
    gram = step_through(model, x, sharing="reduce").gram().dense()
    want = x.mean(1).T @ x.mean(1)
    side = o.input_side(gram, model, "layers.1")
    assert_close(side, want / want.trace(), 1e-12, "means over the frames of a film")


@pytest.mark.parametrize("options", [{"sharing": "reduce"}, {"ekfac": True}])
def test_rows_of_unknown_samples_count_each_and_coverage_says_so(options: dict[str, Any]) -> None:
    model = Experts()
    x = torch.randn(7, 3, 3)
    grams = []
    expert = ["few_rows.weight", "few_rows.bias", "many_rows.weight", "many_rows.bias"]
    for chosen in (options, {}):
        opt = o.optimizer(model, "categorical", statistics_every=1, ema=0.0, **chosen)
        steps(opt, model, [(x, torch.arange(21) % 3)] * 3)
        said = [row.name for row in opt.coverage() if "not known" in row.reason]
        assert said == (expert if chosen else [])
        grams.append(o.part(opt.gram().dense(), model, expert))
    assert_close(*grams, 1e-12, "every place on its own")
