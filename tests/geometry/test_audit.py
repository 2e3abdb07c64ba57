"""The audit's numbers against runs by hand, its tables and figures, and what it refuses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import pullback as pb
from pullback import PullbackError
from pullback.geometry.charts.diffeomorphism import Elementwise
from pullback.geometry.charts.transformations import (
    Affine,
    NeuronPermutation,
    NeuronRescaling,
    Whitening,
)
from pullback.geometry.invariance.audit import audit
from pullback.geometry.invariance.table import Audit, Measure, UpdateMismatch, Verdict
from pullback.geometry.invariance.trial import Contender
from tests.geometry.charts import mixing, shear
from tests.kfac_options import kfac_of

Batch = tuple[Tensor, Tensor]

SINH = Elementwise(torch.sinh, torch.asinh)


def network(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 2)
    ).double()


def data(count: int = 30, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(count, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, y


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def by_hand(model: nn.Module, batch: Batch, lr: float, steps: int) -> Tensor:
    """Plain gradient descent with autograd alone, and the outputs it ends with."""
    model = copy.deepcopy(model)
    x, y = batch
    for _ in range(steps):
        loss = 0.5 * (model(x) - y).square().sum() / len(x)
        params = list(model.parameters())
        with torch.no_grad():
            for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
                p -= lr * g
    return model(x).detach()


def test_mismatches_are_those_of_runs_by_hand() -> None:
    model = network()
    batch = data()
    report = audit(sgd, model, batch, [Affine(3)], steps=3, sizes=(1, 0.1)).rows[0]
    twin = Affine(3).twin(model, batch[0]).model
    start = model(batch[0]).detach()
    for mismatch, size in zip(report.measures["batch"].steps, (1, 0.1), strict=True):
        one, two = (by_hand(m, batch, 0.1 * size, 1) for m in (model, twin))
        want = float((one - two).norm() / (one - start).norm())
        assert mismatch.mismatch == pytest.approx(want, rel=1e-6)
    for mismatch, steps in zip(report.measures["batch"].long_run, (1, 2, 3), strict=True):
        one, two = (by_hand(m, batch, 0.1, steps) for m in (model, twin))
        want = float((one - two).norm() / (one - start).norm())
        assert mismatch.mismatch == pytest.approx(want, rel=1e-6)


def test_the_direction_is_that_of_definitions_5_and_6() -> None:
    """SGD under w = Mθ: df·O(ψ) = MMᵀ∇ against ∇, and J of both, with a dense Jacobian."""
    model = network(nn.Tanh)
    batch = data()
    size = sum(p.numel() for p in model.parameters())
    m = torch.eye(size, dtype=torch.float64) + 0.2 * torch.randn(size, size, dtype=torch.float64)
    report = audit(sgd, model, batch, {"mixing": mixing(m)}, steps=0).rows[0]
    params = dict(model.named_parameters())

    def outputs(p: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, p, (batch[0],)).flatten()

    j = torch.cat([r.flatten(1) for r in torch.func.jacrev(outputs)(params).values()], 1).detach()
    g = j.T @ (outputs(params).detach() - batch[1].flatten()) / len(batch[0])
    other = m @ m.T @ g
    want = float((other - g).norm() / g.norm())
    assert report.measures["parameters"].direction.mismatch == pytest.approx(want, rel=1e-8)
    want = float((j @ (other - g)).norm() / (j @ g).norm())
    assert report.measures["batch"].direction.mismatch == pytest.approx(want, rel=1e-8)


def test_the_model_and_the_random_state_stay_as_they_were() -> None:
    model = network()
    batch = data()
    model(batch[0]).sum().backward()
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state = torch.get_rng_state()
    types = [Whitening(), SINH]
    one = audit(sgd, model, batch, types, steps=1, sizes=(1, 0.1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))  # pyright: ignore[reportArgumentType]
    assert not model._forward_hooks
    repeated = audit(sgd, model, batch, types, steps=1, sizes=(1, 0.1))
    assert one.records() == repeated.records()


def test_frozen_parameters_stay_in_their_places() -> None:
    """SGD under w = 2θ of what is trained: df·O(ψ) = 4∇ against ∇ there, zero elsewhere."""
    model = network(nn.Tanh)
    for name, p in model.named_parameters():
        p.requires_grad_(name == "0.bias")
    double = Elementwise(lambda t: 2 * t, lambda w: w / 2)
    row = audit(sgd, model, data(), [double], steps=1, sizes=(1, 0.1)).rows[0]
    assert row.measures["parameters"].direction.mismatch == pytest.approx(3, rel=1e-9)
    assert row.measures["parameters"].steps[0].mismatch == pytest.approx(3, rel=1e-9)
    rows = audit(sgd, model, data(), steps=1, sizes=(1, 0.1)).rows
    assert {r.transformation for r in rows} >= {"entry permutation", "per-layer affine"}


def test_orthogonal_mixing_is_exact_for_sgd_and_not_for_adam() -> None:
    model = network(nn.Tanh)
    batch = data()
    size = sum(p.numel() for p in model.parameters())
    turn = mixing(torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0])
    makes = {"sgd": sgd, "adam": lambda m: Adam(m.parameters(), lr=1e-2)}
    verdicts = audit(makes, model, batch, {"turn": turn}).verdicts()
    assert verdicts == {("sgd", "turn"): Verdict.EXACT, ("adam", "turn"): Verdict.NOT}


@pytest.mark.parametrize("f", [SINH, shear(0.3)])
def test_natural_gradients_are_first_order_under_nonlinear_maps(f: Any) -> None:
    """m(η) ∝ η: Theorem 2, and that finite steps differ in any case."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # units that differ: J is of full column rank by far
    for count in (6, 30):

        def make(m: nn.Module) -> Optimizer:
            return pb.NaturalGradient(m, solver=pb.solvers.PseudoInverse(), lr=1e-3)

        row = audit(make, model, data(count), {"f": f}, steps=1, sizes=(0.1, 0.01)).rows[0]
        assert row.verdict is Verdict.FIRST_ORDER
        assert row.measures["batch"].order == pytest.approx(1, abs=0.05)
        full = count == 30
        assert row.measures["parameters"].verdict is (Verdict.FIRST_ORDER if full else Verdict.NOT)


def test_kfac_with_a_pseudo_inverse_of_few_samples_is_first_order_on_them_only() -> None:
    def make(m: nn.Module) -> Optimizer:
        return kfac_of(
            m, 1e-2, fisher="exact", damping=0.0, momentum=0.0, statistics_every=1, invert_every=1
        )

    row = audit(make, network(nn.Tanh), data(3), [Affine()], probes=data(20, 5)[0], steps=1).rows[0]
    assert row.measures["probes"].verdict is Verdict.NOT
    assert row.measures["batch"].verdict is not Verdict.EXACT


def test_state_closures_and_lists_of_optimizers() -> None:
    model = network()
    batch = data()
    makes: dict[str, Callable[[nn.Module], Any]] = {
        "momentum": lambda m: SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
        "groups": lambda m: SGD([{"params": [p], "lr": 0.01} for p in m.parameters()]),
        "tensor lr": lambda m: Adam(m.parameters(), lr=torch.tensor(0.01)),
        "wolfe": lambda m: torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe"),
        "two": lambda m: [SGD(list(m.parameters())[:2], 0.01), SGD(list(m.parameters())[2:], 0.01)],
        "mc": lambda m: kfac_of(m, 0.01, damping=pb.optim.kfac.Invariant(1e-2)),
    }
    report = audit(makes, model, batch, [NeuronPermutation()], steps=2, sizes=(1, 0.1))
    assert {o for o, _ in report.verdicts()} == set(makes)
    assert report.verdicts().pop(("wolfe", "neuron permutation")) in Verdict
    others = {o: v for (o, _), v in report.verdicts().items() if o != "wolfe"}
    assert set(others.values()) == {Verdict.EXACT}, others


def test_classes_and_a_loss_of_ones_own() -> None:
    model = network()
    x, _ = data()
    y = torch.randint(0, 2, (len(x),))

    def make(m: nn.Module) -> Optimizer:
        return pb.NaturalGradient(
            m, pb.metrics.Fisher(pb.likelihoods.Categorical()), pb.solvers.PseudoInverse(), lr=0.01
        )

    one = audit(make, model, (x, y), [NeuronRescaling()]).rows[0]
    assert one.verdict is Verdict.NOT  # logits: the Fisher metric is blind to a common shift
    report = audit(sgd, model, (x, y), [NeuronPermutation()], loss_fn=nn.CrossEntropyLoss()).rows[0]
    assert report.verdict is Verdict.EXACT


def test_round_off_is_measured_in_single_precision_too() -> None:
    model = network().float()
    x, y = data()
    report = audit(sgd, model, (x.float(), y.float()), steps=1, sizes=(1, 0.1))
    assert report.row("neuron permutation").verdict is Verdict.EXACT
    assert report.row("entry permutation").verdict is Verdict.EXACT
    assert report.row("per-layer affine").verdict is Verdict.NOT
    assert report.row("elementwise").verdict is Verdict.NOT


def test_lower_precision_needs_its_resolution() -> None:
    """Muon rounds to bfloat16; other coordinates round elsewhere."""

    class Rounded(SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            with torch.no_grad():
                for p in (p for g in self.param_groups for p in g["params"]):
                    noise = 1 + 1e-3 * torch.sin(1e5 * p.flatten()[:1])
                    p -= self.param_groups[0]["lr"] * noise * p.grad
            return loss

    def make(m: nn.Module) -> Optimizer:
        return Rounded(m.parameters(), lr=0.1)

    model = network()
    batch = data()
    types = [NeuronPermutation()]
    assert audit(make, model, batch, types).rows[0].verdict is Verdict.NOT
    assert (
        audit(Contender("fine", make, resolution=1e-2), model, batch, types).rows[0].verdict
        is Verdict.EXACT
    )
    coarse = audit(Contender("coarse", make, resolution=0.1), model, batch, types)
    assert coarse.rows[0].verdict is Verdict.UNDECIDED


def test_standard_transformations_that_do_not_fit_are_named() -> None:
    report = audit(sgd, network(nn.Tanh), data(), steps=0, sizes=(1, 0.1))
    (left,) = report.skipped
    assert left.transformation == "neuron rescaling"
    assert "Tanh" in left.reason
    assert "left out: neuron rescaling" in str(report)
    with pytest.raises(PullbackError, match="Tanh"):
        audit(sgd, network(nn.Tanh), data(), [NeuronRescaling()])
    with pytest.raises(PullbackError, match="no row"):
        report.row("nothing")


def test_batch_norm_in_training_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    report = audit(sgd, model, data(), steps=1, sizes=(1, 0.1))
    assert report.row("entry permutation").verdict is Verdict.EXACT
    assert report.row("elementwise").verdict is Verdict.NOT
    assert int(model[1].num_batches_tracked) == 0  # pyright: ignore[reportArgumentType]


def test_a_twin_that_diverges_is_not_invariant() -> None:
    def make(m: nn.Module) -> Optimizer:
        return SGD(m.parameters(), lr=0.3)

    transformation = {"stiff": Elementwise(lambda t: 1e4 * t, lambda w: w / 1e4)}
    row = audit(make, network(nn.ReLU), data(), transformation, steps=8).rows[0]
    assert row.verdict is Verdict.NOT
    assert row.measures["batch"].long_run[-1].mismatch > 1e3


def test_tables_and_records() -> None:
    makes = {"one": sgd, "two": lambda m: Adam(m.parameters())}
    report = audit(makes, network(), data(), [Whitening(), NeuronPermutation(), SINH], steps=2)
    assert report.optimizers == ("one", "two")
    assert report.transformations == ("input whitening", "neuron permutation", "Elementwise")
    for table in (report, Audit(report.rows[:3])):
        text = str(table)
        assert all(name in text for name in (*table.transformations, "exact", "not invariant"))
    records = report.records()
    assert len(records) == 12
    assert records[0]["verdict"] == "not invariant"
    assert {"mismatch 1", "round-off 0.001", "direction", "order"} <= set(records[0])
    assert str(Audit(())) != ""


def test_verdicts() -> None:
    def verdict(direction: float, steps: tuple[float, ...], off: float = 1e-14) -> Verdict:
        mismatches = tuple(UpdateMismatch(m, off) for m in steps)
        return Measure((1.0, 0.1), mismatches, UpdateMismatch(direction, off), mismatches).verdict

    assert verdict(1e-13, (1e-13, 1e-13)) is Verdict.EXACT
    assert verdict(1e-13, (0.3, 0.03)) is Verdict.FIRST_ORDER
    assert verdict(0.2, (0.3, 0.2)) is Verdict.NOT
    assert verdict(math.inf, (math.inf, math.inf)) is Verdict.NOT
    assert verdict(0.2, (0.3, 0.2), off=0.1) is Verdict.UNDECIDED


class Fails(SGD):
    def step(self, closure: Any = None) -> Any:
        raise ValueError("no such thing")


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Rateless(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


OTHER = nn.Linear(3, 2).double()
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer raises": ({"make_optimizer": lambda m: Fails(m.parameters())}, "no such thing"),
    "factory raises": ({"make_optimizer": lambda m: 1 / 0}, "ZeroDivisionError"),
    "no optimizer": ({"make_optimizer": lambda m: None}, "made no optimizer"),
    "no function": ({"make_optimizer": 3}, "no optimizer to audit"),
    "another model": ({"make_optimizer": lambda m: SGD(OTHER.parameters(), 0.1)}, "not move"),
    "no lr": ({"make_optimizer": lambda m: Rateless(m.parameters())}, "no lr"),
    "zero lr": ({"make_optimizer": lambda m: SGD(m.parameters(), 0.0)}, "not move"),
    "diverges": ({"make_optimizer": lambda m: SGD(m.parameters(), 1e200)}, "smaller lr"),
    "dropout": ({"model": nn.Sequential(network(), nn.Dropout(0.5))}, "not deterministic"),
    "random": ({"model": nn.Sequential(network(), Random())}, "not deterministic"),
    "no module": ({"model": lambda x: x}, "The model is not usable"),
    "nothing to train": ({"model": network().requires_grad_(False)}, "nothing to optimize"),
    "nan loss": ({"batch": (data()[0], data()[1] * torch.nan)}, "not finite"),
    "nan inputs": ({"batch": (data()[0] * torch.nan, data()[1])}, "not finite"),
    "no pair": ({"batch": data()[0]}, "no pair"),
    "empty": ({"batch": (torch.zeros(0, 3).double(), torch.zeros(0, 2).double())}, "empty"),
    "shapes": ({"batch": (data()[0], data()[1][:, :1])}, "do not fit"),
    "vector loss": ({"loss_fn": lambda z, y: (z - y).square()}, "one number"),
    "one size": ({"sizes": (1.0,)}, "two different"),
    "sizes": ({"sizes": (1.0, -1.0)}, "not usable"),
    "steps": ({"steps": -1}, "not usable"),
    "not invertible": ({"transformations": [(lambda t: t**2, torch.sqrt)]}, "not invertible"),
    "probes": ({"probes": torch.ones(3, 7).double()}, "at the probes"),
    "no transformation": ({"transformations": [3]}, "transformation is not usable"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    bad_arguments, words = BAD[name]
    arguments = {"make_optimizer": sgd, "model": network(), "batch": data(), **bad_arguments}
    with pytest.raises(PullbackError, match=words):
        audit(**arguments)


class KeepsAGraph(nn.Module):
    """A tensor that was computed from the weights stays in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.doubled = 2 * self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(PullbackError, match=r"cannot be copied.*Keep no tensors with a graph"):
        audit(lambda m: SGD(m.parameters(), 0.1), KeepsAGraph().double(), data(), [Affine()])


def test_transformations_of_one_name_are_numbered() -> None:
    report = audit(
        lambda m: SGD(m.parameters(), 0.1), network(), data(), [Affine(), Affine()], steps=1
    )
    names = [row.transformation for row in report.rows]
    assert names == ["per-layer affine", "per-layer affine 2"]
