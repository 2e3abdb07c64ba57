"""The table of the documentation: what each optimizer is invariant to, and what not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pullback.geometry.charts.transformations import Rotation
from pullback.geometry.invariance.audit import audit
from pullback.geometry.invariance.table import Audit
from pullback.optim import KFAC
from pullback_experiments.invariance_audit.contenders import optimizers

E = "exact"
F = "first order"
N = "not invariant"
U = "undecided"
RANK = {E: 2, F: 1, N: 0, U: 0}
NAMES = ("input rotation", "input whitening", "per-layer rotation", "per-layer affine",
         "neuron rescaling", "neuron permutation", "entry permutation", "elementwise")  # fmt: skip
ORDERS = (N, N, N, N, N, E, E, N)  # orders of entries, and nothing else
TURNS = (E, N, E, N, N, E, E, N)  # orthogonal changes
LAYERS = (E, E, E, E, E, E, N, N)  # affine changes of layers
#: on a ReLU network, whose rescaling symmetry makes parameters superfluous
RELU = {
    "SGD": TURNS,
    "Adam": ORDERS,
    "L-BFGS": ORDERS,
    "Muon": (E, N, E, N, N, E, N, N),
    "NGD, pseudo-inverse": (E, F, E, F, F, E, E, F),
    "NGD, damped": TURNS,
    "K-FAC, undamped": LAYERS,
    "K-FAC, invariant": LAYERS,
    "K-FAC, Tikhonov": (E, N, E, N, N, E, N, N),
    "K-FAC, eigenbasis": (E, U, N, N, N, E, N, N),  # of C = 1 every basis is an eigenbasis
    "K-FAC, spectral": (E, N, N, N, N, E, N, N),
}
#: where a tanh network of full column rank says something else; it has no rescaling
TANH = {**RELU, "NGD, pseudo-inverse": (E, E, E, E, None, E, E, F)}
#: the ordinary suite has the row with all three verdicts
SLOW = set(RELU) - {"NGD, pseudo-inverse"}
MAKES = {c.name: c for c in optimizers()}


def audit_optimizer(name: str, transformation: type[nn.Module]) -> Audit:
    torch.manual_seed(5)
    model, teacher = (
        nn.Sequential(
            nn.Linear(4, 5), transformation(), nn.Linear(5, 4), transformation(), nn.Linear(4, 2)
        ).double()
        for _ in range(2)
    )
    x = torch.randn(40, 4).double() @ torch.randn(4, 4).double() + 0.5
    with torch.no_grad():
        y = teacher(x) + 0.1 * torch.randn(40, 2).double()
    probes = torch.randn(9, 4).double()
    return audit(MAKES[name], model, (x, y), steps=2, sizes=(1, 0.01), probes=probes)


@pytest.mark.parametrize(
    ("name", "transformation"),
    [
        *(
            pytest.param(name, nn.ReLU, marks=pytest.mark.slow if name in SLOW else ())
            for name in RELU
        ),
        pytest.param("NGD, pseudo-inverse", nn.Tanh, marks=pytest.mark.slow),
        pytest.param("K-FAC, invariant", nn.Tanh, marks=pytest.mark.slow),
    ],
)
def test_verdicts(name: str, transformation: type[nn.Module]) -> None:
    expected = (RELU if transformation is nn.ReLU else TANH)[name]
    table = audit_optimizer(name, transformation)
    actual = {t: str(v) for (_, t), v in table.verdicts().items()}
    want = dict(zip(NAMES, expected, strict=True))
    if transformation is nn.Tanh:
        want.pop("neuron rescaling")
        assert [s.transformation for s in table.skipped] == ["neuron rescaling"]
    assert actual == want
    for inputs in ("batch", "probes"):  # Definition 6 implies Definition 5
        for key, verdict in table.verdicts(inputs).items():
            assert RANK[str(verdict)] >= RANK[str(table.verdicts("parameters")[key])]
    if (name, transformation) == ("NGD, pseudo-inverse", nn.ReLU):  # and not conversely
        assert str(table.row("neuron rescaling").verdict) == F
        assert str(table.row("neuron rescaling").measures["parameters"].verdict) == N


def test_every_optimizer_of_the_table_is_expected_and_explained() -> None:
    assert set(MAKES) == set(RELU)
    assert all(c.about for c in MAKES.values())


def bare() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network without biases, inputs and targets."""
    torch.manual_seed(3)
    sizes = ((4, 5), (5, 4), (4, 2))
    one, two, three = (nn.Linear(*s, bias=False, dtype=torch.float64) for s in sizes)
    x, y = (torch.randn(40, n, dtype=torch.float64) for n in (4, 2))
    return nn.Sequential(one, nn.Tanh(), two, nn.Tanh(), three), x, y


@pytest.mark.parametrize(("rule", "verdict"), [("eigenbasis", E), ("spectral", N)])
def test_without_biases_the_eigenbasis_rule_turns_with_outputs_too(rule: str, verdict: str) -> None:
    """The spectral one divides by the lengths of rows, which do not."""
    model, x, y = bare()
    turns = [Rotation(in_every_layer=True)]
    report = audit(lambda m: KFAC(m, rule=rule), model, (x, y), turns, steps=3, sizes=(1, 0.01))
    assert str(report.rows[0].verdict) == verdict


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral"])
def test_rules_see_the_scale_of_the_loss_by_adams_eps_alone(rule: str) -> None:
    moved = []
    for scale in (1.0, 1024.0):
        model, x, y = bare()
        start = model(x).detach()
        opt = KFAC(model, rule=rule)
        for _ in range(3):
            opt.zero_grad()
            (scale * (model(x) - y).square().mean()).backward()
            opt.step()
        moved.append(model(x).detach() - start)
    assert float((moved[1] - moved[0]).norm() / moved[0].norm()) < 1e-5
