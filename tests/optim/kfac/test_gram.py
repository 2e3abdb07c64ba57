"""The Gram of every kind of layer and of whole networks, against the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.testing import assert_close
from tests.optim.common import vector
from tests.optim.kfac import oracle as o
from tests.optim.kfac.common import Experts, Fused, Then, places
from tests.pairs import each_once


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


class Gain(nn.Module):
    """A parameter of no known layer."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def mlp(*between: nn.Module, bias: bool = True) -> Any:
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 2, bias=bias))


def pair(one: Any, two: Any, tied: bool = False) -> nn.Sequential:
    """Two layers that may have one weight, with biases of their own."""
    if tied:
        two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two)


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Models by name, and the shape of their batch."""
    embed = nn.Embedding
    shared = nn.Linear(3, 3)
    norm = nn.InstanceNorm1d(3, affine=True)
    one_sample = (Then(lambda x: x[0]), norm, Then(lambda x: x.mT[None]), nn.Linear(3, 2))
    half = mlp()
    fixed = nn.BatchNorm1d(4)
    half[0].weight.requires_grad = half[2].bias.requires_grad = False
    fixed(torch.randn(5, 4) + 0.3)  # running statistics of some data
    around: Any = {"groups": 2, "stride": 2, "padding": 1, "padding_mode": "circular"}
    reflect: Any = {"groups": 2, "padding": "same", "padding_mode": "reflect"}
    edge: Any = {"stride": (1, 2, 1), "padding": (1, 0, 1), "padding_mode": "replicate"}
    up1: Any = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}
    up2: Any = {"stride": (2, 1), "padding": (0, 1), "groups": 2}
    line = pair(nn.Conv1d(4, 4, 3, **around), nn.Conv1d(4, 2, 2, dilation=2))
    plane = pair(
        nn.Conv2d(4, 4, (2, 3), **reflect), nn.Conv2d(4, 2, 2, dilation=(1, 2), bias=False)
    )
    deep = pair(nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.Conv2d(4, 3, 2, (2, 1), (0, 1)))
    last = nn.ConvTranspose1d(4, 2, 2, dilation=2, bias=False)
    up = pair(nn.ConvTranspose2d(4, 4, (2, 3), **up2), nn.Conv2d(4, 2, 1))
    untracked = nn.BatchNorm2d(4, track_running_stats=False)
    return {
        "Linear alone": (nn.Linear(3, 2), (3, 3)),
        "Linear, one sample": (mlp(), (1, 3)),
        "Linear on sequences, one without bias": (mlp(bias=False), (3, 2, 3)),
        "Linear on grids": (mlp(), (2, 2, 2, 3)),
        "Linear, half frozen": (half, (3, 3)),
        "Conv1d": (places(line), (2, 4, 7)),
        "Conv2d": (places(plane), (2, 4, 3, 4)),
        "Conv2d, zero padding, depthwise": (places(deep, pooled=True), (2, 4, 4, 4)),
        "Conv3d": (places(nn.Conv3d(4, 2, (2, 1, 2), **edge)), (2, 4, 2, 3, 1)),
        "ConvTranspose1d": (places(pair(nn.ConvTranspose1d(4, 4, 3, **up1), last)), (2, 4, 2)),
        "ConvTranspose2d": (places(up, pooled=True), (2, 4, 2, 3)),
        "ConvTranspose3d": (places(nn.ConvTranspose3d(4, 2, (1, 2, 1))), (2, 4, 1, 2, 2)),
        "Embedding": (pair(embed(5, 3), nn.Linear(3, 3)), (2, 3)),
        "Embedding, padding": (pair(embed(5, 3, padding_idx=1), nn.Linear(3, 3)), (2, 3)),
        "one layer called twice": (nn.Sequential(pair(shared, shared), nn.Linear(3, 2)), (4, 3)),
        "two layers with one weight": (pair(nn.Linear(3, 3), nn.Linear(3, 3), True), (4, 3)),
        "words in and out": (pair(embed(5, 3), nn.Linear(3, 5, bias=False), True), (2, 3)),
        "words in and out, biased": (pair(embed(5, 3), nn.Linear(3, 5), True), (2, 3)),
        "experts": (Experts(), (2, 3, 3)),
        "a gain by hand": (mlp(Gain(4)), (4, 3)),
        "LayerNorm": (mlp(nn.LayerNorm(4)), (3, 3)),
        "LayerNorm of two axes": (places(nn.LayerNorm([4, 3]), nn.Tanh()), (2, 4, 3)),
        "LayerNorm without bias": (mlp(nn.LayerNorm(4, bias=False)), (2, 3, 3)),
        "RMSNorm": (mlp(nn.RMSNorm(4)), (2, 3, 3)),
        "GroupNorm": (places(nn.GroupNorm(2, 4), nn.Tanh()), (2, 4, 2, 2)),
        "BatchNorm1d in training": (pair(nn.BatchNorm1d(3), nn.Linear(3, 2)), (5, 3)),
        "BatchNorm2d without statistics": (places(untracked, nn.Tanh()), (2, 4, 2, 2)),
        "BatchNorm1d evaluated": (mlp(fixed.eval()), (3, 3)),
        "InstanceNorm2d": (places(nn.InstanceNorm2d(4, affine=True), nn.Tanh()), (2, 4, 2, 3)),
        "InstanceNorm1d without an axis of samples": (nn.Sequential(*one_sample), (1, 3, 4)),
        "PReLU": (mlp(nn.PReLU()), (4, 3)),
        "PReLU per channel": (places(nn.PReLU(4), nn.Tanh()), (2, 4, 2, 2)),
    }


WAYS = [
    ("gaussian", True, "expand", "sum"),
    ("categorical", False, "reduce", "mean"),
    ("euclidean", True, "reduce", "mean"),
]
#: layers that see other samples or places than the batch has, which "reduce" cannot know
WITHOUT_REDUCE = ("experts", "InstanceNorm1d without an axis of samples")


def agree(opt: pb.KFAC, model: nn.Module, want: Tensor, law: str, tol: float = 1e-11) -> None:
    """The Gram of all that the definition knows, and what is said of every parameter."""
    known = [n for n in o.index(model) if not n.endswith("gain") and "fused" not in n]
    actual = o.gram(opt, model)
    assert_close(o.part(actual, model, known), o.part(want, model, known), tol, law)
    assert float(torch.linalg.eigvalsh(actual)[0]) >= -1e-10 * float(actual.norm())
    for row in opt.coverage():
        if row.name.endswith("gain"):
            block_names = "units"
        else:
            block_names = ("kronecker", "units")
        assert row.block.startswith(block_names if row.name in o.index(model) else "none"), row


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(("layer", "convention"), each_once(layers(), WAYS))
def test_the_gram_is_that_of_the_definition(layer: str, convention: tuple[Any, ...]) -> None:
    model, shape = layers()[layer]
    loss_name, joint, sharing, reduction = convention
    words = any(isinstance(m, nn.Embedding) for m in model.modules())
    if words:
        x = torch.randint(0, 5, shape)
    else:
        x = torch.randn(shape)
    x[0, 0] = 1  # the table's padding, where it has one
    if sharing == "reduce" and layer in WITHOUT_REDUCE:
        sharing = "expand"
    how: dict[str, Any] = {"kind": loss_name, "joint": joint, "reduction": reduction}
    opt = o.stepped(model, x, sharing=sharing, **how)
    want = o.definition(model, x, reduce=sharing == "reduce", **how)
    agree(opt, model, want, layer)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("loss_name", ["gaussian", "categorical", "euclidean"])
def test_the_output_may_have_its_samples_second(loss_name: str, sharing: str) -> None:
    model = mlp()
    x = torch.randn(4, 3, 3)
    opt = o.stepped(model, x, kind=loss_name, sharing=sharing, batch_dim=1)
    want = o.kfac(model, x, kind=loss_name, reduce=sharing == "reduce", batch_dim=1)
    assert_close(opt.gram().dense(), want, 1e-12, "time before samples")


@pytest.mark.parametrize("ignored", [False, True])
def test_sides_longer_than_max_factor_are_diagonals(ignored: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 11))
    x = torch.randn(6, 3, 5, 5)
    y = torch.arange(6)
    y[3] = -100 if ignored else 3
    opt = o.stepped(model, x, y=y, kind="categorical", max_factor=10)

    def change(r: Tensor, c: Tensor) -> o.Sides:
        return r if len(r) <= 10 else r.diagonal().diag(), c.diagonal().diag()

    if ignored:
        keep = y >= 0
    else:
        keep = None
    want = o.kfac(model, x, kind="categorical", keep=keep, change=change)
    assert_close(opt.gram().dense(), want, 1e-12, "diagonal sides")
    blocks = [r.block for r in opt.coverage()]
    assert ["output diagonal" in b for b in blocks] == [False, False, True, True]
    assert all("input diagonal" in b for b in blocks)


# --- drawn and empirical Fisher -------------------------------------------------------------


@pytest.mark.parametrize("loss_name", ["gaussian", "categorical", "euclidean"])
def test_draws_converge_to_the_exact_fisher(loss_name: str) -> None:
    model = mlp()
    x = torch.randn(100, 3)
    opt = o.stepped(model, x, kind=loss_name, fisher="mc", draws=80)
    assert_close(opt.gram().dense(), o.kfac(model, x, kind=loss_name), 0.06, "average of draws")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss_name", ["gaussian", "categorical", "euclidean"])
def test_the_empirical_fisher_is_that_of_the_losses_of_samples(
    loss_name: str, reduction: str
) -> None:
    """Positions of one sample meet in one covector."""
    model = mlp()
    x = torch.randn(4, 2, 3)
    opt = o.stepped(model, x, kind=loss_name, fisher="empirical", reduction=reduction)
    z = model(x)
    slope = torch.autograd.grad(o.loss(z, loss_name, "sum"), z)[0]
    covectors = [slope * (torch.arange(4) == n).view(4, 1, 1) for n in range(4)]
    want = o.kfac(model, x, kind=loss_name, covectors=covectors, reduction=reduction)
    assert_close(opt.gram().dense(), want, 1e-12, "E[∇ℓ∇ℓᵀ] over the data")


@pytest.mark.parametrize(("fisher", "draws", "steps"), [("mc", 100, 1), ("exact", 1, 50)])
def test_a_parameter_of_no_layer_has_squares_of_drawn_gradients(
    fisher: str, draws: int, steps: int
) -> None:
    model = nn.Sequential(Gain(3), nn.Tanh(), nn.Linear(3, 2))
    x = torch.randn(4, 3)
    options: Any = {"statistics_every": 1, "ema": 0.999, "fisher": fisher, "draws": draws}
    opt = o.optimizer(model, "categorical", **options)
    for _ in range(steps):
        o.step(opt, model, x, "categorical")
    actual = o.part(opt.gram().dense(), model, ["0.gain"])
    want = o.part(o.exact(model, x, kind="categorical"), model, ["0.gain"]).diagonal()
    assert_close(actual.diagonal(), want, 0.25, "unbiased")
    assert actual.count_nonzero() == 3


def test_layers_before_a_batch_norm_are_unbiased() -> None:
    """In training mode the samples are coupled: δ of one sample has parts from all covectors."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(4, 2)
    opt = o.optimizer(model, "gaussian", statistics_every=1, ema=0.999)
    for _ in range(40):
        o.step(opt, model, x, "gaussian")
    names = ["0.weight", "0.bias"]
    want = o.part(o.kfac(model, x, kind="gaussian"), model, names)
    assert_close(o.part(opt.gram().dense(), model, names), want, 0.15, "Σ δδᵀ over all samples")


# --- layers of torch that fuse several linear maps, against the same by linear layers -------


class Recurrent(nn.Module):
    """A recurrent layer, or a cell that is called in a loop, and a head at every time."""

    def __init__(self, loss_name: Any) -> None:
        super().__init__()
        if issubclass(loss_name, nn.RNNBase):
            options = {"batch_first": True}
        else:
            options = {}
        self.rnn = loss_name(3, 4, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.rnn, nn.RNNBase):
            return self.head(self.rnn(x)[0])
        state = None
        out = []
        for step in x.unbind(1):
            state = self.rnn(step, state)
            out.append(state[0] if isinstance(state, tuple) else state)  # an LSTM's is (h, c)
        return self.head(torch.stack(out, 1))


class Unrolled(nn.Module):
    """The same by linear layers."""

    order = ("ih.weight", "hh.weight", "ih.bias", "hh.bias", "head.weight", "head.bias")

    def __init__(self, recurrent: Recurrent) -> None:
        super().__init__()
        wih, whh, bih, bhh = recurrent.rnn.parameters()
        self.ih = nn.Linear(3, len(wih))
        self.hh = nn.Linear(4, len(wih))
        self.head = recurrent.head
        self.ih.load_state_dict({"weight": wih, "bias": bih})
        self.hh.load_state_dict({"weight": whh, "bias": bhh})
        self.gates = len(wih) // 4

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 4)
        out = []
        for step in x.unbind(1):
            u = self.ih(step)
            v = self.hh(h)
            if self.gates == 1:
                h = torch.tanh(u + v)
            elif self.gates == 4:
                i, f, g, q = (u + v).chunk(4, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(q) * torch.tanh(c)
            else:
                ur, uz, un = u.chunk(3, -1)
                vr, vz, vn = v.chunk(3, -1)
                z = torch.sigmoid(uz + vz)
                h = (1 - z) * torch.tanh(un + torch.sigmoid(ur + vr) * vn) + z * h
            out.append(h)
        return self.head(torch.stack(out, 1))


class Attending(nn.Module):
    """Two heads, fused by torch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True, **options)
        for p in self.attend.parameters():
            nn.init.normal_(p, std=0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        return self.head(self.attend(x, y, y, need_weights=False)[0])


class ByHand(nn.Module):
    """The same by four linear layers; one extra key and value where there are biases for them."""

    order = (
        "q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias",
        "o.weight", "o.bias", "head.weight", "head.bias",
    )  # fmt: skip

    def __init__(self, attending: Attending) -> None:
        super().__init__()
        a = attending.attend
        weights: Any = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
        if a.in_proj_weight is not None:
            weights = a.in_proj_weight.chunk(3)
        self.q, self.k, self.v = (nn.Linear(w.shape[1], 4) for w in weights)
        for m, w, b in zip((self.q, self.k, self.v), weights, a.in_proj_bias.chunk(3), strict=True):
            m.load_state_dict({"weight": w, "bias": b})
        self.o = a.out_proj
        self.head = attending.head
        self.more = [
            torch.zeros(1, 0, 4) if b is None else b.detach() for b in (a.bias_k, a.bias_v)
        ]

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        more = [b.expand(len(x), -1, -1) for b in self.more]
        k = torch.cat([self.k(y), more[0]], 1)
        v = torch.cat([self.v(y), more[1]], 1)
        q, k, v = (a.unflatten(-1, (2, 2)).transpose(1, 2) for a in (self.q(x), k, v))
        mixed = torch.softmax(q @ k.mT / 2**0.5, -1) @ v
        return self.head(self.o(mixed.transpose(1, 2).flatten(2)))


Twins = tuple[Callable[[], Any], Callable[[Any], Any], tuple[tuple[int, ...], ...]]
FUSED: dict[str, Twins] = {
    **{
        kind.__name__: (lambda loss_name=kind: Recurrent(loss_name), Unrolled, ((2, 3, 3),))
        for kind in (nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell)
    },
    "self-attention": (Attending, ByHand, ((2, 3, 4),)),
    "attention to more places": (Attending, ByHand, ((2, 3, 4), (2, 4, 4))),
    "attention to fewer places": (Attending, ByHand, ((2, 3, 4), (2, 2, 4))),
    "attention with a learned key": (lambda: Attending(add_bias_kv=True), ByHand, ((2, 3, 4),)),
    "sizes of its own": (lambda: Attending(kdim=3, vdim=3), ByHand, ((2, 3, 4), (2, 4, 3))),
}


@pytest.mark.parametrize(
    ("name", "joint_and_ignored"), each_once(FUSED, [(True, False), (False, False), (True, True)])
)
def test_a_fused_layer_is_its_linear_maps(name: str, joint_and_ignored: tuple[bool, bool]) -> None:
    """Also where the loss ignores places: those that others read count on the side that is read."""
    make, by_hand, shapes = FUSED[name]
    joint, ignored = joint_and_ignored
    model = make()
    args = [torch.randn(*shape) for shape in shapes]
    twin = by_hand(model)
    assert_close(twin(*args), model(*args), 1e-12, "the same function")
    y = torch.arange(6).view(2, 3) % 2
    keep = None
    if ignored:  # the first place of one sample, the last one of the other
        y[0, 0] = y[1, 2] = -100
        keep = y >= 0
    opt = o.stepped(model, *args, y=y, kind="categorical", joint=joint)
    if "learned" in name:
        key_value_biases = ["attend.bias_k", "attend.bias_v"]
    else:
        key_value_biases = []
    actual = o.part(
        opt.gram().dense(), model, [n for n in o.index(model) if n not in key_value_biases]
    )
    order = list(twin.order)
    want = o.part(o.kfac(twin, *args, kind="categorical", joint=joint, keep=keep), twin, order)
    if "sizes" in name:  # one bias for three weights has a block of its own
        split = sum(len(i) for n, i in o.index(twin).items() if n[0] in "qkv")
        separate = o.kfac(twin, *args, kind="categorical", joint=False, keep=keep)
        want[:split, :split] = o.part(separate, twin, order)[:split, :split]
    assert_close(actual, want, 1e-11, name)
    blocks = [r.block for r in opt.coverage() if r.name not in key_value_biases]
    assert all(b.startswith("kronecker") for b in blocks)
    for n in [] if ignored else key_value_biases:  # one place per sample: exact
        grams = opt.gram().dense(), o.exact(model, *args, kind="categorical")
        assert_close(*(o.part(g, model, [n]) for g in grams), 1e-11, n)


def test_micro_batches_of_other_lengths_pool_by_places() -> None:
    """Queries and keys count apart: the mean is over all places of each."""
    model = Attending()
    micro_batches = [(torch.randn(2, 3, 4), torch.randn(2, n, 4)) for n in (2, 5)]
    opt = o.optimizer(model, "gaussian")
    for args in micro_batches:
        o.loss(model(*args), "gaussian").backward()
    opt.step()

    class Both(ByHand):
        def forward(self, *micro_batches: Any) -> Tensor:
            return torch.cat([super(Both, self).forward(*args) for args in micro_batches])

    twin = Both(model)
    want = o.part(o.kfac(twin, *micro_batches, kind="gaussian"), twin, list(twin.order))
    assert_close(opt.gram().dense(), want, 1e-11, "both together")


# --- random networks ------------------------------------------------------------------------


def on_features(r: Random, n: int) -> nn.Module:
    """A layer on the last axis of n features."""
    bias = r.random() < 0.5
    width = r.randint(1, 4)
    makers: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(n, width, bias=bias),
        lambda: nn.LayerNorm(n, eps=1e-3, bias=bias),
        lambda: nn.RMSNorm(n, eps=1e-3),
        lambda: r.choice([nn.Tanh, nn.Sigmoid, nn.Softplus])(),
        lambda: pair(nn.Linear(n, n), nn.Linear(n, n, bias=bias), True),
        lambda: nn.Sequential(*[nn.Linear(n, n, bias=bias), nn.Tanh()] * r.randint(1, 3)),
        lambda: Gain(n),
        nn.PReLU,
        lambda: Fused(nn.MultiheadAttention(n, 1, bias=bias, batch_first=True)),
        lambda: Fused(nn.GRU(n, width, bias=bias, batch_first=True)),
    ]
    return r.choice(makers)()


def on_images(r: Random, n: int, dims: int) -> nn.Module:
    """A layer on images with n channels."""
    loss_name = r.choice(["Conv", "Conv", "ConvTranspose", "norm", "PReLU"])
    if loss_name == "PReLU":
        return nn.PReLU(r.choice([1, n]))
    if loss_name == "norm":
        return nn.GroupNorm(r.choice([1, n]), n)
    groups = r.choice([g for g in (1, 2, 3) if n % g == 0])
    options: dict[str, Any] = {"groups": groups, "bias": r.random() < 0.5}
    options["stride"] = stride = [r.randint(1, 2) for _ in range(dims)]
    out = groups * r.randint(1, 2)
    size = [r.randint(1, 3) for _ in range(dims)]
    if loss_name == "Conv":
        options["dilation"] = dilation = [r.randint(1, 2) for _ in range(dims)]
        reach = [d * (k - 1) for k, d in zip(size, dilation, strict=True)]
        keeps_size = r.random() < 0.5 and set(stride) == {1}
        options["padding"] = "same" if keeps_size else [(i + 1) // 2 for i in reach]
        options["padding_mode"] = r.choice(["zeros", "reflect", "replicate", "circular"])
    return getattr(nn, f"{loss_name}{dims}d")(n, out, size, **options)


def network(r: Random) -> tuple[nn.Module, Tensor]:
    """A network, and a batch for it."""
    samples = r.randint(1, 3)
    layers = nn.Sequential()
    n = r.randint(1, 4)
    family = r.choice(["vectors", "sequences", "words", "images", "images"])
    x = torch.randn(samples, *([r.randint(1, 3)] if family == "sequences" else []), n)
    if family == "words":
        x = torch.randint(0, 4, (samples, r.randint(1, 3)))
        x[0, 0] = 2  # one word at least is no padding
        layers.append(nn.Embedding(4, n, padding_idx=r.choice([None, 1])))
    elif family == "images":
        dims = r.choice([1, 1, 2, 2, 3])
        x = torch.randn(samples, n, *([3] * dims if dims == 3 else [r.randint(3, 4)] * dims))
        for _ in range(r.randint(1, 2)):
            trial = nn.Sequential(*layers, on_images(r, layers(x).shape[1], dims))
            try:
                size = math.prod(trial(x).shape[2:])
            except (RuntimeError, ValueError):  # a padding wider than the image
                continue
            layers = trial if 2 <= size <= 40 else layers
        is_large = math.prod(layers(x).shape[2:]) > 9
        layers = places(*layers, pooled=is_large or r.random() < 0.5)
    for _ in range(r.randint(0, 3)):
        layers.append(on_features(r, layers(x).shape[-1]))
    layers.append(nn.Linear(layers(x).shape[-1], r.randint(2, 3)))
    return layers, x


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("seed", range(16))
def test_random_networks(seed: int) -> None:
    """The blocks are those of the definition, every parameter has one, and the step is finite."""
    r = Random(seed)
    torch.manual_seed(seed)
    model, x = network(r)
    loss_name = r.choice(["gaussian", "categorical", "euclidean"])
    joint = r.random() < 0.5
    sharing = r.choice(["expand", "reduce"])
    reduction = r.choice(["mean", "sum"])
    how: dict[str, Any] = {"kind": loss_name, "joint": joint, "reduction": reduction}
    want = o.definition(model, x, reduce=sharing == "reduce", **how)
    opt = o.stepped(model, x, lr=0.1, sharing=sharing, damping=1e-2, **how)
    agree(opt, model, want, "the Gram", 1e-9)
    assert bool(vector(model).isfinite().all())
    assert opt.info.accepted
