"""Versions, devices, precision, and a check of the numerics in a few seconds."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from .. import KFAC, NaturalGradient
from ..grams import Rows
from ..likelihoods import Gaussian
from ..metrics import Fisher
from ..solvers import PseudoInverse
from ..steps import Constant
from .environment import environment
from .terminal import facts


def examined(console: Console) -> bool:
    """Print all of it; whether every check passed on every device."""
    console.print(_facts())
    console.print()
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    for column in ("check", "device", "relative error", "allowed", ""):
        table.add_column(column)
    healthy = True
    for device in devices():
        for name, check, allowed in CHECKS:
            try:
                error = check(device)
                good, found = error <= allowed, f"{error:.0e}"
            except Exception as failure:
                good, found = False, f"{type(failure).__name__}: {failure}".replace("[", "\\[")
            healthy &= good
            word = "[green]good[/green]" if good else "[red]wrong[/red]"
            table.add_row(name, str(device), found, f"{allowed:.0e}", word)
    console.print(table)
    return healthy


def devices() -> list[torch.device]:
    """Those that can be used here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(count))]


def _facts() -> Table:
    found = {k: v for k, v in environment().items() if k != "device"}
    found["cores"] = os.cpu_count()
    found["devices"] = ", ".join(_named(d) for d in devices())
    tf32 = torch.backends.cuda.matmul.allow_tf32
    found["float32 products"] = (
        f"{torch.get_float32_matmul_precision()}, TF32 {'on' if tf32 else 'off'}"
    )
    found["default dtype"] = torch.get_default_dtype()
    found["data"] = os.environ.get("PULLBACK_DATA") or "PULLBACK_DATA is not set"
    return facts({name: str(value).replace("[", "\\[") for name, value in found.items()})


def _named(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu (no CUDA device)" if not torch.cuda.is_available() else "cpu"
    held = torch.cuda.get_device_properties(device)
    return f"{device}: {held.name}, {held.total_memory / 2**30:.0f} GiB"


# --- the checks: (device) ↦ relative error against dense float64 algebra ----------------------


def _net(device: torch.device, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        x, y = (torch.randn(40, n, dtype=torch.float64) for n in (3, 2))
    return model.to(device), x.to(device), y.to(device)


def _pseudo_inverse_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """J⁺(z − y), (p,)."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    blocks = jacrev(lambda params: functional_call(model, params, (x,)).flatten())(params)
    jacobian = torch.cat([block.flatten(1) for block in blocks.values()], 1)
    return torch.linalg.pinv(jacobian, rtol=1e-10) @ (model(x) - y).detach().flatten()


def _relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def natural_gradient(device: torch.device) -> float:
    """G⁺∇L against the pseudo-inverse of the Jacobian."""
    model, x, y = _net(device)
    want = _pseudo_inverse_step(model, x, y)
    optimizer = NaturalGradient(
        model, metric=Fisher(Gaussian()), solver=PseudoInverse(1e-10), step=Constant(1.0)
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum(1).mean()
        loss.backward()
        return loss

    return _relative_error(optimizer.direction(closure).x, want)


def kfac(device: torch.device) -> float:
    """One layer: K-FAC's factors are exact, so its step is the natural gradient's."""
    model, x, y = _net(device)
    layer = nn.Linear(3, 2).double().to(device)
    with torch.no_grad():
        layer.weight.copy_(next(model.parameters())[:2])
    before = torch.cat([p.detach().flatten() for p in layer.parameters()])
    want = _pseudo_inverse_step(layer, x, y)
    optimizer = KFAC(
        layer, 1.0, likelihood=Gaussian(), fisher="exact", damping=0.0, momentum=0.0, ema=0.0,
        kl_clip=None, statistics_every=1, invert_every=1,
    )  # fmt: skip
    optimizer.zero_grad()
    (0.5 * (layer(x) - y).square().sum(1).mean()).backward()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in layer.parameters()])
    optimizer.close()
    return _relative_error(before - after, want)


def singular(device: torch.device) -> float:
    """A⁺r of a matrix of rank 3 in seven dimensions."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (9, 7))
    rows, r = (a @ b.T).to(device), torch.randn(9, generator=generator, dtype=torch.float64)
    r = r.to(device)
    solver = PseudoInverse(1e-10)
    got = solver.solve(solver.init(Rows(rows)), rows.T @ r, whitened=r).x
    want = torch.linalg.lstsq(rows.cpu(), r.cpu()[:, None], driver="gelsd", rcond=1e-10)
    return _relative_error(got, want.solution[:, 0].to(device))


def products(device: torch.device) -> float:
    """A float32 product against float64: large where TF32 or bfloat16 stand in for float32."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(256, 256, generator=generator, dtype=torch.float64)
    return _relative_error((a.float().to(device) @ a.float().to(device)).cpu(), a @ a)


#: (name, check, largest error)
CHECKS: tuple[tuple[str, Callable[[torch.device], float], float], ...] = (
    ("natural gradient", natural_gradient, 1e-7),
    ("K-FAC of one layer", kfac, 1e-7),
    ("minimum norm, singular Gram", singular, 1e-9),
    ("float32 products", products, 1e-5),
)
