"""Fields: which derivative each name asks for, and arithmetic as of plain tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pullback import PullbackError
from pullback.maps.jets import Index
from pullback.pde.problem.fields import Coordinates, Field, UnknownDerivative, call_by_name

N = 4
NORMALS = torch.randn(N, 3, generator=torch.Generator().manual_seed(0)).double()


def values(index: Index | None) -> Tensor:
    """Numbers that tell every derivative apart."""
    if index is None:
        seed = 7
    else:
        seed = sum((a + 1) * 31**k for k, a in enumerate(index)) + len(index)
    return torch.rand(N, generator=torch.Generator().manual_seed(seed + 100)).double() + 0.5


def field(*names: str, normals: Tensor | None = None) -> Field:
    return Field(values, Coordinates(names), normals)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        *(("x", (0,)), ("t", (2,)), ("xx", (0, 0)), ("xy", (0, 1)), ("yx", (0, 1))),
        *(("tt", (2, 2)), ("txy", (0, 1, 2)), ("xxxx", (0, 0, 0, 0)), ("yyt", (1, 1, 2))),
    ],
)
def test_every_name(name: str, index: Index) -> None:
    u = field("x", "y", "t")
    assert torch.equal(getattr(u, name), values(index))
    assert torch.equal(u.d(name), values(index))
    assert torch.equal(u.d(*name), values(index))


@pytest.mark.parametrize("one", range(1, 13))
@pytest.mark.parametrize("two", [1, 2, 10, 11, 12])
def test_coordinates_of_several_characters(one: int, two: int) -> None:
    u = field(*(f"x{i}" for i in range(1, 13)))
    index = tuple(sorted((one - 1, two - 1)))
    assert torch.equal(u.d(f"x{one}", f"x{two}"), values(index))
    assert torch.equal(getattr(u, f"x{one}x{two}"), values(index))


def test_names_that_begin_alike() -> None:
    """Spelled out, x twice is not the coordinate called xx."""
    u = field("x", "xx")
    assert torch.equal(u.d("x", "x"), values((0, 0)))
    assert torch.equal(u.d("xx"), values((1,)))
    assert torch.equal(u.d("xx", "x"), values((0, 1)))
    assert torch.equal(field("r", "theta").rtheta, values((0, 1)))


def test_space_leaves_time_out() -> None:
    lateral = NORMALS * torch.tensor([1.0, 1.0, 0.0])
    u = field("x", "y", "t", normals=lateral)
    assert torch.equal(u.laplacian, values(None))
    assert torch.equal(u.grad, torch.stack([values((0,)), values((1,))], -1))
    want = NORMALS[:, 0] * values((0,)) + NORMALS[:, 1] * values((1,))
    torch.testing.assert_close(u.normal, want)
    with pytest.raises(PullbackError, match="along time"):
        field("x", "y", "t", normals=NORMALS).normal  # noqa: B018


def test_schemes_of_requests() -> None:
    two = Coordinates(("x", "y", "t"))
    one = Coordinates(("x", "t"))
    assert two.scheme({(2,), None}).laplacian == (0, 1)
    scheme = one.scheme({(1,), None})
    assert not scheme.laplacian
    assert (0, 0) in scheme.indices
    assert two.scheme({()}).indices == ((),)


OTHERS: dict[str, Any] = {
    "number": 2.5,
    "integer": 3,
    "tensor": torch.linspace(1, 2, N).double(),
    "matrix": torch.ones(2, N).double(),
    "field": field("x", "y", "t"),
    "derivative": field("x", "y", "t").xy,
    "numpy": np.float64(1.5),
    "scalar": torch.tensor(0.5),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
)
def test_arithmetic_in_both_orders(op: Callable[[Any, Any], Any], other: str) -> None:
    u = field("x", "y", "t")
    v = OTHERS[other]
    plain = v.value if isinstance(v, Field) else v
    for values, want in (
        (op(u, v), op(u.value, plain)),
        (op(v, u), op(plain, u.value)),
        (op(u.x, v), op(u.x, plain)),
    ):
        torch.testing.assert_close(torch.as_tensor(values), torch.as_tensor(want))


def test_signs_comparisons_and_functions() -> None:
    u: Any = field("x", "y", "t")
    w = u.value
    assert torch.equal(-u, -w)
    assert torch.equal(+u, w)
    assert torch.equal(abs(-u), w)
    assert torch.equal(u > 0.7, w > 0.7)
    assert torch.equal(u == w[0], w == w[0])
    assert torch.equal(u != w[0], w != w[0])
    assert torch.equal(u[1:], w[1:])
    assert torch.equal(torch.sin(u), torch.sin(w))
    assert torch.equal(torch.where(u > 0.7, u, 0.0), torch.where(w > 0.7, w, 0.0))
    assert torch.equal(torch.stack([u, u.x]), torch.stack([w, u.x]))
    assert torch.equal(torch.add(u.x, u, alpha=2), u.x + 2 * w)
    assert len({u, u}) == 1


@pytest.mark.parametrize("name", ["z", "xz", "sin", "laplace", "shape", "x1"])
def test_unknown_names_are_refused(name: str) -> None:
    u = field("x", "y", "t")
    with pytest.raises(UnknownDerivative, match="the coordinates are x, y, t") as info:
        getattr(u, name)
    assert isinstance(info.value, PullbackError)
    assert not hasattr(u, name)
    with pytest.raises(UnknownDerivative):
        u.d("x", name)


def test_no_normal_inside() -> None:
    with pytest.raises(PullbackError, match="no outward normal"):
        _ = field("x").normal


@pytest.mark.parametrize("name", ["laplacian", "normal", "d", "grad", "value", "2x", "a b", ""])
def test_unusable_coordinates(name: str) -> None:
    with pytest.raises(PullbackError, match="cannot be used"):
        Coordinates(("x", name))


def test_call_by_names() -> None:
    offered = {"u": 1, "x": 2, "k": 3}
    assert call_by_name(lambda x, u: (x, u), offered, "It") == (2, 1)
    assert call_by_name(lambda u, scale=10: u * scale, offered, "It") == 10
    assert call_by_name(lambda **all: sorted(all), offered, "It") == ["k", "u", "x"]
    assert call_by_name(lambda: 4, offered, "It") == 4
    for wrong in (lambda y: y, lambda *args: args):
        with pytest.raises(PullbackError, match="It asks for"):
            call_by_name(wrong, offered, "It")


def test_call_of_objects_and_their_methods() -> None:
    """Callables without a hash, bound methods, and functions that come and go."""

    class Scaled:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __call__(self, x: float) -> float:
            return 2 * x

        def other(self, y: float) -> float:
            return 3 * y

    offered = {"x": 1.0, "y": 10.0}
    assert call_by_name(Scaled(), offered, "It") == 2.0
    assert call_by_name(Scaled().other, offered, "It") == 30.0
    for _ in range(3):
        assert call_by_name(lambda x: x, offered, "It") == 1.0
        assert call_by_name(lambda y: y, offered, "It") == 10.0
