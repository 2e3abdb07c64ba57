"""What cannot be solved is refused with what, why and a remedy, and the network stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback import PullbackError, pde
from tests.optim.common import refused

LINE = pde.Interval(0, 1)
EQUATION = pde.Equation(lambda u: u.xx + 1)


def problem(*conditions: pde.Condition, **options: Any) -> pde.Problem:
    return pde.Problem(LINE, conditions or (EQUATION, pde.Dirichlet(0.0)), **options)


def solve(of: pde.Problem | None = None, network: nn.Module | None = None, **options: Any) -> Any:
    return pde.solve(
        problem() if of is None else of,
        pde.mlp(1, 4, 1, seed=0) if network is None else network,
        **{"steps": 3, "points": 16, "progress": False, **options},
    )


class Function(nn.Module):
    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner = pde.mlp(1, 4, 1, seed=0)
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self._forward(self.inner, x)


def module_of_two_dtypes() -> nn.Module:
    network = pde.mlp(1, 4, 1)
    network[0].float()
    return network


def integers() -> nn.Module:
    network = pde.mlp(1, 4, 1)
    network.register_parameter("n", nn.Parameter(torch.ones(2, dtype=torch.int64), False))
    return network


def frozen() -> nn.Module:
    return pde.mlp(1, 4, 1).requires_grad_(False)


NAN = float("nan")
PROBLEMS: dict[str, tuple[Callable[[], Any], str]] = {
    "empty interval": (lambda: pde.Interval(1, 1), "empty"),
    "empty difference": (
        lambda: pde.Box([(0, 1), (0, 1)]) - pde.Box([(-1, 2), (-1, 2)]),
        "difference",
    ),
    "no domain": (lambda: pde.Problem("box", [EQUATION]), "The domain"),  # pyright: ignore[reportArgumentType]
    "no conditions": (lambda: pde.Problem(LINE, []), "no conditions"),
    "no condition": (lambda: problem(lambda u: u.x), "is none"),  # pyright: ignore[reportArgumentType]
    "no equation": (lambda: problem(pde.Dirichlet(0.0)), "no equation"),
    "no fields": (lambda: problem(fields=()), "fields"),
    "free that is no field": (lambda: problem(free=("p",)), "free"),
    "two fields of one name": (lambda: problem(fields=("u", "u")), "two things"),
    "field like a coordinate": (lambda: problem(fields=("x",)), "two things"),
    "unknown like a field": (lambda: problem(unknowns={"u": 1.0}), "two things"),
    "unknown called points": (lambda: problem(unknowns={"points": 1.0}), "two things"),
    "coordinate called d": (
        lambda: pde.Problem(pde.Interval(0, 1, name="d"), [EQUATION]),
        "cannot be used",
    ),
}
RUNS: dict[str, tuple[Callable[[], Any], str]] = {
    "outside": (
        lambda: solve(problem(EQUATION, pde.Dirichlet(0.0, on=pde.Interval(0, 2).boundary))),
        "outside the domain",
    ),
    "no dependence": (lambda: solve(problem(pde.Equation(lambda x: x))), "does not depend"),
    "relu": (
        lambda: solve(network=pde.mlp(1, 4, 1, activation=torch.nn.ReLU, seed=0)),
        "ReLU is piecewise",
    ),
    "leaky relu": (
        lambda: solve(network=pde.mlp(1, 4, 1, activation=torch.nn.LeakyReLU)),
        "LeakyReLU is piecewise",
    ),
    "unknown derivative": (lambda: solve(problem(pde.Equation(lambda u: u.yy))), "no derivative"),
    "unknown argument": (lambda: solve(problem(pde.Equation(lambda v: v.x))), "asks for 'v'"),
    "unknown field": (lambda: solve(problem(EQUATION, pde.Dirichlet(0.0, field="p"))), "no field"),
    "infinite residual": (
        lambda: solve(problem(pde.Equation(lambda u, x: u / (0 * x)))),
        "'equation' is not finite",
    ),
    "logarithm": (
        lambda: solve(problem(pde.Equation(lambda u, x: u.xx + torch.log(x - 0.5)))),
        "such as",
    ),
    "infinite value": (
        lambda: solve(problem(EQUATION, pde.Dirichlet(lambda x: x / 0))),
        "'dirichlet' is not finite",
    ),
    "infinite energy": (
        lambda: solve(problem(pde.Energy(lambda u, x: 0.5 * u.x**2 + u / (0 * x)))),
        "'energy' is not finite",
    ),
    "infinite gradient": (
        lambda: solve(problem(pde.Equation(lambda u: (u - u).sqrt() + u.xx))),
        "finite",
    ),
    "concave energy": (lambda: solve(problem(pde.Energy(lambda u: -(u.x**2)))), "semidefinite"),
    "float16": (lambda: solve(network=pde.mlp(1, 4, 1, dtype=torch.float16)), "float16"),
    "bfloat16": (lambda: solve(network=pde.mlp(1, 4, 1, dtype=torch.bfloat16)), "bfloat16"),
    "mixed": (lambda: solve(network=module_of_two_dtypes()), "precision"),
    "integers": (lambda: solve(network=integers()), "precision"),
    "no parameters": (lambda: solve(network=nn.Identity()), "no parameters"),
    "frozen": (lambda: solve(network=frozen()), "nothing to optimize"),
    "two inputs": (lambda: solve(network=pde.mlp(2, 4, 1)), "1 coordinates"),
    "two outputs": (lambda: solve(network=pde.mlp(1, 4, 2)), "1 entries per point"),
    "flat output": (
        lambda: solve(network=Function(lambda net, x: net(x)[:, 0])),
        "1 entries per point",
    ),
    "dropout": (
        lambda: solve(network=nn.Sequential(pde.mlp(1, 4), nn.Dropout(0.5), pde.mlp(4, 1))),
        "random",
    ),
    "batch norm": (
        lambda: solve(
            network=nn.Sequential(pde.mlp(1, 4), nn.BatchNorm1d(4).double(), pde.mlp(4, 1))
        ),
        "other points",
    ),
    "grid of one": (
        lambda: solve(
            pde.Problem(pde.Box([(0, 1)] * 2), [pde.Equation(lambda u: u.x)]),
            pde.mlp(2, 3, 1),
            points=3,
            sampler="grid",
        ),
        "no full grid",
    ),
    "sampler": (lambda: solve(sampler="magic"), "Unknown sampler"),
    "points": (lambda: solve(points=0), "number of points"),
    "points as float": (lambda: solve(points=100.0), "number of points"),
    "points of nothing": (lambda: solve(points={"robin": 3}), "Unknown condition 'robin'"),
    "seed": (lambda: solve(seed="one"), "seed"),
    "steps": (lambda: solve(steps=-1), "steps= is"),
    "steps as float": (lambda: solve(steps=2.5), "steps= is"),
    "resample": (lambda: solve(resample=0), "resampling"),
    "slabs": (lambda: solve(slabs=2), "need time"),
    "solver": (lambda: solve(solver="cg"), "not a Solver"),
    "step": (lambda: solve(step=0.1), "not a Step"),
    "gram": (lambda: solve(gram="big"), "Unknown gram"),
    "exact of another shape": (
        lambda: solve(problem(exact=lambda x: torch.stack([x, x]))),
        "wrong shape",
    ),
    "exact of unknown arguments": (lambda: solve(problem(exact=lambda t: t)), "asks for 't'"),
    "reference of another shape": (
        lambda: solve(problem(reference=lambda x: x[:3])),
        "wrong shape",
    ),
    "data of another dimension": (
        lambda: solve(problem(EQUATION, pde.Data(torch.zeros(3, 2), torch.zeros(3)))),
        "coordinates",
    ),
    "nan points": (
        lambda: solve(problem(EQUATION, pde.Data(torch.tensor([NAN, 0.5]), torch.zeros(2)))),
        "non-finite",
    ),
    "initial without time": (lambda: solve(problem(EQUATION, pde.Initial(0.0))), "needs time"),
    "periodic in a ball": (
        lambda: solve(
            pde.Problem(pde.Disk((0, 0), 1), [pde.Equation(lambda u: u.x), pde.Periodic("x")]),
            pde.mlp(2, 3, 1),
        ),
        "",
    ),
    "steps that need a path": (
        lambda: solve(solver=pb.solvers.ConjugateGradient(damping=1e-3)),
        "every damped solution",
    ),
}


@pytest.mark.parametrize("name", [*PROBLEMS, *RUNS])
def test_refusals(name: str) -> None:
    make, message = {**PROBLEMS, **RUNS}[name]
    with pytest.raises(PullbackError, match=message) as info:
        make()
    assert info.value.what
    assert info.value.why
    assert info.value.remedy


def test_refused_runs_change_nothing(tmp_path: Path) -> None:
    for residual in (
        lambda u, x: u / (0 * x),
        lambda u: u.zz,
        lambda u: (u - u).sqrt() + u.xx,
    ):
        network = pde.mlp(1, 4, 1, seed=0)
        before = {n: p.detach().clone() for n, p in network.named_parameters()}
        path = tmp_path / "run.pt"
        with pytest.raises(PullbackError):
            solve(problem(pde.Equation(residual)), network, checkpoint=path)
        assert all(torch.equal(p, before[n]) for n, p in network.named_parameters())
        assert not path.exists()


def test_buffers_of_a_refused_network_stay() -> None:
    network = nn.Sequential(pde.mlp(1, 4), nn.BatchNorm1d(4).double(), pde.mlp(4, 1))
    before = {n: b.clone() for n, b in network.named_buffers()}
    with pytest.raises(PullbackError, match="other points"):
        solve(network=network)
    assert all(torch.equal(b, before[n]) for n, b in network.named_buffers())
    network.eval()
    with pytest.warns(UserWarning, match="batch_norm"):
        solve(network=network)


def test_points_that_see_each_other_are_refused() -> None:
    def forward(net: Any, x: Any) -> Any:
        return net(x) * net(x)[:1]

    with pytest.raises(PullbackError, match="other points"):
        solve(network=Function(forward))


def test_messages_of_the_network_come_through() -> None:
    network = pde.Hard(pde.mlp(1, 3, 1), LINE, distance=lambda y: y)
    with pytest.raises(PullbackError, match="The distance asks for 'y'"):
        solve(network=network)


OTHERS: dict[str, dict[str, Any]] = {
    "network": {"network": pde.mlp(1, 5, 1)},
    "network of the same size": {"network": pde.mlp(1, 2, 2, 1)},
    "dtype": {"network": pde.mlp(1, 4, 1, dtype=torch.float32)},
    "problem": {"of": problem(name="other")},
    "domain": {"of": pde.Problem(pde.Interval(0, 2), [EQUATION, pde.Dirichlet(0.0)])},
    "seed": {"seed": 3},
    "points": {"points": 20},
    "sampler": {"sampler": "sobol"},
    "schedule": {"resample": 2},
}


def test_checkpoints_of_other_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    solve(checkpoint=path)
    for name, other in OTHERS.items():
        network = other.get("network", pde.mlp(1, 4, 1, seed=5))
        before = [p.detach().clone() for p in network.parameters()]
        with pytest.raises(PullbackError, match="belongs to another"):
            solve(checkpoint=path, **{**other, "network": network})
        for p, value in zip(network.parameters(), before, strict=True):
            assert torch.equal(p, value), name
    assert len(solve(checkpoint=path, steps=5).history) == 5


def test_corrupted_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    solve(checkpoint=path)
    whole = path.read_bytes()
    for content in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(PullbackError, match="cannot be read"):
            solve(checkpoint=path)
    torch.save({"something": 1}, path)
    with pytest.raises(PullbackError, match="not a saved solve"):
        solve(checkpoint=path)
    solve().save(path)
    with pytest.raises(PullbackError, match="belongs to another"):
        solve(checkpoint=path)
    with pytest.raises(PullbackError, match="cannot be read"):
        solve(checkpoint=tmp_path)


def test_duplicate_names_are_told_apart() -> None:
    left = pde.Dirichlet(1.0, on=lambda d: d.face("x", "low"), name="end")
    right = pde.Dirichlet(2.0, on=lambda d: d.face("x", "high"), name="end")
    odd = pde.Equation(lambda u: u.xx, name="end 2")
    of = problem(left, odd, right, EQUATION, EQUATION)
    names = [c.name for c in of.conditions]
    assert len(set(names)) == 5
    assert names[:2] == ["end", "end 2"]
    assert left.name == right.name == "end"  # the user's own objects
    solution = solve(of)
    assert len(solution.history) == 3


def test_no_truth_no_error() -> None:
    solution = solve(steps=1)
    assert solution.history.error == []
    with pytest.raises(PullbackError, match="No solution"):
        _ = solution.error


def test_values_keep_their_digits() -> None:
    """0.1 is not rounded to float32 on its way."""
    of = pde.Problem(LINE, [pde.Equation(lambda u: u.xx), pde.Dirichlet(0.1)], exact=lambda x: 0.1)
    solution = solve(of, steps=60)
    assert solution.error < 1e-9
    x = torch.linspace(0, 1, 3).double()[:, None]
    assert torch.equal(of.truth(x), torch.full((3, 1), 0.1, dtype=torch.float64))
    two = pde.Problem(
        LINE, [pde.Equation(lambda u, v: u + v)], fields=("u", "v"), exact=lambda x: (x, 0.1)
    )
    want = torch.cat([x, torch.full((3, 1), 0.1, dtype=torch.float64)], 1)
    assert torch.equal(two.truth(x), want)


def test_tensors_of_other_precisions_are_taken() -> None:
    x: Tensor = torch.linspace(0, 1, 5)  # float32
    of = problem(EQUATION, pde.Data(x, x * (1 - x) / 2))
    assert len(solve(of).history) == 3


def test_a_network_that_begins_at_zero_is_not_taken_for_a_flat_one() -> None:
    network = pde.mlp(1, 6, 6, 1, seed=0)
    network[1] = nn.ReLU()
    with torch.no_grad():
        for p in network[-1].parameters():
            p.zero_()
    assert len(solve(network=network).history) == 3


def _by_graph(u: Any, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    return u.xx + torch.autograd.grad(torch.sin(x).sum(), x)[0]


@pytest.mark.parametrize(
    "residual",
    [
        lambda u, x: u.xx + np.sin(np.asarray(x)),
        lambda u, x: u.xx + torch.tensor(np.sin(x.numpy())),
        _by_graph,
    ],
    ids=["asarray", "numpy", "autograd"],
)
def test_residuals_that_leave_torch_are_told_of_sources(residual: Any) -> None:
    problem = pde.Problem(pde.Interval(0, 1), [pde.Equation(residual), pde.Dirichlet(0.0)])
    with refused("'equation' cannot be differentiated", "numpy or autograd", "sources={'f'"):
        pde.solve(problem, pde.mlp(1, 4, 1), steps=2, points=20)


@pytest.mark.parametrize("problem", [pde.Poisson, "poisson2d", pde.mlp(2, 4, 1)])
def test_what_is_no_problem_is_refused(problem: Any) -> None:
    with refused("The problem of solve() is not usable", "got", "Pass a Problem"):
        pde.solve(problem, pde.mlp(2, 4, 1))
    with refused("The problem of network_for() is not usable", "got", "Pass a Problem"):
        pde.network_for(problem)


def test_a_class_is_no_network() -> None:
    with refused("The network is not usable", "Linear", "network_for(problem)"):
        pde.solve(pde.Poisson(), nn.Linear)  # pyright: ignore[reportArgumentType]
