"""Versions, devices, precision, and a check of the numerics in a few seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from .. import KFAC, NaturalGradient
from ..grams import Rows
from ..likelihoods import Gaussian
from ..metrics import Fisher
from ..optim.kfac import Estimation, Natural
from ..solvers import PseudoInverse
from ..steps import Constant
from .environment import describe_environment
from .terminal import make_fact_table


def examine(console: Console) -> bool:
    """Print the facts and a table of checks; return True if all passed on every device."""
    console.print(_facts())
    console.print()
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    for column in ("check", "device", "relative error", "allowed", ""):
        table.add_column(column)
    is_healthy = True
    for device in list_devices():
        for check in CHECKS:
            try:
                error = check.measure(device)
                has_passed = error <= check.allowed
                result = f"{error:.0e}"
            except Exception as failure:
                has_passed = False
                result = _escape(f"{type(failure).__name__}: {failure}")
            is_healthy &= has_passed
            verdict = "[green]good[/green]" if has_passed else "[red]wrong[/red]"
            table.add_row(check.name, str(device), result, f"{check.allowed:.0e}", verdict)
    console.print(table)
    return is_healthy


def _escape(text: object) -> str:
    """Return text in which rich finds no markup."""
    return str(text).replace("[", "\\[")


def list_devices() -> list[torch.device]:
    """Return the devices that can be used on this machine."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return devices


def _facts() -> Table:
    """Return a table of versions, devices and settings of precision."""
    facts = describe_environment()
    del facts["device"]
    facts["cores"] = os.cpu_count()
    facts["devices"] = ", ".join(map(_describe_device, list_devices()))
    tf32 = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
    facts["float32 products"] = f"{torch.get_float32_matmul_precision()}, TF32 {tf32}"
    facts["default dtype"] = torch.get_default_dtype()
    facts["data"] = os.environ.get("PULLBACK_DATA") or "PULLBACK_DATA is not set"
    return make_fact_table({name: _escape(value) for name, value in facts.items()})


def _describe_device(device: torch.device) -> str:
    if device.type == "cpu" and torch.cuda.is_available():
        return "cpu"
    if device.type == "cpu":
        return "cpu (no CUDA device)"
    properties = torch.cuda.get_device_properties(device)
    return f"{device}: {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


# --- the checks: (device) ↦ relative error against dense float64 algebra ----------------------


@dataclass(frozen=True)
class _Regression:
    """A small network with inputs and targets."""

    model: nn.Module
    x: Tensor
    y: Tensor

    @classmethod
    def make(cls, device: torch.device, seed: int = 0) -> _Regression:
        """Return the same regression for the same seed, on any device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
            x = torch.randn(40, 3, dtype=torch.float64)
            y = torch.randn(40, 2, dtype=torch.float64)
        return cls(model.to(device), x.to(device), y.to(device))


def _pseudo_inverse_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return J⁺(z − y), (p,)."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    blocks = jacrev(lambda params: functional_call(model, params, (x,)).flatten())(params)
    jacobian = torch.cat([block.flatten(1) for block in blocks.values()], 1)
    return torch.linalg.pinv(jacobian, rtol=1e-10) @ (model(x) - y).detach().flatten()


def _relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def natural_gradient(device: torch.device) -> float:
    """Compare G⁺∇L with the pseudo-inverse of the Jacobian."""
    regression = _Regression.make(device)
    model = regression.model
    x = regression.x
    y = regression.y
    expected = _pseudo_inverse_step(model, x, y)
    optimizer = NaturalGradient(
        model, metric=Fisher(Gaussian()), solver=PseudoInverse(1e-10), step=Constant(1.0)
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum(1).mean()
        loss.backward()
        return loss

    return _relative_error(optimizer.direction(closure).x, expected)


def kfac(device: torch.device) -> float:
    """Compare K-FAC of one layer, whose factors are exact, with the natural gradient."""
    regression = _Regression.make(device)
    x = regression.x
    y = regression.y
    layer = nn.Linear(3, 2).double().to(device)
    with torch.no_grad():
        layer.weight.copy_(next(regression.model.parameters())[:2])
    before = torch.cat([p.detach().flatten() for p in layer.parameters()])
    expected = _pseudo_inverse_step(layer, x, y)
    rule = Natural(
        Gaussian(), fisher="exact", damping=0.0, momentum=0.0, kl_clip=None,
        estimation=Estimation(ema=0.0),
    )  # fmt: skip
    optimizer = KFAC(layer, 1.0, rule=rule, statistics_every=1, invert_every=1)
    optimizer.zero_grad()
    (0.5 * (layer(x) - y).square().sum(1).mean()).backward()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in layer.parameters()])
    optimizer.close()
    return _relative_error(before - after, expected)


def singular_gram(device: torch.device) -> float:
    """Compare A⁺r of a matrix of rank 3 in seven dimensions with LAPACK's."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    b = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    rows = (a @ b.T).to(device)
    r = torch.randn(9, generator=generator, dtype=torch.float64)
    r = r.to(device)
    solver = PseudoInverse(1e-10)
    x = solver.solve(solver.init(Rows(rows)), rows.T @ r, whitened=r).x
    expected = torch.linalg.lstsq(rows.cpu(), r.cpu()[:, None], driver="gelsd", rcond=1e-10)
    return _relative_error(x, expected.solution[:, 0].to(device))


def float32_products(device: torch.device) -> float:
    """Compare a float32 product with float64: TF32 or bfloat16 in its place show at once."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 256, generator=generator, dtype=torch.float64)
    return _relative_error((a.float().to(device) @ a.float().to(device)).cpu(), a @ a)


@dataclass(frozen=True)
class Check:
    """A relative error that is measured on a device, and the largest that is allowed."""

    name: str
    measure: Callable[[torch.device], float]
    allowed: float


#: errors that round-off does not reach, and a wrong formula or precision does
CHECKS = (
    Check("natural gradient", natural_gradient, 1e-7),
    Check("K-FAC of one layer", kfac, 1e-7),
    Check("minimum norm, singular Gram", singular_gram, 1e-9),
    Check("float32 products", float32_products, 1e-5),
)
