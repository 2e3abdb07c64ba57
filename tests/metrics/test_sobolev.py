"""The Sobolev metric: K⁻¹ ⊗ I over the batch, and the function's move it implies."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.likelihoods import Bernoulli, Categorical
from pullback.metrics import Euclidean, Fisher, Matern, ReproducingKernel, Sobolev, Weighted
from pullback.metrics.rkhs import distances
from pullback.testing import assert_close, check_metric, jacobian
from tests.laws.models import mlp
from tests.laws.table import FORMS


def points(n: int = 4, d: int = 2) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_kernel_numbers() -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    k = Matern(1.5, 1.0)(x, x)
    want = torch.tensor([0.7357588823, 0.1991482735, 0.4060058497], dtype=torch.float64)
    assert_close(torch.stack([k[0, 1], k[0, 2], k[1, 2]]), want, 1e-9, "K at X = (0, 1, 3)")
    assert torch.equal(k.diagonal(), torch.ones(3).double())
    assert_close(Matern(1.5, 2.0)(2 * x, 2 * x), k, 1e-15, "scale is a length")


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_kernel_smoothness(dimension: int) -> None:
    """K is the Matérn-3/2 kernel, whose spectrum decays as (1 + |ξ|²)^{−(n+3)/2}: s = (n + 3)/2.

    The radial profile decides it: on a line, the transform of e^{−r}(1 + r) is 4/(1 + ξ²)², and
    in Rⁿ the profile r^ν K_ν(r) with ν = 3/2 has s = ν + n/2.
    """
    from scipy.special import gamma, kv

    r = torch.linspace(0.1, 5, 20, dtype=torch.float64)
    x = torch.zeros(20, dimension, dtype=torch.float64)
    x[:, -1] = r
    actual = Matern(1.5, 1.0)(x, torch.zeros(1, dimension).double())[:, 0]
    nu = 1.5
    matern = 2 ** (1 - nu) / gamma(nu) * r.numpy() ** nu * kv(nu, r.numpy())
    assert_close(actual, torch.tensor(matern), 1e-12, "Matérn with ν = 3/2")


def test_distances_do_not_cancel() -> None:
    x = torch.tensor([[1e6], [1e6 + 1e-3]], dtype=torch.float64)
    assert abs(float(distances(x, x)[0, 1]) - 1e-3) < 1e-9


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3), (4, 1)], ids=str)
@pytest.mark.parametrize(
    "metric",
    [
        Sobolev(1.5),
        Weighted(Sobolev(1.5), 2.0),
        Sobolev(1.5, order=0.5),
        Sobolev(kernel=lambda a, b: torch.exp(-torch.cdist(a, b).square() / 2)),
        Sobolev(1.5, inner=Fisher(Bernoulli())),
    ],
    ids=["smooth", "weighted", "rough", "own kernel", "inner"],
)
def test_laws(shape: tuple[int, ...], metric) -> None:
    z = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    check_metric(metric, z, points(), tol=1e-11)


def test_matrix_is_the_inverse_kernel_on_every_output() -> None:
    x = points()
    z = points(4, 3)
    k = Matern(1.5, 1.5)(x, x)
    factor = Sobolev(1.5, jitter=0.0).factor(z, inputs=x)
    v = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert_close(factor.matvec(v), torch.linalg.solve(k, v), 1e-11, "M = K⁻¹ ⊗ I")
    g = torch.randn(4, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    r = factor.whiten(g).value
    assert r is not None
    assert_close(factor.apply(r), g, 1e-12, "S r = g")
    assert_close((r**2).sum(), (g * (k @ g)).sum(), 1e-12, "|r|² = ⟨g, K g⟩")


def wide(m: int = 2) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return mlp(2, 12, m).double(), points()


def test_push_forward_of_the_inverse_gram_is_the_kernel() -> None:
    """J(Jᵀ(K⁻¹ ⊗ I)J)⁺Jᵀ = K ⊗ I for J of full row rank, with the library's A = SᵀJ."""
    model, x = wide()
    j = jacobian(model(x), list(model.parameters()))
    assert torch.linalg.matrix_rank(j) == len(j)
    factor = Sobolev(1.0, jitter=0.0).factor(model(x).detach(), inputs=x)
    a = torch.stack([factor.transpose(c.view(4, 2)).flatten() for c in j.T], 1)  # SᵀJ
    inverse = torch.linalg.pinv(a)
    k = Matern(1.5, 1.0)(x, x)
    want = torch.kron(k, torch.eye(2).double())
    assert_close(j @ inverse @ inverse.T @ j.T, want, 1e-10, "J G⁺ Jᵀ = K ⊗ I")


@pytest.mark.parametrize("form", FORMS)
def test_the_function_moves_by_the_kernel_times_the_gradient(form: str) -> None:
    """Δf = −ηK∇L on the batch, to first order in η; ∇L is N times the mean's cotangent."""
    model, x = wide()
    t = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    before = model(x).detach()
    j = jacobian(model(x), list(model.parameters()))
    w = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt = pb.NaturalGradient(
        model, Sobolev(1.0, jitter=0.0), pb.solvers.PseudoInverse(), lr=1e-3, gram=form
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * ((model(x) - t) ** 2).sum(1).mean()
        loss.backward()
        return loss

    assert opt.step(closure).accepted
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - w
    want = -1e-3 * Matern(1.5, 1.0)(x, x) @ (before - t)
    assert_close((j @ moved).view(4, 2), want, 1e-9, "tangent move = −ηK∇L")
    assert_close(model(x).detach() - before, want, 1e-2, "the function's own move, to O(η)")


def test_equal_inputs_need_the_jitter() -> None:
    x = points()[[0, 1, 1, 2]]
    z = points(4, 3)
    check_metric(Sobolev(), z, x, tol=1e-4)  # the default jitter serves, at condition 1e10
    with pytest.raises(pb.PullbackError, match="jitter"):
        Sobolev(jitter=0.0).factor(z, inputs=x)
    k = Sobolev(jitter=1e-3).kernel(x, torch.float64)
    assert_close(
        k.diagonal(), torch.full((4,), 1.001, dtype=torch.float64), 1e-15, "the jitter is stated"
    )
    assert_close(k[1, 2], torch.tensor(1.0).double(), 1e-15, "off the diagonal nothing is added")
    assert float(Sobolev().kernel(x, torch.float64)[0, 0]) == 1 + 1e-10
    assert float(Sobolev().kernel(x.float(), torch.float32)[0, 0]) == pytest.approx(1 + 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_step_with_equal_inputs_is_finite(form: str) -> None:
    model, x = wide()
    x = x[[0, 1, 1, 2]]
    opt = pb.NaturalGradient(model, Sobolev(), pb.solvers.Cholesky(1e-3), lr=0.1, gram=form)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss

    before = float(closure().detach())
    info = opt.step(closure)
    assert info.accepted, info.reason
    assert float(closure().detach()) < before


@pytest.mark.parametrize(
    ("inputs", "message"),
    [(None, "inputs"), (torch.arange(4), "float"), (points(3), "4 samples")],
    ids=["none", "integers", "another batch"],
)
def test_unusable_inputs_are_refused(inputs: Tensor | None, message: str) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        Sobolev().factor(points(4, 3), inputs=inputs)
    with pytest.raises(pb.PullbackError, match="positive"):
        Sobolev(scale=0.0)


def test_several_calls_are_refused() -> None:
    """K relates the samples of one call; across calls there would be no K."""
    model, x = wide()
    opt = pb.NaturalGradient(model, Sobolev())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x[:2]) ** 2).mean() + (model(x[2:]) ** 2).mean()
        loss.backward()
        return loss

    with pytest.raises(pb.PullbackError, match="one call"):
        opt.step(closure)


def categorical_factor(z: Tensor) -> Tensor:
    """P, one matrix per sample: diag(√p) − p√pᵀ."""
    p = z.softmax(1)
    return torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]


@pytest.mark.parametrize("form", FORMS)
def test_fisher_weighted_gram(form: str) -> None:
    """G = Jᵀ P(K⁻¹ ⊗ I)Pᵀ J/N, whatever its form, and the step of the damped system."""
    model, x = wide(3)
    y = torch.tensor([0, 2, 1, 2])
    metric = Sobolev(1.0, jitter=0.0, inner=Fisher(Categorical()))
    assert metric.samples(model(x)) == 4
    j = jacobian(model(x), list(model.parameters()))
    p = torch.block_diag(*categorical_factor(model(x).detach()))
    inverse = torch.linalg.inv(Matern(1.5, 1.0)(x, x)).contiguous()
    m = p @ torch.kron(inverse, torch.eye(3).double()) @ p.T
    g = j.T @ m @ j / 4
    opt = pb.NaturalGradient(model, metric, pb.solvers.Cholesky(1e-2), lr=1.0, gram=form)
    before = torch.cat([q.detach().flatten() for q in model.parameters()])
    loss = torch.nn.functional.cross_entropy(model(x), y)
    slope = jacobian(loss[None], list(model.parameters()))[0]

    def closure() -> Tensor:
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert opt.step(closure).accepted
    moved = torch.cat([q.detach().flatten() for q in model.parameters()]) - before
    want = -torch.linalg.solve(g + 1e-2 * torch.eye(len(g)).double(), slope)
    assert_close(moved, want, 1e-8, "the damped step")


def test_the_inner_fisher_metric_is_that_of_the_amplitudes() -> None:
    """Pᵀdz = d(2√p), so M is the Sobolev metric of x ↦ 2√p(x)."""
    x = points()
    z = points(4, 3)
    v = torch.randn(4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    move = torch.func.jvp(lambda z: 2 * z.softmax(1).sqrt(), (z,), (v,))[1]
    metric = Sobolev(1.5, jitter=0.0, inner=Fisher(Categorical()))
    total = (v * metric.factor(z, inputs=x).matvec(v)).sum()
    want = (move * torch.linalg.solve(Matern(1.5, 1.5)(x, x), move)).sum()
    assert_close(total, want, 1e-11, "⟨v, M v⟩")


@pytest.mark.filterwarnings("ignore:The Sobolev kernel")
def test_far_apart_it_is_the_metric_of_single_samples() -> None:
    x = 1e3 * points()
    z = points(4, 3)
    v = points(4, 3).flip(0)
    one = Sobolev(1e-3, jitter=0.0).factor(z, inputs=x)
    assert_close(one.matvec(v), Euclidean().factor(z).matvec(v), 1e-14, "K = I")
    fisher = Fisher(Categorical())
    two = Sobolev(1e-3, jitter=0.0, inner=fisher).factor(z, inputs=x)
    assert_close(two.matvec(v), fisher.factor(z).matvec(v), 1e-14, "K = I, inner Fisher")


def test_kernels_of_a_user() -> None:
    x = points()
    z = points(4, 3)
    v = points(4, 3).flip(0)
    user_factor = Sobolev(kernel=lambda x, y: 10 * Matern(1.5, 2.0)(x, y), jitter=1e-3).factor(
        z, inputs=x
    )
    library_factor = Sobolev(2.0, jitter=1e-3).factor(z, inputs=x)
    assert_close(
        10 * user_factor.matvec(v),
        library_factor.matvec(v),
        1e-12,
        "degree −1 in K, jitter included",
    )
    assert isinstance(Sobolev(2.0, order=2.5).kernel_of, ReproducingKernel)
    assert Sobolev(2.0).scale == 2.0
    assert Sobolev(kernel=lambda x, y: x @ y.T).scale is None


BAD_KERNELS = {
    "shape": (lambda x, y: torch.ones(2, 2), "fit the batch"),
    "no tensor": (lambda x, y: 1.0, "fit the batch"),
    "not symmetric": (lambda x, y: torch.eye(4).double() + torch.ones(4, 4).triu(1), "symmetric"),
    "indefinite": (lambda x, y: torch.ones(4, 4) - 2 * torch.eye(4), "singular"),
    "nan": (lambda x, y: torch.full((4, 4), torch.nan), "not finite"),
}


@pytest.mark.parametrize("name", BAD_KERNELS)
def test_kernels_that_are_none(name: str) -> None:
    kernel, message = BAD_KERNELS[name]
    with pytest.raises(pb.PullbackError, match=message):
        Sobolev(kernel=kernel).factor(points(4, 3), inputs=points())


def test_unusable_options() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kernel": Matern(), "scale": 2.0}, "kernel"),
        ({"kernel": 3.0}, "kernel"),
        ({"jitter": -1.0}, "jitter"),
        ({"jitter": float("nan")}, "jitter"),
        ({"inner": Euclidean()}, "rotation"),
        ({"order": 1.0}, "half-integers"),
    ]
    for options, message in cases:
        with pytest.raises(pb.PullbackError, match=message):
            Sobolev(**options)


def test_inputs_that_are_not_finite() -> None:
    x = points()
    x[1, 0] = torch.inf
    with pytest.raises(pb.PullbackError, match="not finite"):
        Sobolev().factor(points(4, 3), inputs=x)


@pytest.mark.parametrize(("scale", "actual"), [(1e-3, "identity"), (1e5, "all-ones")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scales_that_tell_nothing_warn_once(scale: float, actual: str, dtype: torch.dtype) -> None:
    metric = Sobolev(scale, jitter=1e-3)
    x = points().to(dtype)
    z = points(4, 3).to(dtype)
    with pytest.warns(UserWarning, match=rf"{actual}.*median_distance\(inputs\); it is 2\."):
        metric.factor(z, inputs=x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric.factor(z, inputs=x)
        Sobolev(2.0).factor(z, inputs=x)
        Sobolev(1e5).factor(z[:1], inputs=x[:1])


def test_copies_and_pickles() -> None:
    metric = Sobolev(2.0, inner=Fisher(Categorical()))
    assert repr(pickle.loads(pickle.dumps(metric))) == repr(metric)
    assert repr(copy.deepcopy(metric)) == repr(metric)


@pytest.mark.parametrize(
    ("metric", "spread"),
    [
        (Sobolev(), 0.0),
        (Sobolev(5.0, order=5.5), 1.0),
        (Sobolev(kernel=lambda a, b: torch.exp(-torch.cdist(a, b)) * a.new_ones(())), 0.0),
    ],
)
def test_large_batches_in_single_precision_with_the_default_jitter(
    metric: Sobolev, spread: float
) -> None:
    """λ_max of K is the batch size, and its round-off in float32 more than the jitter."""
    x = spread * points(512, 3).float()
    z = torch.randn(512, 2, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all-ones, as it should say
        factor = metric.factor(z, inputs=x)
    moved = factor.transpose(z)
    assert moved.dtype == torch.float32
    k = metric.kernel(x, torch.float32).double() + 0.0
    want = (z.double() * torch.linalg.solve(k, z.double())).sum()  # zᵀK⁻¹z = |L⁻¹z|²
    assert_close(moved.double().square().sum(), want, 1e-2, "zᵀMz")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_single(dtype: torch.dtype) -> None:
    factor = Sobolev().factor(points(4, 3).to(dtype), inputs=points().to(dtype))
    assert factor.transpose(points(4, 3).float()).dtype == torch.float32


def test_arguments_that_are_no_numbers_and_batches_without_samples() -> None:
    for jitter in ("small", torch.ones(2), float("nan")):
        with pytest.raises(pb.PullbackError, match="jitter"):
            Sobolev(jitter=jitter)  # type: ignore[arg-type]
    with pytest.raises(pb.PullbackError, match="inputs"):
        Sobolev().factor(torch.zeros(0, 2), inputs=torch.zeros(0, 3))
    with pytest.raises(pb.PullbackError, match="no distance"):
        pb.metrics.median_distance([1.0, 2.0])  # type: ignore[arg-type]
