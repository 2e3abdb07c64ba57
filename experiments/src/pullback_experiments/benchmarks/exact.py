"""One exact damped natural-gradient step against the routes people use today.

    pullback bench exact [--device cuda]

The naive route forms the Jacobian with torch.func and solves on the smaller side; NNGeometry and
curvlinops (extra `bench`) solve the same damped Fisher system with their own representations.
Every route's answer is compared with a float64 solve, so that no one is fast and wrong.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import pullback as pb

from ..framework.benchmark import Record, make_parser
from ..framework.timing import compare, describe_machine
from .models import Attention, mlp, small_conv

#: added to the Gram by all routes
DAMPING = 1e-2
Route = Callable[[], Tensor]


def problems() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    return {
        "MLP 64-128-128-10, N=64": (mlp([64, 128, 128, 10], nn.Tanh), torch.randn(64, 64)),
        "MLP 784-512-512-10, N=32": (mlp([784, 512, 512, 10]), torch.randn(32, 784)),
        "conv net, 64-256 channels, N=16": (small_conv(64), torch.randn(16, 3, 32, 32)),
        "conv net, 16-64 channels, N=32": (small_conv(16), torch.randn(32, 3, 32, 32)),
        "transformer block, width 256, N=16": (Attention(256), torch.randn(16, 16, 256)),
        "transformer block, width 64, N=16": (Attention(64), torch.randn(16, 16, 64)),
        "MLP 32-16-10 (p < N·m), N=512": (mlp([32, 16, 10], nn.Tanh), torch.randn(512, 32)),
    }


def flat_gradient(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def naive(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """torch.func per-sample Jacobians, the metric's factor, a dense solve on the small side."""
    params = {n: p.detach() for n, p in model.named_parameters()}

    def single(p: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, p, (sample[None],))[0]

    jacobian = vmap(jacrev(single), in_dims=(None, 0))(params, x)
    j = torch.cat([v.flatten(2) for v in jacobian.values()], -1)  # (N, m, p)
    prob = torch.softmax(model(x).detach(), -1)
    root = prob.sqrt()
    s = torch.diag_embed(root) - prob[:, :, None] * root[:, None, :]
    a = torch.einsum("nck,ncp->nkp", s, j).flatten(0, 1) / len(x) ** 0.5
    g = flat_gradient(model, x, y)
    n, p = a.shape
    if p <= n:
        return torch.linalg.solve(
            a.T @ a + DAMPING * torch.eye(p, device=g.device, dtype=g.dtype), g
        )
    k = a @ a.T + DAMPING * torch.eye(n, device=g.device, dtype=g.dtype)
    return (g - a.T @ torch.linalg.solve(k, a @ g)) / DAMPING


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Route:
    """The optimizer as a user runs it: closure, Gram, solve."""
    metric = pb.metrics.Fisher(pb.likelihoods.Categorical())
    opt = pb.NaturalGradient(model, metric, pb.solvers.Cholesky(DAMPING), lr=1.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return lambda: opt.direction(closure).x


def nngeometry(model: nn.Module, x: Tensor, y: Tensor) -> Route | None:
    try:
        from nngeometry.layercollection import LayerCollection
        from nngeometry.metrics import FIM
        from nngeometry.object import PMatDense, PMatLowRank, PVector
    except ImportError:
        return None
    size = sum(p.numel() for p in model.parameters())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
    is_dense = size <= 30 * len(x)
    representation = PMatLowRank
    if is_dense:
        representation = PMatDense

    def route() -> Tensor:
        layers = LayerCollection.from_model(model)
        fisher = FIM(model, loader, representation, variant="classif_logits", device=x.device)
        g = PVector(layers, vector_repr=flat_gradient(model, x, y))
        if is_dense:
            return fisher.solve(g, regul=DAMPING).to_torch()
        return fisher.solvePVec(g, regul=DAMPING).to_torch()

    return route


def curvlinops(model: nn.Module, x: Tensor, y: Tensor) -> Route | None:
    try:
        from curvlinops import CGInverseLinearOperator, GGNLinearOperator
        from curvlinops.examples import IdentityLinearOperator
    except ImportError:
        return None
    params = [p for p in model.parameters() if p.requires_grad]

    def route() -> Tensor:
        ggn = GGNLinearOperator(
            model, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False
        )
        eye = IdentityLinearOperator([p.shape for p in params], x.device, x.dtype)
        inverse = CGInverseLinearOperator(ggn + DAMPING * eye, tolerance=1e-5, max_iter=1000)
        return inverse @ flat_gradient(model, x, y)

    return route


def measure(name: str, model: nn.Module, x: Tensor, device: torch.device) -> dict:
    model = model.to(device)
    x = x.to(device)
    y = torch.randint(0, 10, (len(x),), generator=torch.Generator().manual_seed(1)).to(device)
    reference = naive(copy.deepcopy(model).double(), x.double(), y)
    routes: dict[str, Route | None] = {
        "pullback": ours(copy.deepcopy(model), x, y),
        "naive": lambda: naive(model, x, y),
        "NNGeometry": nngeometry(copy.deepcopy(model), x, y),  # it leaves hooks behind
        "curvlinops (CG)": curvlinops(copy.deepcopy(model), x, y),
    }
    errors = {}
    usable = {}
    for route, run in routes.items():
        if run is None:
            continue
        try:
            answer = run().double()
        except Exception as error:  # a peer that refuses the model is reported, not hidden
            errors[route] = f"fails: {type(error).__name__}"
            continue
        errors[route] = float((answer - reference).norm() / reference.norm())
        usable[route] = run
    times = compare(usable, device)
    size = sum(p.numel() for p in model.parameters())
    print(f"\n{name}: p = {size:,}, rows = {len(x) * 10:,}")
    for route, error in errors.items():
        if isinstance(error, str):
            print(f"  {route:16} {error}")
            continue
        ratio = times[route] / times["pullback"]
        print(f"  {route:16} {1e3 * times[route]:9.1f} ms {ratio:7.1f}×   error {error:.1e}")
    ratios = {r: times[r] / times["pullback"] for r in times}
    return {"parameters": size, "rows": len(x) * 10, "ratio": ratios, "error": errors}


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    warnings.filterwarnings("ignore")
    print(describe_machine(device))
    print("time of one exact step, and as a multiple of pullback's; error against float64")
    record = Record.on_device(options.out, device, resume=False)
    for name, (model, x) in problems().items():
        record.put(name, measure(name, model, x, device))
