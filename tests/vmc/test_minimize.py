"""Ground states of small systems, verdicts, checkpoints, and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback import vmc
from pullback.steps import Constant, Spring, Step
from pullback.steps.base import Local, Move, reject
from pullback.vmc.statistics import EnergyStatistics
from pullback.vmc.verdict import Evidence, judge
from tests.vmc.states import make_network
from tests.vmc.test_hamiltonians import one_way, rotated_chain


def exact_energy(hamiltonian: vmc.Hamiltonian) -> float:
    sector = 0 if hamiltonian.conserves_magnetization else None
    return float(torch.linalg.eigvalsh(hamiltonian.dense(sector))[0])


@pytest.fixture
def ising() -> vmc.TransverseFieldIsing:
    return vmc.TransverseFieldIsing(vmc.Chain(8), field=1.0)


def rbm(lattice: vmc.Lattice, features: int = 2, seed: int = 0) -> vmc.Rbm:
    torch.manual_seed(seed)
    return vmc.Rbm(lattice, features).double()


@pytest.mark.parametrize(
    "hamiltonian",
    [
        pytest.param(vmc.TransverseFieldIsing(vmc.Chain(8), field=1.0), marks=pytest.mark.slow),
        vmc.Heisenberg(vmc.Chain(8)),
    ],
    ids=repr,
)
def test_ground_states(hamiltonian: vmc.Hamiltonian) -> None:
    network = rbm(hamiltonian.lattice, 3)  # pyright: ignore[reportAttributeAccessIssue]
    result = vmc.minimize(hamiltonian, network, steps=60, samples=200, progress=False)
    exact = exact_energy(hamiltonian)
    assert result.verdict.name == "converged", result.stopped
    assert result.energy == pytest.approx(exact, rel=1e-3)
    assert abs(result.energy - exact) < 5 * result.error + 2e-4 * abs(exact)
    assert result.variance < 0.05
    assert len(result.history) == 60


class AsComplex(nn.Module):
    """The same state as complex numbers."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, s: Tensor) -> Tensor:
        return torch.view_as_complex(self.network(s))


@pytest.mark.slow
@pytest.mark.parametrize("network_name", ["phase", "complex"])
def test_states_with_a_phase(network_name: str) -> None:
    """Without the sign rule the ground state has signs, which a real network cannot have."""
    hamiltonian = vmc.Heisenberg(vmc.Chain(8), sign_rule=False)
    torch.manual_seed(0)
    network: nn.Module = vmc.Convolutional(vmc.Chain(8), 6, 2, 5, phase=True).double()
    if network_name == "complex":
        network = AsComplex(network)
    result = vmc.minimize(hamiltonian, network, steps=80, samples=400, lr=0.02, progress=False)
    assert result.energy == pytest.approx(exact_energy(hamiltonian), rel=1e-3)


@pytest.mark.slow
def test_a_complex_hamiltonian() -> None:
    hamiltonian = vmc.FunctionHamiltonian(rotated_chain, 6, conserves_magnetization=True)
    result = vmc.minimize(
        hamiltonian, make_network("phase", 6), steps=150, samples=300, progress=False
    )
    assert result.energy == pytest.approx(exact_energy(hamiltonian), rel=1e-2)


def shifted_ising_rows(s: Tensor) -> tuple[Tensor, Tensor]:
    rows = vmc.TransverseFieldIsing(vmc.Chain(6)).connections(s)
    return rows.configurations, rows.elements + 1000.0 * (torch.arange(7) == 0)


class OneCorrelation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, configurations: Tensor) -> Tensor:
        return self.weight * configurations[:, 0] * configurations[:, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_constant_added_to_the_hamiltonian_makes_no_state_converged() -> None:
    hamiltonian = vmc.FunctionHamiltonian(shifted_ising_rows, 6)
    result = vmc.minimize(hamiltonian, OneCorrelation(), steps=30, samples=100, progress=False)
    assert result.verdict.v_score > 0.1
    assert result.verdict.outcome is not vmc.Outcome.CONVERGED, result.stopped


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_highest_state_is_never_converged() -> None:
    """The constant state is an eigenstate without the sign rule, and its gradient is zero."""
    hamiltonian = vmc.Heisenberg(vmc.Chain(6), sign_rule=False)
    network = rbm(hamiltonian.lattice)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    result = vmc.minimize(
        hamiltonian, network, steps=25, samples=50, step=Spring(0.9), progress=False
    )
    assert result.variance == 0
    assert result.verdict.outcome is vmc.Outcome.STALLED, result.stopped
    assert "above the mean" in result.stopped


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_real_network_without_the_sign_rule_is_never_converged() -> None:
    """The lowest positive state is no eigenstate; samples may collapse onto few configurations."""
    hamiltonian = vmc.Heisenberg(vmc.Chain(8), sign_rule=False)
    network = rbm(hamiltonian.lattice)
    result = vmc.minimize(hamiltonian, network, steps=40, samples=100, progress=False)
    assert result.verdict.is_alarming, result.stopped


@pytest.mark.parametrize(
    "step",
    [
        Constant(),
        pytest.param(Spring(0.9), marks=pytest.mark.slow),
        pytest.param(vmc.PrimeSpring(), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_other_steps(ising: vmc.TransverseFieldIsing, step: pb.steps.Step) -> None:
    network = rbm(ising.lattice)
    result = vmc.minimize(
        ising, network, steps=40, samples=100, lr=0.02, step=step,
        solver=pb.solvers.Cholesky(0.01), progress=False,
    )  # fmt: skip
    assert result.energy == pytest.approx(exact_energy(ising), rel=5e-3)


@pytest.mark.slow
def test_single_precision_and_sample_space(ising: vmc.TransverseFieldIsing) -> None:
    torch.manual_seed(0)
    network = vmc.Convolutional(vmc.Chain(8), channels=6, layers=2, kernel=5)
    result = vmc.minimize(
        ising, network, steps=60, samples=100, gram="kernel", progress=False, measure=4000
    )
    assert result.energy == pytest.approx(exact_energy(ising), rel=1e-3)


def test_the_same_seed_gives_the_same_bits(ising: vmc.TransverseFieldIsing) -> None:
    energies = [
        vmc.minimize(ising, rbm(ising.lattice), steps=3, samples=30, progress=False).history.energy
        for _ in range(2)
    ]
    assert energies[0] == energies[1]


def test_a_run_resumes_to_the_same_bits(ising: vmc.TransverseFieldIsing, tmp_path: Path) -> None:
    whole = rbm(ising.lattice)
    want = vmc.minimize(ising, whole, steps=6, samples=40, progress=False)
    halves = rbm(ising.lattice)
    path = tmp_path / "run.pt"
    for steps in (3, 6):
        result = vmc.minimize(
            ising, halves, steps=steps, samples=40, progress=False, checkpoint=path
        )
    assert result.history.energy == want.history.energy
    assert result.energy == want.energy
    for one, two in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(one, two)


class RejectAlways(Step):
    """A step that leaves the parameters where they are."""

    def take(self, local: Local) -> Move:
        return reject(local.direction(), "always")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rejected_steps_are_counted_on_after_a_checkpoint(
    ising: vmc.TransverseFieldIsing, tmp_path: Path
) -> None:
    for steps in (4, 30):
        result = vmc.minimize(
            ising,
            rbm(ising.lattice),
            steps=steps,
            samples=20,
            step=RejectAlways(),
            progress=False,
            checkpoint=tmp_path / "run.pt",
        )
    assert result.verdict.stop_reason is vmc.StopReason.NO_STEP
    assert len(result.history) == 10


def test_a_checkpoint_of_another_run_is_refused(
    ising: vmc.TransverseFieldIsing, tmp_path: Path
) -> None:
    path = tmp_path / "run.pt"
    vmc.minimize(ising, rbm(ising.lattice), steps=2, samples=20, progress=False, checkpoint=path)
    with pytest.raises(pb.PullbackError, match="another run"):
        vmc.minimize(
            ising, rbm(ising.lattice), steps=2, samples=30, progress=False, checkpoint=path
        )
    with pytest.raises(pb.PullbackError, match="its chains is 20"):
        vmc.minimize(
            ising, rbm(ising.lattice), samples=20, checkpoint=path,
            sampler=vmc.Metropolis(chains=5),
        )  # fmt: skip
    path.write_text("nothing")
    with pytest.raises(pb.PullbackError, match="cannot be read"):
        vmc.minimize(
            ising, rbm(ising.lattice), steps=2, samples=30, progress=False, checkpoint=path
        )


def test_results_are_saved_and_loaded(ising: vmc.TransverseFieldIsing, tmp_path: Path) -> None:
    result = vmc.minimize(ising, rbm(ising.lattice), steps=3, samples=50, progress=False)
    result.save(tmp_path / "state.pt")
    other = rbm(ising.lattice, seed=5)
    loaded = vmc.Result.load(tmp_path / "state.pt", other)
    assert loaded.energy == result.energy
    assert loaded.stopped == result.stopped
    assert loaded.history.energy == result.history.energy
    assert torch.equal(loaded.samples, result.samples)


def test_a_budget_that_is_too_small_is_said(ising: vmc.TransverseFieldIsing) -> None:
    network = rbm(ising.lattice)
    result = vmc.minimize(ising, network, steps=1000, samples=50, budget=1e-6, progress=False)
    assert result.verdict.stop_reason is vmc.StopReason.BUDGET_SPENT
    assert result.verdict.outcome is vmc.Outcome.UNFINISHED
    assert len(result.history) == 1
    assert "budget" in result.stopped


def test_other_ways_to_stop(ising: vmc.TransverseFieldIsing) -> None:
    network = rbm(ising.lattice)

    def third_step(run: vmc.Minimization) -> bool:
        return len(run.history) == 3

    by_callback = vmc.minimize(
        ising, network, steps=50, samples=50, callbacks=[third_step], progress=False
    )
    assert by_callback.verdict.stop_reason is vmc.StopReason.CALLBACK
    assert len(by_callback.history) == 3
    by_tolerance = vmc.minimize(ising, network, steps=200, samples=100, tol=1e-2, progress=False)
    assert by_tolerance.verdict.stop_reason is vmc.StopReason.TOLERANCE_REACHED
    by_patience = vmc.minimize(ising, network, steps=300, samples=100, patience=10, progress=False)
    assert by_patience.verdict.stop_reason is vmc.StopReason.NO_PROGRESS
    assert len(by_patience.history) < 300


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_frozen_chains_are_never_converged() -> None:
    """Deep in the ferromagnet a state of two peaks holds every chain where it began."""

    class TwoPeaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(30.0))

        def forward(self, s: Tensor) -> Tensor:
            return self.scale * (s * s.roll(1, 1)).sum(1)

    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(8), field=1e-3)
    result = vmc.minimize(
        hamiltonian, TwoPeaks().double(), steps=30, samples=100, lr=1e-3, progress=False
    )
    assert result.verdict.outcome is vmc.Outcome.UNRELIABLE
    assert result.verdict.chain_problem is vmc.ChainProblem.FROZEN
    assert "frozen" in result.stopped


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_chains_that_stay_in_two_sectors_are_never_converged() -> None:
    """Peaks at both ferromagnets with a soft rim: chains accept moves, and never cross."""

    class SoftPeaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.6))

        def forward(self, s: Tensor) -> Tensor:
            return self.scale * s.sum(1).abs()

    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(16), field=0.2)
    result = vmc.minimize(
        hamiltonian, SoftPeaks().double(), steps=25, samples=100, lr=1e-4, progress=False
    )
    assert result.verdict.outcome is vmc.Outcome.UNRELIABLE
    assert result.verdict.chain_problem is vmc.ChainProblem.UNMIXED


class TwoBasins(nn.Module):
    """|ψ| is large where the spins are up, and where they alternate; chains stay in one of both."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.8, dtype=torch.float64))

    def forward(self, configurations: Tensor) -> Tensor:
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(8)
        return self.slope * torch.maximum(configurations.sum(1), configurations @ signs)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_energy_is_that_of_the_chains_of_the_steps_and_fresh_ones_are_compared() -> None:
    def gather_chains(run: vmc.Minimization) -> None:
        run.chains.configurations = torch.ones_like(run.chains.configurations)

    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(16), field=0.0)
    result = vmc.minimize(
        hamiltonian, TwoBasins(), steps=1, samples=64, lr=1e-6, callbacks=[gather_chains],
        progress=False,
    )  # fmt: skip
    assert result.energy < -10
    assert result.fresh is not None
    assert result.fresh.energy > -8
    assert result.verdict.chain_problem is vmc.ChainProblem.DISAGREE


class Broken(nn.Module):
    """No state: NaN from the first call, a wrong shape, other values at every call."""

    def __init__(self, defect: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))
        self.defect = defect

    def forward(self, s: Tensor) -> object:
        value = s @ self.weight.to(s)
        if self.defect == "nan":
            return value * math.nan
        if self.defect == "matrix":
            return value[:, None].expand(-1, 3)
        if self.defect == "scalar":
            return value.sum()
        if self.defect == "random":
            return value + torch.rand_like(value)
        if self.defect == "constant":
            return s.sum(1)
        return (value, value)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("nan", "NaN"), ("matrix", "not log ψ"), ("scalar", "not log ψ"), ("tuple", "not log ψ"),
        ("random", "not a function"), ("constant", "does not depend"),
    ],
)  # fmt: skip
def test_networks_that_are_no_state_are_refused(
    ising: vmc.TransverseFieldIsing, defect: str, message: str
) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        vmc.minimize(ising, Broken(defect), steps=2, samples=20, progress=False)


def test_networks_in_half_precision_are_refused(ising: vmc.TransverseFieldIsing) -> None:
    with pytest.raises(pb.PullbackError, match="not precise enough"):
        vmc.minimize(ising, rbm(ising.lattice).half(), steps=2, samples=20, progress=False)


def becomes_one_way(s: Tensor) -> tuple[Tensor, Tensor]:
    """A field along x that is Hermitian except at the configuration of all spins up."""
    connected = -s[:, None]
    return connected, torch.where(s.sum(1, keepdim=True) == 8, -1.0, -3.0).double()


def test_an_operator_is_checked_again_where_the_training_went() -> None:
    def gather_chains(run: vmc.Minimization) -> None:
        run.chains.configurations = torch.ones_like(run.chains.configurations)

    hamiltonian = vmc.FunctionHamiltonian(becomes_one_way, 8)
    with pytest.raises(pb.PullbackError, match="not Hermitian"):
        vmc.minimize(
            hamiltonian, make_network("real", 8), steps=1, samples=10, callbacks=[gather_chains],
            progress=False,
        )  # fmt: skip


def test_a_network_for_another_number_of_sites_is_refused(ising: vmc.TransverseFieldIsing) -> None:
    with pytest.raises(pb.PullbackError, match="as many sites"):
        vmc.minimize(ising, vmc.Rbm(6), steps=2, samples=20, progress=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_network_that_breaks_on_the_way_gives_a_verdict(ising: vmc.TransverseFieldIsing) -> None:
    class BreaksLater(vmc.Rbm):
        broken = False

        def forward(self, configurations: Tensor) -> Tensor:
            value = super().forward(configurations)
            return value * math.nan if self.broken else value

    torch.manual_seed(0)
    network = BreaksLater(ising.lattice, 1).double()

    def break_network(run: vmc.Minimization) -> None:
        network.broken = len(run.history) == 4

    result = vmc.minimize(
        ising, network, steps=20, samples=50, callbacks=[break_network], progress=False
    )
    assert result.verdict.outcome is vmc.Outcome.DIVERGED
    assert result.verdict.stop_reason is vmc.StopReason.NOT_FINITE
    assert len(result.history) == 4


def ising_rows(s: Tensor) -> tuple[Tensor, Tensor]:
    rows = vmc.TransverseFieldIsing(vmc.Chain(8)).connections(s)
    return rows.configurations, rows.elements


def rows_of_zeros(s: Tensor) -> tuple[Tensor, Tensor]:
    return 0 * s[:, None], torch.ones(len(s), 1, dtype=torch.float64)


def infinite_elements(s: Tensor) -> tuple[Tensor, Tensor]:
    return s[:, None], torch.full((len(s), 1), math.inf, dtype=torch.float64)


def one_tensor(s: Tensor) -> tuple[Tensor, Tensor]:
    return s[:, None]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("hamiltonian", "message"),
    [
        (vmc.FunctionHamiltonian(one_way, 8), "not Hermitian"),
        (vmc.FunctionHamiltonian(ising_rows, 8, True), "leaves the sector"),
        (vmc.FunctionHamiltonian(rows_of_zeros, 8), "out of the configurations"),
        (vmc.FunctionHamiltonian(infinite_elements, 8), "not finite"),
        (vmc.FunctionHamiltonian(one_tensor, 8), "two tensors"),
    ],
)
def test_hamiltonians_that_make_no_sense_are_refused(
    hamiltonian: vmc.Hamiltonian, message: str
) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        vmc.minimize(hamiltonian, make_network("real", 8), steps=1, samples=40, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps="), ({"samples": 1}, "samples="), ({"lr": 0.0}, "lr="),
        ({"lr": "fast"}, "lr="), ({"budget": 0}, "budget="), ({"step": 3}, "step="),
        ({"solver": "qr"}, "solver="), ({"measure": 0}, "measure="), ({"tol": math.nan}, "tol="),
        ({"patience": 0}, "patience="), ({"seed": 2**62}, "seed="), ({"seed": "a"}, "seed="),
        ({"sampler": "flip"}, "sampler="), ({"evaluation": {}}, "evaluation="),
        ({"callbacks": [1]}, "callbacks="), ({"lr": lambda step: math.nan}, "lr= gives no"),
        ({"lr": lambda step: "fast"}, "lr= gives no"),
    ],
)  # fmt: skip
def test_unusable_options_are_refused(
    ising: vmc.TransverseFieldIsing, options: dict[str, object], message: str
) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        vmc.minimize(ising, rbm(ising.lattice), progress=False, **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(pb.PullbackError, match="Hamiltonian"):
        vmc.minimize("H", rbm(ising.lattice))  # pyright: ignore[reportArgumentType]


def test_a_learning_rate_may_fall_to_zero(ising: vmc.TransverseFieldIsing) -> None:
    rates = [0.05, 0.05, 0.0]
    result = vmc.minimize(
        ising, rbm(ising.lattice), steps=3, samples=40, lr=rates.__getitem__, progress=False
    )
    assert result.history.lr == rates
    assert math.isfinite(result.energy)


def evidence(
    energies: list[float], final: float, reason: vmc.StopReason, **changes: float
) -> Evidence:
    history = vmc.History()
    for energy in energies:
        history.append(
            energy=energy, error=0.01, variance=1e-4, acceptance=0.5, rhat=math.nan, lr=0.1,
            damping=1e-3, momentum=0.0, seconds=1.0, sampling_seconds=0.0, energy_seconds=0.0,
            solving_seconds=0.0,
        )  # fmt: skip
    numbers = {"error": 0.005, "variance": 1e-4, "rhat": 1.0, "spin_rhat": 1.0, **changes}
    fresh_energy = numbers.pop("fresh", -10.0)
    fresh_rhat = numbers.pop("fresh_rhat", 1.0)
    statistics = EnergyStatistics(final, autocorrelation=0.0, samples=1000, **numbers)  # pyright: ignore[reportArgumentType]
    fresh = replace(statistics, energy=fresh_energy, rhat=fresh_rhat)
    return Evidence(reason, history, statistics, fresh, 0.0, 10, None)


@pytest.mark.parametrize(
    ("energies", "final", "changes", "outcome", "problem"),
    [
        ([-10.0] * 40, -10.0, {}, vmc.Outcome.CONVERGED, None),
        ([-5 - 0.1 * k for k in range(50)], -10.0, {}, vmc.Outcome.UNFINISHED, None),
        ([-10.0] * 40, -10.0, {"variance": 2.0}, vmc.Outcome.STALLED, None),
        ([-10.0] * 40, -10.0, {"rhat": 1.3}, vmc.Outcome.UNRELIABLE, vmc.ChainProblem.UNMIXED),
        ([-10.0] * 40, -10.0, {"spin_rhat": math.inf}, vmc.Outcome.UNRELIABLE,
         vmc.ChainProblem.UNMIXED),
        ([-10.0] * 40, -10.0, {"fresh": -9.0}, vmc.Outcome.UNRELIABLE,
         vmc.ChainProblem.DISAGREE),
        ([-10.0] * 40, -10.0, {"fresh_rhat": 2.0}, vmc.Outcome.UNRELIABLE,
         vmc.ChainProblem.DISAGREE),
        ([-10.0] * 40, -10.0, {"error": 0.0, "variance": 0.0, "fresh": -10 - 1e-9},
         vmc.Outcome.CONVERGED, None),
        ([-10.0] * 40, -10.0, {"error": math.nan}, vmc.Outcome.UNRELIABLE,
         vmc.ChainProblem.TOO_FEW),
        ([-10.0] * 40, math.nan, {}, vmc.Outcome.DIVERGED, None),
        ([-10.0] * 3, -10.0, {}, vmc.Outcome.UNFINISHED, None),
    ],
)  # fmt: skip
def test_verdicts(
    energies: list[float],
    final: float,
    changes: dict[str, float],
    outcome: vmc.Outcome,
    problem: vmc.ChainProblem | None,
) -> None:
    verdict = judge(evidence(energies, final, vmc.StopReason.ALL_STEPS, **changes))
    assert verdict.outcome is outcome, verdict.text
    assert verdict.chain_problem is problem
    assert verdict.name in verdict.text


def test_steps_that_were_too_short_to_move_the_state_are_unfinished() -> None:
    """40 steps of 1e-6: no network would have moved, so a larger one is no remedy."""
    stalled = evidence([-10.0] * 40, -10.0, vmc.StopReason.ALL_STEPS, variance=2.0)
    assert judge(stalled).outcome is vmc.Outcome.STALLED
    stalled.history.lr = [1e-6] * 40
    verdict = judge(stalled)
    assert verdict.outcome is vmc.Outcome.UNFINISHED
    assert "lr=" in verdict.text


def test_an_eigenstate_with_other_signs_may_be_an_excited_one() -> None:
    converged = evidence([-10.0] * 40, -10.0, vmc.StopReason.ALL_STEPS)
    assert judge(converged).outcome is vmc.Outcome.CONVERGED
    verdict = judge(replace(converged, frustration=0.5))
    assert verdict.outcome is vmc.Outcome.EIGENSTATE
    assert "excited" in verdict.text


def test_an_excited_eigenstate_is_not_converged() -> None:
    """Without the sign rule a ring of six has its ground state at momentum π.

    A state that is invariant under translations ends as an eigenstate above it.
    """
    lattice = vmc.Chain(6)
    torch.manual_seed(0)
    network = vmc.Convolutional(lattice, 4, 2, 3, phase=True).double()
    result = vmc.minimize(
        vmc.Heisenberg(lattice, sign_rule=False), network, steps=100, samples=200, progress=False
    )
    assert result.verdict.outcome is not vmc.Outcome.CONVERGED, result.stopped
