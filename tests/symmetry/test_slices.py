"""Laws of slices, on networks and at points of any scale: the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from pullback import PullbackError
from pullback.symmetry import find
from pullback.symmetry.actions.scaling import Leg, Scaling
from pullback.symmetry.slices import Balanced, EqualNorm, Slice
from tests.pairs import each_once

from .chain import convnet, mlp, relative, scalings, shake

SLICES: dict[str, Callable[[nn.Sequential], Slice]] = {
    "balanced": lambda m: Balanced(scalings(m), m),
    "layer-balanced": lambda m: Balanced([s.merged() for s in scalings(m)], m),
    "equal-norm": lambda m: EqualNorm(scalings(m), m),
}
NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "3-4-5-2": (lambda: mlp(3, 4, 5, 2), (3,)),
    "bias-free": (lambda: mlp(3, 4, 5, 2, bias=False), (3,)),
    "one hidden": (lambda: mlp(3, 6, 2), (3,)),
    "square": (lambda: mlp(4, 4, 4, 4), (4,)),
    "width one": (lambda: mlp(2, 1, 3, 1), (2,)),
    "deep": (lambda: mlp(3, 5, 4, 6, 3, 2), (3,)),
    "conv": (convnet, (2, 6, 6)),
}
table = pytest.mark.parametrize(("slice_name", "net"), each_once(SLICES, NETS))


def prepare(slice_name: str, net: str, size: float = 0.0) -> tuple[nn.Sequential, Slice, Tensor]:
    make, shape = NETS[net]
    model = make()
    shake(model, scalings(model), size)
    x = torch.randn(9, *shape, generator=torch.Generator().manual_seed(1)).double()
    return model, SLICES[slice_name](model), x


def vector(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for n, p in model.named_parameters()
    }


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(sum((a[n] * b[n]).sum() for n in a))


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    params = {n: p.detach() for n, p in model.named_parameters()}
    rows = jacrev(lambda w: functional_call(model, w, (x,)).flatten())(params)
    return torch.cat([rows[n].flatten(1) for n in params], 1)


@table
@pytest.mark.parametrize("size", [0.0, 3.0])
def test_retract_keeps_the_function_lands_on_the_slice_and_stays(
    slice_name: str, net: str, size: float
) -> None:
    model, slice_, x = prepare(slice_name, net, size)
    before = model(x)
    report = slice_.retract_()
    assert relative(model(x), before) < 1e-13
    assert slice_.contains()
    assert float(slice_.constraint().abs().max()) < 1e-13
    assert report.off > 1e-3
    assert not report.dead
    repeated = slice_.retract()
    for name, p in model.named_parameters():
        assert torch.allclose(repeated[name], p, rtol=1e-14, atol=0)


@table
def test_layers_come_back_from_ten_to_the_thirty(slice_name: str, net: str) -> None:
    model, slice_, x = prepare(slice_name, net)
    merged = [s.merged() for s in scalings(model)]
    slice_.retract_()
    home = {n: p.detach().clone() for n, p in model.named_parameters()}
    before = model(x)
    shake(model, merged, 30.0)
    slice_.retract_()
    assert relative(model(x), before) < 1e-12
    for name, p in model.named_parameters():
        assert relative(p, home[name]) < 1e-12, name


@pytest.mark.parametrize("size", [80, 140])
@table
def test_units_come_back_from_where_squares_vanish(slice_name: str, net: str, size: float) -> None:
    make, shape = NETS[net]
    model = make()
    x = torch.randn(9, *shape).double()
    # two neighboring layers share the way: their product is what a weight is multiplied by
    for i, group in enumerate(scalings(model)):
        shake(model, [group], size / (1 + i % 2), seed=i)
    before = model(x).detach()
    assert all(torch.isfinite(p).all() for p in (before, *model.parameters()))
    slice_ = SLICES[slice_name](model)
    retraction = slice_.retract_()
    assert not retraction.dead
    assert relative(model(x), before) < 1e-12
    assert slice_.contains()


@table
def test_retract_does_not_touch_its_argument_and_finds_one_point_per_orbit(
    slice_name: str, net: str
) -> None:
    model, slice_, _ = prepare(slice_name, net)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    point = slice_.retract()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    if slice_name == "balanced":
        group = scalings(model)
    else:
        group = [s.merged() for s in scalings(model)]
    shake(model, group, 2.0, seed=5)
    other = slice_.retract()
    assert all(relative(other[n], point[n]) < 1e-12 for n in point)


@table
def test_project_is_the_orthogonal_projection_onto_the_tangent_space(
    slice_name: str, net: str
) -> None:
    model, slice_, _ = prepare(slice_name, net)
    slice_.retract_()
    v = vector(model)
    u = slice_.project(v)
    twice = slice_.project(u)
    assert all(torch.allclose(twice[n], u[n], atol=1e-13) for n in u)
    assert abs(dot({n: v[n] - u[n] for n in v}, u)) < 1e-12
    # tangent: the constraint does not change along u, by central differences
    h = 1e-6
    ahead = slice_.constraint({n: p.detach() + h * u[n] for n, p in model.named_parameters()})
    back = slice_.constraint({n: p.detach() - h * u[n] for n, p in model.named_parameters()})
    assert float((ahead - back).abs().max()) / (2 * h) < 1e-7
    # and its dimension is right: a tangent basis is fixed, normals vanish
    basis = slice_.tangent_basis()
    flat = torch.cat([x.flatten() for x in v.values()])
    projected = torch.cat([x.flatten() for x in u.values()])
    assert torch.allclose(basis @ (basis.mT @ flat), projected, atol=1e-12)
    assert basis.shape[1] == len(flat) - len(slice_.constraint())
    assert torch.allclose(slice_.project(flat), projected, atol=1e-13)


@table
def test_lift_is_tangent_and_moves_the_function_alike(slice_name: str, net: str) -> None:
    model, slice_, x = prepare(slice_name, net)
    slice_.retract_()
    v = torch.cat([t.flatten() for t in vector(model).values()])
    lifted = slice_.lift(v)
    j = jacobian(model, x)
    assert relative(j @ lifted, j @ v) < 1e-12
    basis = slice_.tangent_basis()
    assert relative(basis @ (basis.mT @ lifted), lifted) < 1e-12


def test_the_balanced_slice_is_orthogonal_to_orbits_and_gradients_are_tangent() -> None:
    for slice_name in ("balanced", "layer-balanced"):
        model, slice_, x = prepare(slice_name, "deep")
        slice_.retract_()
        model(x).square().sum().backward()
        g = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        u = slice_.project(g)
        assert max(relative(u[n], g[n]) for n in g) < 1e-12
        decay = {n: p.detach() for n, p in model.named_parameters()}
        projection = slice_.project(decay)
        bare = {n: p for n, p in decay.items() if n != "8.bias"}
        assert max(relative(projection[n], bare[n]) for n in bare) < 1e-12


def test_balanced_layers_are_those_of_the_formula() -> None:
    """|A_j|² = |A_1|² + Σ_{k<j} |b_k|²."""
    model, slice_, _ = prepare("layer-balanced", "deep", 2.0)
    slice_.retract_()
    layers = [m for m in model if isinstance(m, nn.Linear)]
    total = layers[0].weight.square().sum()
    for a, b in pairwise(layers):
        total = total + a.bias.square().sum()
        assert b.weight.square().sum().item() == pytest.approx(total.item(), rel=1e-13)


def test_balanced_units_are_the_least_of_the_orbit() -> None:
    model, slice_, _ = prepare("balanced", "3-4-5-2")
    slice_.retract_()
    least = sum(float(p.detach().square().sum()) for p in model.parameters())
    for seed in range(5):
        shake(model, scalings(model), 0.01, seed)
        assert sum(float(p.detach().square().sum()) for p in model.parameters()) > least
        slice_.retract_()


def test_the_layer_slice_is_no_immersion_the_quotient_by_units_is() -> None:
    """Net 3-4-5-2 without biases: 42 parameters, the kernel has one vector per hidden unit."""
    model, layers, _ = prepare("equal-norm", "bias-free")
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(2)).double()
    layers.retract_()
    rank = torch.linalg.matrix_rank(jacobian(model, x))
    assert int(rank) == 42 - 9
    basis = layers.tangent_basis()
    assert basis.shape[1] == 40
    assert int(torch.linalg.matrix_rank(jacobian(model, x) @ basis)) == 33
    units = Balanced(scalings(model), model)
    units.retract_()
    basis = units.tangent_basis()
    assert basis.shape[1] == 33
    assert int(torch.linalg.matrix_rank(jacobian(model, x) @ basis)) == 33


def test_many_units_are_balanced_and_projected_by_products() -> None:
    """More units than a dense Gram is formed for."""
    model = mlp(5, 700, 500, 3)
    shake(model, scalings(model), 3.0)
    x = torch.randn(4, 5).double()
    before = model(x)
    slice_ = Balanced(scalings(model), model)
    slice_.retract_()
    assert relative(model(x), before) < 1e-12
    assert float(slice_.constraint().abs().max()) < 1e-13
    v = vector(model)
    u = slice_.project(v)
    assert all(torch.allclose(slice_.project(u)[n], u[n], atol=1e-12) for n in u)
    assert abs(dot({n: v[n] - u[n] for n in v}, u)) < 1e-9


@pytest.mark.parametrize("slice_name", SLICES)
def test_a_symmetry_that_was_found_offers_its_slices(slice_name: str) -> None:
    model, slice_, x = prepare(slice_name, "conv", 2.0)
    symmetry = find(model, x)
    before = model(x)
    assert symmetry.retract_(slice_name).off > 1e-3
    assert slice_.contains()
    assert relative(model(x), before) < 1e-13
    v = torch.cat([t.flatten() for t in vector(model).values()])
    assert torch.allclose(symmetry.project(v, slice_name), slice_.project(v), atol=1e-13)


# --- hostile input ----------------------------------------------------------------------------


def test_dead_units_keep_their_scale_and_are_reported() -> None:
    model = mlp(3, 4, 5, 2)
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 0
        model[4].weight[:, 2] = 0
    x = torch.randn(6, 3).double()
    before = model(x)
    weight_before = model[2].weight.detach().clone()
    slice_ = Balanced(scalings(model), model)
    report = slice_.retract_()
    assert report.dead == {"units of 0": (1,), "units of 2": (2,)}
    assert report.scales[0][1] == 0
    assert relative(model(x), before) < 1e-13
    assert slice_.contains()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert torch.equal(model[2].weight[2, 1], weight_before[2, 1])  # between two dead units
    v = vector(model)
    u = slice_.project(v)
    assert all(torch.allclose(slice_.project(u)[n], u[n], atol=1e-12) for n in u)


@pytest.mark.parametrize("slice_name", SLICES)
def test_a_zero_layer_is_left_alone(slice_name: str) -> None:
    model = mlp(3, 4, 5, 2)
    with torch.no_grad():
        model[4].weight.zero_()
    slice_ = SLICES[slice_name](model)
    before = model(torch.ones(1, 3).double())
    report = slice_.retract_()
    assert report.dead
    assert torch.allclose(model(torch.ones(1, 3).double()), before)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("slice_name", SLICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision(slice_name: str, dtype: torch.dtype) -> None:
    model = mlp(3, 8, 5, 2).to(dtype)
    shake(model, scalings(model), 1.0)
    x = torch.randn(6, 3).to(dtype)
    before = model(x)
    slice_ = SLICES[slice_name](model)
    slice_.retract_()
    eps = torch.finfo(dtype).eps
    assert float(slice_.constraint().abs().max()) < 8 * eps
    assert relative(model(x).double(), before.double()) < 20 * eps
    assert slice_.contains()


@pytest.mark.parametrize("slice_name", SLICES)
def test_what_is_not_finite_is_refused(slice_name: str) -> None:
    model = mlp(3, 4, 2)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with pytest.raises(PullbackError, match="NaN"):
        SLICES[slice_name](model).retract_()


def test_no_symmetry_and_strange_names_are_refused() -> None:
    model = mlp(3, 4, 2)
    with pytest.raises(PullbackError, match="no slice"):
        Balanced([], model)
    with pytest.raises(PullbackError, match="no such parameter"):
        Balanced([Scaling(1, [Leg("w", torch.zeros(1, 1).long(), 1)])], model)
    with pytest.raises(PullbackError, match="another shape"):
        Balanced(scalings(mlp(3, 5, 2)), model)


def test_a_parameter_shared_across_two_orbits_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4), nn.ReLU()) * 2, nn.Linear(4, 2)).double()
    assert model[0] is model[2]
    rows = torch.arange(4)[:, None]
    columns = torch.arange(4)[None]
    one = Scaling(4, [Leg("0.weight", rows, 1), Leg("0.weight", columns, -1)], "first")
    two = Scaling(4, [Leg("0.weight", rows, 1), Leg("4.weight", columns, -1)], "second")
    with pytest.raises(PullbackError, match="two orbits"):
        Balanced([one, two], model)


def test_equal_norms_need_a_chain() -> None:
    """Two branches from one hidden layer: three norms, one number."""
    params = {n: torch.randn(3, 3).double() for n in "abc"}
    legs = [Leg("a", torch.arange(3)[:, None], 1)]
    legs += [Leg(n, torch.arange(3)[None], -1) for n in "bc"]
    EqualNorm([Scaling(3, legs)], params)  # b and c are one block
    more = [Leg("b", torch.arange(3)[:, None], 1), Leg("d", torch.arange(3)[None], -1)]
    params["d"] = torch.randn(3, 3).double()
    with pytest.raises(PullbackError, match="chain"):
        EqualNorm([Scaling(3, legs), Scaling(3, more)], params)
    assert Balanced([Scaling(3, legs), Scaling(3, more)], params).retract().keys() == params.keys()


def test_a_vector_of_the_wrong_length_is_refused() -> None:
    _, slice_, _ = prepare("balanced", "3-4-5-2")
    with pytest.raises(PullbackError, match="shape"):
        slice_.project(torch.zeros(3).double())


def test_units_tied_along_a_skip() -> None:
    """x ↦ C relu(h + B relu(h)), h = relu(A x): B leads into the units that it comes from."""
    torch.manual_seed(0)
    a, b, c = (torch.randn(4, 4).double() for _ in range(3))
    rows = torch.arange(4)[:, None]
    columns = torch.arange(4)[None]
    legs = [Leg("a", rows, 1), Leg("b", rows, 1), Leg("b", columns, -1), Leg("c", columns, -1)]
    group = Scaling(4, legs)
    params = {"a": a, "b": b, "c": c}
    params |= group.act(params, torch.randn(4).double() * 5)

    def f(w: dict[str, Tensor], x: Tensor) -> Tensor:
        h = (x @ w["a"].T).relu()
        return (h + (h @ w["b"].T).relu()).relu() @ w["c"].T

    x = torch.randn(5, 4).double()
    slice_ = Balanced([group], params)
    point = slice_.retract()
    assert relative(f(point, x), f(params, x)) < 1e-12
    into = point["a"].square().sum(1) + point["b"].square().sum(1)
    out = point["b"].square().sum(0) + point["c"].square().sum(0)
    assert relative(into, out) < 1e-13
