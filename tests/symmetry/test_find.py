"""Symmetries that are found are in the kernel of J, and where nothing is degenerate they are it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import PullbackError
from pullback.symmetry import Leg, Mixing, Scaling, find
from tests.symmetry.networks import (
    Of,
    basic_block,
    cross_attention,
    dense,
    fused_attention,
    in_kernel,
    mixer,
    mlp,
    nullity,
    own_attention,
    randomize,
    segmentation,
    shared_keys,
    shortcut,
)


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def encoder(**kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, activation="gelu", **kwargs)


def wide(model: nn.Module) -> nn.Module:
    """Biases near zero, so that units change side on the example."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data *= 0.1
    return model


def gated_layer(s: Any, x: Tensor) -> Tensor:
    a, b = s.w1(x).chunk(2, -1)
    return s.w2(F.silu(a) * b)


#: name -> (model, example, generators)
EXACT: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "mlp 3-4-5-2": (lambda: wide(randomize(mlp([3, 4, 5, 2]), 4)), normal(200, 3), 9),
    "mlp without bias": (lambda: randomize(mlp([4, 5, 3, 2], bias=False), 2), normal(200, 4), 8),
    "leaky": (lambda: randomize(mlp([3, 5, 2], nn.LeakyReLU)), normal(100, 3), 5),
    "prelu": (lambda: wide(randomize(mlp([3, 5, 2], nn.PReLU))), normal(100, 3), 5),
    "rrelu": (lambda: wide(randomize(mlp([3, 5, 2], nn.RReLU))).eval(), normal(100, 3), 5),
    "gelu": (lambda: randomize(mlp([3, 5, 2], nn.GELU)), normal(60, 3), 0),
    "tanh": (lambda: randomize(mlp([3, 5, 2], nn.Tanh)), normal(60, 3), 0),
    "conv, groups, pooling, flatten": (
        lambda: wide(
            randomize(
                nn.Sequential(
                    *(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2)),
                    *(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.LeakyReLU(), nn.AvgPool2d(2)),
                    *(nn.Flatten(), nn.Linear(6, 2)),
                ),
                4,
            )
        ),
        normal(120, 2, 4, 4),
        10,
    ),
    "transposed and depthwise": (
        lambda: wide(
            randomize(
                nn.Sequential(
                    *(nn.ConvTranspose2d(2, 4, 3, groups=2), nn.ReLU()),
                    *(nn.Conv2d(4, 4, 3, groups=4), nn.LeakyReLU(), nn.Conv2d(4, 3, 1)),
                )
            )
        ),
        normal(10, 2, 4, 4),
        8,
    ),
    "conv1d, batch norm with fixed statistics": (
        lambda: randomize(
            nn.Sequential(
                *(nn.Conv1d(5, 4, 3, padding=1), nn.BatchNorm1d(4), nn.LeakyReLU()),
                *(nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 2)),
            )
        ).eval(),
        normal(90, 5, 4),
        12,
    ),
    # scalings 2 + 3 + 3, GL(2) into and out of a transposed convolution
    "segmentation": (lambda: wide(randomize(segmentation())), normal(12, 2, 4, 4), 16),
    "residual block": (lambda: wide(randomize(basic_block())), normal(200, 2, 5, 5), 7),
    "sum of two layers": (lambda: wide(randomize(shortcut())), normal(150, 2, 5, 5), 11),
    "linear layers": (lambda: randomize(mlp([5, 3, 4], nn.Identity)), normal(40, 5), 12),
    "gate": (
        lambda: randomize(Of(gated_layer, w1=nn.Linear(3, 8), w2=nn.Linear(4, 3))),
        normal(60, 3),
        4,
    ),
    "layer norm, softmax": (
        lambda: wide(
            randomize(
                nn.Sequential(
                    *(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU()),
                    *(nn.Linear(4, 3), nn.Softmax(-1)),
                )
            )
        ),
        normal(90, 3),
        13,
    ),
    "group norm": (
        lambda: wide(
            randomize(
                nn.Sequential(
                    *(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.LeakyReLU()),
                    *(nn.Flatten(), nn.Linear(16, 2)),
                )
            )
        ),
        normal(120, 2, 4, 4),
        6,
    ),
    "fused attention": (lambda: randomize(fused_attention()), normal(20, 5, 4), 28),
    "own attention": (lambda: randomize(own_attention()), normal(20, 5, 4), 24),
    "shared keys": (lambda: randomize(shared_keys()), normal(20, 5, 4), 12),
    "cross attention": (
        lambda: randomize(cross_attention()),
        (normal(20, 5, 4), normal(20, 6, 4, seed=3)),
        52,
    ),
    "cross attention, separate weights": (
        lambda: randomize(cross_attention(kdim=3, vdim=3, weights=True)),
        (normal(20, 5, 4), normal(20, 6, 3, seed=3)),
        50,
    ),
    "pre-norm transformer block": (
        lambda: randomize(encoder(norm_first=True)),
        normal(20, 5, 4),
        59,
    ),
    "post-norm transformer block": (lambda: randomize(encoder()), normal(20, 5, 4), 46),
    "recurrent": (lambda: randomize(nn.LSTM(3, 2)), normal(4, 30, 3), 8),
    # 4 gains, 4 shifts and 3 mean directions into the layer that reads the mean
    "layer norm, averaged": (
        lambda: randomize(
            Of(lambda s, x: s.out(s.norm(x).mean(1)), norm=nn.LayerNorm(4), out=nn.Linear(4, 3))
        ),
        normal(60, 5, 4),
        11,
    ),
    "linear layers with a mean between": (
        lambda: randomize(
            nn.Sequential(
                *(nn.Conv2d(2, 3, 2), nn.AdaptiveAvgPool2d(1)),
                *(nn.Flatten(), nn.Linear(3, 3)),
            )
        ),
        normal(60, 2, 4, 4),
        12,
    ),
    "keys and values are means": (
        lambda: randomize(
            Of(
                lambda s, x: s.out(
                    F.scaled_dot_product_attention(
                        s.q(x), *(f(x).unflatten(1, (2, 2)).mean(2) for f in (s.k, s.v))
                    )
                ),
                **{name: nn.Linear(3, 3) for name in ("q", "k", "v", "out")},
            )
        ),
        normal(30, 4, 3),
        9 + 9 + 3 + 3,
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_kernel_of_j_is_the_symmetries(name: str) -> None:
    make, x, expected = EXACT[name]
    model = make()
    if isinstance(x, tuple):
        args = x
    else:
        args = (x,)
    symmetry = find(model, x)
    z = symmetry.generators()
    j = dense(model, *args)
    assert z.shape == (symmetry.dimension, j.shape[1])
    if len(z):
        assert in_kernel(j, z) <= 1e-12
    if len(z):
        independent = int(torch.linalg.matrix_rank(z, rtol=1e-10))
    else:
        independent = 0
    assert independent == expected
    assert nullity(j) == independent, symmetry.rank()


def test_relu_block_of_a_transformer_or_the_difference_is_explained() -> None:
    model = randomize(encoder(norm_first=True), 3)
    model.__dict__["activation"] = F.relu
    x = normal(12, 5, 4)
    symmetry = find(model, x)
    ranks = symmetry.rank()
    assert ranks.independent == 59 + 6
    assert in_kernel(dense(model, x), symmetry.generators()) <= 1e-12
    assert ranks.unexplained == 0 or ranks.reasons


def test_layers_that_mix_tokens_or_the_difference_is_explained() -> None:
    model = randomize(mixer(), 3)
    x = normal(120, 5, 4)
    symmetry = find(model, x)
    j = dense(model, x)
    assert in_kernel(j, symmetry.generators()) < 1e-14
    # channels' layers are those of a transformer: 11 + 11 behind n2 and n3, 4 of c2; 1 of n1's gain
    assert symmetry.dimension == 27
    ranks = symmetry.rank()
    assert ranks.unexplained == nullity(j) - 27 == 6
    # the 5 biases of t2 are constants that the next norms take away, and then there is one more
    assert "the graph does not show" in ranks.reasons[0]


def test_batch_norm_in_training_mode() -> None:
    model = wide(randomize(basic_block(nn.BatchNorm2d))).train()
    x = normal(60, 2, 5, 5)
    symmetry = find(model, x)
    abouts = " ".join(a.about for a in symmetry.actions)
    assert "c1.bias before a batch norm" in abouts
    assert symmetry.dimension == 4 + 3 + 4 + 3
    # a rescaling before the norm is undone only up to eps, and the number says so
    assert {r.about.split()[2].rstrip(",") for r in symmetry.rejected} == {"c1", "c2"}
    assert all(1e-9 < r.residual < 1e-2 for r in symmetry.rejected)
    assert in_kernel(dense(model, x), symmetry.generators()) <= 1e-12


def test_without_eps_a_norm_swallows_scales() -> None:
    model = randomize(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, eps=0.0), nn.Tanh()))
    symmetry = find(model, normal(30, 3))
    assert not symmetry.rejected
    assert any(isinstance(a, Scaling) and a.units == 1 for a in symmetry.actions)


def test_shifted_relu_and_gelu_are_not_reported() -> None:
    shifted = randomize(
        Of(lambda s, x: s.b(F.relu(s.a(x) - 0.3)), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    )
    for model in (
        shifted,
        randomize(mlp([3, 4, 2], nn.GELU)),
        randomize(mlp([3, 4, 2], nn.ReLU6)),
    ):
        symmetry = find(model, normal(20, 3))
        assert symmetry.dimension == 0
        assert symmetry.generators().shape == (0, 26)
        assert symmetry.scalings == []
        assert "no symmetry was found" in str(symmetry)
        assert symmetry.orbit(torch.zeros(0)).keys() == dict(model.named_parameters()).keys()


def test_printed_generators_are_not_in_the_kernel() -> None:
    """∂/∂r¹ − ∂/∂rʲ (unit radial fields), and the printed bias form, which scales b_r for A_r."""
    model = wide(randomize(mlp([3, 4, 5, 2]), 1))
    x = normal(50, 3)
    j = dense(model, x)
    params = dict(model.named_parameters())
    right = find(model, x, group="layer").generators()
    assert right.shape == (2, 63 - 10)
    assert in_kernel(j, right) <= 1e-12

    w = {n: p.detach() for n, p in params.items()}
    radial = torch.cat(
        [
            (w["0.weight"] / w["0.weight"].norm()).flatten(),
            torch.zeros(4 + 20 + 5, dtype=torch.float64),
            (-w["4.weight"] / w["4.weight"].norm()).flatten(),
            torch.zeros(2, dtype=torch.float64),
        ]
    )[None]
    assert in_kernel(j, radial) > 1e-3
    # Z_3 = A_1 + b_1 + b_2 − A_3: right with A_r last, wrong with b_r
    pieces = [
        w["0.weight"],
        w["0.bias"],
        0 * w["2.weight"],
        w["2.bias"],
        -w["4.weight"],
        0 * w["4.bias"],
    ]
    z3 = torch.cat([p.flatten() for p in pieces])[None]
    assert in_kernel(j, z3) <= 1e-12
    assert torch.linalg.matrix_rank(torch.cat([right, z3])) == 2
    pieces[4] = 0 * w["4.weight"]
    pieces[5] = -w["4.bias"]
    assert in_kernel(j, torch.cat([p.flatten() for p in pieces])[None]) > 1e-3


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 4)
        self.fc2 = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        if h.sum() > 0:
            h = 2 * h
        return self.fc2(F.relu(h))


def between(units: int, into: str, out: str) -> Scaling:
    line = torch.arange(units)
    legs = [Leg(f"{into}.weight", line[:, None], 1), Leg(f"{into}.bias", line, 1)]
    return Scaling(units, [*legs, Leg(f"{out}.weight", line[None], -1)])


def test_control_flow_is_refused_and_actions_can_be_named() -> None:
    model = Branching().double()
    x = normal(7, 3)
    with pytest.raises(PullbackError, match="actions="):
        find(model, x)
    named = between(4, "fc1", "fc2")
    symmetry = find(model, x, actions=[named])
    assert symmetry.generators().shape == (4, 26)
    assert in_kernel(dense(model, x), symmetry.generators()) <= 1e-12
    assert find(model, x, actions=[named], group="layer").dimension == 1


def test_named_actions_are_verified() -> None:
    model = randomize(mlp([3, 4, 5, 2], nn.GELU))
    model[1] = nn.ReLU()
    symmetry = find(model, normal(9, 3), actions=[between(4, "0", "2"), between(5, "2", "4")])
    assert symmetry.dimension == 4
    assert symmetry.rejected[0].residual > 1e-3


def test_shared_parameters_never_give_a_wrong_generator() -> None:
    def twice(s: Any, x: Tensor) -> Tensor:
        return s.c(F.relu(s.b(F.relu(s.b(F.relu(s.a(x)))))))

    model = randomize(Of(twice, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2)))
    x = normal(30, 3)
    symmetry = find(model, x)
    assert symmetry.dimension == 4  # one scale per channel of all three activations
    assert in_kernel(dense(model, x), symmetry.generators()) <= 1e-12

    def tied(s: Any, t: Tensor) -> Tensor:
        h = s.e(t)
        return (h + s.f2(F.relu(s.f1(h)))) @ s.e.weight.T

    pieces = {"e": nn.Embedding(7, 4), "f1": nn.Linear(4, 6), "f2": nn.Linear(6, 4)}
    words = randomize(Of(tied, **pieces))
    tokens = torch.arange(7)[None]
    symmetry = find(words, tokens)
    assert symmetry.dimension == 6
    assert in_kernel(dense(words, tokens), symmetry.generators()) <= 1e-12
    # a table against itself: s(e) = −s(e)
    separate = randomize(Of(lambda s, t: F.relu(s.e(t)) @ s.e.weight.T, e=nn.Embedding(7, 4)))
    assert find(separate, tokens).dimension == 0


def test_frozen_parameters_do_not_move() -> None:
    model = mlp([3, 4, 5, 2]).double()
    model[0].requires_grad_(False)
    symmetry = find(model, normal(20, 3))
    assert symmetry.dimension == 5
    assert symmetry.generators().shape == (5, sum(p.numel() for p in model[2:].parameters()))
    model.requires_grad_(False)
    assert find(model, normal(20, 3)).dimension == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_verified_in_float64(dtype: torch.dtype) -> None:
    model = mlp([3, 4, 5, 2]).to(dtype)
    symmetry = find(model, torch.randn(20, 3, dtype=dtype))
    assert symmetry.generators().shape == (9, 53)
    assert all(v.residual <= 1e-13 for v in symmetry.verified)
    moved = symmetry.orbit(0.1)
    assert {w.dtype for w in moved.values()} == {dtype}


def test_without_an_example() -> None:
    assert find(mlp([3, 4, 2])).dimension == 4
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 26 * 26, 2))
    assert find(images).dimension == 4
    with pytest.raises(PullbackError, match="Pass an example"):
        find(Of(lambda s, x, y: s.a(x) + y, a=nn.Linear(3, 3)))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Dropout(0.5)
    )
    before = {n: t.clone() for n, t in model.state_dict().items()}
    x = torch.randn(4, 2, 5, 5)
    inputs_before = x.clone()
    find(model, x)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert torch.equal(x, inputs_before)
    assert all(p.grad is None for p in model.parameters())


def test_heads_are_mixed_by_one_matrix_each() -> None:
    symmetry = find(randomize(own_attention()), normal(6, 5, 4))
    mixings = [a for a in symmetry.actions if isinstance(a, Mixing)]
    assert [m.size for m in mixings] == [2, 2, 2, 2]


def test_structured_arguments_and_outputs() -> None:
    def forward(s: Any, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        h = F.relu(s.a(x)) * mask
        return {"y": s.b(h), "hidden": h.argmax(-1)}

    model = randomize(Of(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
    x = normal(9, 3)
    mask = torch.ones(9, 4, dtype=torch.float64)
    assert find(model, (x, mask)).dimension == 0  # argmax compares the units
    assert find(randomize(mlp([3, 4, 2])), {"input": x}).dimension == 4


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.full((4, 3), float("nan"))])
def test_bad_examples_are_refused(x: Tensor) -> None:
    with pytest.raises(PullbackError, match="example"):
        find(mlp([3, 4, 2]), x)


def test_one_sample_without_a_batch() -> None:
    symmetry = find(randomize(mlp([3, 4, 2])), normal(3))
    assert symmetry.dimension == 4
    assert symmetry.rank().reasons


def test_writing_in_place() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        h[:, :2] = h[:, :2].relu()
        h[:, 2:] = torch.tanh(h[:, 2:])
        return s.b(h)

    model = randomize(Of(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)))
    x = normal(30, 3)
    symmetry = find(model, x)
    before = model(x).detach()
    assert symmetry.dimension == 2
    assert [s.units for s in symmetry.scalings] == [2]  # some rows of the weights, and not others
    symmetry.retract_()
    assert symmetry.slice().contains()
    assert torch.allclose(model(x), before, rtol=1e-12)


def test_rms_norm_swallows_scales_up_to_eps() -> None:
    layers = (nn.Linear(3, 4), nn.RMSNorm(4, eps=1e-4), nn.Tanh())
    rejected = find(randomize(nn.Sequential(*layers)), normal(30, 3)).rejected
    assert [r.about for r in rejected] == ["scaling of 0"]
    assert 1e-8 < rejected[0].residual < 1e-2
    layers[1].eps = None  # then that of float64
    assert find(randomize(nn.Sequential(*layers)), normal(30, 3)).rejected == ()


def test_complex_parameters_are_refused() -> None:
    x = normal(5, 3).to(torch.complex64)
    with pytest.raises(PullbackError, match="complex"):
        find(mlp([3, 4, 2], nn.Identity).to(torch.complex64), x)


def test_group_must_be_known() -> None:
    with pytest.raises(PullbackError, match="neuron"):
        find(mlp([3, 4, 2]), torch.randn(5, 3), group="channel")  # pyright: ignore
