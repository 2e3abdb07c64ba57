"""The networks, optimizers and training steps that `pullback bench slices` compares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pullback.symmetry.actions.scaling import Leg, Scaling
from pullback.symmetry.slice_sgd import SliceSGD
from pullback.symmetry.sliced import Sliced

from .kfac_models import Bottleneck, resnet50

PAPER = (3072, 2634, 2196, 1758, 1320, 882, 444, 10)
LR = 1e-4
Make = Callable[[nn.Module], torch.optim.Optimizer]
#: torch's SGD with the retraction of layers: what approach I is without biases
KEPT = "SGD on layers, every 10"
SLICED: dict[str, dict[str, Any]] = {
    "units": {},
    "units, every 10": {"every": 10},
    "units, all layers": {"sweeps": 1},
    "units, momentum": {"momentum": 0.9},
    "layers": {"group": "layer"},
    "layers, every 10": {"group": "layer", "every": 10},
    "layers, approach II": {"group": "layer", "gradient": "gtk-orthonormal"},
    "layers, polar": {"group": "layer", "gradient": "gtk-polar"},
    KEPT: {"every": 10},
}
#: what is measured of the other networks
_FEW = ("SGD foreach", "SGD fused", "SGD again", "units", "units, every 10", "layers")
CHOSEN = {
    "bare": (*_FEW, "layers, every 10", "layers, approach II"),
    "resnet50": (*_FEW, KEPT),
}


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
    into = ["1"]
    readers = list[str]()
    for i, block in enumerate(model):
        if not isinstance(block, Bottleneck):
            continue
        readers.append(f"{i}.conv1")
        out.append(scaling(model, [f"{i}.norm1"], [f"{i}.conv2"]))
        out.append(scaling(model, [f"{i}.norm2"], [f"{i}.conv3"]))
        if len(block.skip):
            out.append(scaling(model, into, [*readers, f"{i}.skip.0"]))
            into = [f"{i}.skip.1"]
            readers = []
        into.append(f"{i}.norm3")
    return [*out, scaling(model, into, [*readers, str(len(model) - 1)])]


class Route:
    """One optimizer on a model of its own: its training steps, and its steps alone."""

    def __init__(
        self, model: nn.Module, make: Make, x: Tensor, y: Tensor, period: int, steps: int
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make(self.model)
        self._x = x
        self._y = y
        self.steps = steps
        self.train()
        with Counter() as counter:
            for _ in range(period):
                self.update_parameters()
        self.operations = counter.operations / period
        self.bytes = counter.bytes / period

    def train(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self._x), self._y).backward()
        self.optimizer.step()

    def update_parameters(self) -> None:
        self.optimizer.step()

    def choose_step(self, step_only: bool) -> Callable[[], None]:
        """Return the optimizer's step alone, or the whole training step."""
        if step_only:
            return self.update_parameters
        return self.train

    def block(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that takes as many steps as a block has."""

        def run() -> None:
            for _ in range(self.steps):
                step()

        return run

    def capture_graph(self, step: Callable[[], None], pool: Any, device: torch.device) -> Any:
        """A block of steps as one CUDA graph."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(max(3, self.steps)):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        if step == self.train:
            self.optimizer.zero_grad()  # gradients then live in the graph's pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(self.steps):
                step()
        return graph.replay

    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.model.parameters())


class Counter(TorchDispatchMode):
    """Operations that are no views, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "profiler":
            named = kwargs or {}
            written = [_is_written(func, i) for i in range(len(args))]
            self.operations += 1
            self.bytes += _size(args) + _size(list(named.values()))
            self.bytes += sum(_size(a) for a, flag in zip(args, written, strict=True) if flag)
            if not any(written):
                self.bytes += _size(out)
        return out


def _is_written(func: Any, index: int) -> bool:
    """Return True if an argument is changed; fused steps also declare gradients, which are not."""
    alias = func._schema.arguments[index].alias_info
    return alias is not None and alias.is_write and not ("fused" in func.__name__ and index)


def _size(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    if isinstance(x, (list, tuple)):
        return sum(_size(each) for each in x)
    return 0


class Bench:
    """A model with a batch: routes are training steps on copies of it."""

    def __init__(self, name: str, device: torch.device, quick: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.name = name
        self.quick = quick
        if name == "resnet50":
            self.model, self.x = self._make_resnet()
            self.scalings = resnet_scalings(self.model)
        else:
            self.model, self.x = self._make_mlp()
            self.scalings = mlp_scalings(self.model)
        self.y = torch.randint(0, 10, (len(self.x),), device=device)

    def _make_mlp(self) -> tuple[nn.Module, Tensor]:
        """Return the paper's network with its batch; a small one where quick."""
        widths = PAPER
        samples = 128
        if self.quick:
            widths = (48, 64, 48, 32, 10)
            samples = 8
        model = relu_mlp(widths, bias=self.name == "mlp").to(self.device)
        return model, torch.randn(samples, widths[0], device=self.device)

    def _make_resnet(self) -> tuple[nn.Module, Tensor]:
        """Return ResNet-50 with images of full size on a GPU, and two small ones elsewhere."""
        if self.quick:
            model = resnet50(depths=(1, 1, 1, 1), width=8)
        else:
            model = resnet50(depths=(3, 4, 6, 3), width=64)
        shape = (2, 3, 64, 64)
        if self.device.type == "cuda" and not self.quick:
            shape = (64, 3, 224, 224)
        return model.to(self.device), torch.randn(shape, device=self.device)

    @property
    def steps(self) -> int:
        """Return the least number of steps of a block."""
        large = self.device.type != "cuda" or self.name == "resnet50"
        if self.quick:
            return 1
        if large:
            return 2
        return 10

    def period(self, name: str) -> int:
        """Return after how many steps each kind of step has been done once."""
        options = SLICED.get(name, {})
        # in a chain two classes of units take turns; the residual network's share no parameter
        is_fused = options.get("sweeps") or "layer" in str(options) or "SGD" in name
        interval = options.get("every", 1)
        if is_fused or self.name == "resnet50":
            return interval
        return 2 * interval

    def block(self, name: str) -> int:
        """Return the steps of a block that holds every kind of step in its proportion."""
        return -(-self.steps // self.period(name)) * self.period(name)

    def route(self, name: str) -> Route:
        make = self.optimizers()[name]
        period = self.period(name)
        return Route(self.model, make, self.x, self.y, period, self.block(name))

    def optimizers(self) -> dict[str, Make]:
        sgd = torch.optim.SGD
        adam = torch.optim.Adam
        on_gpu = self.device.type == "cuda"
        out: dict[str, Make] = {
            "SGD foreach": lambda m: sgd(m.parameters(), LR, foreach=True),
            "SGD fused": lambda m: sgd(m.parameters(), LR, fused=True),
            "SGD again": lambda m: sgd(m.parameters(), LR, fused=True),
            "SGD momentum": lambda m: sgd(m.parameters(), LR, momentum=0.9, foreach=True),
        }
        for name, options in SLICED.items():
            out[name] = lambda m, name=name, options=options: SliceSGD(
                m, LR, symmetry=self.scalings, captured=self.block(name), **options
            )
        slice_name = "equal-norm"
        if self.name == "resnet50":
            slice_name = "layer-balanced"
        out[KEPT] = lambda m: self._make_sliced(
            sgd(m.parameters(), LR, foreach=True), m, KEPT, slice=slice_name, **SLICED[KEPT]
        )
        out["Adam"] = lambda m: adam(m.parameters(), LR, capturable=on_gpu)
        out["Sliced Adam"] = lambda m: self._make_sliced(
            adam(m.parameters(), LR, capturable=on_gpu), m, "Sliced Adam"
        )
        return {name: out[name] for name in CHOSEN.get(self.name, out)}

    def _make_sliced(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, name: str, **options: Any
    ) -> Sliced:
        return Sliced(optimizer, self.scalings, model=model, captured=self.block(name), **options)
