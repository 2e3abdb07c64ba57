"""Verification: what is wrong is refused, whatever the scales, and many layers cost little."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import PullbackError
from pullback.symmetry import Leg, Mixing, Scaling, find
from pullback.symmetry.graph.example import Example
from pullback.symmetry.verify import Verified, Verifier, verify_actions

from .networks import Of, dense, in_kernel, mlp, randomize


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def scaling(units: int, into: str, out: str) -> Scaling:
    line = torch.arange(units)
    return Scaling(units, [Leg(into, line[:, None], 1), Leg(out, line[None], -1)])


def test_residuals_estimate_the_norm_of_j_z() -> None:
    """Against the dense J, for a generator that is no symmetry (its bias is left behind)."""
    model = randomize(mlp([3, 4, 2]))
    x = normal(20, 3)
    wrong = scaling(4, "0.weight", "2.weight")
    residuals = Verifier(Example(model, x)).unit_residuals(wrong)
    params = dict(model.named_parameters())
    z = wrong.generators(params)
    j = dense(model, x)
    for i in range(4):
        flat = torch.cat(
            [z[n][i].flatten() if n in z else torch.zeros(p.numel()) for n, p in params.items()]
        )
        assert (j @ flat).norm() / flat.norm() / j.norm() > 1e-4
        assert 1e-4 < residuals[i] <= 2.0
    accepted, rejected = verify_actions(Example(model, x), [wrong])
    assert not accepted
    assert len(rejected) == 1


def test_one_wrong_unit_among_good_ones_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.ReLU(), nn.Linear(5, 2)).double()
    legs = [Leg("0.weight", torch.arange(5)[:, None], 1)]
    # columns 3 and 4 of the next layer are mistaken for each other
    legs.append(Leg("2.weight", torch.tensor([[0, 1, 2, 4, 3]]), -1))
    # far apart in size, so that a wrong one could hide behind the others
    with torch.no_grad():
        model.get_parameter("0.weight")[3:] *= 1e-9
    accepted, rejected = verify_actions(Example(model, normal(30, 3)), [Scaling(5, legs)])
    assert [v.action.dimension for v in accepted] == [3]
    assert "2 of 5 units" in rejected[0].about


def test_a_wrong_mixing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    rows = torch.arange(4)
    wrong = Mixing(4, [("0.weight", rows), ("0.bias", rows)], [("2.weight", rows, False)])
    accepted, rejected = verify_actions(Example(model, normal(30, 3)), [wrong])
    assert not accepted
    assert rejected[0].residual > 1e-3


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e200])
def test_layers_of_any_size_are_verified_and_retracted(size: float) -> None:
    model = randomize(mlp([3, 4, 5, 2]))
    x = normal(9, 3)
    y = model(x).detach()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(size)
        model.get_parameter("0.bias").mul_(size)
        model.get_parameter("2.weight").div_(size)
    symmetry = find(model, x)
    assert symmetry.dimension == 9
    assert not symmetry.rejected
    symmetry.retract_()
    assert (model(x) - y).norm() <= 1e-12 * y.norm()
    assert all(1e-3 < float(p.detach().abs().amax()) < 1e3 for p in model.parameters())


def test_a_model_that_computes_in_float32_is_verified_to_its_own_precision() -> None:
    model = Of(lambda s, x: s.b(F.relu(s.a(x))).float(), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    symmetry = find(model, torch.randn(9, 3))
    assert symmetry.dimension == 4
    assert all(isinstance(v, Verified) for v in symmetry.verified)


def deep(blocks: int, width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(2, width, 3, padding=1, bias=False)]
    for _ in range(blocks):
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))


@pytest.mark.parametrize("training", [True, False])
def test_many_batch_norms_are_reported_as_one(training: bool) -> None:
    model = randomize(deep(6, 4)).train(training)
    x = normal(6, 2, 5, 5)
    symmetry = find(model, x)
    assert len(symmetry.rejected) == (6 if training else 0)
    assert str(symmetry).count("rejected") == (1 if training else 0)
    if training:
        assert "5 more" in str(symmetry)
        assert "eps" in symmetry.rejected[0].reason


def test_torch_transformers_with_a_mask_are_traced() -> None:
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, 0.0, batch_first=True, activation="gelu", norm_first=True
    )
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    model = randomize(model)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    x = normal(3, 5, 4)
    with_mask = find(model, {"src": x, "mask": mask})
    assert with_mask.dimension == find(model, x).dimension > 0
    wrapped = Of(lambda s, x: s.m(x, mask=mask), m=model)
    assert in_kernel(dense(wrapped, x), with_mask.generators()) <= 1e-12


def test_gated_linear_units_scale_in_one_half() -> None:
    model = randomize(nn.Sequential(nn.Linear(3, 8), nn.GLU(), nn.Linear(4, 2)))
    symmetry = find(model, normal(40, 3))
    assert symmetry.dimension == 4
    assert in_kernel(dense(model, normal(40, 3, seed=5)), symmetry.generators()) <= 1e-12


BAD = {
    "no module": (lambda x: x, torch.zeros(2, 3), "nn.Module"),
    "meta": (nn.Linear(3, 2, device="meta"), torch.zeros(2, 3, device="meta"), "meta"),
    "wrong shape": (mlp([3, 4, 2]), torch.zeros(2, 5), "does not run"),
    "integers": (mlp([3, 4, 2]), torch.zeros(2, 3).long(), "does not run"),
    "classes": (Of(lambda s, x: s.a(x).argmax(-1), a=nn.Linear(3, 2)), torch.ones(2, 3), "outputs"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_verified_is_refused(name: str) -> None:
    model, x, message = BAD[name]
    with pytest.raises(PullbackError, match=message):
        find(model, x)  # pyright: ignore[reportArgumentType]


def test_rank_of_a_large_network_says_what_was_skipped() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 256))
    said = str(find(model, torch.randn(8, 64)).rank())
    assert "nullity of J skipped" in said
    assert "skipped: J is" in said
    assert "None" not in said
