"""Every registered layer, alone: rows, products and Grams from (a, δ) against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pullback.maps import Call, ModuleMap, identity_covectors
from pullback.maps.layers import REGISTRY, Layer
from pullback.maps.layers.affine import AffineBlock
from pullback.maps.layers.gram import Route
from pullback.testing import assert_close, jacobian


def randomize(module: nn.Module) -> nn.Module:
    """Gains of one and shifts of zero would hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for b in module.buffers():
            if b.is_floating_point():
                b.add_(torch.rand_like(b))
    return module


CASES = {
    "Linear": (lambda: nn.Linear(3, 2), (4, 3)),
    "Linear, no bias": (lambda: nn.Linear(3, 2, bias=False), (4, 3)),
    "Linear over places": (lambda: nn.Linear(3, 2), (4, 2, 3, 3)),
    "Linear to one": (lambda: nn.Linear(3, 1), (4, 3)),
    "Conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (3, 2, 7)),
    "Conv1d circular": (lambda: nn.Conv1d(2, 2, 4, padding=3, padding_mode="circular"), (3, 2, 5)),
    "Conv1d same, even": (lambda: nn.Conv1d(2, 2, 4, padding="same", dilation=3), (2, 2, 6)),
    "Conv1d valid": (lambda: nn.Conv1d(2, 2, 2, padding="valid"), (3, 2, 5)),
    "Conv1d reflect": (lambda: nn.Conv1d(1, 2, 3, padding=2, padding_mode="reflect"), (3, 1, 4)),
    "Conv1d replicate": (
        lambda: nn.Conv1d(1, 2, 3, padding=2, padding_mode="replicate"),
        (3, 1, 4),
    ),
    "Conv2d groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (2, 4, 3, 3)),
    "Conv2d depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3, padding=1, bias=False), (2, 3, 3, 3)),
    "Conv2d mixed": (
        lambda: nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
        (2, 2, 4, 5),
    ),
    "Conv2d 1×1": (lambda: nn.Conv2d(3, 2, 1), (2, 3, 2, 2)),
    "Conv2d same, circular": (
        lambda: nn.Conv2d(2, 2, (2, 3), padding="same", padding_mode="circular"),
        (2, 2, 3, 4),
    ),
    "Conv3d": (
        lambda: nn.Conv3d(2, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 1), groups=2),
        (2, 2, 2, 3, 2),
    ),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1),
        (3, 2, 4),
    ),
    "ConvTranspose1d, output padding beyond any input": (
        lambda: nn.ConvTranspose1d(2, 2, 2, dilation=4, output_padding=3),
        (3, 2, 3),
    ),
    "ConvTranspose2d groups": (
        lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(1, 2), dilation=(2, 1), groups=2),
        (2, 4, 2, 2),
    ),
    "ConvTranspose2d, no bias": (
        lambda: nn.ConvTranspose2d(2, 3, 2, stride=2, bias=False),
        (2, 2, 2, 3),
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 1, 1), groups=2),
        (2, 2, 2, 3, 3),
    ),
    "LayerNorm": (lambda: nn.LayerNorm(4), (3, 4)),
    "LayerNorm over two axes": (lambda: nn.LayerNorm((2, 3)), (3, 2, 2, 3)),
    "LayerNorm, no bias": (lambda: nn.LayerNorm(4, bias=False), (3, 2, 4)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (3, 2, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (3, 4, 2)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3).eval(), (4, 3)),
    "BatchNorm1d over places": (lambda: nn.BatchNorm1d(3).eval(), (4, 3, 2)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3).eval(), (2, 3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2).eval(), (2, 2, 2, 1, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(2, affine=True), (3, 2, 4)),
    "InstanceNorm2d, tracked": (
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True),
        (2, 2, 2, 3),
    ),
    "InstanceNorm2d, eval": (
        lambda: nn.InstanceNorm2d(2, affine=True, track_running_stats=True).eval(),
        (2, 2, 2, 3),
    ),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 2, 1)),
    "PReLU": (lambda: nn.PReLU(), (3, 2, 4)),
    "PReLU per channel": (lambda: nn.PReLU(2), (3, 2, 4)),
    "PReLU per feature": (lambda: nn.PReLU(4), (3, 4)),
    "PReLU on scalars": (lambda: nn.PReLU(), (5,)),
    "Embedding": (lambda: nn.Embedding(5, 2), (3, 4)),
    "Embedding, padding": (lambda: nn.Embedding(5, 2, padding_idx=1), (3, 4)),
    "Embedding of one token": (lambda: nn.Embedding(5, 3), (4,)),
}
ROUTES = ("hadamard", "materialized")


def test_every_registered_layer_stands_in_the_table() -> None:
    torch.manual_seed(0)
    tested_types = {type(make()) for make, _ in CASES.values()}
    layers = {layer_type for layer_type, layer in REGISTRY.items() if isinstance(layer, Layer)}
    layers = {
        layer_type for layer_type in layers if layer_type.__module__.startswith("torch.")
    }  # no stand-ins
    assert layers <= tested_types, f"no case for {layers - tested_types}"


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", CASES)
def test_layer(name: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    module = randomize(make().double())
    table = isinstance(module, nn.Embedding)
    if table:
        x = torch.randint(0, 5, shape)
    else:
        x = torch.randn(*shape).double()
    if route == "materialized" and not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
        pytest.skip("one route")
    monkeypatch.setattr(AffineBlock, "_choose_route", lambda self, other: Route(route))
    # couple the outputs of a sample, so that δ is dense
    model = nn.Sequential(module, Mixed())
    z = model(x)
    j = jacobian(z, list(model.parameters()))
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    linear = ModuleMap(model, Call.of(x)).linearize(dict(model.named_parameters()))
    pulled = linear.pullback(identity_covectors(linear.value))
    assert {c.reason for c in pulled.coverage} == {"known layer"}, pulled.coverage
    n, r = pulled.shape
    assert_close(pulled.rows(), j, 1e-12, "rows = J")
    v = torch.randn(j.shape[1]).double()
    c = torch.randn(n, r).double()
    assert_close(pulled.project(v), (j @ v).view(n, r), 1e-12, "project(v) = J v")
    assert_close(pulled.lift(c), j.T @ c.flatten(), 1e-12, "lift(c) = Jᵀc")
    for budget in (1, 2**30):
        assert_close(pulled.kernel(budget=budget), j @ j.T, 1e-12, "kernel = JJᵀ")
        piece = pulled.narrow(1, n)
        assert_close(pulled.kernel(piece, budget=budget), j @ j[r:].T, 1e-12, "kernel of two parts")
        assert_close(piece.kernel(budget=budget), j[r:] @ j[r:].T, 1e-12, "kernel of a part")
    assert_close(piece.rows(), j[r:], 1e-12, "rows of a part")
    for key, before in buffers.items():
        assert torch.equal(dict(module.named_buffers())[key], before), f"{key} was written"


class Mixed(nn.Module):
    """A fixed nonlinear mix of each sample's entries, three numbers of it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim > 1:
            x = x.flatten(1)
        else:
            x = x[:, None]
        mix = torch.linspace(-1, 1, 3 * x.shape[1], dtype=x.dtype).view(3, -1)
        return torch.sin(x @ mix.T + 0.3 * x.sum(1, keepdim=True))


@pytest.mark.parametrize("route", ROUTES)
def test_half_frozen_affine_layers(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the weight, only the bias."""
    monkeypatch.setattr(AffineBlock, "_choose_route", lambda self, other: Route(route))
    torch.manual_seed(0)
    x = torch.randn(3, 2, 5).double()
    for frozen in ("weight", "bias"):
        if route == "materialized" and frozen == "weight":
            continue  # a bias alone has no rows to speak of: it always goes by its Gram
        model = nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), Mixed()).double()
        getattr(model[0], frozen).requires_grad_(False)
        free = {n: p for n, p in model.named_parameters() if p.requires_grad}
        j = jacobian(model(x), list(free.values()))
        linear = ModuleMap(model, Call.of(x)).linearize(free)
        pulled = linear.pullback(identity_covectors(linear.value))
        assert_close(pulled.rows(), j, 1e-12, "rows")
        assert_close(pulled.kernel(budget=2**30), j @ j.T, 1e-12, "kernel")
        v = torch.randn(j.shape[1]).double()
        assert_close(pulled.project(v).flatten(), j @ v, 1e-12, "project")


def test_a_bias_alone_goes_by_its_rows() -> None:
    model = nn.Linear(50, 4).double()
    model.weight.requires_grad_(False)
    x = torch.randn(3, 50).double()
    linear = ModuleMap(model, Call.of(x)).linearize({"bias": model.bias})
    pulled = linear.pullback(identity_covectors(linear.value))
    assert [c.route for c in pulled.coverage] == ["rows"]
    assert_close(pulled.kernel(budget=2**30), torch.eye(4).repeat(3, 3).double(), 1e-15, "kernel")


@pytest.mark.parametrize(
    ("shape", "want"),
    [
        (((4, 1, 1, 500), 500), "hadamard"),  # wide layer, one place
        (((64, 1, 1, 2), 2), "materialized"),  # tiny layer, many samples
        (((4, 1, 100, 8), 8), "materialized"),  # many places, few features: a convolution
        (((4, 1, 3, 900), 900), "hadamard"),
    ],
    ids=str,
)
def test_the_cheaper_route_is_taken(shape, want: str) -> None:
    (n, g, t, i), o = shape
    block = AffineBlock("w", "b", torch.zeros(n, g, t, i), torch.randn(n, 2, g, t, o))
    assert block.route == want
