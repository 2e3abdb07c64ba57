"""What staying on a slice costs beside torch's SGD, for the whole training step and the step alone.

    python -m benchmarks.slices [--device cuda] [--quick] [--only NAME ...] [--out FILE]

Models: the seven-layer ReLU network for CIFAR-10 of the paper (21.6M parameters, batch 128) and
ResNet-50 (on a GPU batch 64 of 224×224, on a CPU two images of 64×64). The baseline is the faster
of torch's foreach and fused SGD. The floor is the traffic that a retraction cannot do without: one
class of units reads its weights once for the norms and reads and writes them once to rescale,
three passes where SGD itself has three.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.symmetry.actions.scaling import Leg, Scaling
from pullback.symmetry.slice_sgd import SliceSGD
from pullback.symmetry.sliced import Sliced

from .kfac_models import Bottleneck, resnet50
from .timing import compare, environment

RESULTS = Path(__file__).parent / "results"
PAPER = (3072, 2634, 2196, 1758, 1320, 882, 444, 10)
TARGET = 1.05
Make = Callable[[nn.Module], torch.optim.Optimizer]


def relu_mlp(widths: tuple[int, ...] = PAPER, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def scaling(model: nn.Module, into: list[str], out: list[str]) -> Scaling:
    """Units whose modules' rows (or gains) lead in, and whose columns lead out."""
    modules = dict(model.named_modules())
    units = len(next(modules[into[0]].parameters()))
    legs = []
    for name in into:
        for key, w in modules[name].named_parameters(recurse=False):
            rows = torch.arange(units).view(-1, *[1] * (w.ndim - 1))
            legs.append(Leg(f"{name}.{key}", rows, 1))
    for name in out:
        w = modules[name].weight
        assert isinstance(w, Tensor)
        columns = torch.arange(units).view(1, -1, *[1] * (w.ndim - 2))
        legs.append(Leg(f"{name}.weight", columns, -1))
    return Scaling(units, legs, f"{into} against {out}")


def mlp_scalings(model: nn.Module) -> list[Scaling]:
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [scaling(model, [a], [b]) for a, b in pairwise(names)]


def resnet_scalings(model: nn.Module) -> list[Scaling]:
    """The gains of each norm into the next convolutions; along a skip they are one."""
    assert isinstance(model, nn.Sequential)
    out = []
    into, readers = ["1"], list[str]()
    for i, block in enumerate(model):
        if not isinstance(block, Bottleneck):
            continue
        readers.append(f"{i}.conv1")
        out.append(scaling(model, [f"{i}.norm1"], [f"{i}.conv2"]))
        out.append(scaling(model, [f"{i}.norm2"], [f"{i}.conv3"]))
        if len(block.skip):
            out.append(scaling(model, into, [*readers, f"{i}.skip.0"]))
            into, readers = [f"{i}.skip.1"], []
        into.append(f"{i}.norm3")
    return [*out, scaling(model, into, [*readers, str(len(model) - 1)])]


class Bench:
    """A model with a batch: routes are training steps on copies of it."""

    def __init__(self, name: str, device: torch.device, quick: bool) -> None:
        torch.manual_seed(0)
        self.device, self.name = device, name
        if name == "mlp":
            widths = (48, 64, 48, 32, 10) if quick else PAPER
            self.model: nn.Module = relu_mlp(widths).to(device)
            x = torch.randn(8 if quick else 128, widths[0], device=device)
            self.scalings = mlp_scalings(self.model)
        else:
            large = device.type == "cuda" and not quick
            self.model = resnet50(depths=(1, 1, 1, 1) if quick else (3, 4, 6, 3)).to(device)
            n, side = (64, 224) if large else (2, 64)
            x = torch.randn(n, 3, side, side, device=device)
            self.scalings = resnet_scalings(self.model)
        self.x, self.y = x, torch.randint(0, 10, (len(x),), device=device)

    def route(self, make: Make, alone: bool) -> Callable[[], Any]:
        model = copy.deepcopy(self.model)
        optimizer = make(model)

        def full() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(self.x), self.y).backward()
            optimizer.step()

        full()
        return optimizer.step if alone else full

    def optimizers(self) -> dict[str, Make]:
        lr = 1e-4
        out: dict[str, Make] = {
            "SGD foreach": lambda m: torch.optim.SGD(m.parameters(), lr, foreach=True),
            "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr, fused=True),
            "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr, momentum=0.9),
        }
        for name, options in {
            "units": {},
            "units, every 10": {"every": 10},
            "units, all layers": {"sweeps": 1},
            "units, momentum": {"momentum": 0.9},
            "layers": {"group": "layer"},
            "layers, approach II": {"group": "layer", "gradient": "gtk-orthonormal"},
            "layers, polar": {"group": "layer", "gradient": "gtk-polar"},
        }.items():
            out[name] = lambda m, options=options: SliceSGD(
                m, lr, symmetry=self.scalings, **options
            )
        out["Adam"] = lambda m: torch.optim.Adam(m.parameters(), lr)
        out["Sliced Adam"] = lambda m: Sliced(
            torch.optim.Adam(m.parameters(), lr), self.scalings, model=m
        )
        return out


BASES = {"units, momentum": ("SGD momentum",), "Sliced Adam": ("Adam",)}


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Of each route to its baseline."""
    out = {}
    for name, s in seconds.items():
        if not name.startswith("SGD") and name != "Adam":
            bases = BASES.get(name, ("SGD foreach", "SGD fused"))
            known = [seconds[b] for b in bases if b in seconds]
            if known:
                out[name] = s / min(known)
    return out


def repeated(run: Callable[[], Any], times: int) -> Callable[[], Any]:
    return lambda: [run() for _ in range(times)]


def measure(
    name: str, device: torch.device, quick: bool, only: list[str] | None = None
) -> dict[str, Any]:
    bench = Bench(name, device, quick)
    result: dict[str, Any] = {"parameters": sum(p.numel() for p in bench.model.parameters())}
    size = 4e-9 * result["parameters"]
    result["floor_gigabytes"] = {"SGD": 3 * size, "retraction": 3 * size}
    # a retraction is one of two classes in turn, so a repeat is several steps
    chunk = 1 if quick else 20 if device.type == "cuda" else 2
    for kind, alone in (("training step", False), ("step alone", True)):
        chosen = {n: m for n, m in bench.optimizers().items() if only is None or n in only}
        routes = {n: repeated(bench.route(make, alone), chunk) for n, make in chosen.items()}
        seconds = compare(routes, device, repeats=2 if quick else 9, warmup=2, patience=20)
        seconds = {n: s / chunk for n, s in seconds.items()}
        found = ratios(seconds)
        result[kind] = {"milliseconds": {n: 1e3 * s for n, s in seconds.items()}, "ratio": found}
        print(f"\n{name}, {kind} ({result['parameters']:,} parameters)")
        for route, s in seconds.items():
            shown = f"{found[route]:6.3f}" if route in found else ""
            print(f"  {route:22} {1e3 * s:9.3f} ms {shown}")
        del routes
    result["target"] = TARGET
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--routes", nargs="*", default=None, help="some of the optimizers")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args([] if arguments is None else arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    torch.backends.cudnn.allow_tf32 = True
    print(environment(device))
    path = options.out or RESULTS / f"slices-{device.type}.json"
    results: dict[str, Any] = {}
    if path.exists() and not options.quick:
        results = json.loads(path.read_text())["results"]
    for name in ("mlp", "resnet50"):
        if options.only is None or name in options.only:
            results[name] = measure(name, device, options.quick, options.routes)
            if not options.quick:
                record = {"environment": environment(device), "results": results}
                path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
