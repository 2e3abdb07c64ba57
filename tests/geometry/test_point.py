"""Pointwise geometry against dense oracles, and the theorems and examples of van Oostrum et al."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback import PullbackError
from pullback.geometry import (
    MoorePenrose,
    Point,
    RandomInverse,
    WeightedNorm,
)
from pullback.solvers import Cholesky
from pullback.testing import assert_close

DTYPE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DTYPE)


def make_overparametrized(seed: int = 0) -> Callable[[Tensor], Tensor]:
    """R⁸ → R⁵ of rank 3: five functions of three combinations of the parameters."""
    b = draw(3, 8, seed=seed + 1)
    c = draw(5, 3, seed=seed + 2)
    return lambda x: torch.tanh(c @ torch.sin(b @ x)) + (c @ (b @ x)) ** 2


def spd(n: int, seed: int = 0) -> Tensor:
    a = draw(n, n, seed=seed)
    return a @ a.T + torch.eye(n, dtype=DTYPE)


def jacobian(phi: Callable[[Tensor], Tensor], xi: Tensor) -> Tensor:
    j = torch.autograd.functional.jacobian(phi, xi)
    assert isinstance(j, Tensor)
    return j.reshape(-1, xi.numel())


def projector(j: Tensor, g: Tensor) -> Tensor:
    """The g-orthogonal projector on the columns of J, from an orthonormal basis of them."""
    u, s, _ = torch.linalg.svd(j, full_matrices=False)
    basis = u[:, s > 1e-9 * s[0]]
    return basis @ torch.linalg.solve(basis.T @ g @ basis, basis.T @ g)


def loss(z: Tensor) -> Tensor:
    return (z**3).sum() + z.flatten()[0] * z.flatten()[1]


def slope(z: Tensor) -> Tensor:
    z = z.detach().requires_grad_()
    return torch.autograd.grad(loss(z), z)[0]


INVERSES = {
    "default": None,
    "Moore–Penrose": MoorePenrose(1e-10),
    "random 1": RandomInverse(1),
    "random 2": RandomInverse(2, scale=10.0),
    "weighted": WeightedNorm(spd(8, seed=7)),
    "weighted diagonal": WeightedNorm(draw(8, seed=8).abs() + 0.1),
}


@pytest.mark.parametrize("inverse", INVERSES.values(), ids=INVERSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_theorem_1_any_generalized_inverse_pushes_forward_to_the_projection(
    inverse: object, seed: int
) -> None:
    phi = make_overparametrized(seed)
    xi = draw(8, seed=seed + 20)
    g = spd(5, seed=seed)
    point = Point(phi, xi, g)
    pushed = point.pushforward(point.natural_gradient(loss, inverse))  # pyright: ignore
    ambient = torch.linalg.solve(g, slope(phi(xi)))
    truth = projector(jacobian(phi, xi), g) @ ambient
    assert_close(pushed, truth, 1e-8, "Theorem 1")
    assert_close(point.project(ambient), truth, 1e-10, "project")


def test_theorem_1_fails_with_damping() -> None:
    phi = make_overparametrized()
    xi = draw(8, seed=20)
    g = spd(5)
    point = Point(phi, xi, g)
    exact = point.pushforward(point.natural_gradient(loss))
    for damping, low, high in ((1e-2, 1e-7, 1e-1), (1.0, 1e-5, 1.0)):
        damped = point.pushforward(point.natural_gradient(loss, Cholesky(damping)))
        error = float((damped - exact).norm() / exact.norm())
        assert low < error < high
    j = jacobian(phi, xi)
    gram = j.T @ g @ j
    truth = torch.linalg.solve(gram + 0.1 * torch.eye(8).to(g), j.T @ slope(phi(xi)))
    x = point.natural_gradient(loss, Cholesky(0.1))
    assert isinstance(x, Tensor)
    assert_close(x, truth, 1e-9, "(G + λ)⁻¹∇L")


@pytest.mark.parametrize("inverse", INVERSES.values(), ids=INVERSES)
def test_theorem_2_reparametrization_invariance_on_the_model(inverse: object) -> None:
    phi = make_overparametrized()
    g = spd(5)
    theta = draw(8, seed=3)
    mix = draw(8, 8, seed=4)

    def f(t: Tensor) -> Tensor:
        return mix @ torch.sinh(0.3 * t) + t**3

    one = Point(phi, f(theta), g)
    two = Point(lambda t: phi(f(t)), theta, g)
    pushed = [p.pushforward(p.natural_gradient(loss, inverse)) for p in (one, two)]  # pyright: ignore
    assert_close(pushed[1], pushed[0], 1e-7, "Theorem 2")


def test_damping_is_not_invariant() -> None:
    phi = make_overparametrized()
    g = spd(5)
    theta = draw(8, seed=3)
    mix = draw(8, 8, seed=4)
    one = Point(phi, mix @ theta, g)
    two = Point(lambda t: phi(mix @ t), theta, g)
    pushed = [p.pushforward(p.natural_gradient(loss, Cholesky(1e-2))) for p in (one, two)]
    assert float((pushed[0] - pushed[1]).norm() / pushed[0].norm()) > 1e-6


def test_example_a3_exact_numbers() -> None:
    def phi(x: Tensor) -> Tensor:
        return torch.stack([x[0] + x[1], 0 * x[0]])

    def psi(t: Tensor) -> Tensor:
        return phi(torch.stack([2 * t[0], t[1]]))

    def square(z: Tensor) -> Tensor:
        return z[0] ** 2

    one = Point(phi, tensor(2, 1))
    two = Point(psi, tensor(1, 1))
    assert_close(one.gram(), torch.ones(2, 2, dtype=DTYPE), 1e-15, "G(ξ)")
    assert_close(two.gram(), tensor(4, 2, 2, 1).view(2, 2), 1e-15, "G(θ)")
    assert_close(one.gradient(square), tensor(6, 6), 1e-15, "∇_ξ L")  # pyright: ignore
    assert_close(two.gradient(square), tensor(12, 6), 1e-15, "∇_θ L")  # pyright: ignore
    y_xi = one.natural_gradient(square)
    x = two.natural_gradient(square)
    assert isinstance(y_xi, Tensor)
    assert isinstance(x, Tensor)
    f = torch.diag(tensor(2, 1))
    y_theta = f @ x
    assert_close(y_xi, tensor(3, 3), 1e-14, "y_Ξ")
    assert_close(x, tensor(2.4, 1.2), 1e-14, "θ-coefficients")
    assert_close(y_theta, tensor(4.8, 1.2), 1e-14, "y_Θ")
    assert float(one.pushforward(y_theta - y_xi).norm()) < 1e-14
    # the other chart's solution is the one of smallest ‖df⁻¹y‖ here (Remark 2)
    weighted = one.natural_gradient(square, WeightedNorm(torch.linalg.inv(f @ f.T)))
    assert isinstance(weighted, Tensor)
    assert_close(weighted, y_theta, 1e-14, "Remark 2")


def figure_eight(x: Tensor) -> Tensor:
    return torch.cat([torch.sin(2 * x), torch.sin(x)])


def test_example_2_and_a2_corrected() -> None:
    """On (−π/4, 5π/4) both 0 and π map to (0, 0); f(θ) = π − θ maps the interval to itself."""

    def psi(t: Tensor) -> Tensor:
        return figure_eight(torch.pi - t)

    t = draw(5, seed=1)
    for x in t:
        truth = torch.stack([-torch.sin(2 * x), torch.sin(x)])
        assert_close(psi(x[None]), truth, 1e-14, "ψ = (−sin 2θ, sin θ)")
    one = Point(figure_eight, tensor(0))
    two = Point(psi, tensor(0))
    unit = tensor(1)
    assert_close(one.pushforward(unit), tensor(2, 1), 1e-15, "∂(ξ₁)")
    assert_close(two.pushforward(unit), tensor(-2, 1), 1e-15, "∂(θ₁)")
    assert_close(one.gram(), tensor(5).view(1, 1), 1e-15, "G")
    assert_close(two.gram(), tensor(5).view(1, 1), 1e-15, "G")
    for weights in (tensor(1, 0), tensor(0.3, -2)):
        covector = weights.__matmul__
        moves = [p.pushforward(p.natural_gradient(covector)) for p in (one, two)]
        assert_close(moves[0], (2 * weights[0] + weights[1]) / 5 * tensor(2, 1), 1e-14, "(52)")
        assert_close(moves[1], (weights[1] - 2 * weights[0]) / 5 * tensor(-2, 1), 1e-14, "(56)")
    # a reparametrization that keeps the parameter, 0 ↦ π, gives the same move
    same_point = Point(figure_eight, tensor(torch.pi))
    assert_close(
        same_point.pushforward(same_point.natural_gradient(lambda z: z[0])),
        two.pushforward(two.natural_gradient(lambda z: z[0])),
        1e-13,
        "θ₁ = f⁻¹(ξ₂)",
    )


def test_example_1_spans_that_meet_in_zero_only() -> None:
    """M = R², and two parametrizations of the point 0 that see one direction each."""
    one = Point(lambda x: torch.stack([x[0], x[1] ** 3]), tensor(0, 0))
    two = Point(lambda x: torch.stack([x[0] ** 3, x[1]]), tensor(0, 0))
    weights = tensor(2, -3)
    moves = [p.pushforward(p.natural_gradient(lambda z: weights @ z)) for p in (one, two)]
    assert_close(moves[0], tensor(2, 0), 1e-15, "the projection on the first span")
    assert_close(moves[1], tensor(0, -3), 1e-15, "and on the second")
    assert_close(one.residual(lambda z: weights @ z), tensor(0, -3), 1e-15, "what is lost")


def test_proposition_2_a_homeomorphism_with_zero_differential() -> None:
    phi = make_overparametrized()
    xi = draw(8, seed=3)
    point = Point(lambda t: phi(xi + t**3), torch.zeros(8, dtype=DTYPE))
    assert_close(point.value, phi(xi), 1e-15, "ψ(0) = φ(ξ*)")
    assert point.rank.rank == 0
    assert not bool(point.pushforward(draw(8)).any())
    x = point.natural_gradient(loss)
    assert isinstance(x, Tensor)
    assert not bool(x.any())
    assert not bool(point.project(draw(5)).any())
    assert point.decompose(loss).lost == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_decomposition_is_orthogonal(dtype: torch.dtype) -> None:
    phi = make_overparametrized()
    g = spd(5)
    cast = lambda x: phi(x.to(DTYPE)).to(x.dtype)  # noqa: E731
    xi = draw(8, seed=20)
    piece = Point(cast, xi.to(dtype), g.to(dtype), rcond=1e-5).decompose(loss)
    tol = 1e-3 if dtype == torch.float32 else 1e-9
    assert piece.ambient.dtype == dtype
    tangent = piece.tangent.to(DTYPE)
    lost = piece.residual.to(DTYPE)
    assert_close(piece.ambient.to(DTYPE), tangent + lost, tol, "the sum")
    assert abs(float(tangent @ g @ lost)) < tol * piece.length**2
    truth = torch.linalg.solve(g, slope(phi(xi)))
    length = float(truth @ g @ truth) ** 0.5
    assert abs(piece.length / length - 1) < tol
    assert abs(piece.lost - float(lost @ g @ lost) ** 0.5 / length) < tol


def test_gram_and_gradient_with_a_metric_that_moves() -> None:
    phi = make_overparametrized()
    xi = draw(8, seed=3)
    metric = lambda z: torch.diag(1 + z**2)  # noqa: E731
    j = jacobian(phi, xi)
    m = metric(phi(xi))
    assert_close(Point(phi, xi, metric).gram(), j.T @ m @ j, 1e-13, "G")
    assert_close(Point(phi, xi).gram(), j.T @ j, 1e-13, "G in the Euclidean metric")
    gradient = j.T @ slope(phi(xi))
    one = Point(phi, xi, metric).natural_gradient(gradient)
    two = Point(phi, xi, metric).natural_gradient(loss)
    assert isinstance(one, Tensor)
    assert isinstance(two, Tensor)
    assert_close(one, two, 1e-8, "∇_ξ L and L give the same")
    assert_close(two, torch.linalg.pinv(j.T @ m @ j, rtol=1e-10) @ gradient, 1e-8, "G⁺∇L")


def test_a_dict_of_parameters() -> None:
    xi = {"a": draw(2, 3), "b": draw(3, seed=1)}

    def phi(w: dict[str, Tensor]) -> Tensor:
        return torch.tanh(w["a"] @ w["b"])

    point = Point(phi, xi)
    v = {"a": draw(2, 3, seed=2), "b": draw(3, seed=3)}
    truth = torch.func.jvp(phi, (xi,), (v,))[1]
    assert_close(point.pushforward(v), truth, 1e-14, "J v")
    x = point.natural_gradient(lambda z: z.sum())
    assert isinstance(x, dict)
    assert {n: t.shape for n, t in x.items()} == {n: t.shape for n, t in xi.items()}
    flat = torch.cat([x["a"].flatten(), x["b"]])
    assert_close(point.pushforward(flat), point.pushforward(x), 1e-14, "flat vectors too")
    assert_close(point.pushforward(x), torch.ones(2, dtype=DTYPE), 1e-12, "all of grad^Z L")


@pytest.mark.parametrize(
    "metric",
    [
        None,
        pb.metrics.Fisher(pb.likelihoods.Categorical()),
        pb.metrics.Sobolev(2.0),
        pb.metrics.Bregman(lambda z: torch.cosh(z).sum()),
    ],
    ids=["Euclidean", "Fisher", "Sobolev", "Bregman"],
)
def test_a_module_agrees_with_the_optimizer_and_the_oracle(metric: pb.metrics.Metric) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = draw(6, 3)
    y = torch.tensor([0, 1, 2, 0, 1, 1])
    before = [p.detach().clone() for p in model.parameters()]
    point = Point(model, None, metric, inputs=x)
    if metric is None:
        used = pb.metrics.Euclidean()
    else:
        used = metric
    cross = lambda z: nn.functional.cross_entropy(z, y)  # noqa: E731
    truth = pb.testing.oracle(model, x, used, cross)
    assert_close(point.gram(), truth.gram, 1e-12, "G")
    natural = point.natural_gradient(cross)
    assert isinstance(natural, dict)
    flat = torch.cat([natural[n].flatten() for n, _ in model.named_parameters()])
    assert_close(flat, truth.solve(), 1e-7, "G⁺∇L")
    opt = pb.NaturalGradient(model, used, pb.solvers.PseudoInverse())

    def closure() -> Tensor:
        opt.zero_grad()
        value = cross(model(x))
        value.backward()
        return value

    assert_close(flat, opt.direction(closure).x, 1e-8, "the optimizer's direction")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    piece = point.decompose(cross)
    assert piece.residual.shape == (6, 3)
    assert 0 <= piece.lost <= 1
    assert_close(piece.tangent, point.pushforward(natural), 1e-7, "Theorem 1")


def test_reduction_and_a_matrix_over_all_outputs_of_a_module() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = draw(4, 3)
    mean = Point(model, None, pb.metrics.Euclidean(), inputs=x).gram()
    total = Point(model, None, pb.metrics.Euclidean(), inputs=x, reduction="sum").gram()
    assert_close(total, 4 * mean, 1e-14, "sum and mean")
    g = spd(8)
    j = pb.testing.jacobian(model(x), list(model.parameters()))
    assert_close(Point(model, None, g, inputs=x).gram(), j.T @ g @ j, 1e-12, "a matrix")


def test_other_parameters_of_a_module() -> None:
    model = nn.Linear(3, 2).double()
    x = draw(4, 3)
    other = {"weight": draw(2, 3), "bias": draw(2)}
    point = Point(model, other, inputs=x)
    assert_close(point.value, x @ other["weight"].T + other["bias"], 1e-14, "φ(ξ)")
    partial = Point(model, {"bias": draw(2)}, inputs=x)
    assert partial.parameters == 2
    assert partial.rank.rank == 2


@pytest.mark.parametrize(
    "inverse", [RandomInverse(3), WeightedNorm(spd(26)), Cholesky(0.1)], ids=repr
)
def test_inverses_are_solvers(inverse: pb.solvers.Solver) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = draw(6, 3)
    y = draw(6, 2, seed=1)
    opt = pb.NaturalGradient(model, solver=inverse, gram="rows")

    def closure() -> Tensor:
        opt.zero_grad()
        value = 0.5 * (model(x) - y).square().sum(1).mean()
        value.backward()
        return value

    truth = pb.testing.oracle(model, x, pb.metrics.Euclidean())
    move = truth.jacobian @ opt.direction(closure).x
    want = (model(x) - y).detach().flatten()
    if isinstance(inverse, Cholesky):
        g = truth.gram + 0.1 * torch.eye(26).to(want)
        want = truth.jacobian @ torch.linalg.solve(g, truth.jacobian.T @ want / 6)
    assert_close(move, want, 1e-7, "the function's move")


def test_random_inverse_is_not_symmetric_and_damping_replaces_it() -> None:
    gram = pb.grams.Rows(draw(3, 6))
    solver = RandomInverse(0, scale=10.0)
    state = solver.init(gram)
    g = gram.dense()
    inverse = torch.stack([solver.solve(state, e).x for e in torch.eye(6).to(g)], 1)
    assert_close(g @ inverse @ g, g, 1e-10, "G G⁻ G = G")
    assert float((inverse - inverse.T).norm()) > 0.1 * float(inverse.norm())
    rhs = draw(6, seed=3)
    damped = solver.solve(solver.init(gram), rhs, 0.5).x
    truth = torch.linalg.solve(g + 0.5 * torch.eye(6).to(g), rhs)
    assert_close(damped, truth, 1e-10, "(G + λ)⁻¹")


def test_an_ill_conditioned_map_keeps_its_digits() -> None:
    hilbert = 1 / (torch.arange(8)[:, None] + torch.arange(8) + 1).to(DTYPE)
    ones = torch.ones(8, dtype=DTYPE)
    point = Point(lambda x: hilbert @ x, ones)
    for inverse in (None, RandomInverse(0)):
        moved = point.pushforward(point.natural_gradient(lambda z: z.sum(), inverse))
        assert float((moved - 1).abs().max()) < 1e-9


def test_weighted_norm_is_the_smallest() -> None:
    a = draw(3, 6)
    w = spd(6, seed=2)
    solver = WeightedNorm(w)
    g = a.T @ draw(3, seed=4)
    x = solver.solve(solver.init(pb.grams.Rows(a)), g).x
    assert_close(a.T @ (a @ x), g, 1e-10, "G x = g")
    null = torch.linalg.svd(a).Vh[3:]
    assert float((null @ (w @ x)).norm()) < 1e-10 * float(x.norm())


BAD = {
    "no map": (lambda: Point(3, tensor(1)), "φ is not usable"),  # pyright: ignore
    "no coordinates": (lambda: Point(lambda x: x), "ξ is not usable"),
    "empty": (lambda: Point(lambda x: x, torch.zeros(0)), "empty"),
    "integers": (lambda: Point(lambda x: x, torch.tensor([1])), "float type"),
    "NaN": (lambda: Point(lambda x: x, tensor(1, float("nan"))), "NaN"),
    "NaN values": (lambda: Point(lambda x: x.log(), tensor(-1.0)), "not finite"),
    "infinite slope": (lambda: Point(lambda x: x.sqrt(), tensor(0.0)).rank, "dφ"),
    "no tensor": (lambda: Point(lambda x: 1.0, tensor(1)), "point of Z"),  # pyright: ignore
    "meta": (lambda: Point(lambda x: x, torch.ones(2, device="meta")), "meta"),
    "rcond": (lambda: Point(lambda x: x, tensor(1), rcond=-1.0), "rcond"),
    "empty values": (lambda: Point(lambda x: x[:0], tensor(1)), "point of Z"),
    "module without inputs": (lambda: Point(nn.Linear(2, 1)), "inputs"),
    "wrong name": (
        lambda: Point(nn.Linear(2, 1), {"w": tensor(1)}, inputs=draw(2, 2)),
        "no parameter",
    ),
    "dropout": (
        lambda: Point(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), inputs=torch.ones(4, 2)),
        "stochastic",
    ),
    "wrong vector": (lambda: Point(lambda x: x, tensor(1, 2)).pushforward(tensor(1)), "fit ξ"),
    "NaN vector": (
        lambda: Point(lambda x: x, tensor(1)).pushforward(tensor(float("nan"))),
        "not finite",
    ),
    "wrong tangent": (lambda: Point(lambda x: x, tensor(1, 2)).project(tensor(1)), "fit φ"),
    "wrong gradient": (lambda: Point(lambda x: x, tensor(1, 2)).natural_gradient(tensor(1)), "fit"),
    "vector loss": (lambda: Point(lambda x: x, tensor(1, 2)).natural_gradient(lambda z: z), "one"),
    "NaN loss": (
        lambda: Point(lambda x: x, tensor(-1)).natural_gradient(lambda z: z.log().sum()),
        "L is not finite",
    ),
    "infinite slope of the loss": (
        lambda: Point(lambda x: x, tensor(0)).natural_gradient(lambda z: z.sqrt().sum()),
        "dL is not finite",
    ),
    "indefinite": (lambda: Point(lambda x: x, tensor(1, 2), torch.diag(tensor(1, -1))), "semidef"),
    "asymmetric": (lambda: Point(lambda x: x, tensor(1, 2), tensor(1, 1, 0, 1).view(2, 2)), "sym"),
    "metric of another size": (lambda: Point(lambda x: x, tensor(1, 2), spd(3)), "fit"),
    "NaN metric": (
        lambda: Point(lambda x: x, tensor(1), tensor(float("nan")).view(1, 1)),
        "finite",
    ),
    "metric that raises": (lambda: Point(lambda x: x, tensor(1), lambda z: z @ spd(3)), "metric"),
    "reduction": (lambda: Point(lambda x: x, tensor(1), reduction="max"), "reduction"),
    "a class": (
        lambda: Point(lambda x: x, tensor(1)).natural_gradient(lambda z: z.sum(), MoorePenrose),
        "inverse is not usable",
    ),
    "weight": (
        lambda: Point(lambda x: x, tensor(1, 2)).natural_gradient(
            lambda z: z.sum(), WeightedNorm(tensor(1, -1))
        ),
        "positive definite",
    ),
    "inference mode": (
        torch.inference_mode()(lambda: Point(lambda x: x, tensor(1, 2))),
        "inference mode",
    ),
    "a complex vector": (
        lambda: Point(lambda x: x, tensor(1, 2)).pushforward(torch.ones(2, dtype=torch.complex64)),
        "complex64",
    ),
    "a vector without values": (
        lambda: Point(lambda x: x, tensor(1, 2)).pushforward(torch.ones(2, device="meta")),
        "meta",
    ),
    "weight of another size": (
        lambda: Point(lambda x: x, tensor(1, 2)).natural_gradient(
            lambda z: z.sum(), WeightedNorm(tensor(1))
        ),
        "fit",
    ),
}


@pytest.mark.parametrize(("call", "match"), BAD.values(), ids=BAD)
def test_bad_input(call: Callable[[], object], match: str) -> None:
    with pytest.raises(PullbackError, match=match):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_map_in_lower_precision_than_its_coordinates(dtype: torch.dtype) -> None:
    point = Point(lambda x: x.to(dtype) ** 2, tensor(0.3, -1.2))
    assert float((point.gram() - torch.diag(tensor(0.36, 5.76))).abs().max()) < 2e-2
    half = Point(lambda x: x**2, torch.ones(3, dtype=torch.bfloat16))
    assert half.natural_gradient(lambda z: z.sum()).tolist() == [0.5] * 3  # pyright: ignore
