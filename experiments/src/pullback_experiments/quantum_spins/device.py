"""J1–J2 on one GPU: `python -m pullback_experiments.quantum_spins.device FOLDER --minutes 14`.

It needs torch alone. A vision transformer with factored attention (155,620 parameters on 10 × 10)
is trained on the square-lattice J1–J2 model with Marshall's sign rule, 4,096 samples a step. The
parts write to FOLDER/j1j2.json as they go:

    compare   one natural-gradient step against the same step with a stored `torch.func` Jacobian:
              seconds, memory, and the difference of the directions
    train     energies per site and where the seconds of a step go; at the end the energy, also of
              fresh chains and of the symmetrized state
    profile   forward passes by the size of their chunks, and the kernels of a step

The training is saved to FOLDER/j1j2.pt and goes on from there when the command is repeated, until
all of its calls together have taken `--minutes`. `--call-minutes` ends one call earlier. Energies
are in spins S = σ/2 per site.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from pullback import vmc
from pullback.grams import GramForm
from pullback.metrics import FubiniStudy
from pullback.optim import NaturalGradient
from pullback.solvers import Cholesky
from pullback.steps import Constant, Spring, Step
from pullback.vmc.amplitude import Evaluator, LogAmplitude
from pullback.vmc.energies import compute_local_energies
from pullback.vmc.statistics import summarize


@dataclass(frozen=True)
class Options:
    """Sizes and rates of the run.

    Attributes:
        side: of the square lattice.
        j2: coupling of next-nearest neighbours.
        width, heads, blocks: of the transformer.
        samples: of a step, one for every chain.
        moves: proposals between two steps.
        lr: learning rate for H in Pauli matrices; that of NetKet's tutorial is 0.0075.
        damping: λ of the quantum geometric tensor; theirs is 1e-4, without momentum.
        momentum: of SPRING; 0 for plain steps, negative for `vmc.adaptive_step`.
        precision: of the natural gradient, "float64" or "float32". λ = 1e-4 is below the round-off
            of a kernel in float32.
        tf32: evaluate amplitudes in TF32, 1 or 0; otherwise in float32.
        graphed: launch evaluations by CUDA graphs, 1 or 0.
        compiled: evaluate by torch.compile, 1 or 0.
        decay: share of the time after which the rate falls along a cosine to a tenth.
        measure: samples of the final energy.
        chunk: configurations of one forward pass.
        memory: bytes of one panel of rows.
        seed: of network and chains.
    """

    side: int = 10
    j2: float = 0.5
    width: int = 60
    heads: int = 10
    blocks: int = 4
    samples: int = 4096
    moves: int = 60
    lr: float = 0.0075
    damping: float = 5e-4
    momentum: float = 0.9
    precision: str = "float64"
    tf32: int = 0
    graphed: int = 1
    compiled: int = 1
    decay: float = 0.45
    measure: int = 65_536
    chunk: int = 2**12
    memory: int = 2**31
    seed: int = 0


class JsonRecord:
    """A dict that is written to a file whenever a part of it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def update(self, **entries: Any) -> None:
        """Replace parts and write the file, all or nothing."""
        self.entries.update(entries)
        partial_path = self._path.with_suffix(".part")
        partial_path.write_text(json.dumps(self.entries, indent=1))
        partial_path.replace(self._path)


def build_network(options: Options, device: torch.device) -> vmc.FactoredTransformer:
    """Return the transformer of this seed."""
    torch.manual_seed(options.seed)
    lattice = vmc.Square(options.side)
    network = vmc.FactoredTransformer(lattice, options.width, options.heads, options.blocks)
    return network.to(device, getattr(torch, options.precision))


def build_evaluation(options: Options) -> vmc.EvaluationOptions:
    """Return how amplitudes are evaluated: in float32, whatever the natural gradient is in."""
    return vmc.EvaluationOptions(
        chunk=options.chunk,
        dtype=torch.float32,
        tf32=bool(options.tf32),
        compiled=bool(options.compiled),
        graphed=bool(options.graphed),
    )


def build_step(options: Options) -> Step:
    """Return SPRING, plain steps or adaptive ones, as the momentum says."""
    if options.momentum < 0:
        return vmc.adaptive_step(options.damping)
    if options.momentum == 0:
        return Constant()
    return Spring(options.momentum)


def schedule_rate(options: Options, elapsed_share: float, step: int) -> float:
    """The learning rate: ten steps of warm-up, constant, then a cosine down to a tenth."""
    warm_up = min(1.0, (step + 1) / 10)
    share = max(0.0, elapsed_share - options.decay) / (1 - options.decay)
    fall = 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, share))) / 2
    return options.lr * warm_up * fall


# --- training -----------------------------------------------------------------------------------


class Training:
    """The run of `vmc.minimize` with its schedule in time, its lines and its record."""

    def __init__(
        self, options: Options, minutes: float, folder: Path, device: torch.device
    ) -> None:
        self._options = options
        self._seconds = 60 * minutes
        self._path = folder / "j1j2.pt"
        self._record = JsonRecord(folder / "j1j2.json")
        self._device = device
        self._run: vmc.Minimization | None = None

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step, from the seconds of all calls so far."""
        seconds = 0.0
        if self._run is not None:
            seconds = self._run.history.spent
        elif self._path.exists():
            seconds = float(self._record.entries.get("seconds", 0.0))
        return schedule_rate(self._options, seconds / self._seconds, step)

    def _report(self, run: vmc.Minimization) -> bool:
        """Print and record every ten steps; ask to stop when the time is over."""
        self._run = run
        history = run.history
        if len(history) % 10 == 0:
            spins = 4 * run.hamiltonian.sites
            stages = summarize_stages(history)
            print(
                f"step {len(history)}  E/site {history.energy[-1] / spins:.6f} ± "
                f"{history.error[-1] / spins:.6f}  variance {history.variance[-1]:.3g}  lr "
                f"{history.lr[-1]:.4f}  accepted {history.acceptance[-1]:.2f}  "
                f"{stages['step']:.3f} s/step  after {history.spent:.0f} s",
                flush=True,
            )
            self._write(run, stages)
        return history.spent >= self._seconds

    def _write(self, run: vmc.Minimization, stages: dict[str, float]) -> None:
        spins = 4 * run.hamiltonian.sites
        history = run.history
        self._record.update(
            options=asdict(self._options),
            device=describe(self._device),
            parameters=sum(p.numel() for p in run.network.parameters()),
            stages=stages,
            steps=len(history),
            seconds=history.spent,
            energy_per_site=[round(energy / spins, 7) for energy in history.energy],
            error_per_site=[round(error / spins, 7) for error in history.error],
            variance=[round(variance, 4) for variance in history.variance],
            acceptance=[round(acceptance, 4) for acceptance in history.acceptance],
        )

    def run(self, call_minutes: float, steps: int) -> vmc.Result:
        """Train until the call's minutes, all minutes or the steps are over, and measure."""
        options = self._options
        hamiltonian = vmc.Heisenberg(vmc.Square(options.side), j2=options.j2)
        network = build_network(options, self._device)
        # a fresh chain takes more than a thousand proposals to equilibrium
        sampler = vmc.Metropolis(
            chains=options.samples, moves=options.moves, thermalization=40 * options.moves
        )
        result = vmc.minimize(
            hamiltonian,
            network,
            steps=steps,
            samples=options.samples,
            seed=options.seed,
            sampler=sampler,
            lr=self._rate,
            solver=Cholesky(options.damping),
            step=build_step(options),
            gram=GramForm("kernel", options.memory),
            evaluation=build_evaluation(options),
            measure=options.measure,
            budget=60 * call_minutes,
            checkpoint=self._path,
            callbacks=[self._report],
            progress=False,
        )
        if self._run is not None:
            self._write(self._run, summarize_stages(result.history))
        spins = 4 * hamiltonian.sites
        final = {
            "energy_per_site": result.energy / spins,
            "error_per_site": result.error / spins,
            "variance": result.variance,
            "rhat": result.statistics.rhat,
            "autocorrelation": result.statistics.autocorrelation,
            "samples": result.statistics.samples,
            "verdict": result.stopped,
        }
        if result.fresh is not None:
            final["fresh_energy_per_site"] = result.fresh.energy / spins
            final["fresh_error_per_site"] = result.fresh.error / spins
        self._record.update(final=final)
        print(json.dumps(final, indent=1), flush=True)
        return result

    def measure_symmetrized(self, samples: int) -> None:
        """Record the energy of the state averaged over the space group and spin inversion."""
        if self._run is None:
            return
        lattice = PatchOffsets(self._options.side)
        symmetrized = vmc.Symmetrized(self._run.network, lattice, spin_inversion=1)
        images = len(symmetrized.permutations)
        evaluation = replace(
            build_evaluation(self._options), chunk=max(1, 2**13 // images), compiled=False
        )
        chains = self._run.chains.configurations[:samples]
        symmetrized = symmetrized.to(self._device)
        numbers = measure_state(self._options, symmetrized, chains, evaluation)
        self._record.update(symmetrized=numbers)
        print(json.dumps({"symmetrized": numbers}, indent=1), flush=True)


class PatchOffsets(vmc.Square):
    """A square whose translations are those within a patch of 2 × 2 sites.

    The transformer does not change under translations by whole patches, so that with these its
    average is one over all translations.
    """

    def translations(self) -> Tensor:
        return super().translations()[[0, 1, self.m, self.m + 1]]


def measure_state(
    options: Options,
    network: torch.nn.Module,
    configurations: Tensor,
    evaluation: vmc.EvaluationOptions,
) -> dict[str, float]:
    """Return the energy from chains that continue from these configurations, (chains, sites)."""
    start = time.perf_counter()
    hamiltonian = vmc.Heisenberg(vmc.Square(options.side), j2=options.j2)
    count = len(configurations)
    sampler = vmc.Metropolis(chains=count, moves=options.moves)
    chains = vmc.MarkovChains(hamiltonian, sampler, count, options.seed, configurations.device)
    chains.configurations = configurations
    chains.is_thermalized = True
    evaluator = Evaluator(LogAmplitude(network), evaluation)
    samples = chains.draw(evaluator)
    local_energies = compute_local_energies(hamiltonian, evaluator, samples[:, 0]).values
    energy = summarize(local_energies[:, None], samples)
    spins = 4 * hamiltonian.sites
    return {
        "energy_per_site": energy.energy / spins,
        "error_per_site": energy.error / spins,
        "variance": energy.variance,
        "samples": energy.samples,
        "seconds": time.perf_counter() - start,
    }


def summarize_stages(history: vmc.History) -> dict[str, float]:
    """Median seconds of the last steps by stage."""
    last = slice(-20, None)
    stages = {
        "sampling": statistics.median(history.sampling_seconds[last]),
        "local energies": statistics.median(history.energy_seconds[last]),
        "natural gradient": statistics.median(history.solving_seconds[last]),
    }
    if len(history) > 1:
        ends = history.seconds[-21:]
        stages["step"] = (ends[-1] - ends[0]) / (len(ends) - 1)
    else:
        stages["step"] = history.spent
    return stages


# --- one step against a stored Jacobian ----------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes of a calculation, with the direction that it gave."""

    seconds: float
    bytes: int
    direction: Tensor


def measure(calculate: Callable[[], Tensor], device: torch.device, repeats: int = 5) -> Measured:
    """Return the fastest of some repetitions after a warm-up, and the rise of the peak memory."""
    direction = calculate()
    seconds = []
    peak = 0
    for _ in range(repeats):
        del direction
        start_bytes = 0
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start_bytes = torch.cuda.memory_allocated()
        start = time.perf_counter()
        direction = calculate()
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - start_bytes
        seconds.append(time.perf_counter() - start)
    return Measured(min(seconds), peak, direction)


def stored_direction(
    network: vmc.FactoredTransformer, samples: Tensor, cotangents: Tensor, damping: float
) -> Tensor:
    """x = Aᵀ(AAᵀ + λ)⁻¹r with A stored: centered rows of torch.func, divided by √N."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def rows_of_sample(sample: Tensor) -> Tensor:
        def evaluate(values: dict[str, Tensor]) -> Tensor:
            return functional_call(network, values, (sample[None],))[0]

        pull = vjp(evaluate, parameters)[1]
        basis = torch.eye(2, dtype=samples.dtype, device=samples.device)
        pulled = vmap(lambda covector: pull(covector)[0])(basis)
        return torch.cat([rows.flatten(1) for rows in pulled.values()], 1)

    rows = vmap(rows_of_sample, chunk_size=512)(samples)
    rows -= rows.mean(0)
    matrix = rows.flatten(0, 1).div_(math.sqrt(len(samples)))
    whitened = cotangents.flatten() * math.sqrt(len(samples))
    kernel = matrix @ matrix.T
    kernel.diagonal().add_(damping)
    lower, fault = torch.linalg.cholesky_ex(kernel)
    if int(fault):  # in float32 round-off may exceed the damping
        return matrix.new_empty(0)
    return matrix.T @ torch.cholesky_solve(whitened[:, None], lower)[:, 0]


def structured_direction(
    optimizer: NaturalGradient, model: torch.nn.Module, samples: Tensor, cotangents: Tensor
) -> Tensor:
    """Return the library's direction: its kernel is formed from the layers' inputs."""

    def closure() -> float:
        optimizer.zero_grad()
        (model(samples) * cotangents).sum().backward()
        return 0.0

    return optimizer.direction(closure).x


def draw_balanced_samples(options: Options, device: torch.device) -> Tensor:
    """Random configurations with as many spins up as down, (samples, sites), float64."""
    generator = torch.Generator().manual_seed(1)
    sites = options.side**2
    noise = torch.rand(options.samples, sites, generator=generator)
    ranks = noise.argsort(1).argsort(1)
    return torch.where(ranks < sites // 2, 1.0, -1.0).to(device, torch.float64)


def draw_cotangents(options: Options, device: torch.device) -> Tensor:
    """Those of random complex local energies, (samples, 2), float64."""
    generator = torch.Generator().manual_seed(2)
    energies = torch.randn(options.samples, 2, generator=generator, dtype=torch.float64)
    centered = energies - energies.mean(0)
    return (2 * centered / options.samples).to(device)


def build_optimizer(network: torch.nn.Module, options: Options) -> NaturalGradient:
    """Return the library's natural gradient in sample space."""
    return NaturalGradient(
        network,
        FubiniStudy(),
        Cholesky(options.damping),
        Constant(),
        gram=GramForm("kernel", options.memory),
    )


@dataclass(frozen=True)
class StepComparison:
    """The natural gradient of the library and that of a stored Jacobian, in one precision."""

    library: Measured
    stored: Measured

    def summarize(self, exact: Tensor) -> dict[str, float | None]:
        """Return seconds, bytes, their ratios, and relative errors of both directions."""
        return {
            "structured_seconds": self.library.seconds,
            "structured_bytes": self.library.bytes,
            "stored_seconds": self.stored.seconds,
            "stored_bytes": self.stored.bytes,
            "times_faster": self.stored.seconds / self.library.seconds,
            "share_of_memory": self.library.bytes / max(1, self.stored.bytes),
            "structured_error": measure_difference(self.library.direction, exact),
            "stored_error": measure_difference(self.stored.direction, exact),
        }


def measure_difference(direction: Tensor, exact: Tensor) -> float | None:
    """Return |x − exact| / |exact|; None for a direction that could not be computed."""
    if not direction.numel():
        return None
    return float((direction.to(exact) - exact).norm() / exact.norm())


def compare_in_precision(options: Options, precision: str, device: torch.device) -> StepComparison:
    """Measure both directions from the same network, samples and cotangents."""
    options = replace(options, precision=precision)
    network = build_network(options, device)
    dtype = getattr(torch, precision)
    samples = draw_balanced_samples(options, device).to(dtype)
    cotangents = draw_cotangents(options, device).to(dtype)
    optimizer = build_optimizer(network, options)
    library = measure(lambda: structured_direction(optimizer, network, samples, cotangents), device)
    stored = measure(
        lambda: stored_direction(network, samples, cotangents, options.damping), device
    )
    return StepComparison(library, stored)


def compare_steps(options: Options, device: torch.device) -> dict[str, Any]:
    """The directions of a stored Jacobian and of the library, in float64 and in float32.

    Sampling and local energies would be the same on both sides and are left out. The script with a
    stored Jacobian subtracts means and scales in place. In float32 its kernel is in float32 too;
    that of the library is added up in float64. Errors are relative to the direction of the stored
    Jacobian in float64. `float32_against_float64` compares the library's float32 with that.
    """
    double = compare_in_precision(options, "float64", device)
    single = compare_in_precision(options, "float32", device)
    exact = double.stored.direction
    mixed = StepComparison(single.library, double.stored)
    numbers = {
        "memory": options.memory,
        "float64": double.summarize(exact),
        "float32": single.summarize(exact),
        "float32_against_float64": mixed.summarize(exact),
    }
    print(json.dumps(numbers, indent=1), flush=True)
    return numbers


# --- first looks ---------------------------------------------------------------------------------


def look(options: Options, seconds: float, device: torch.device) -> dict[str, Any]:
    """Train for some seconds and print energies, variances, stages and round-off."""
    hamiltonian = vmc.Heisenberg(vmc.Square(options.side), j2=options.j2)
    network = build_network(options, device)
    start = time.perf_counter()
    result = vmc.minimize(
        hamiltonian,
        network,
        steps=100_000,
        samples=options.samples,
        seed=options.seed,
        sampler=vmc.Metropolis(
            chains=options.samples, moves=options.moves, thermalization=5 * options.moves
        ),
        lr=lambda step: schedule_rate(options, 0.0, step),
        solver=Cholesky(options.damping),
        step=build_step(options),
        gram=GramForm("kernel", options.memory),
        evaluation=build_evaluation(options),
        measure=512,
        budget=seconds,
        progress=False,
    )
    spins = 4 * hamiltonian.sites
    history = result.history
    numbers = {
        "options": asdict(options),
        "seconds": time.perf_counter() - start,
        "steps": len(history),
        "stages": summarize_stages(history),
        "energy_per_site": [round(energy / spins, 5) for energy in history.energy],
        "variance": [round(variance, 1) for variance in history.variance],
        "round_off": measure_round_off(hamiltonian, network, result.samples[:256]),
    }
    print(json.dumps(numbers), flush=True)
    return numbers


def measure_round_off(
    hamiltonian: vmc.Hamiltonian, network: torch.nn.Module, samples: Tensor
) -> dict[str, float]:
    """Root mean square errors of local energies in float32 and TF32, over their deviation."""
    evaluations = {
        "float64": vmc.EvaluationOptions(dtype=torch.float64, chunk=2**12),
        "float32": vmc.EvaluationOptions(dtype=torch.float32, chunk=2**12),
        "tf32": vmc.EvaluationOptions(dtype=torch.float32, chunk=2**12, tf32=True),
    }
    energies = {}
    for name, evaluation in evaluations.items():
        evaluator = Evaluator(LogAmplitude(network), evaluation)
        energies[name] = compute_local_energies(hamiltonian, evaluator, samples).values
    exact = energies.pop("float64")
    deviation = (exact - exact.mean()).abs().square().mean().sqrt()
    errors = {}
    for name, values in energies.items():
        errors[name] = float((values - exact).abs().square().mean().sqrt() / deviation)
        errors[f"{name} mean"] = float((values - exact).mean().real / exact.mean().real)
    return errors


def profile_stages(options: Options, device: torch.device) -> dict[int, float]:
    """Configurations a second by the size of a chunk; prints the kernels of a step."""
    network = build_network(options, device)
    samples = draw_balanced_samples(options, device)
    rates = {}
    for chunk in (512, 1024, 2048, 4096, 8192, 16384):
        evaluation = replace(build_evaluation(options), chunk=chunk, compiled=False)
        evaluator = Evaluator(LogAmplitude(network), evaluation)
        configurations = samples.to(torch.int8).repeat(-(-(2**16) // len(samples)), 1)
        measured = measure(partial(evaluator.log_modulus, configurations), device)
        rates[chunk] = len(configurations) / measured.seconds
    print(json.dumps({"configurations a second": rates}, indent=1), flush=True)
    dtype = getattr(torch, options.precision)
    samples = samples.to(dtype)
    cotangents = draw_cotangents(options, device).to(dtype)
    optimizer = build_optimizer(network, options)
    structured_direction(optimizer, network, samples, cotangents)
    with torch.profiler.profile() as profile:
        structured_direction(optimizer, network, samples, cotangents)
    table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=30)
    print(table, flush=True)
    return rates


def parse_variants(text: str, options: Options) -> list[Options]:
    """Options with changes such as "momentum=0,lr=0.01;tf32=1"."""
    variants = []
    for changes in text.split(";"):
        changed = {}
        for change in filter(None, changes.split(",")):
            name, value = change.split("=")
            changed[name] = type(getattr(options, name))(value)
        variants.append(replace(options, **changed))
    return variants


def describe(device: torch.device) -> str:
    """Return the names of the device and of torch's version."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"CPU, torch {torch.__version__}"


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=14.0, help="of training, over all calls")
    parser.add_argument("--call-minutes", type=float, default=8.5, help="of training in this call")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--symmetrized", type=int, default=0, help="samples of the mean state")
    parser.add_argument("--parts", default="compare,train")
    parser.add_argument("--variants", default="", help="of the part look: momentum=0;tf32=1")
    parser.add_argument("--look-seconds", type=float, default=30.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in asdict(Options()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()


def run_comparison(options: Options, device: torch.device, path: Path) -> None:
    """Record a step against one with a stored Jacobian, or why that failed."""
    try:
        numbers: dict[str, Any] = compare_steps(options, device)
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError) as error:
        numbers = {"failed": str(error).splitlines()[0]}
    JsonRecord(path).update(compare=numbers)


def run_looks(
    variants: Sequence[Options], seconds: float, device: torch.device, path: Path
) -> None:
    """Record some seconds of training with each of these options."""
    looks = []
    for variant in variants:
        try:
            looks.append(look(variant, seconds, device))
        except RuntimeError as error:  # among them failures of compilers and of memory
            looks.append({"options": asdict(variant), "failed": repr(error)[:2000]})
            print(looks[-1], flush=True)
        JsonRecord(path).update(looks=looks)


def run_training(options: Options, arguments: argparse.Namespace, device: torch.device) -> None:
    """Train, measure the energy, and record both."""
    training = Training(options, arguments.minutes, arguments.folder, device)
    training.run(arguments.call_minutes, arguments.steps)
    if arguments.symmetrized:
        training.measure_symmetrized(arguments.symmetrized)


def main() -> None:
    """Do the parts that were asked for."""
    arguments = parse_arguments()
    options = Options(**{name: getattr(arguments, name) for name in asdict(Options())})
    device = torch.device(arguments.device)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    path = arguments.folder / "j1j2.json"
    parts = arguments.parts.split(",")
    if "compare" in parts:
        run_comparison(options, device, path)
    if "look" in parts:
        variants = parse_variants(arguments.variants, options)
        run_looks(variants, arguments.look_seconds, device, path)
    if "train" in parts:
        run_training(options, arguments, device)
    if "profile" in parts:
        JsonRecord(path).update(chunk_rates=profile_stages(options, device))


if __name__ == "__main__":
    main()
