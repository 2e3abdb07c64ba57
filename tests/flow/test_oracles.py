"""Flows with known solutions: logistic margins, least squares, softmax, diverging logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback import flow
from pullback.likelihoods import Bernoulli, Categorical, Gaussian
from pullback.metrics import Euclidean, Fisher

DTYPE = torch.float64
Y = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=DTYPE)

#: enough to tell formulas apart; `test_known_margins` asks for the default's digits
ROUGH = {"rtol": 1e-6, "atol": 1e-8}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def margins(s0: Tensor, y: Tensor, t: float) -> Tensor:
    """s(t) = y log(e^(t + c) − 1), c = log(1 + e^(y s₀)), where e^(t + c) may overflow."""
    c = torch.log1p(torch.exp(y * s0))
    return y * (t + c + torch.log(-torch.expm1(-(t + c))))


def linear(features: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(features, 1, bias=False).double()


def net(features: int = 8) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(features, 10), nn.Tanh(), nn.Linear(10, 1)).double()


def logistic(model: nn.Module, x: Tensor, y: Tensor, reduction: str) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        losses = F.softplus(-y * model(x)[:, 0])
        if reduction == "mean":
            return losses.mean()
        return losses.sum()

    return closure


def test_logistic_margins() -> None:
    model = net()
    x = draw(5, 8)
    s0 = model(x)[:, 0].detach()
    trajectory = flow.integrate(
        model, logistic(model, x, Y, "sum"), Fisher(Bernoulli()), (0, 1), reduction="sum", **ROUGH
    )
    assert trajectory.status == "finished"
    for t in (0.0, 0.3, 1.0):
        assert float((trajectory.values(t)[:, 0] - margins(s0, Y, t)).abs().max()) < 1e-5
        assert abs(float(trajectory.loss(t) - F.softplus(-Y * margins(s0, Y, t)).sum())) < 1e-5


def test_a_summed_loss_with_a_mean_metric_is_n_times_faster() -> None:
    model = linear()
    x = draw(5, 8)
    s0 = model(x)[:, 0].detach()
    loss = logistic(model, x, Y, "sum")
    trajectory = flow.integrate(model, loss, Fisher(Bernoulli()), (0, 1), **ROUGH)
    for t in (0.2, 1.0):
        assert float((trajectory.values(t)[:, 0] - margins(s0, Y, 5 * t)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("s0", "y", "t", "truth"),
    [
        (0.0, 1.0, 1.0, 1.4898801256),
        pytest.param(-1.0, -1.0, 2.0, -3.2761855192, marks=pytest.mark.slow),
    ],
)
def test_known_margins(s0: float, y: float, t: float, truth: float) -> None:
    trajectory = flow.integrate(
        lambda s: s,
        lambda z: F.softplus(-y * z).sum(),
        Fisher(Bernoulli()),
        (0, t),
        start=torch.tensor([s0], dtype=DTYPE),
    )
    assert abs(float(trajectory.values()) - truth) < 1e-9
    assert abs(float(trajectory.parameters()) - truth) < 1e-9


def test_discrete_steps_of_a_linear_model() -> None:
    """s ← s + η y (1 + e^(−ys)); from 0 with η = ½: 1, 1.6839397206."""
    model = linear()
    x = draw(5, 8)
    nn.init.zeros_(model.weight)  # pyright: ignore
    opt = pb.NaturalGradient(
        model, Fisher(Bernoulli()), pb.solvers.PseudoInverse(), pb.steps.Constant(0.5)
    )
    inner = logistic(model, x, Y, "mean")

    def closure() -> Tensor:
        opt.zero_grad()
        loss = inner()
        loss.backward()
        return loss

    s = torch.zeros(5, dtype=DTYPE)
    for expected in (1.0, 1.6839397206):
        opt.step(closure)
        s = s + 0.5 * Y * (1 + torch.exp(-Y * s))
        assert float((model(x)[:, 0] - s).abs().max()) < 1e-10
        assert abs(float(s[0]) - expected) < 1e-9


@pytest.mark.parametrize(
    ("make", "last"), [(linear, 800.0), pytest.param(net, 45.0, marks=pytest.mark.slow)]
)
def test_logits_of_eight_hundred(make: Callable[[], nn.Module], last: float) -> None:
    model = make()
    x = draw(5, 8)
    s0 = model(x)[:, 0].detach()
    data = flow.Supervised(x, (1 + Y) / 2, Bernoulli())
    trajectory = flow.integrate(model, data, t=(0, last))
    assert trajectory.status == "finished"
    for t in (1.0, 40.0, last):  # autograd's p − y is zero from 37 on
        assert float((trajectory.values(t)[:, 0] - margins(s0, Y, t)).abs().max()) < 1e-8
    assert float(trajectory.loss()) < 1e-18


def test_softmax_logits() -> None:
    """z_y − z_k = d_k + u with e^u = (1 + C)e^t − C, C = Σ e^(−d_k): all classes recede alike."""
    x = draw(5, 8)
    y = torch.tensor([0, 2, 1, 1, 0])
    torch.manual_seed(0)
    model = nn.Linear(8, 3).double()
    z0 = model(x).detach()
    data = flow.Supervised(x, y, Categorical())
    trajectory = flow.integrate(model, data, t=(0, 1), at=[0.3, 1.0], **ROUGH)
    loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    closure = flow.integrate(model, loss, Fisher(Categorical()), (0, 0.3), at=[0.3], **ROUGH)
    gap = z0.gather(1, y[:, None]) - z0
    c = torch.exp(-gap).sum(1, keepdim=True) - 1
    for t in (0.3, 1.0):
        u = t + torch.log(1 + c - c * torch.exp(torch.tensor(-t, dtype=DTYPE)))
        truth = torch.where(gap == 0, 0.0, gap + u)
        for one in (trajectory, closure) if t < 1 else (trajectory,):
            z = one.values(t)
            assert float((z.gather(1, y[:, None]) - z - truth).abs().max()) < 1e-5


@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_more_samples_than_parameters(classes: int) -> None:
    """No margins of their own: the log-domain velocity is the dense weighted one."""
    torch.manual_seed(0)
    x = draw(30, 3)
    y = torch.randint(0, classes, (30,))
    model = nn.Linear(3, 1 if classes == 2 else 3).double()
    metric: pb.metrics.Metric
    if classes == 2:
        data = flow.Supervised(x, y, Bernoulli())
        metric = Fisher(Bernoulli())
        loss = F.binary_cross_entropy_with_logits
        closure = lambda: loss(model(x)[:, 0], y.to(DTYPE))  # noqa: E731
    else:
        data = flow.Supervised(x, y, Categorical())
        metric = Fisher(Categorical())
        closure = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    one = flow.integrate(model, data, t=(0, 0.2))
    two = flow.integrate(model, closure, metric, (0, 0.2))
    assert one.ok
    assert two.ok
    for t in (0.1, 0.2):
        assert float((one.values(t) - two.values(t)).abs().max()) < 1e-7
        assert abs(float(one.loss(t) - two.loss(t))) < 1e-8


@pytest.mark.parametrize("shift", [0.0, 800.0, -300.0])
def test_the_velocity_far_out_is_the_weighted_least_squares_solution(shift: float) -> None:
    """N > D with margins around `shift`: min Σ φ(u)φ(−u)(x̃ᵀΔ − 1/φ(u))², weights in log domain."""
    from pullback.flow.supervised import SupervisedField

    x = torch.cat([torch.ones(12, 1, dtype=DTYPE), 0.3 * draw(12, 2)], 1)
    beta = torch.tensor([shift, 1.0, -2.0], dtype=DTYPE)
    y = torch.ones(12, dtype=DTYPE)
    model = nn.Linear(3, 1, bias=False).double()
    data = flow.Supervised(x, (1 + y) / 2, Bernoulli())
    field = SupervisedField(model, data, True, solver=pb.solvers.PseudoInverse())
    local = field.local(beta)
    assert not local.reason
    u = x @ beta
    ld = F.logsigmoid(u) + F.logsigmoid(-u)
    c = ld.max()
    rows = torch.exp((ld - c) / 2)[:, None] * x
    targets = torch.exp(F.logsigmoid(-u) - (ld + c) / 2)
    truth = torch.linalg.lstsq(rows, targets[:, None], driver="gelsd").solution[:, 0]
    assert float((local.velocity - truth).norm()) < 1e-9 * float(truth.norm())


def test_least_squares_decays_at_one_rate_naturally_and_by_the_kernel_euclideanly() -> None:
    model = linear()
    x = draw(5, 8)
    y = draw(5, 1, seed=3)
    r0 = (model(x) - y).detach()

    def residuals(params: dict[str, Tensor]) -> Tensor:
        return x @ params["weight"].T - y

    natural = flow.integrate(model, residuals, t=(0, 1.5), **ROUGH)
    kernel = x @ x.T / 5
    euclidean = flow.integrate(model, residuals, t=(0, 1.5), kind="euclidean", **ROUGH)
    data = flow.Supervised(x, y, Gaussian())
    supervised = flow.integrate(model, data, t=(0, 1.5), **ROUGH)
    for t in (0.7, 1.5):
        shrunk = torch.exp(torch.tensor(-t, dtype=DTYPE)) * r0
        assert float((natural.values(t, x) - y - shrunk).abs().max()) < 1e-5
        assert float((supervised.values(t) - y - shrunk).abs().max()) < 1e-5
        assert abs(float(natural.loss(t) - 0.5 * shrunk.square().mean())) < 1e-5
        rotated = torch.linalg.matrix_exp(-t * kernel) @ r0
        assert float((euclidean.values(t, x) - y - rotated).abs().max()) < 1e-5
        assert float((euclidean.values(t) * 5**0.5 - rotated[:, 0]).abs().max()) < 1e-5


def test_natural_flow_is_invariant_under_reparametrization_and_euclidean_is_not() -> None:
    b = draw(3, 6, seed=1)
    c = draw(4, 3, seed=2)
    g = torch.diag(torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=DTYPE))

    def phi(w: Tensor) -> Tensor:
        return torch.tanh(c @ (b @ w)) + c @ (b @ w)

    def psi(v: Tensor) -> Tensor:
        return phi(torch.sinh(v) + v.flip(0) ** 3)

    def loss(z: Tensor) -> Tensor:
        return 0.5 * ((z - 1) ** 2).sum()

    v0 = 0.3 * draw(6, seed=5)
    w0 = torch.sinh(v0) + v0.flip(0) ** 3
    ends = {}
    for model_name, metric, last in (("natural", g, 0.5), ("euclidean", None, 0.03)):
        one = flow.integrate(phi, loss, metric, (0, last), start=w0, kind=model_name, rtol=1e-5)
        two = flow.integrate(psi, loss, metric, (0, last), start=v0, kind=model_name, rtol=1e-5)
        assert one.ok
        assert two.ok
        gaps = [(one.values(s * last) - two.values(s * last)).norm() for s in (0.0, 0.6, 1.0)]
        ends[model_name] = float(max(gaps))
    assert ends["natural"] < 1e-3
    assert ends["euclidean"] > 1e-2


def test_a_metric_that_moves_and_a_dict_of_coordinates() -> None:
    """θ' = −θ/M(θ) for φ = id: with M = θ it is θ' = −1."""
    start = {"a": torch.tensor([2.0], dtype=DTYPE), "b": torch.tensor([3.0], dtype=DTYPE)}
    trajectory = flow.integrate(
        lambda w: torch.cat([w["a"], w["b"]]),
        lambda z: 0.5 * (z**2).sum(),
        lambda z: torch.diag(z),
        (0, 1),
        start=start,
    )
    end = trajectory.parameters()
    assert abs(float(end["a"]) - 1) < 1e-9
    assert abs(float(end["b"]) - 2) < 1e-9
    assert float(start["a"]) == 2.0


@pytest.mark.parametrize("method", flow.METHODS)
def test_every_method(method: str) -> None:
    model = linear()
    x = draw(5, 8)
    s0 = model(x)[:, 0].detach()
    data = flow.Supervised(x, (1 + Y) / 2, Bernoulli())
    trajectory = flow.integrate(model, data, t=(0, 1), method=method, rtol=1e-5, atol=1e-7)
    assert trajectory.status == "finished"
    for t in (0.7, 1.0):
        assert float((trajectory.values(t)[:, 0] - margins(s0, Y, t)).abs().max()) < 1e-3


def test_damped_flow_and_the_euclidean_metric() -> None:
    """With M = I and damping λ: s' = K(K + λ)⁻¹∂, K = JJᵀ."""
    model = linear()
    x = draw(5, 8)
    y = draw(5, 1, seed=3)
    r0 = (model(x) - y).detach()
    trajectory = flow.integrate(
        model,
        lambda: 0.5 * (model(x) - y).square().sum(),
        Euclidean(),
        (0, 0.3),
        solver=pb.solvers.Cholesky(damping=0.5),
        reduction="sum",
    )
    k = x @ x.T
    rate = k @ torch.linalg.inv(k + 0.5 * torch.eye(5).to(k))
    truth = torch.linalg.matrix_exp(-0.3 * rate) @ r0
    assert float((trajectory.values() - y - truth).abs().max()) < 1e-8


@pytest.mark.parametrize("scale", [30.0, 300.0, 1e6])
def test_weights_beyond_the_digits_end_the_flow_with_a_reason(scale: float) -> None:
    """N > D, logits tens apart: the samples of largest weight decide, or the flow says why not."""
    from pullback.flow.supervised import SupervisedField

    x = draw(6, 3)
    beta = scale * draw(3, seed=1)
    y = (x @ beta).sign()
    data = flow.Supervised(x, (1 + y) / 2, Bernoulli())
    model = pb.linear.LinearModel(3, beta)
    local = SupervisedField(model, data, True, solver=pb.solvers.PseudoInverse()).local(beta)
    if local.reason:
        assert "round to zero" in local.reason
        assert scale > 100
    else:
        truth = -pb.linear.logistic_natural_gradient(x, y, beta)
        assert float((local.velocity - truth).norm()) < 1e-6 * float(truth.norm())


def test_classes_of_any_integer_type() -> None:
    x = draw(4, 5)
    y = torch.tensor([0, 1, 2, 1])
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    ends = [
        flow.integrate(model, flow.Supervised(x, c, Categorical()), t=(0.0, 0.001)).flat()
        for c in (y, y.to(torch.int32), y.to(torch.uint8))
    ]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
