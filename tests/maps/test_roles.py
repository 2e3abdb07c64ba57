"""What `parameter_roles` says of small models, and that it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

import pullback as pb
from pullback.maps.output_parts import merge_overlapping


def rows(model: nn.Module, *inputs: Any, **kwargs: Any) -> dict[str, Any]:
    return {row.name: row for row in pb.parameter_roles(model, *inputs, **kwargs)}


WIDTH = 12
HEADS = 3


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """From (B, heads, T, d) to (B, T, width)."""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def rotate(z: Tensor) -> Tensor:
    """A rotary embedding, of which half of the features stand apart for a moment."""
    one, two = z[..., : z.shape[-1] // 2], z[..., z.shape[-1] // 2 :]
    return z * 0.3 + torch.cat([-two, one], -1) * 0.2


def heads(z: Tensor) -> Tensor:
    return z.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def attend_to_chunks(y: Tensor) -> Tensor:
    return attend(*map(heads, y.chunk(3, -1)))


def attend_to_views(y: Tensor) -> Tensor:
    q, k, v = y.view(*y.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    return attend(rotate(q), rotate(k), v)


def unbound(y: Tensor) -> Tensor:
    return attend(*map(heads, y.reshape(*y.shape[:2], 3, WIDTH).unbind(2)))


def attend_to_slices(y: Tensor) -> Tensor:
    pieces = [heads(y[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3)]
    return attend(rotate(pieces[0]), rotate(pieces[1]), pieces[2])


def attend_normalized(y: Tensor) -> Tensor:
    """Queries and keys are normalized and rotated together before they part."""
    queries_and_keys, v = y.split([2 * WIDTH, WIDTH], -1)
    q, k = F.layer_norm(queries_and_keys.clamp(-8, 8), queries_and_keys.shape[-1:]).chunk(2, -1)
    return attend(rotate(heads(q)), rotate(heads(k)), heads(v))


def partly_rotated(y: Tensor) -> Tensor:
    q, k, v = map(heads, y.split(WIDTH, dim=2))
    q, k = (torch.cat([rotate(z[..., :2]), z[..., 2:]], -1) for z in (q, k))
    return attend(q, k, v)


def grouped_queries(y: Tensor) -> Tensor:
    each = WIDTH // HEADS
    q, k, v = y.split([WIDTH, each, each], -1)
    k, v = (heads(z).repeat_interleave(HEADS, 1) for z in (k, v))
    return attend(rotate(heads(q)), rotate(k), v)


def apply_gate(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


def glu(y: Tensor) -> Tensor:
    return F.glu(y, -1)


def split_after_padding(y: Tensor) -> Tensor:
    """Windows of attention are filled up, by zeros and by other entries, before they are split."""
    y = torch.cat([F.pad(y, (0, 0, 0, 1)), torch.zeros(y.shape[0], 1, y.shape[2])], 1)
    return attend(*map(heads, y.chunk(3, -1)))[:, :-2]


def split_after_depthwise_convolution(y: Tensor) -> Tensor:
    """A causal convolution of every channel by itself, as Mamba has it before it splits them."""
    filters = torch.ones(y.shape[-1], 1, 3)
    y = F.conv1d(F.pad(y.mT, (2, 0)), filters, groups=len(filters)).mT
    return attend(*map(heads, F.silu(y).chunk(3, -1)))


def split_after_a_copy_in_a_cache(y: Tensor) -> Tensor:
    """The fused output is kept for later calls; no function of this one uses the copy."""
    torch.zeros_like(y).copy_(y)
    return attend(*map(heads, y.chunk(3, -1)))


def split_by_einsum(y: Tensor) -> Tensor:
    y = y.view(*y.shape[:2], 3, HEADS, -1)
    q, k, v = torch.einsum("btchd->cbhtd", y)
    return attend(q, k, v)


SPLITS: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    (attend_to_chunks, (WIDTH,) * 3),
    (attend_to_views, (WIDTH,) * 3),
    (unbound, (WIDTH,) * 3),
    (attend_to_slices, (WIDTH,) * 3),
    (attend_normalized, (WIDTH,) * 3),
    (partly_rotated, (WIDTH,) * 3),
    (grouped_queries, (12, 4, 4)),
    (apply_gate, (WIDTH, WIDTH)),
    (glu, (WIDTH, WIDTH)),
    (split_after_padding, (WIDTH,) * 3),
    (split_after_depthwise_convolution, (WIDTH,) * 3),
    (split_after_a_copy_in_a_cache, (WIDTH,) * 3),
    (split_by_einsum, (WIDTH,) * 3),
    (torch.relu, (WIDTH,)),
]


class Fused(nn.Module):
    """A fused weight, what is done with its output, and a head after a residual."""

    def __init__(self, after: Callable[[Tensor], Tensor], rows: int, product: str) -> None:
        super().__init__()
        self.after, self.product = after, product
        self.fused = nn.Linear(WIDTH, rows)
        self.w = nn.Parameter(torch.randn(WIDTH, rows))
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.product == "linear":
            y = self.fused(x)
        elif self.product == "product":
            y = x @ self.w
        elif self.product == "einsum":
            y = torch.einsum("bti,io->bto", x, self.w)
        else:
            y = x @ self.w + self.fused(x)
        return self.head(x + self.mix(self.after(y)))


@pytest.mark.parametrize("product", ["linear", "product", "einsum", "added"])
@pytest.mark.parametrize(("after", "split"), SPLITS, ids=lambda v: getattr(v, "__name__", ""))
def test_splits_of_fused_weights(
    after: Callable[[Tensor], Tensor], split: tuple[int, ...], product: str
) -> None:
    torch.manual_seed(0)
    roles = rows(Fused(after, sum(split), product), torch.randn(2, 4, WIDTH))
    if product in ("linear", "added"):
        row = roles["fused.weight"]
        assert (row.role, row.split, row.split_axis) == ("matrix", split, 0), row.reason
    if product != "linear":
        assert (roles["w"].role, roles["w"].split, roles["w"].split_axis) == ("matrix", split, 1)
    assert roles["mix.weight"].split == (WIDTH,)
    assert (roles["head.weight"].role, roles["head.weight"].split) == ("head", (5,))
    assert roles["fused.bias"].role == "vector"


@pytest.mark.parametrize("wrap", [lambda layer: layer, nn.utils.parametrizations.weight_norm])
def test_depthwise_layers_keep_the_rows_of_their_channels_apart(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    class Mixer(nn.Module):
        """The mixer of a state-space model: x, B and C pass a convolution, z and dt do not."""

        def __init__(self) -> None:
            super().__init__()
            self.fused = nn.Linear(WIDTH, 2 * WIDTH + 4 + 4 + 3)
            self.conv = wrap(nn.Conv1d(WIDTH + 8, WIDTH + 8, 3, padding=2, groups=WIDTH + 8))
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, u: Tensor) -> Tensor:
            z, mixed, dt = self.fused(u).split([WIDTH, WIDTH + 8, 3], -1)
            mixed = F.silu(self.conv(mixed.mT)[..., : u.shape[1]].mT)
            x, b, c = mixed.split([WIDTH, 4, 4], -1)
            scores = torch.einsum("bsn,btn->bst", b, c).tril()
            step = F.softplus(dt).repeat_interleave(4, -1)
            return self.head((scores @ (x * step)) * F.silu(z))

    roles = rows(Mixer(), torch.randn(2, 4, WIDTH))
    assert roles["fused.weight"].split == (12, 12, 4, 4, 3)
    assert {row.role for name, row in roles.items() if name.startswith("conv")} == {"vector"}


def test_heads_in_one_einsum_are_rows_of_one_matrix_each_for_queries_keys_and_values() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(3, HEADS, WIDTH // HEADS, WIDTH))
            self.head = nn.Linear(WIDTH, 5)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = torch.einsum("btd,chkd->cbhtk", x, self.qkv)
            return self.head(attend(q, k, v))

    row = rows(Attention(), torch.randn(2, 4, WIDTH))["qkv"]
    assert (row.role, row.split) == ("experts", (WIDTH,))
    assert row.reason == "a stack of 3 matrices"


def test_rows_by_turns_are_not_split() -> None:
    def by_head(y: Tensor) -> Tensor:
        return attend(*y.unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1))

    row = rows(Fused(by_head, 3 * WIDTH, "linear"), torch.randn(2, 4, WIDTH))["fused.weight"]
    assert row.split == (3 * WIDTH,)
    assert "by turns" in row.reason


def test_convolutions() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(1, 8, 3, padding=1)
            self.depthwise = nn.Conv2d(8, 16, 3, padding=1, groups=8)
            self.grouped = nn.Conv2d(16, 8, 1, groups=2)
            self.gated = nn.Conv2d(8, 16, 1)
            self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
            self.last = nn.Conv2d(6, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.grouped(F.relu(self.depthwise(self.first(x))))
            x = F.glu(self.gated(x), 1)
            return self.last(self.up(x)).softmax(1)

    actual = rows(Net(), torch.randn(2, 1, 6, 6))
    roles = {name: row.role for name, row in actual.items() if name.endswith("weight")}
    assert roles == {
        "first.weight": "convolution",
        "depthwise.weight": "vector",
        "grouped.weight": "convolution",
        "gated.weight": "convolution",
        "up.weight": "convolution",
        "last.weight": "head",
    }
    assert actual["grouped.weight"].split == (4, 4)
    assert actual["gated.weight"].split == (8, 8)
    assert (actual["up.weight"].split, actual["up.weight"].split_axis) == ((6,), 1)


class Experts(nn.Module):
    def __init__(self, product: str) -> None:
        super().__init__()
        self.product = product
        self.up = nn.Parameter(torch.randn(3, 2 * WIDTH, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.product == "loop":
            y = sum(F.linear(apply_gate(F.linear(x, self.up[e])), self.down[e]) for e in range(3))
        elif self.product == "shared":  # all experts meet all inputs
            y = torch.einsum("bi,eoi->ebo", x, self.up)
            y = torch.einsum("ebi,eoi->bo", apply_gate(y), self.down)
        elif self.product == "bmm":
            y = apply_gate(torch.bmm(x.expand(3, *x.shape), self.up.mT))
            y = torch.bmm(y, self.down.mT).sum(0)
        else:
            routed = torch.stack([x, x.flip(0), -x])
            y = apply_gate(torch.einsum("ebi,eoi->ebo", routed, self.up))
            y = torch.einsum("ebi,eoi->bo", y, self.down)
        return self.head(y)


@pytest.mark.parametrize("variant", ["loop", "bmm", "einsum", "shared"])
def test_experts(variant: str) -> None:
    roles = rows(Experts(variant), torch.randn(5, WIDTH))
    assert (roles["up"].role, roles["up"].split) == ("experts", (WIDTH, WIDTH))
    assert (roles["down"].role, roles["down"].split) == ("experts", (WIDTH,))
    assert roles["up"].split_axis == 1
    assert roles["head.weight"].role == "head"


def test_an_expert_without_rows_has_a_role() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.experts[0](x).relu())

    row = rows(Routed(), torch.randn(3, 4))["experts.1.weight"]
    assert (row.role, row.split) == ("matrix", (4,))
    assert "did not use it" in row.reason


def test_embeddings_and_ties() -> None:
    class Language(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.words, self.positions = nn.Embedding(10, 8), nn.Parameter(torch.randn(1, 5, 8))
            self.token, self.inner = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 8)
            self.longer, self.normalized = nn.Parameter(torch.randn(1, 9, 8)), nn.Embedding(5, 8)
            self.head = nn.Linear(8, 10, bias=False)
            if tied:
                self.head.weight = self.words.weight

        def forward(self, words: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(words), -1, -1), self.words(words)], 1)
            x = x + self.positions + self.longer[:, 2 : 2 + x.shape[1]]
            return self.head(self.inner(x) + F.layer_norm(self.normalized.weight, (8,)))

    words = torch.randint(0, 10, (3, 4))
    untied, tied = rows(Language(False), words), rows(Language(True), words)
    assert untied["words.weight"].role == tied["words.weight"].role == "embedding"
    assert untied["head.weight"].role == "head"
    assert "head.weight" not in tied
    assert "tied" in tied["words.weight"].reason
    for name in ("positions", "longer", "normalized.weight"):
        assert untied[name].role == "embedding"
    assert untied["token"].role == "vector"
    assert untied["inner.weight"].role == "matrix"


def test_a_weight_that_is_used_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(self.layer(x).relu())
            return self.head(x + x @ self.layer.weight)

    roles = rows(Shared(), torch.randn(3, 4))
    assert roles["layer.weight"].role == "matrix"
    assert roles["head.weight"].role == "head"


@pytest.mark.parametrize(
    ("layer_type", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)], ids=["lstm", "gru", "rnn"]
)
def test_recurrent_layers(layer_type: Any, gates: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = layer_type(4, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x)[0])

    roles = rows(Net(), torch.randn(3, 5, 4))
    for name in ("inner.weight_ih_l0", "inner.weight_hh_l0"):
        assert (roles[name].role, roles[name].split) == ("matrix", (6,) * gates)
    assert roles["inner.bias_ih_l0"].role == "vector"
    assert roles["head.weight"].role == "head"


def test_a_recurrent_cell_by_hand() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inputs, self.states = nn.Linear(4, 24), nn.Linear(6, 24)
            self.head = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = c = x.new_zeros(len(x), 6)
            for t in range(x.shape[1]):
                i, f, g, o = (self.inputs(x[:, t]) + self.states(h)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            return self.head(h)

    roles = rows(Cell(), torch.randn(3, 5, 4))
    assert roles["inputs.weight"].split == roles["states.weight"].split == (6,) * 4


def test_attention_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3))
    roles = rows(model, torch.randn(2, 5, 4))
    assert roles["1.self_attn.in_proj_weight"].split == (8, 8, 8)
    assert roles["1.self_attn.out_proj.weight"].role == "matrix"
    assert roles["1.self_attn.in_proj_bias"].role == "vector"
    assert roles["2.weight"].role == "head"
    assert roles["1.linear2.weight"].role == "matrix"


PARAMETRIZED: list[Callable[[nn.Module], nn.Module]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
]


@pytest.mark.parametrize("make", PARAMETRIZED, ids=lambda f: f.__name__)
def test_parametrized_weights(make: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(make(nn.Linear(6, 12)), nn.GLU(), nn.Linear(6, 2))
    roles = rows(model, torch.randn(3, 6))
    weights = [row for row in roles.values() if row.shape == (12, 6)]
    assert [(row.role, row.split) for row in weights] == [("matrix", (6, 6))]
    assert all(row.role == "vector" for row in roles.values() if 1 in row.shape)
    assert roles["2.weight"].role == "head"


def test_convolutions_whose_weights_are_computed() -> None:
    norm = parametrizations.spectral_norm
    up = parametrizations.weight_norm(nn.ConvTranspose1d(4, 6, 2, 2))
    depthwise, grouped = nn.Conv1d(6, 6, 3, groups=6), nn.Conv1d(6, 8, 1, groups=2)
    model = nn.Sequential(up, norm(depthwise), norm(grouped), nn.Conv1d(8, 2, 1))
    roles = rows(model, torch.randn(2, 4, 5))
    actual = {name: (row.role, row.split, row.split_axis) for name, row in roles.items()}
    assert actual["0.parametrizations.weight.original1"] == ("convolution", (6,), 1)
    assert actual["1.parametrizations.weight.original"] == ("vector", (), 0)
    assert actual["2.parametrizations.weight.original"] == ("convolution", (4, 4), 0)


@pytest.mark.parametrize("outputs", [1, 4])
@pytest.mark.parametrize("make", [parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_head_whose_weight_is_computed(make: Callable[..., nn.Module], outputs: int) -> None:
    model = nn.Sequential(make(nn.Linear(6, 6)), nn.ReLU(), make(nn.Linear(6, outputs)))
    roles = [row.role for row in rows(model, torch.randn(3, 6)).values() if len(row.shape) == 2]
    assert roles == ["matrix", "head"]


class RotaryQueries(nn.Module):
    """Unequal queries, keys and values of one weight, whose even and odd entries are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 16)
        self.gates = nn.Linear(8, 16)
        self.head = nn.Linear(8, 3)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2] * x.shape[-1] / 2).view(x.shape[-2], -1)
        even = x[..., ::2]
        odd = x[..., 1::2]
        rotated = (
            even * angles.cos() - odd * angles.sin(),
            even * angles.sin() + odd * angles.cos(),
        )
        return torch.stack(rotated, -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([8, 4, 4], -1)
        k, v = k.repeat(1, 1, 2), v.repeat(1, 1, 2)
        h = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        one, two = self.gates(h).chunk(2, -1)
        return self.head(one.tanh() + two.sigmoid())


def test_rows_that_a_rotary_embedding_adds_belong_to_one_matrix() -> None:
    """After an activation a sum shows nothing: the matrices below it are independent."""
    roles = rows(RotaryQueries(), torch.randn(2, 5, 8))
    assert roles["qkv.weight"].split == (8, 4, 4)
    assert roles["gates.weight"].split == (8, 8)


def test_a_column_has_one_row() -> None:
    class Column(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(6, 1))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * (x @ self.w).sigmoid())

    row = rows(Column(), torch.randn(5, 6))["w"]
    assert (row.role, row.split, row.split_axis) == ("matrix", (1,), 1)


def test_slices_of_one_weight() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(12, 4))
            self.head = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([F.linear(x, w) for w in self.w.chunk(3)], -1).relu())

    roles = rows(Sliced(), torch.randn(5, 4))
    assert (roles["w"].role, roles["w"].split, roles["w"].split_axis) == ("matrix", (4, 4, 4), 0)


def test_two_heads_and_none() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.policy, self.value = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.inner(x).relu()
            return {"policy": self.policy(x), "value": self.value(x).squeeze(-1)}

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x.relu())
            return x

    roles = rows(Both(), torch.randn(3, 4))
    assert {name for name, row in roles.items() if row.role == "head"} == {
        "policy.weight",
        "value.weight",
    }
    assert all(row.role != "head" for row in rows(Residual(), torch.randn(3, 4)).values())


def test_scores_of_pairs_have_no_head() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 6), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) @ self.two(x).mT

    assert {row.role for row in rows(Pairs(), torch.randn(3, 4)).values()} == {"matrix", "vector"}


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training: bool) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(64, 3)
    )
    model.train(training)
    model[0].weight.requires_grad_(False)
    x = torch.randn(3, 2, 6, 6)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random = torch.get_rng_state()
    with torch.no_grad():
        table = pb.parameter_roles(model, x)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5
    assert model.training is training
    assert not any(module._forward_hooks for module in model.modules())
    assert [row.name for row in table] == [name for name, _ in model.named_parameters()]
    assert table[0].role == "convolution"


def test_the_table_prints_and_names_the_default_rules() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    table = pb.parameter_roles(model, torch.randn(3, 4))
    assert [row.rule for row in table] == [
        "spectral", "adam", "adam", "adam", "adam", "adam",
    ]  # fmt: skip
    lines = str(table).splitlines()
    assert lines[0].split() == ["parameter", "shape", "role", "split", "rule", "reason"]
    assert lines[1].split()[:5] == ["0.weight", "8×4", "matrix", "8", "spectral"]
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    assert pb.parameter_roles(plain, torch.randn(3, 4))[2].rule == "eigenbasis"


def test_lazy_modules_are_refused() -> None:
    with pytest.raises(pb.PullbackError, match="no shape yet"):
        pb.parameter_roles(nn.LazyLinear(3), torch.randn(2, 4))


def test_models_on_the_meta_device_have_roles() -> None:
    model = Fused(attend_to_chunks, 3 * WIDTH, "linear").to("meta")
    roles = rows(model, torch.randn(2, 4, WIDTH, device="meta"))
    assert roles["fused.weight"].split == (WIDTH,) * 3
    assert roles["head.weight"].role == "head"


def test_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(pb.PullbackError, match="inference mode"):
        pb.parameter_roles(nn.Linear(4, 2), torch.randn(3, 4))


def test_reentrant_checkpoints_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            inputs = self.first(x)
            return checkpoint.checkpoint(self.second, inputs, use_reentrant=True)

    with pytest.raises(pb.PullbackError, match="use_reentrant=False"):
        pb.parameter_roles(Model(), torch.randn(3, 4))


def test_overlapping_parts_become_one() -> None:
    assert merge_overlapping([[0, 1], [2, 3], [3, 4], [6]]) == [[0, 1], [2, 3, 4], [6]]
