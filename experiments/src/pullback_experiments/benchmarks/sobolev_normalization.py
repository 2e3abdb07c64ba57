"""Which Z makes K-FAC's Sobolev blocks closest to the exact ones?

    pullback bench sobolev-normalization [--quick] [--out FILE]

Layer by layer the exact block of the Sobolev Gram is G = Σ_ij K⁻¹_ij Σ_o V_oi V_ojᵀ / B, with the
gradients V_oi = Σ_t δ_oit ⊗ ā_it of output o at sample i. Its Kronecker approximation is
A ⊗ S with A = āᵀK⁻¹ā/Z (a mean over places) and S = Σ_o Ds_oᵀK⁻¹Ds_o/B. Three choices
of Z give plain K-FAC at K = I:

    B,        1ᵀK⁻¹1,        tr K⁻¹.

For each the table has the distance ‖A ⊗ S − G‖/‖G‖ (Frobenius), beside that of the best multiple of
A ⊗ S, and how far the damped direction (A ⊗ S + λ)⁻¹g is from (G + λ)⁻¹g for the loss's gradient g
(λ = 0.03), as the relative distance. Networks: a 64-32-10 perceptron and a small convolution net on
scikit-learn's digits, when new and after training. Everything in float64. The result is written to
experiments/results/sobolev-normalization.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.metrics.rkhs import Matern, median_distance

from ..framework.benchmark import RESULTS, make_parser, write_record
from ..framework.timing import describe_machine
from ..showcase.problems import load

SCALES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # in median distances
BATCHES = (32, 128)
CHOICES = ("B", "1'K⁻¹1", "tr K⁻¹")


@dataclass(frozen=True)
class Regularization:
    """What is added to matrices before they are inverted."""

    #: to the Grams, where their directions are compared
    damping: float = 0.03
    #: to the kernel matrix, of entries at most one: its condition is then at most 1e5 times B
    jitter: float = 1e-5


REGULARIZATION = Regularization()


@dataclass
class Record:
    """One layer at one scale: errors by Z, and that of the best multiple."""

    net: str
    trained: bool
    batch: int
    scale: float
    condition: float
    layer: str
    frobenius: dict[str, float]
    best: float
    direction: dict[str, float]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(48, 10),
    )  # fmt: skip


NETS = {"mlp": perceptron, "conv": convnet}


def train_network(net: nn.Module, x: Tensor, y: Tensor, steps: int = 400) -> nn.Module:
    opt = torch.optim.Adam(net.parameters(), 3e-3)
    for k in range(steps):
        rows = torch.arange(k * 64, k * 64 + 64) % len(x)
        opt.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        opt.step()
    return net


@dataclass
class Layer:
    """ā (B, T, I + 1), δ (m, B, T, O) and the gradient g (O, I + 1) of one layer."""

    name: str
    inputs: Tensor
    deltas: Tensor
    gradient: Tensor


@dataclass
class LayerCall:
    """A layer's input and output in one forward pass."""

    module: nn.Module
    input: Tensor
    output: Tensor

    def augmented_input(self) -> Tensor:
        """Return ā: the input by position with a one at the end, (B, T, I + 1)."""
        if isinstance(self.module, nn.Linear):
            a = self.input[:, None]
        else:
            a = F.unfold(self.input, 3, padding=1).mT
        return torch.cat([a, torch.ones_like(a[..., :1])], 2)


def capture_calls(net: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, LayerCall]]:
    """Return net(x) and the calls of its linear and convolutional layers, by name."""
    calls: dict[str, LayerCall] = {}

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            calls[name] = LayerCall(module, args[0].detach(), out)

        return keep

    handles = []
    for name, module in net.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            handles.append(module.register_forward_hook(make_hook(name)))
    z = net(x)
    for handle in handles:
        handle.remove()
    return z, calls


def split_positions(delta: Tensor) -> Tensor:
    """Return a cotangent of a layer's output as (B, T, O)."""
    if delta.ndim == 2:
        return delta[:, None]
    return delta.flatten(2).mT


def layers(net: nn.Module, x: Tensor, y: Tensor) -> Iterator[Layer]:
    """Yield inputs and output Jacobians of all layers, by autograd alone."""
    z, calls = capture_calls(net, x)
    outs = [call.output for call in calls.values()]
    by_output = [torch.autograd.grad(z[:, o].sum(), outs, retain_graph=True) for o in range(10)]
    slopes = torch.autograd.grad(F.cross_entropy(z, y), outs)
    for k, (name, call) in enumerate(calls.items()):
        a = call.augmented_input()
        delta = torch.stack([split_positions(d[k]) for d in by_output])
        gradient = torch.einsum("bto,bti->oi", split_positions(slopes[k]), a)
        yield Layer(name, a, delta, gradient)


def measure_errors(layer: Layer, k: Tensor) -> tuple[dict[str, float], float, dict[str, float]]:
    """Errors of one layer's block by choice of Z."""
    n, positions = layer.inputs.shape[:2]
    inverse = torch.linalg.inv(k)
    rows = torch.einsum("mbto,bti->mboi", layer.deltas, layer.inputs).flatten(2)
    a = torch.einsum("bti,bc,ctj->ij", layer.inputs, inverse, layer.inputs) / positions
    s = torch.einsum("mbto,bc,mctp->op", layer.deltas, inverse, layer.deltas) / n
    g = torch.einsum("mbp,bc,mcq->pq", rows, inverse, rows) / n
    one = torch.kron(s, a)  # degree −2 in K, to be divided by Z
    chosen = {"B": n, "1'K⁻¹1": float(inverse.sum()), "tr K⁻¹": float(inverse.trace())}
    best = float((one * g).sum() / (one * one).sum())
    frobenius = {name: float((one / z - g).norm() / g.norm()) for name, z in chosen.items()}
    flat = layer.gradient.flatten()
    eye = torch.eye(len(g), dtype=g.dtype)
    damping = REGULARIZATION.damping
    want = torch.linalg.solve(g + damping * eye, flat)
    sv, su = torch.linalg.eigh(s)
    av, au = torch.linalg.eigh(a)
    in_eigenbasis = su.T @ layer.gradient @ au
    direction = {}
    for name, z in chosen.items():
        kfac_direction = su @ (in_eigenbasis / (sv[:, None] * av / z + damping)) @ au.T
        direction[name] = float((kfac_direction.flatten() - want).norm() / want.norm())
    return frobenius, float((best * one - g).norm() / g.norm()), direction


def study(batches: tuple[int, ...], scales: tuple[float, ...]) -> list[Record]:
    """Return a record for every layer at every scale: of fresh and of trained networks."""
    x, y = load()
    records: list[Record] = []
    for net, make in NETS.items():
        torch.manual_seed(0)
        model = make().double()
        for batch in batches:
            records += study_batch(net, model, x[:batch], y[:batch], scales, trained=False)
        model = train_network(model, x[:1347], y[:1347])
        for batch in batches:
            records += study_batch(net, model, x[:batch], y[:batch], scales, trained=True)
    return records


def study_batch(
    net: str, model: nn.Module, x: Tensor, y: Tensor, scales: Sequence[float], *, trained: bool
) -> list[Record]:
    """Return a record for every layer of a network at every scale, in median distances."""
    unit = median_distance(x)
    network_layers = list(layers(model, x, y))
    records = []
    for scale in scales:
        kernel = Matern(scale=scale * unit)(x, x)
        kernel = kernel + REGULARIZATION.jitter * torch.eye(len(x)).double()
        condition = float(torch.linalg.cond(kernel))
        for layer in network_layers:
            errors = measure_errors(layer, kernel)
            records.append(Record(net, trained, len(x), scale, condition, layer.name, *errors))
    return records


def table(records: list[Record]) -> str:
    """Return medians over networks, batches and layers by scale, then how often each Z is best."""
    names = "  ".join(CHOICES)
    lines = [f"scale/median  cond K | ‖A⊗S − G‖/‖G‖: {names}  best multiple | direction: {names}"]
    for scale in sorted({r.scale for r in records}):
        lines.append(format_scale(scale, [r for r in records if r.scale == scale]))
    for measure in ("frobenius", "direction"):
        wins = dict.fromkeys(CHOICES, 0)
        for record in records:
            errors = getattr(record, measure)
            wins[min(errors, key=errors.__getitem__)] += 1
        lines.append(f"closest ({measure}), of {len(records)}: {wins}")
    return "\n".join(lines)


def format_scale(scale: float, records: list[Record]) -> str:
    """Return the medians of the records at one scale, in a line."""
    condition = median(r.condition for r in records)
    best = median(r.best for r in records)
    frobenius = format_medians([r.frobenius for r in records])
    direction = format_medians([r.direction for r in records])
    return f"{scale:12g} {condition:8.1e} | {frobenius}  {best:9.3g} | {direction}"


def format_medians(errors: list[dict[str, float]]) -> str:
    """Return the median error of every choice of Z."""
    cells = []
    for choice in CHOICES:
        value = median(by_choice[choice] for by_choice in errors)
        cells.append(f"{value:9.3g}")
    return " ".join(cells)


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--quick", action="store_true", help="one batch size and two scales")
    parser.add_argument("--out", type=Path, default=RESULTS / "sobolev-normalization.json")
    options = parser.parse_args(arguments)
    if options.quick:
        records = study((32,), (0.3, 1.0))
    else:
        records = study(BATCHES, SCALES)
    print(table(records))
    record = {
        "environment": describe_machine(torch.device("cpu")),
        **asdict(REGULARIZATION),
        "records": [asdict(r) for r in records],
    }
    write_record(options.out, record)
