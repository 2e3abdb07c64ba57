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

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.metrics.rkhs import Matern, median_distance

from ..framework.benchmark import RESULTS, make_parser
from ..framework.timing import describe_machine
from ..showcase.problems import load

SCALES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # in median distances
BATCHES = (32, 128)
DAMPING = 0.03
JITTER = 1e-5
CHOICES = ("B", "1'K⁻¹1", "tr K⁻¹")


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


def layers(net: nn.Module, x: Tensor, y: Tensor) -> Iterator[Layer]:
    """Inputs and output Jacobians by autograd alone."""
    captured: dict[str, tuple[nn.Module, Tensor, Tensor]] = {}

    def hook(name: str):
        def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            captured[name] = (module, args[0].detach(), out)

        return keep

    layer_types = (nn.Linear, nn.Conv2d)
    handles = [
        m.register_forward_hook(hook(n))
        for n, m in net.named_modules()
        if isinstance(m, layer_types)
    ]
    z = net(x)
    for handle in handles:
        handle.remove()
    outs = [o for _, _, o in captured.values()]
    by_output = [torch.autograd.grad(z[:, o].sum(), outs, retain_graph=True) for o in range(10)]
    slopes = torch.autograd.grad(F.cross_entropy(z, y), outs)
    for k, (name, (module, a, _)) in enumerate(captured.items()):
        a = a if isinstance(module, nn.Linear) else F.unfold(a, 3, padding=1).mT
        if a.ndim == 2:
            a = a[:, None]
        else:
            a = a
        a = torch.cat([a, torch.ones_like(a[..., :1])], 2)

        def flat(d: Tensor) -> Tensor:
            if d.ndim == 2:
                return d[:, None]
            return d.flatten(2).mT

        delta = torch.stack([flat(d[k]) for d in by_output])
        yield Layer(name, a, delta, torch.einsum("bto,bti->oi", flat(slopes[k]), a))


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
    want = torch.linalg.solve(g + DAMPING * eye, flat)
    sv, su = torch.linalg.eigh(s)
    av, au = torch.linalg.eigh(a)
    in_eigenbasis = su.T @ layer.gradient @ au
    direction = {}
    for name, z in chosen.items():
        kfac_direction = su @ (in_eigenbasis / (sv[:, None] * av / z + DAMPING)) @ au.T
        direction[name] = float((kfac_direction.flatten() - want).norm() / want.norm())
    return frobenius, float((best * one - g).norm() / g.norm()), direction


def study(batches: tuple[int, ...], scales: tuple[float, ...]) -> list[Record]:
    x, y = load()
    records = []
    for net, make in NETS.items():
        torch.manual_seed(0)
        model = make().double()
        for after in (False, True):
            if after:
                model = train_network(model, x[:1347], y[:1347])
            else:
                model = model
            for batch in batches:
                xs = x[:batch]
                ys = y[:batch]
                unit = median_distance(xs)
                all_layers = list(layers(model, xs, ys))
                for scale in scales:
                    k = Matern(scale=scale * unit)(xs, xs) + JITTER * torch.eye(batch).double()
                    condition = float(torch.linalg.cond(k))
                    for one in all_layers:
                        errors = measure_errors(one, k)
                        records.append(
                            Record(net, after, batch, scale, condition, one.name, *errors)
                        )
    return records


def table(records: list[Record]) -> str:
    """Medians over networks, batches and layers, by scale."""
    lines = ["scale/median  cond K | ‖A⊗S − G‖/‖G‖: " + "  ".join(CHOICES) + "  best multiple | "]
    lines[0] += "direction: " + "  ".join(CHOICES)
    for scale in sorted({r.scale for r in records}):
        at_scale = [r for r in records if r.scale == scale]
        frobenius = [median(r.frobenius[c] for r in at_scale) for c in CHOICES]
        direction = [median(r.direction[c] for r in at_scale) for c in CHOICES]
        best = median(r.best for r in at_scale)
        condition = median(r.condition for r in at_scale)
        row = f"{scale:12g} {condition:8.1e} | " + " ".join(f"{v:9.3g}" for v in frobenius)
        lines.append(f"{row}  {best:9.3g} | " + " ".join(f"{v:9.3g}" for v in direction))
    for measure in ("frobenius", "direction"):
        wins = dict.fromkeys(CHOICES, 0)
        for r in records:
            errors = getattr(r, measure)
            wins[min(errors, key=errors.__getitem__)] += 1
        lines.append(f"closest ({measure}), of {len(records)}: {wins}")
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__doc__)
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
        "damping": DAMPING,
        "jitter": JITTER,
        "records": [asdict(r) for r in records],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
