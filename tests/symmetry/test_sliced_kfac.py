"""K-FAC on a slice: its averages and inverses move with the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Exact, Invariant
from pullback.symmetry import Sliced, find
from tests.kfac_options import kfac_of
from tests.pairs import each_once
from tests.symmetry.networks import Of, randomize


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tied() -> nn.Module:
    """One layer that is used twice, on its own outputs."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = nn.functional.leaky_relu(s.into(x), 0.3)
        for _ in range(2):
            h = nn.functional.leaky_relu(s.again(h), 0.3)
        return s.out(h)

    return Of(forward, into=nn.Linear(4, 4), again=nn.Linear(4, 4), out=nn.Linear(4, 3))


def leaky() -> nn.Module:
    return nn.LeakyReLU(0.3)


IMAGES = normal(80, 2, 4, 4)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (
        lambda: nn.Sequential(
            *(nn.Linear(4, 6), leaky(), nn.Linear(6, 5), leaky(), nn.Linear(5, 3))
        ),
        normal(80, 4),
    ),
    "without biases": (
        lambda: nn.Sequential(
            *(nn.Linear(4, 6, bias=False), leaky(), nn.Linear(6, 5, bias=False), leaky()),
            nn.Linear(5, 3),
        ),
        normal(80, 4),
    ),
    "groups": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 2, groups=2), leaky(), nn.Conv2d(4, 4, 2, groups=2), leaky()),
            *(nn.Flatten(), nn.Linear(16, 3)),
        ),
        IMAGES,
    ),
    "transposed": (
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 3, 2, stride=2), leaky(), nn.ConvTranspose2d(3, 2, 2), leaky()),
            *(nn.Flatten(), nn.Linear(18, 3)),
        ),
        IMAGES,
    ),
    "table": (
        lambda: nn.Sequential(nn.Embedding(5, 4), leaky(), nn.Flatten(), nn.Linear(8, 3)),
        torch.randint(5, (80, 2), generator=torch.Generator().manual_seed(0)),
    ),
    "norm": (
        lambda: nn.Sequential(
            *(nn.Linear(4, 5), nn.LayerNorm(5), leaky(), nn.Linear(5, 3)),
        ),
        normal(80, 4),
    ),
    "tied": (tied, normal(80, 4)),
    "one unit": (
        lambda: nn.Sequential(nn.Linear(1, 1), leaky(), nn.Linear(1, 3)),
        normal(80, 1),
    ),
}


def far(name: str) -> tuple[nn.Module, Tensor]:
    """A network somewhere on its orbit."""
    make, x = NETWORKS[name]
    model = randomize(make(), 3)
    symmetry = find(model, x)
    moved = symmetry.orbit(normal(symmetry.dimension, seed=4))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(moved[n])
    return model, x


def kfac(model: nn.Module, **options: Any) -> pb.KFAC:
    options_used = {
        "lr": 0.01,
        "kl_clip": 1e-2,
        "fisher": "exact",
        "damping": Invariant(0.1),
        **options,
    }
    return kfac_of(model, likelihood=pb.likelihoods.Gaussian(), **options_used)


def train(model: nn.Module, x: Tensor, opt: torch.optim.Optimizer, steps: int) -> Tensor:
    y = normal(len(x), 3, seed=8)
    for _ in range(steps):
        opt.zero_grad()
        (0.5 * (model(x) - y).square().sum(1).mean()).backward()
        opt.step()
    return model(x).detach()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("name", "slice"), each_once(NETWORKS, ["balanced", "layer-balanced"]))
def test_the_function_goes_where_kfac_takes_it_without_a_slice(name: str, slice: str) -> None:
    """With a damping that knows no coordinates K-FAC is invariant, if its memory is moved along."""
    model, x = far(name)
    options = {"ema": 0.8, "statistics_every": 2, "invert_every": 3, "momentum": 0.5}
    other = copy.deepcopy(model)
    plain = train(model, x, kfac(model, **options), 8)
    opt = Sliced(kfac(other, **options), find(other, x), slice)
    assert relative(train(other, x, opt, 8), plain) < 1e-9
    assert opt.slice is not None
    assert opt.slice.contains(tolerance=0.2)


def direction(opt: pb.KFAC, x: Tensor) -> dict[str, Tensor]:
    """What a step of length 1 subtracts, without new statistics."""
    before = {n: p.detach().clone() for n, p in opt.model.named_parameters()}
    opt.param_groups[0].update(lr=1.0, momentum=0.0)
    train(opt.model, x, opt, 1)
    assert not opt.info.took_statistics
    return {n: before[n] - p.detach() for n, p in opt.model.named_parameters()}


def test_left_behind_it_goes_elsewhere() -> None:
    model, x = far("mlp")
    options = {"ema": 0.8, "statistics_every": 4, "invert_every": 4, "momentum": 0.0}
    other = copy.deepcopy(model)
    plain = train(model, x, kfac(model, **options), 6)
    inner = kfac(other, **options)
    train(other, x, inner, 2)
    duplicate = copy.deepcopy(inner.state_dict())
    opt = Sliced(inner, find(other, x))
    inner.load_state_dict(duplicate)  # as if it had not been moved
    assert relative(train(other, x, opt, 4), plain) > 1e-3


@pytest.mark.parametrize(
    ("name", "damping", "form"),
    [
        ("mlp", Invariant(0.1), {}),
        ("groups", 0.0, {"max_factor": 5}),
        ("transposed", 0.0, {"joint": False}),
        ("tied", 0.0, {}),
        ("mlp", 0.0, {"max_factor": 5}),
    ],
)
def test_memory_after_a_retraction_is_that_of_the_rescaled_network(
    name: str, damping: Any, form: dict[str, Any]
) -> None:
    """Both the Gram and its inverse."""
    model, x = far(name)
    options = {"damping": damping, "lr": 0.0, "ema": 0.0, "kl_clip": None, **form}
    inner = kfac(model, **options)
    train(model, x, inner, 1)  # statistics of where we are; lr = 0 moves nothing
    Sliced(inner, find(model, x))
    fresh = kfac(copy.deepcopy(model), **options)
    train(fresh.model, x, fresh, 1)
    assert relative(inner.gram().dense(), fresh.gram().dense()) < 1e-9
    want = direction(fresh, x)
    for n, actual in direction(inner, x).items():
        assert relative(actual, want[n]) < 1e-9


@pytest.mark.parametrize("form", ["factors", "eigenbases", "corrected", "diagonals"])
def test_directions_are_carried_in_every_form_of_inverse(form: str) -> None:
    """F̂⁻¹g of the moved memory is α times the one before, where the gradient is g/α."""
    model, x = far("mlp")
    options: dict[str, dict[str, Any]] = {
        "factors": {"damping": 1e-2, "invert_every": 1, "statistics_every": 1},
        "eigenbases": {"damping": Exact(1e-2)},
        "corrected": {"damping": 1e-2, "ekfac": True},
        "diagonals": {"damping": Exact(1e-2), "max_factor": 5},
    }
    inner = kfac(model, lr=0.0, kl_clip=None, **options[form])
    train(model, x, inner, 2)
    inner.close()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    old = direction(copy.deepcopy(inner), x)
    Sliced(inner, find(model, x))
    factors = {n: p.detach() / before[n] for n, p in model.named_parameters()}
    for n, new in direction(inner, x).items():
        assert relative(new, old[n] * factors[n]) < 1e-9
    assert max(float(f.log().abs().max()) for f in factors.values()) > 0.1


def test_it_resumes_to_the_same_bits() -> None:
    model, x = far("mlp")
    symmetry = find(model, x)
    opt = Sliced(kfac(model), symmetry)
    train(model, x, opt, 3)
    other = copy.deepcopy(model)
    repeated = Sliced(kfac(other), find(other, x), every=1)
    with torch.no_grad():
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    repeated.load_state_dict(copy.deepcopy(opt.state_dict()))  # torch shares tensors
    assert torch.equal(train(model, x, opt, 3), train(other, x, repeated, 3))


def test_single_precision_and_frozen_layers() -> None:
    make, x = NETWORKS["mlp"]
    model: Any = make()
    opt = Sliced(kfac(model.float()), find(model, x.float()))
    y = normal(len(x), 3, seed=8).float()
    for _ in range(3):
        opt.zero_grad()
        (0.5 * (model(x.float()) - y).square().sum(1).mean()).backward()
        opt.step()
    model[0].weight.requires_grad_(False)
    opt.zero_grad()
    (0.5 * (model(x.float()) - y).square().sum(1).mean()).backward()
    opt.step()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("rule", [None, "eigenbasis", "spectral"])
def test_rules_of_whole_matrices_are_refused(rule: str | None) -> None:
    """Whatever is said of their moments: bases and roots cannot be rescaled unit by unit."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    for transport in (None, {"first": -1, "second": -2}):
        with pytest.raises(pb.PullbackError, match="does not go with slices"):
            pb.symmetry.Sliced(pb.KFAC(model, rule=rule), model, transport=transport)
