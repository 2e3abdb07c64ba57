"""SliceSGD: what the theory says of one step, and a torch optimizer's duties."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback import PullbackError
from pullback.symmetry import find
from pullback.symmetry.descent.sweeps import invert_by_products
from pullback.symmetry.slice_sgd import SliceSGD
from pullback.symmetry.slices import Balanced, EqualNorm
from tests.pairs import all_pairs

from .chain import convnet, mlp, relative, scalings, shake

GRADIENTS = ("riemannian", "gtk-orthonormal", "gtk-polar")


def data(model: nn.Sequential, n: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if isinstance(model[0], nn.Conv2d):
        shape = (2, 6, 6)
    else:
        shape = (model[0].in_features,)
    x = torch.randn(n, *shape, generator=generator).to(next(model.parameters()).dtype)
    return x, torch.randn(n, model[-1].out_features, generator=generator).to(x.dtype)


def backward(model: nn.Sequential) -> Tensor:
    x, y = data(model)
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def make(model: nn.Sequential, lr: float = 0.05, **options) -> SliceSGD:
    return SliceSGD(model, lr, symmetry=scalings(model), **options)


# --- what the theory says ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "bias", "decay"),
    [("layer", False, 0.0), ("neuron", False, 0.0), ("neuron", True, 0.0), ("neuron", True, 0.1)],
)
@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_one_step_changes_the_function_as_sgd_does(
    group: str, bias: bool, decay: float, net: str
) -> None:
    if net == "mlp":
        model = mlp(3, 6, 5, 2, bias=bias)
    else:
        model = convnet(bias=bias)
    opt = make(model, group=group, weight_decay=decay)
    twin = copy.deepcopy(model)
    backward(model)
    opt.step()
    backward(twin)
    torch.optim.SGD(twin.parameters(), lr=0.05, weight_decay=decay).step()
    x, _ = data(model)
    assert relative(model(x), twin(x)) < 6e-15
    distance = [relative(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]
    assert 1e-8 < max(distance) < 0.05**2  # but the parameters differ


def test_the_projection_does_nothing_without_biases_and_something_with() -> None:
    for bias, low, high in ((False, 0.0, 1e-14), (True, 1e-3, 1.0)):
        model = mlp(3, 6, 5, 2, bias=bias)
        slice_ = EqualNorm(scalings(model), model)
        slice_.retract_()
        backward(model)
        g = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        u = slice_.project(g)
        change = sum(float((u[n] - g[n]).square().sum()) for n in g) ** 0.5
        size = sum(float(x.square().sum()) for x in g.values()) ** 0.5
        assert low <= change / size <= high


def test_the_riemannian_step_is_the_projected_gradient() -> None:
    """Biases, and weight decay of one layer only: the projection is real and it is made."""
    model = mlp(3, 6, 5, 2)
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.8},
        {"params": [*model[2].parameters(), *model[4].parameters()]},
    ]
    opt = make(model, group="layer", params=groups)
    twin = copy.deepcopy(model)
    backward(model)
    g = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for n in ("0.weight", "0.bias"):
        g[n] += 0.8 * dict(model.named_parameters())[n].detach()
    slice_ = EqualNorm(scalings(twin), twin)
    u = slice_.project(g)
    size = sum(float(x.square().sum()) for x in g.values()) ** 0.5
    assert sum(float((u[n] - g[n]).square().sum()) for n in g) ** 0.5 > 0.05 * size
    with torch.no_grad():
        for n, p in twin.named_parameters():
            p -= 0.05 * u[n]
    slice_.retract_()
    opt.step()
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert relative(p, q) < 1e-13, n


@pytest.mark.parametrize(
    ("group", "gradient", "momentum"), all_pairs(["neuron", "layer"], GRADIENTS, [0.0, 0.9])
)
def test_training_lowers_the_loss_and_stays_near_the_slice(
    group: str, gradient: str, momentum: float
) -> None:
    model = mlp(3, 8, 6, 5, 2)
    opt = make(model, 0.01, group=group, gradient=gradient, momentum=momentum)
    losses = []
    off = []
    for _ in range(20):
        losses.append(float(backward(model)))
        opt.step()
        assert opt.slice is not None
        off.append(float(opt.slice.constraint().abs().max()))
    assert losses[-1] < losses[0]
    assert max(off) < (1e-11 if group == "layer" else 0.1)
    opt.retract_()
    assert opt.slice is not None
    assert opt.slice.contains()


def test_the_neuron_slice_is_missed_by_the_square_of_the_learning_rate() -> None:
    worst = []
    for lr in (0.02, 0.01):
        model = mlp(3, 8, 6, 5, 2)
        opt = make(model, lr)
        backward(model)
        opt.step()
        assert opt.slice is not None
        worst.append(float(opt.slice.constraint().abs().max()))
    assert worst[0] / worst[1] == pytest.approx(4, rel=0.2)
    assert worst[1] < 1e-3


def test_sweeps_come_closer_and_one_hidden_layer_is_exact() -> None:
    off = []
    for sweeps in (None, 1, 40):
        model = mlp(3, 8, 6, 5, 2)
        opt = make(model, 0.05, sweeps=sweeps)
        backward(model)
        opt.step()
        assert opt.slice is not None
        off.append(float(opt.slice.constraint().abs().max()))
    assert off[0] > off[1] > off[2]
    assert off[2] < 1e-7
    model = mlp(3, 8, 2)
    opt = make(model, 0.05)
    for _ in range(3):
        backward(model)
        opt.step()
        assert opt.slice is not None
        assert opt.slice.contains()


@pytest.mark.parametrize("group", ["neuron", "layer"])
def test_badly_scaled_networks_come_back(group: str) -> None:
    """The trajectory does not know where on the orbit it began; SGD's breaks."""
    ends = []
    for size in (0.0, 3.0):
        model = mlp(3, 8, 6, 2)
        units = scalings(model)
        shake(model, units if group == "neuron" else [s.merged() for s in units], size)
        opt = make(model, 0.05, group=group)
        for _ in range(20):
            backward(model)
            opt.step()
        ends.append(float(backward(model)))
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_momentum_is_a_covector() -> None:
    """Velocities of a twin elsewhere on the orbit are the transported ones."""
    model = mlp(3, 6, 5, 2)
    opt = make(model, 0.05, momentum=0.9)
    for _ in range(3):
        backward(model)
        opt.step()
    pairing = sum(
        float((p.detach() * opt.state[p]["momentum_buffer"]).sum()) for p in model.parameters()
    )
    before = {n: opt.state[p]["momentum_buffer"].clone() for n, p in model.named_parameters()}
    weights_before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt.retract_()
    after = {n: opt.state[p]["momentum_buffer"] for n, p in model.named_parameters()}
    assert any(not torch.equal(before[n], after[n]) for n in before)
    for n, p in model.named_parameters():
        assert torch.allclose(after[n] * p.detach(), before[n] * weights_before[n], atol=1e-14)
    repeated = sum(
        float((p.detach() * opt.state[p]["momentum_buffer"]).sum()) for p in model.parameters()
    )
    assert repeated == pytest.approx(pairing, rel=1e-12)


class Joined(nn.Module):
    """Two layers and the input side by side: the next has columns that nothing scales."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(4, 3)
        self.c = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x).relu(), self.b(x).relu(), x], 1))


class Skip(nn.Module):
    """Units tied along a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(5, 7)
        self.c = nn.Linear(7, 5)
        self.d = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.d((h + self.c(self.b(h).relu())).relu())


class Gated(nn.Module):
    """A product: the next layer's columns answer to two scalings."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)
        self.b = nn.Linear(4, 5)
        self.c = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).relu() * self.b(x))


GRAPHS = {
    "joined": Joined,
    "skip": Skip,
    "gated": Gated,
    "norm": lambda: nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3), nn.PReLU(), nn.Linear(3, 2)
    ),
    "grouped": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 1)),
        nn.Conv1d(4, 8, 1, groups=2),
        nn.ReLU(),
        nn.Conv1d(8, 8, 1, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 2),
    ),
}


@pytest.mark.parametrize(
    ("net", "group", "momentum"), all_pairs(GRAPHS, ["neuron", "layer"], [0.0, 0.9])
)
def test_networks_that_are_no_chains(net: str, group: str, momentum: float) -> None:
    torch.manual_seed(0)
    model = GRAPHS[net]().double()
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(1)).double()
    before = model(x)
    opt = SliceSGD(model, 0.01, group=group, momentum=momentum, symmetry=find(model, x))
    assert opt.slice is not None
    assert relative(model(x), before) < 1e-13
    assert opt.slice.contains()
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), 0.01)
    for m, o in ((model, opt), (twin, other)):
        o.zero_grad()
        m(x).square().mean().backward()
        o.step()
    if isinstance(opt.slice, Balanced):
        assert relative(model(x), twin(x)) < 1e-13
    for _ in range(5):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    assert float(opt.slice.constraint().abs().max()) < 0.05
    opt.retract_()
    assert opt.slice.contains()


# --- a torch optimizer --------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["neuron", "layer"])
def test_state_dict_resumes_to_the_same_bits(group: str) -> None:
    model = mlp(3, 8, 6, 5, 2)
    opt = make(model, momentum=0.9, group=group)
    for _ in range(3):
        backward(model)
        opt.step()
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    other = mlp(3, 8, 6, 5, 2, seed=1)
    resumed = make(other, 1.0, group=group)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for _ in range(3):
        for m, o in ((model, opt), (other, resumed)):
            backward(m)
            o.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_copies_and_pickles_train_on() -> None:
    model = mlp(3, 8, 6, 2)
    opt = make(model, momentum=0.9)
    backward(model)
    opt.step()
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        backward(twin.model)
        twin.step()
    backward(model)
    opt.step()
    for p, q in zip(model.parameters(), twin.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_schedulers_closures_and_scalers() -> None:
    model = mlp(3, 8, 2, dtype=torch.float32)
    opt = make(model, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    assert float(opt.step(lambda: backward(model))) > 0
    scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # pyright: ignore[reportPrivateImportUsage]
    x, y = data(model)
    before = [p.detach().clone() for p in model.parameters()]
    opt.zero_grad()
    scaler.scale(F.mse_loss(model(x), y)).backward()
    scaler.step(opt)
    scaler.update()
    assert any(not torch.equal(p, k) for p, k in zip(model.parameters(), before, strict=True))


def test_param_groups_have_their_own_rates() -> None:
    model = mlp(3, 8, 6, 2)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    opt = make(model, params=groups)
    opt.add_param_group({"params": model[4].parameters(), "lr": 0.2})
    twin = copy.deepcopy(model)
    backward(model)
    opt.step()
    backward(twin)
    with torch.no_grad():
        for layer, lr in ((2, 0.05), (4, 0.2)):
            for p in twin[layer].parameters():
                assert p.grad is not None
                p -= lr * p.grad
    x, _ = data(model)
    assert relative(model(x), twin(x)) < 1e-14
    with pytest.raises(PullbackError, match="belong"):
        opt.add_param_group({"params": nn.Parameter(torch.zeros(1))})


def test_frozen_parameters_and_those_outside_orbits() -> None:
    model = mlp(3, 8, 6, 2)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    opt = make(model)
    assert opt.slice is not None
    assert [s.about for s in opt.slice.scalings] == ["units of 2"]
    last = model[4].bias.detach().clone()
    backward(model)
    expected = last - 0.05 * model[4].bias.grad  # pyright: ignore[reportOptionalOperand]
    opt.step()
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[4].bias, expected)
    model[4].weight.requires_grad_(False)  # and none is left: plain SGD
    before = model[4].weight.detach().clone()
    backward(model)
    opt.step()
    assert opt.slice is None
    assert torch.equal(model[4].weight, before)


def test_every_and_retract() -> None:
    model = mlp(3, 8, 2)
    opt = make(model, every=3)
    off = []
    for _ in range(6):
        backward(model)
        opt.step()
        assert opt.slice is not None
        off.append(bool(opt.slice.contains()))
    assert off == [False, False, True, False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", ["neuron", "layer"])
def test_low_precision_trains(dtype: torch.dtype, group: str) -> None:
    model = mlp(3, 8, 6, 2).to(dtype)
    shake(model, [s.merged() for s in scalings(model)], 1.0)
    opt = make(model, 0.05, group=group, momentum=0.9)
    first = float(backward(model))
    for _ in range(20):
        backward(model)
        opt.step()
    assert float(backward(model)) < first
    assert all(p.dtype == dtype and bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("group", ["neuron", "layer"])
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_gradient_that_is_not_finite_does_not_spread(group: str, gradient: str) -> None:
    """As in torch's SGD the entries that it reaches are lost; no others are."""
    model = mlp(3, 8, 6, 2)
    opt = make(model, group=group, gradient=gradient)
    backward(model)
    assert model[0].weight.grad is not None
    model[0].weight.grad[2, 1] = torch.nan
    opt.step()
    lost = {n: int((~p.isfinite()).sum()) for n, p in model.named_parameters()}
    others = [count for n, count in lost.items() if not n.startswith("0.")]
    assert others == [0] * len(others)
    assert lost["0.weight"] == 1 or gradient == "gtk-polar"


def test_dead_units_and_zero_layers_train() -> None:
    model = mlp(3, 8, 6, 2)
    with torch.no_grad():
        model[0].weight[0] = 0
        model[0].bias[0] = 0
        model[4].weight.zero_()
    for group in ("neuron", "layer"):
        twin = copy.deepcopy(model)
        opt = make(twin, group=group)
        assert opt.start is not None
        assert opt.start.dead
        for _ in range(3):
            backward(twin)
            opt.step()
        assert all(bool(p.isfinite().all()) for p in twin.parameters())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("group", ["neuron", "layer"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_recorded_graphs_do_what_the_kernels_do(group: str, momentum: float) -> None:
    """On a GPU retractions are replayed from the third time on: the same as on a CPU."""
    models = [mlp(3, 8, 6, 5, 2), mlp(3, 8, 6, 5, 2).cuda()]
    optimizers = [make(m, group=group, momentum=momentum) for m in models]
    for step in range(12):
        for m, o in zip(models, optimizers, strict=True):
            x, y = (t.to(m[0].weight.device) for t in data(m))
            o.param_groups[0]["lr"] = 0.05 / (1 + step)
            o.zero_grad()
            F.mse_loss(m(x), y).backward()
            o.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert relative(q.cpu(), p) < 1e-10
    if group == "neuron":
        assert len(optimizers[1]._retractor._replay._graphs) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("group", "gradient", "momentum"), all_pairs(["neuron", "layer"], GRADIENTS, [0.0, 0.9])
)
def test_training_steps_can_be_captured(group: str, gradient: str, momentum: float) -> None:
    """Two steps, forward to retraction, as one graph: what the same steps do on a CPU."""
    models = [mlp(3, 8, 6, 5, 2), mlp(3, 8, 6, 5, 2).cuda()]
    options = {"group": group, "gradient": gradient, "momentum": momentum}
    opts = [make(m, 0.01, captured=2, **options) for m in models]
    x, y = (t.cuda() for t in data(models[1]))

    def steps(m: nn.Sequential, o: SliceSGD, x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            o.zero_grad()
            F.mse_loss(m(x), y).backward()
            o.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            steps(models[1], opts[1], x, y)
    torch.cuda.current_stream().wait_stream(stream)
    opts[1].zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps(models[1], opts[1], x, y)
    for _ in range(3):
        graph.replay()
    for _ in range(5):
        steps(models[0], opts[0], x.cpu(), y.cpu())
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        assert relative(q.cpu(), p) < 1e-10


# --- bad input ------------------------------------------------------------------------------------


def test_models_without_symmetry_are_refused_with_a_remedy() -> None:
    with pytest.raises(PullbackError, match=r"torch\.optim\.SGD"):
        SliceSGD(mlp(3, 4, 2), 0.1, symmetry=[])


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"momentum": -0.1},
        {"weight_decay": float("inf")},
        {"group": "row"},
        {"gradient": "natural"},
        {"every": 0},
        {"sweeps": 0},
        {"every": 1.5},
    ],
)
def test_bad_arguments_are_refused(bad: dict[str, object]) -> None:
    options: dict[str, object] = {"lr": 0.1, **bad}
    with pytest.raises(PullbackError):
        make(mlp(3, 4, 2), **options)  # pyright: ignore[reportArgumentType]


def test_a_parameter_list_is_no_model() -> None:
    with pytest.raises(PullbackError, match="model itself"):
        SliceSGD(mlp(3, 4, 2).parameters(), 0.1)  # pyright: ignore[reportArgumentType]


def test_scalings_are_found_by_default() -> None:
    model = mlp(3, 8, 6, 2)
    opt = SliceSGD(model, 0.05)
    assert isinstance(opt.slice, Balanced)
    assert sum(opt.slice.units.sizes) == 14
    assert opt.slice.contains()
    assert isinstance(SliceSGD(model, 0.05, group="layer").slice, EqualNorm)
    with pytest.raises(PullbackError, match="no slice"):
        SliceSGD(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), 0.1)


def test_inverses_by_products_follow_a_slow_change_and_recover_from_a_jump() -> None:
    """What a GPU does instead of a factorization."""
    torch.manual_seed(0)
    chain = 2 * torch.eye(6) - torch.diag(torch.ones(5), 1) - torch.diag(torch.ones(5), -1)
    a = (chain + 0.1 * torch.randn(6, 6)).double()
    near = invert_by_products(a, torch.linalg.inv(a * 1.01))
    assert torch.allclose(near, torch.linalg.inv(a), rtol=1e-12, atol=1e-12)
    far = 1e6 * torch.eye(6).double()
    for _ in range(8):
        far = invert_by_products(a, far)
    assert torch.allclose(far, torch.linalg.inv(a), rtol=1e-12, atol=1e-12)
    assert not invert_by_products(a * torch.nan, near).any()


def test_a_state_of_another_optimizer_is_refused() -> None:
    model = mlp(3, 5, 2)
    opt = make(model, momentum=0.9)
    adam = torch.optim.Adam(model.parameters())
    before = copy.deepcopy(opt.state_dict())
    backward(model)
    adam.step()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    sgd.step()
    for other in (adam, sgd):
        with pytest.raises(PullbackError, match="not SliceSGD's"):
            opt.load_state_dict(other.state_dict())
    assert opt.state_dict()["param_groups"] == before["param_groups"]
    opt.step()


def test_its_text_says_which_slice() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    text = repr(SliceSGD(model, 0.1))
    assert "lr: 0.1" in text
    assert "group='neuron', gradient='riemannian', slice=Balanced" in text
