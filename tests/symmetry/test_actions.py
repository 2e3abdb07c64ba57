"""Each group action by itself: exact finite elements, linear tangents, entries left alone."""

from __future__ import annotations

import torch
from torch import Tensor

from pullback.symmetry import Leg, Mixing, Scaling
from pullback.symmetry.actions.action import Action
from pullback.symmetry.actions.shifts import (
    ParameterRows,
    Reader,
    bias_shift,
    common_shift,
    mean_shift,
)
from pullback.symmetry.graph.scales import FIXED, ZERO, Scales


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check(action: Action, params: dict[str, Tensor]) -> None:
    """The generators are the tangents, and the derivative of the orbit."""
    z = action.generators(params)
    element = normal(action.dimension, seed=9)
    tangent = action.tangent(params, element)
    assert set(z) == set(action.names) == set(tangent)
    for name, t in tangent.items():
        assert t.shape == params[name].shape
        assert torch.allclose(torch.tensordot(element, z[name], 1), t)
    h = 1e-6
    ahead, behind = (action.act(params, s * h * element) for s in (1, -1))
    for name, t in tangent.items():
        assert torch.allclose((ahead[name] - behind[name]) / (2 * h), t, atol=1e-8)
    covector = {n: normal(*params[n].shape, seed=3) for n in params}
    paired = action.pairing(params, covector)
    exact = sum((z[n] * covector[n]).flatten(1).sum(1) for n in z)
    assert torch.allclose(paired, torch.as_tensor(exact))


PARAMS = {
    "a": normal(3, 2),
    "b": normal(3, seed=1),
    "c": normal(4, 3, seed=2),
    "d": normal(4, seed=4),
}
UNITS = torch.arange(3)
ROWS = ParameterRows("c", torch.arange(4))


def scaling() -> Scaling:
    return Scaling(3, [Leg("a", UNITS[:, None], 1), Leg("b", UNITS, 1), Leg("c", UNITS[None], -1)])


def test_scalings() -> None:
    check(scaling(), PARAMS)
    scales = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    moved = scaling().act(PARAMS, scales.log())
    assert torch.allclose(
        moved["c"] @ torch.relu(moved["a"]), PARAMS["c"] @ torch.relu(PARAMS["a"])
    )
    merged = scaling().merged()
    check(merged, PARAMS)
    assert merged.dimension == 1


def test_entries_without_a_unit_stay() -> None:
    unit = torch.tensor([0, -1, 1])
    partial = Scaling(2, [Leg("a", unit[:, None], 1), Leg("c", unit[None], -2)])
    check(partial, PARAMS)
    check(partial.merged(), PARAMS)
    moved = partial.act(PARAMS, torch.ones(2, dtype=torch.float64))
    assert torch.equal(moved["a"][1], PARAMS["a"][1])
    assert torch.equal(moved["c"][:, 1], PARAMS["c"][:, 1])
    assert not partial.legs[0].is_complete
    restricted = scaling().only(torch.tensor([True, False, True]))
    assert restricted.units == 2
    check(restricted, PARAMS)
    sums = partial.legs[0].sums(PARAMS["a"], 2)
    assert torch.allclose(sums, PARAMS["a"][[0, 2]].sum(1))


def test_a_parameter_with_two_legs() -> None:
    recurrent = Scaling(3, [Leg("w", UNITS[:, None], 1), Leg("w", UNITS[None], -1)])
    check(recurrent, {"w": normal(3, 3)})


def test_mixings() -> None:
    rows = torch.tensor([2, 0])
    between = Mixing(2, [("a", rows), ("b", rows)], [("c", rows, False)])
    check(between, PARAMS)
    moved = between.act(PARAMS, normal(4, seed=5))
    assert torch.allclose(moved["c"] @ moved["a"], PARAMS["c"] @ PARAMS["a"])
    against = Mixing(2, [("a", rows)], [("c", torch.tensor([1, 3]), True)])
    check(against, PARAMS)
    moved = against.act(PARAMS, normal(4, seed=6))
    assert torch.allclose(
        moved["a"][rows].T @ moved["c"][[1, 3]], PARAMS["a"][rows].T @ PARAMS["c"][[1, 3]]
    )


def test_shifts() -> None:
    reader = Reader(ROWS, UNITS, ParameterRows("d", ROWS.rows))
    shift = bias_shift(3, [Leg("b", UNITS, 1)], [(reader, 1)])
    check(shift, PARAMS)
    moved = shift.act(PARAMS, normal(3, seed=7))
    before, after = (p["c"] @ p["b"] + p["d"] for p in (PARAMS, {**PARAMS, **moved}))
    assert torch.allclose(before, after)
    check(bias_shift(2, [Leg("b", torch.tensor([0, -1, 1]), 1)]), PARAMS)
    check(common_shift(ParameterRows("a", UNITS[:2]), ParameterRows("b", UNITS[:2]), 3), PARAMS)
    check(common_shift(None, ParameterRows("b", UNITS), 1), PARAMS)
    check(
        bias_shift(3, [Leg("b", UNITS, 1), Leg("e", UNITS[None], -1)]),
        {**PARAMS, "e": normal(5, 3)},
    )
    check(bias_shift(3, [Leg("b", UNITS, 1)], [(reader, 1)], uniform=True), PARAMS)


def test_mean_direction_of_a_layer_norm() -> None:
    params = {**PARAMS, "g": normal(3, seed=8), "s": normal(3, seed=9)}
    reader = Reader(ROWS, UNITS, ParameterRows("d", ROWS.rows))
    mean = mean_shift(reader, "g", "s")
    check(mean, params)
    moved = {**params, **mean.act(params, normal(4, seed=2))}
    n = normal(6, 3)
    n = n - n.mean(1, keepdim=True)
    one, two = (((n * p["g"] + p["s"]) @ p["c"].T + p["d"]) for p in (params, moved))
    assert torch.allclose(one, two)


def test_equations_between_scales_are_solved() -> None:
    scales = Scales()
    a, b, c = scales.new_atoms(3, 0)
    scales.unify(scales.product(a, b), c)  # a + b = c
    scales.unify(a, scales.power(b, -1))  # a = −b, hence c = 0
    assert scales.solve_label(int(c)) == ()
    assert scales.solve_label(int(a)) != ()
    scales.fix(a)
    assert scales.solve_label(int(b)) == ()


def test_zeros_agree_with_any_scale() -> None:
    scales = Scales()
    a = scales.new_atoms(2, 0)
    zero = torch.tensor([ZERO, ZERO])
    assert torch.equal(scales.unify(a, zero), a)
    assert bool((scales.product(a, zero) == ZERO).all())
    assert scales.solve_label(int(a[0]))
    assert scales.merge(torch.tensor([[ZERO, int(a[0])]]), [1]).item() == int(a[0])
    # fractions of a scale are given up
    half = scales.power(a[:1], 1, 2)
    assert half.item() == FIXED
    assert scales.solve_label(int(a[0])) == ()
