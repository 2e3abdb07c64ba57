"""Values of the wrong kind are refused where they are given, with what, why and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pullback as pb
from pullback import PullbackError
from pullback.cli.app import app
from pullback.pde.judgement.history import History

pde: Any = pb.pde  # what follows is of the wrong type on purpose

LINE = pde.Interval(0, 1)
SQUARE = pde.Box([(0, 1)] * 2)
EQUATION = pde.Equation(lambda u: u.xx + 1)
NAN = float("nan")
INF = float("inf")
X = torch.rand(5, 2, dtype=torch.float64)


def problem(*conditions: Any, **options: Any) -> Any:
    return pde.Problem(LINE, conditions or (EQUATION, pde.Dirichlet(0.0)), **options)


def solve(**options: Any) -> Any:
    arguments = {"steps": 1, "points": 8, "progress": False, **options}
    return pde.solve(problem(), pde.mlp(1, 3, 1, seed=0), **arguments)


def drawn(condition: Any) -> Any:
    return pde.solve(
        pde.Problem(SQUARE, [pde.Equation(lambda u: u.laplacian), condition]),
        pde.mlp(2, 3, 1, seed=0),
        steps=1,
        points=16,
        progress=False,
    )


def solution() -> Any:
    return pde.PDESolution(problem(), pde.mlp(1, 3, 1), History())


def fourier(*arguments: Any, **options: Any) -> Any:
    return pde.FourierFeatures(*arguments, **options)


def net() -> Any:
    return pde.mlp(2, 3, 1, seed=0)


Table = dict[str, tuple[Callable[[], Any], str]]

SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"device": "gpu"}, "device 'gpu' cannot be used"),
    ({"device": "meta"}, "no values"),
    ({"device": 1.5}, "device 1.5 cannot be used"),
    ({"refine": 40}, "refinement is not usable"),
    ({"solver": pb.solvers.Cholesky}, "solver= is not a Solver"),
    ({"step": "armijo"}, "step= is not a Step"),
    ({"memory": 0}, "memory"),
    ({"memory": 1e9}, "memory"),
    ({"memory": "4GB"}, "memory"),
    ({"tol": NAN}, "tol"),
    ({"tol": -1.0}, "tol"),
    ({"tol": "small"}, "tol"),
    ({"budget": NAN}, "budget"),
    ({"budget": -1}, "budget"),
    ({"budget": "1h"}, "budget"),
    ({"patience": 0}, "patience"),
    ({"patience": 2.5}, "patience"),
    ({"patience": True}, "patience"),
    ({"callbacks": print}, "in a list"),
    ({"callbacks": [3]}, "in a list"),
    ({"callbacks": None}, "in a list"),
    ({"steps": True}, "steps= is"),
    ({"measure": True}, "measure= is"),
]
CONDITIONS: Table = {
    "Robin of a string": (lambda: pde.Robin("1", 1.0), "numbers a and b"),
    "Robin of nan": (lambda: pde.Robin(1.0, NAN), "numbers a and b"),
    "Robin of zeros": (lambda: pde.Robin(0, 0.0), "not both 0"),
    "periodic order": (lambda: pde.Periodic("x", True), "order"),
    "periodic on a boundary": (
        lambda: drawn(pde.Periodic("x", on=SQUARE.boundary)),
        "pairs are needed",
    ),
    "Dirichlet on pairs": (
        lambda: drawn(pde.Dirichlet(0.0, on=SQUARE.pairs("x"))),
        "single points are needed",
    ),
    "Neumann on pairs": (
        lambda: drawn(pde.Neumann(0.0, on=lambda d: d.pairs("y"))),
        "single points are needed",
    ),
    "data of strings": (lambda: pde.Data(["a"], [1.0]), "measured points"),
    "data of nothing": (lambda: pde.Data([[0.5]], None), "measured values"),
    "data at one number": (lambda: pde.Data(0.5, [1.0]), "measured points"),
    "complex data": (lambda: pde.Data([0.5], torch.ones(1) * 1j), "measured values"),
    "data somewhere": (
        lambda: pde.Data([0.5], [1.0], on=LINE.boundary),
        "its points are its region",
    ),
    "name": (lambda: pde.Dirichlet(0.0, name=3), "name of a condition"),
    "weight": (lambda: pde.Dirichlet(0.0, weight="heavy"), "weight"),
    "weight of True": (lambda: pde.Dirichlet(0.0, weight=True), "weight"),
    "weight per point": (lambda: pde.Dirichlet(0.0, weight=torch.ones(2)), "weight"),
}
PROBLEMS: Table = {
    "no domain": (lambda: pde.Problem(None, [EQUATION]), "The domain"),
    "a region": (lambda: pde.Problem(LINE.boundary, [EQUATION]), "The domain"),
    "one condition": (lambda: pde.Problem(LINE, EQUATION), "Pass a list"),
    "conditions of none": (lambda: pde.Problem(LINE, None), "Pass a list"),
    "fields as a string": (lambda: problem(fields="u"), "fields"),
    "fields as a number": (lambda: problem(fields=2), "fields"),
    "fields of numbers": (lambda: problem(fields=(1,)), "fields"),
    "no identifier": (lambda: problem(fields=("u-v",)), "fields"),
    "a keyword": (lambda: problem(fields=("lambda",)), "fields"),
    "free as a string": (lambda: problem(free="u"), "free"),
    "unknowns as a list": (lambda: problem(unknowns=["k"]), "unknowns"),
    "unknown of a string": (lambda: problem(unknowns={"k": "1"}), "initial value of 'k'"),
    "unknown of nan": (lambda: problem(unknowns={"k": NAN}), "initial value of 'k'"),
    "unknown of none": (lambda: problem(unknowns={"k": None}), "initial value of 'k'"),
    "unknown with a dot": (lambda: problem(unknowns={"a.b": 1.0}), "name of an unknown"),
    "unknown keys": (lambda: problem(unknowns={"keys": 1.0}), "name of an unknown"),
    "unknown number": (lambda: problem(unknowns={1: 1.0}), "name of an unknown"),
    "exact": (lambda: problem(exact=1.0), "exact="),
    "reference": (lambda: problem(reference=torch.ones(3)), "reference="),
}
NETWORKS: Table = {
    "activation": (lambda: pde.mlp(1, 3, 1, activation=3), "activation"),
    "activation as a function": (lambda: pde.mlp(1, 3, 1, activation=torch.tanh), "activation"),
    "activation as a module": (lambda: pde.mlp(1, 3, 1, activation=nn.Tanh()), "activation"),
    "activation of nothing": (lambda: pde.mlp(1, 3, 1, activation=lambda: None), "activation"),
    "integers": (lambda: pde.mlp(1, 3, 1, dtype=torch.int64), "dtype"),
    "dtype as a string": (lambda: pde.mlp(1, 3, 1, dtype="float64"), "dtype"),
    "seed": (lambda: pde.mlp(1, 3, 1, seed="a"), "seed"),
    "no features": (lambda: fourier(2, 0), "Fourier"),
    "negative features": (lambda: fourier(2, -1), "Fourier"),
    "features as float": (lambda: fourier(2, 3.0), "Fourier"),
    "scale": (lambda: fourier(2, 3, NAN), "Fourier"),
    "Fourier dtype": (lambda: fourier(2, 3, dtype=torch.int32), "dtype"),
    "rescaled to nothing": (lambda: pde.Rescaled(net(), (0, 1)), "region"),
    "rescaled to a face": (lambda: pde.Rescaled(net(), SQUARE.face("x", "low")), "with volume"),
    "rescaled function": (lambda: pde.Rescaled(torch.sin, SQUARE), "network"),
    "axis too large": (lambda: pde.Symmetric(net(), 2, -1)(X), "no axis 2"),
    "negative axis": (lambda: pde.Symmetric(net(), -1, 1), "axis"),
    "axis by name": (lambda: pde.Symmetric(net(), "x", 1), "axis"),
    "period as a string": (lambda: pde.PeriodicEmbedding(2, 0, "1"), "periodic embedding"),
    "infinite period": (lambda: pde.PeriodicEmbedding(2, 0, INF), "periodic embedding"),
    "embedded axis": (lambda: pde.PeriodicEmbedding(2, "x", 1.0), "periodic embedding"),
    "harmonics": (lambda: pde.PeriodicEmbedding(2, 0, 1.0, 1.5), "periodic embedding"),
    "hard region": (lambda: pde.Hard(net(), None, distance=lambda x: x), "region"),
    "hard distance": (lambda: pde.Hard(net(), SQUARE, distance=0.0), "distance"),
    "hard lift": (lambda: pde.Hard(net(), SQUARE, distance=lambda x: x, lift=1.0), "lift"),
}
POINTS: Table = {
    "every": (lambda: pde.Refine(every="a"), "refinement"),
    "every as float": (lambda: pde.Refine(every=2.5), "refinement"),
    "until": (lambda: pde.Refine(until="end"), "refinement"),
    "where": (lambda: SQUARE.where(3), "predicate"),
    "where on a boundary": (lambda: SQUARE.boundary.where(None), "predicate"),
    "where among points": (lambda: SQUARE.points(X).where(3), "predicate"),
    "flat points": (lambda: solution()(torch.zeros(3)), r"shape \(N, 1\)"),
    "points of another dimension": (lambda: solution()(X), r"shape \(N, 1\)"),
    "points as a list": (lambda: solution()([[0.5]]), r"shape \(N, 1\)"),
}
READY: Table = {
    "viscosity": (lambda: pde.Burgers("0.01"), "viscosity"),
    "viscosity inf": (lambda: pde.Burgers(INF), "viscosity"),
    "speed": (lambda: pde.Wave(None), "speed"),
    "Reynolds": (lambda: pde.Kovasznay("40"), "Reynolds"),
    "beta": (lambda: pde.Convection("40"), "speed"),
    "beta inf": (lambda: pde.Convection(INF), "speed"),
    "k": (lambda: pde.Helmholtz(k="1"), "wave number"),
    "wave numbers": (lambda: pde.Helmholtz(a1=True), "wave numbers"),
    "dim": (lambda: pde.Poisson(dim="2"), "dimension"),
    "boundary weight": (lambda: pde.Poisson(boundary_weight="1"), "weight"),
}
TABLES = {
    "condition": CONDITIONS,
    "problem": PROBLEMS,
    "network": NETWORKS,
    "points": POINTS,
    "ready": READY,
    "settings": {
        str(options): (partial(solve, **options), message) for options, message in SETTINGS
    },
}
CASES = {}
for title, table in TABLES.items():
    CASES |= {f"{title}: {name}": case for name, case in table.items()}


@pytest.mark.parametrize("name", CASES)
def test_refusals(name: str) -> None:
    make, message = CASES[name]
    with pytest.raises(PullbackError, match=message) as info:
        make()
    assert info.value.what
    assert info.value.why
    assert info.value.remedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_device_that_is_missing() -> None:
    with pytest.raises(PullbackError, match="'cuda' cannot be used"):
        solve(device="cuda")


def test_functions_of_single_numbers_get_a_note() -> None:
    equation = pde.Equation(lambda u, x: u.xx + math.sin(x))
    with pytest.raises(ValueError, match="scalar") as info:
        pde.solve(
            pde.Problem(LINE, [equation, pde.Dirichlet(0.0)]), pde.mlp(1, 3, 1, seed=0), steps=1
        )
    assert "write torch.sin, not math.sin" in info.value.__notes__[0]


def test_a_network_that_overflows_has_a_check() -> None:
    problem = pde.Problem(LINE, [pde.Equation(lambda u: u.xx + 1), pde.Dirichlet(0.0)])
    network = pde.mlp(1, 3, 1, seed=0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1e200)
    solution = pde.solve(problem, network, steps=0, points=10, progress=False)
    assert solution.spectrum is None
    assert "estimated error: unknown" in str(solution.check())


def test_a_complex_source_is_refused() -> None:
    equation = pde.Equation(lambda u, f: u.xx + f)
    problem = pde.Problem(LINE, [equation, pde.Dirichlet(0.0)], sources={"f": lambda x: 1j * x})
    with pytest.raises(PullbackError, match="source 'f' is not usable: got torch"):
        pde.solve(problem, pde.mlp(1, 3, 1, seed=0), steps=1, points=10, progress=False)


def test_usable_ones_pass() -> None:
    solve(device="cpu", tol=1e-9, budget=0, patience=None, callbacks=(), memory=2**20)
    solve(device=torch.device("cpu"), refine=pde.Refine(every=1))
    times = [0.1, 0.7]
    data = pde.Data(times, [1, 2])
    assert data.region(LINE).x[:, 0].tolist() == times  # in float64, not by way of float32


@pytest.mark.parametrize("command", [["solve", "ritz"], ["run", "yin-2024-poisson", "--quick"]])
@pytest.mark.parametrize("under", ["", "below"])
def test_out_that_is_no_folder(command: list[str], under: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    result = CliRunner().invoke(app, [*command, "--out", str(file / under)])
    assert result.exit_code == 1
    assert "cannot be the folder" in result.output
    assert file.read_text() == "kept"


OPTIMIZERS = [torch.optim.Adam, pb.KFAC(nn.Linear(1, 1)), lambda module: None]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["class", "object", "nothing"])
def test_optimizers_that_are_no_function_of_the_module(optimizer: Any) -> None:
    with pytest.raises(PullbackError, match=r"optimizer= is not usable.*lambda m: "):
        solve(optimizer=optimizer)
