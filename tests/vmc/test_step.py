"""Energies, forces and natural gradients against dense calculations over all configurations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback import vmc
from pullback._core.processes import Processes
from pullback.metrics import FubiniStudy
from pullback.steps import Local, Move, Step
from pullback.testing import assert_close, jacobian
from pullback.vmc.amplitude import EvaluationOptions, LogAmplitude
from pullback.vmc.run import Batch, Minimization, Settings
from pullback.vmc.statistics import summarize
from tests.pairs import each_once
from tests.vmc.states import KINDS, amplitudes, as_complex, make_network
from tests.vmc.test_energies import make_evaluator


def complex_rows(network: nn.Module, configurations: Tensor) -> Tensor:
    """O = ∂ log ψ/∂w, (N, p) complex, one reverse pass per entry."""
    log_psi = as_complex(network(configurations.double()))
    parameters = list(network.parameters())
    real = jacobian(log_psi.real, parameters)
    imaginary = torch.zeros_like(real)
    if log_psi.imag.requires_grad:
        imaginary = jacobian(log_psi.imag, parameters)
    return torch.complex(real, imaginary)


def dense_system(rows: Tensor, energies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """S = Re⟨(O − ⟨O⟩)*(O − ⟨O⟩)⟩ and ∇⟨H⟩ = 2 Re⟨(O − ⟨O⟩)*(E − ⟨E⟩)⟩."""
    probability = (weights / weights.sum()).to(rows.dtype)
    centered = rows - probability @ rows
    deviation = energies - probability @ energies
    tensor = (centered.conj().T * probability) @ centered
    gradient = (centered.conj().T * probability) @ deviation
    return tensor.real, 2 * gradient.real


class Probe(Step):
    """Keeps the local picture and rejects the move."""

    def take(self, local: Local) -> Move:
        self.gradient = local.gradient
        self.solution = local.direction()
        return Move(self.solution.x, 0.0, self.solution, accepted=False)


def make_run(
    hamiltonian: vmc.Hamiltonian, network: nn.Module, step: Step, gram: str
) -> Minimization:
    settings = Settings(
        steps=1, samples=40, seed=0, sampler=vmc.Metropolis(), lr=0.1,
        solver=pb.solvers.Cholesky(1e-2), step=step, gram=gram,
        evaluation=EvaluationOptions(), measure=40, tol=None, patience=None, budget=None,
        callbacks=(), progress=False,
    )  # fmt: skip
    return Minimization(hamiltonian, network, settings, None, Processes())


@pytest.mark.parametrize(
    ("network_name", "gram"), each_once(KINDS, ["rows", "kernel", "dense", "matrix_free"])
)
def test_a_step_solves_the_dense_system(network_name: str, gram: str) -> None:
    """(S + λ)x = ∇⟨H⟩ from drawn samples, repeated ones included."""
    hamiltonian = vmc.Heisenberg(vmc.Chain(6), j2=0.3)
    network = make_network(network_name, 6)
    probe = Probe()
    run = make_run(hamiltonian, network, probe, gram)
    batch = run._draw_batch(run.chains)
    run.optimizer.step(run._make_closure(batch, 0.1))
    rows = complex_rows(network, batch.samples)
    weights = torch.ones(len(rows), dtype=torch.float64)
    tensor, gradient = dense_system(rows, batch.local_energies, weights)
    if network_name == "real":
        assert float(batch.local_energies.imag.abs().max()) == 0
    assert_close(probe.gradient, gradient, 1e-12, "∇⟨H⟩")
    damped = tensor + 1e-2 * torch.eye(len(gradient), dtype=torch.float64)
    assert_close(probe.solution.x, torch.linalg.solve(damped, gradient), 1e-9, "x")


@pytest.mark.parametrize("network_name", KINDS)
def test_the_force_is_the_gradient_of_the_exact_energy(network_name: str) -> None:
    """Over all configurations with weights |ψ|², against autograd of ψᵀHψ/ψᵀψ."""
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(8), field=0.6)
    network = make_network(network_name, 8)
    basis = vmc.enumerate_configurations(8)
    matrix = hamiltonian.dense().to(torch.complex128)
    psi = amplitudes(network, basis)
    energy = (psi.conj() @ (matrix @ psi)).real / (psi.conj() @ psi).real
    exact = torch.autograd.grad(energy, list(network.parameters()))
    want = torch.cat([g.flatten() for g in exact])
    local = vmc.compute_local_energies(hamiltonian, make_evaluator(network), basis)
    weights = psi.detach().abs().square()
    assert float((weights * local.values.real).sum() / weights.sum()) == pytest.approx(
        float(energy.detach()), rel=1e-13
    )
    _, gradient = dense_system(complex_rows(network, basis), local.values, weights)
    assert_close(gradient, want, 1e-11, "∇⟨H⟩ from local energies")


@pytest.mark.parametrize("network_name", ["real", "phase"])
def test_the_metric_is_the_second_derivative_of_the_fidelity(network_name: str) -> None:
    """1 − |⟨ψ|ψ'⟩|² = dwᵀS dw to second order, over all configurations."""
    network = make_network(network_name, 6)
    basis = vmc.enumerate_configurations(6).double()
    psi = amplitudes(network, basis).detach()
    weights = psi.abs().square()
    model = LogAmplitude(network)
    parameters = dict(model.named_parameters())
    linear = pb.maps.ModuleMap(model, pb.maps.Call.of(basis)).linearize(parameters)
    event = tuple(linear.value.shape[1:])
    factor = pb.metrics.Scaled(FubiniStudy(weights).factor(linear.value), 1 / 64, event)
    tensor = pb.grams.assemble([pb.grams.RowBlock(linear, factor)], "rows", 2**30).dense()
    direction = torch.randn(len(tensor), generator=torch.Generator().manual_seed(0)).double()
    shift = 1e-4
    with torch.no_grad():
        for p, d in zip(
            network.parameters(),
            direction.split([p.numel() for p in network.parameters()]),
            strict=True,
        ):
            p += shift * d.view(p.shape)
    moved = amplitudes(network, basis).detach()
    overlap = (psi.conj() @ moved).abs() ** 2 / (weights.sum() * moved.abs().square().sum())
    infidelity = float(1 - overlap)
    assert infidelity == pytest.approx(shift**2 * float(direction @ tensor @ direction), rel=1e-3)


def test_values_of_the_closure_are_those_of_the_proximal_model() -> None:
    """c·dz + |dz|²/(2 lr) at other parameters, and zero at the first."""
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(5))
    network = make_network("phase", 5)
    run = make_run(hamiltonian, network, Probe(), "auto")
    batch = run._draw_batch(run.chains)
    closure = run._make_closure(batch, 0.25)
    before = network(batch.samples.double()).detach()
    assert closure() == 0.0
    with torch.no_grad():
        for p in network.parameters():
            p += 0.01
    change = network(batch.samples.double()).detach() - before
    deviation = batch.local_energies - batch.local_energies.mean()
    cotangents = 2 * torch.view_as_real(deviation) / len(change)
    centered = change - change.mean(0)
    want = (cotangents * change).sum() + centered.square().sum() / len(change) / 0.5
    assert closure() == pytest.approx(float(want), rel=1e-10)


def test_statistics_of_a_batch_are_those_of_its_energies() -> None:
    hamiltonian = vmc.TransverseFieldIsing(vmc.Chain(6))
    run = make_run(hamiltonian, make_network("phase", 6), Probe(), "auto")
    batch = run._draw_batch(run.chains)
    assert isinstance(batch, Batch)
    one_chain = summarize(batch.local_energies[:, None], batch.samples[:, None])
    assert one_chain.energy == pytest.approx(batch.statistics.energy)
    deviation = batch.local_energies - batch.local_energies.mean()
    assert batch.statistics.variance == pytest.approx(float(deviation.abs().square().mean()))


class WithLargeMean(nn.Module):
    """A state whose norm is a parameter with a huge derivative, which the metric ignores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = vmc.Rbm(8, features=8)
        self.log_norm = nn.Linear(1, 1, bias=False)

    def forward(self, s: Tensor) -> Tensor:
        return self.network(s) + self.log_norm(torch.full_like(s[:, :1], 1e4))[:, 0]


def test_small_dampings_do_not_drown_in_the_round_off_of_single_precision() -> None:
    samples = vmc.enumerate_configurations(8)[::5]
    generator = torch.Generator().manual_seed(1)
    energies = torch.randn(len(samples), generator=generator, dtype=torch.float64)
    cotangents = (energies - energies.mean()) / len(samples)
    directions = []
    for dtype in (torch.float64, torch.float32):
        network = WithLargeMean().to(dtype)
        optimizer = pb.NaturalGradient(
            network, FubiniStudy(), pb.solvers.Cholesky(1e-5), pb.steps.Constant(), gram="kernel"
        )

        def closure(network: nn.Module = network, dtype: torch.dtype = dtype) -> float:
            network.zero_grad()
            (network(samples.to(dtype)) * cotangents.to(dtype)).sum().backward()
            return 0.0

        solution = optimizer.direction(closure)
        assert solution.damping == 1e-5, solution.status
        # the norm itself may go anywhere: no state depends on it
        directions.append(solution.x.double()[:-1])
    assert (directions[1] - directions[0]).norm() < 1e-3 * directions[0].norm()
