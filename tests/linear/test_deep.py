"""Deep matrix factorization: natural gradients against the pseudo-inverse of the dense Jacobian."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pullback import PullbackError
from pullback.linear import DeepMatrix, split_obstacle
from pullback.linear.deep import _make_tangent
from pullback.linear.minimum_norm import solve_iteratively
from pullback.linear.tangents import MatrixTangent
from pullback.testing import relative_error
from tests.linear.oracles import flat, jacobian, product

DOUBLE = torch.float64
#: wide, square, narrow (bottlenecks at any place), one factor, and lines
DIMS = [
    [4, 6, 5, 3],
    [3, 3, 3],
    [2, 5, 3],
    [5, 2, 4],
    [5, 2, 2, 4],
    [4, 1, 3, 2],
    [2, 3, 3, 4],
    [6, 3, 6, 2, 6],
    [4, 3],
    [1, 4, 1],
    [1, 1],
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def net(dims: list[int], seed: int = 1) -> DeepMatrix:
    return DeepMatrix(dims, seed=seed, dtype=DOUBLE)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(relative_error(a, b))


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_natural_gradient_is_the_pseudo_inverse(dims: list[int]) -> None:
    model = net(dims)
    grad = draw(dims[0], dims[-1])
    moves = model.natural_gradient(grad)
    assert [m.shape for m in moves] == [w.shape for w in model.factors]
    j = jacobian(product, list(model.factors))
    assert error(flat(moves), torch.linalg.pinv(j) @ grad.flatten()) < 1e-11
    damped = flat(model.natural_gradient(grad, damping=0.3))
    eye = torch.eye(j.shape[1], dtype=DOUBLE)
    want = torch.linalg.solve(j.T @ j + 0.3 * eye, j.T @ grad.flatten())
    assert error(damped, want) < 1e-12


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=5), st.integers(0, 2**20), st.booleans())
def test_any_dims_at_any_rank(dims: list[int], seed: int, deficient: bool) -> None:
    model = net(dims, seed)
    grad = draw(dims[0], dims[-1], seed=seed + 1)
    if deficient:  # one factor of rank one
        w = model.factors[seed % model.depth].data
        w.copy_(torch.outer(w[:, 0], w[0]))
    j = jacobian(product, list(model.factors))
    sigma = torch.linalg.svdvals(j)
    sigma = sigma[sigma > 1e-12 * sigma[0]]
    actual = flat(model.natural_gradient(grad, rcond=1e-12))
    want = torch.linalg.pinv(j, rtol=1e-12) @ grad.flatten()
    assert (
        float((actual - want).norm()) <= 1e-12 * float(sigma[0] / sigma[-1] * want.norm()) + 1e-13
    )


def test_tiny_numbers() -> None:
    """W₁ = diag(2, 1), W₂ = [[1, 1], [0, 1]], ∇ = e₁e₁ᵀ, by hand."""
    model = DeepMatrix.of([torch.diag(torch.tensor([2.0, 1.0])), torch.tensor([[1.0, 1], [0, 1]])])
    grad = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    one, two = model.natural_gradient(grad)
    torch.testing.assert_close(29 * one, torch.tensor([[5.0, -1.0], [0.0, 0.0]]))
    torch.testing.assert_close(29 * two, torch.tensor([[12.0, -2.0], [0.0, 0.0]]))
    one, two = model.split_natural_gradient(grad)
    torch.testing.assert_close(one, torch.tensor([[0.5, -0.5], [0.0, 0.0]]))
    torch.testing.assert_close(two, torch.tensor([[0.25, 0.0], [0.0, 0.0]]))
    # the sides as the paper prints them reach another matrix
    a, b = (w.detach() for w in model.factors)
    reached = (torch.linalg.pinv(b).T @ grad / 2) @ b + a @ (grad @ torch.linalg.pinv(a) / 2)
    torch.testing.assert_close(reached, torch.tensor([[1.0, 0.5], [-0.5, -0.5]]))


def test_narrow_two_factors_project_onto_the_tangent_space() -> None:
    """J J⁺∇ = ∇ − (1 − UU⁺)∇(1 − V⁺V), and the moves in closed form."""
    model = net([7, 2, 5])
    grad = draw(7, 5)
    u, v = model.values()
    left = u @ torch.linalg.pinv(u)
    right = torch.linalg.pinv(v) @ v
    one, two = model.natural_gradient(grad)
    others = grad - left @ grad
    want = grad - (others - others @ right)
    assert error(one @ v + u @ two, want) < 1e-13
    # the balanced formula of the same image is longer or equal
    du = (grad - 0.5 * left @ grad) @ torch.linalg.pinv(v)
    dv = torch.linalg.pinv(u) @ (grad - 0.5 * grad @ right)
    assert error(du @ v + u @ dv, want) < 1e-12
    assert flat([one, two]).norm() <= flat([du, dv]).norm()


def test_entries_alone() -> None:
    """Matrix completion: J has the rows of the observed entries."""
    rows = torch.tensor([0, 4, 2, 0])
    columns = torch.tensor([3, 3, 1, 0])
    grad = draw(4)
    for dims in ([5, 3, 4], [5, 6, 7, 4], [5, 2, 2, 4]):
        model = net(dims)
        actual = flat(model.natural_gradient(grad, entries=(rows, columns)))
        j = jacobian(lambda *w: product(*w)[rows, columns], list(model.factors))
        assert error(actual, torch.linalg.pinv(j) @ grad) < 1e-12


def test_invariance_of_the_model_step() -> None:
    """J x = ∇ whatever the depth where J has full row rank: β moves as if it were the parameter."""
    grad = draw(3, 4)
    for dims in ([3, 4], [3, 5, 4], [3, 4, 6, 4], [3, 5, 5, 5, 4]):
        model = net(dims)
        j = jacobian(product, list(model.factors))
        assert error(j @ flat(model.natural_gradient(grad)), grad.flatten()) < 1e-11


def test_split_solves_where_it_exists_but_is_longer() -> None:
    model = net([3, 6, 5, 4])
    grad = draw(3, 4)
    j = jacobian(product, list(model.factors))
    shortest = flat(model.natural_gradient(grad))
    split = flat(model.split_natural_gradient(grad))
    assert error(j @ split, grad.flatten()) < 1e-12
    assert split.norm() > 1.01 * shortest.norm()
    q = [torch.linalg.qr(draw(4, 4, seed=i)).Q for i in range(3)]
    orthogonal = DeepMatrix.of(q)
    grad = draw(4, 4)
    split = flat(orthogonal.split_natural_gradient(grad))
    assert error(split, flat(orthogonal.natural_gradient(grad))) < 1e-13


def test_split_is_refused_where_it_is_no_solution() -> None:
    """2-3-3-4: J has full row rank, and the split is wrong all the same."""
    model = net([2, 3, 3, 4])
    grad = draw(2, 4)
    j = jacobian(product, list(model.factors))
    assert int(torch.linalg.matrix_rank(j)) == 8
    assert "rank 3 of 4 columns" in split_obstacle(model.values())
    with pytest.raises(PullbackError, match=r"rank 3 of 4 columns.*natural_gradient"):
        model.split_natural_gradient(grad)
    zero = DeepMatrix.of([torch.zeros(2, 2), torch.eye(2)])
    with pytest.raises(PullbackError, match="rank 0 of 2 rows"):
        zero.split_natural_gradient(torch.eye(2))


@pytest.mark.parametrize(
    "dims",
    [[10, 12, 11, 9], [9, 9, 9, 9], [12, 5, 12, 11], [9, 12, 4, 5, 12], [8, 3, 7, 2, 8], [6, 4, 6]],
    ids=str,
)
def test_iteration_for_large_matrices(dims: list[int]) -> None:
    model = net(dims)
    grad = draw(dims[0] * dims[-1])
    tangent = _make_tangent(model.values(), list(range(model.depth)), ())
    assert isinstance(tangent, MatrixTangent)
    j = jacobian(product, list(model.factors))
    assert error(solve_iteratively(tangent, grad), torch.linalg.pinv(j) @ grad) < 1e-10
    want = j.T @ torch.linalg.solve(j @ j.T + 0.1 * torch.eye(len(j), dtype=DOUBLE), grad)
    assert error(solve_iteratively(tangent, grad, 0.1), want) < 1e-10


def test_large_matrices_are_solved_by_iteration() -> None:
    model = net([60, 80, 70, 60])
    grad = draw(60, 60)
    moves = model.natural_gradient(grad)
    factors = model.values()
    before = [torch.eye(60, dtype=DOUBLE), factors[0], factors[0] @ factors[1]]
    after = None
    after = [factors[1] @ factors[2], factors[2], torch.eye(60, dtype=DOUBLE)]
    image = sum(a @ m @ b for a, m, b in zip(before, moves, after, strict=True))
    assert isinstance(image, torch.Tensor)
    assert error(image, grad) < 1e-11
    # minimum norm: the moves are AᵀΛBᵀ for one Λ, here read off the last factor's neighbor
    lam = torch.linalg.lstsq(before[0], moves[0]).solution @ torch.linalg.pinv(after[0].T)
    for a, m, b in zip(before, moves, after, strict=True):
        assert error(a.T @ lam @ b.T, m) < 1e-7


def test_forward_is_the_product_the_map_and_the_entries() -> None:
    model = net([4, 6, 3])
    x = draw(7, 4)
    torch.testing.assert_close(model(), product(*model.factors))
    torch.testing.assert_close(model(x), x @ model.beta)
    rows = torch.tensor([0, 3])
    columns = torch.tensor([2, 1])
    torch.testing.assert_close(model(rows, columns), model.beta[rows, columns])
    assert model.depth == 2
    assert net([4, 3]).beta.shape == (4, 3)


def test_where_the_factors_come_from() -> None:
    assert torch.equal(DeepMatrix([3, 4], seed=5).beta, DeepMatrix([3, 4], seed=5).beta)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(
        DeepMatrix([3, 4], generator=generator).beta, DeepMatrix([3, 4], seed=5).beta
    )
    assert DeepMatrix([3, 4], seed=0, dtype=DOUBLE).beta.dtype is DOUBLE
    factors = [draw(2, 3), draw(3, 2)]
    model = DeepMatrix([2, 3, 2], factors)
    assert torch.equal(model.factors[0], factors[0])
    model.factors[0].data.zero_()
    assert factors[0].any()
    assert DeepMatrix.of(factors, dtype=torch.float32).beta.dtype is torch.float32
    assert not DeepMatrix([2, 2], 0.0).beta.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = DeepMatrix([3, 4, 2], seed=0, dtype=dtype)
    grad = draw(3, 2)
    for g in (grad.to(dtype), grad):
        moves = model.natural_gradient(g)
        assert all(m.dtype is dtype for m in moves)
        want = DeepMatrix.of(model.values(DOUBLE)).natural_gradient(g.double())
        assert error(flat(moves).double(), flat(want)) < (1e-5 if dtype is torch.float32 else 1e-2)


NONE = torch.zeros(0, dtype=torch.long)


def tiny(size: float, depth: int) -> DeepMatrix:
    """Factors of entries about `size`."""
    return DeepMatrix.of([size * w for w in net([2] * (depth + 1), 3).values()])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DeepMatrix([3]), "no factor"),
        (lambda: DeepMatrix([3, 0]), "dims is not usable"),
        (lambda: DeepMatrix(3), "dims is not usable"),  # pyright: ignore[reportArgumentType]
        (lambda: net([3, 2]).split_natural_gradient(draw(3, 2) / 0), "not finite"),
        (lambda: net([3, 2]).natural_gradient(draw(1), entries=([0], [1])), "not usable"),  # pyright: ignore[reportArgumentType]
        (lambda: net([3, 2]).natural_gradient(draw(0), entries=(NONE, NONE)), "no entries"),
        (lambda: tiny(1e-200, 3).natural_gradient(draw(2, 2)), "not finite"),
        (lambda: DeepMatrix([3, True]), "dims is not usable"),
        (lambda: DeepMatrix([3, 2], [torch.ones(2, 3)]), "Factor 0 does not fit"),
        (lambda: DeepMatrix([3, 2], [torch.ones(3, 2)] * 2), "number of factors"),
        (lambda: DeepMatrix([1, 1], [torch.ones(1, 1, dtype=torch.long)]), "float type"),
        (lambda: DeepMatrix.of([torch.ones(3, 2), torch.ones(3, 2)]), "Factor 1 does not fit"),
        (lambda: DeepMatrix([2, 2], seed=0, generator=torch.Generator()), "Both a generator"),
        (lambda: net([3, 2]).natural_gradient(draw(2, 3)), "gradient does not fit"),
        (lambda: net([3, 2]).natural_gradient(draw(3, 2) / 0), "not finite"),
        (lambda: net([3, 2]).natural_gradient(draw(3, 2), damping=-1.0), "damping"),
        (lambda: DeepMatrix([3, 2, 2], 0.0).natural_gradient(torch.ones(3, 2)), "tangent is zero"),
        (lambda: DeepMatrix([2, 2], float("nan")).natural_gradient(torch.eye(2)), None),
        (lambda: net([2, 2, 2], 1).float()(torch.ones(3)), "input does not fit"),
        (lambda: net([3, 2])(torch.tensor([0]), torch.tensor([2])), "columns .* out of range"),
        (lambda: net([3, 2])(torch.tensor([0]), torch.tensor([0, 1])), "do not fit each other"),
        (lambda: net([3, 2])(draw(2), torch.tensor([0, 1])), "rows .* not usable"),
    ],
)
def test_bad_input(call, message: str | None) -> None:
    if message is None:  # one factor: J is the identity, whatever the factor holds
        with pytest.raises(PullbackError, match="not finite"):
            call()
        return
    with pytest.raises(PullbackError, match=message):
        call()


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("size", [1e-140, 1e140])
def test_factors_of_any_size(size: float, depth: int) -> None:
    """X = J⁺∇ is of degree 1 − L in the factors, though squares of J are out of range."""
    grad = draw(2, 2)
    want = tiny(1.0, depth).natural_gradient(grad)
    direction = tiny(size, depth).natural_gradient(grad)
    scaled = [m * size if depth == 2 else m * size * size for m in direction]
    assert error(flat(scaled), flat(want)) < 1e-12


def test_bytes_are_indices() -> None:
    model = net([4, 3])
    index = torch.tensor([1, 2], dtype=torch.uint8)
    assert torch.equal(model(index, index), model.beta[[1, 2], [1, 2]])


def test_one_zero_factor_of_two_still_has_a_tangent() -> None:
    model = DeepMatrix.of([torch.zeros(3, 4, dtype=DOUBLE), draw(4, 2)])
    grad = draw(3, 2)
    j = jacobian(product, list(model.factors))
    assert error(flat(model.natural_gradient(grad)), torch.linalg.pinv(j) @ grad.flatten()) < 1e-12
