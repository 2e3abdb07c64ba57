"""Small networks whose symmetries are known, and a dense Jacobian that knows nothing of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pullback.testing import jacobian


def dense(model: nn.Module, *args: Any) -> Tensor:
    """J by reverse mode, over the parameters that require gradients."""
    out = model(*args)
    out = (out[0] if isinstance(out, tuple) else out).flatten()
    params = [p for p in model.parameters() if p.requires_grad]
    eye = torch.eye(len(out), dtype=out.dtype)
    try:
        pulled = torch.autograd.grad(out, params, eye, True, is_grads_batched=True)
    except RuntimeError:  # an operation that does not come in batches
        return jacobian(out, params)
    return torch.cat([g.reshape(len(out), -1) for g in pulled], 1)


def nullity(j: Tensor) -> int:
    return j.shape[1] - int(torch.linalg.matrix_rank(j, rtol=1e-11))


def in_kernel(j: Tensor, z: Tensor) -> float:
    """The largest ‖J Z_i‖/(‖J‖‖Z_i‖)."""
    lengths = z.norm(dim=1).clamp(min=1e-300)
    return float(((z @ j.T).norm(dim=1) / lengths).max() / torch.linalg.matrix_norm(j, 2))


Net = TypeVar("Net", bound=nn.Module)


def randomize(model: Net, seed: int = 0, std: float = 0.6) -> Net:
    """Everything random, norms' gains and biases too."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    for p in model.parameters():
        p.data = std * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    for name, b in model.named_buffers():
        if name.endswith("running_mean"):
            b.copy_(0.3 * torch.randn(b.shape, generator=generator, dtype=torch.float64))
        if name.endswith("running_var"):
            b.copy_(0.5 + torch.rand(b.shape, generator=generator, dtype=torch.float64))
    return model


def mlp(
    sizes: Sequence[int], act: Callable[[], nn.Module] = nn.ReLU, bias: bool = True
) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias), act()]
    return nn.Sequential(*layers[:-1])


class Of(nn.Module):
    """forward(self, *args) from a function."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def basic_block(norm: Callable[[int], nn.Module] = nn.Identity) -> nn.Module:
    """A stem, a residual block with a skip, and a head."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = F.relu(s.stem(x))
        x = F.relu(x + s.n2(s.c2(F.relu(s.n1(s.c1(x))))))
        return s.head(F.adaptive_avg_pool2d(x, 2).flatten(1))

    return Of(
        forward,
        stem=nn.Conv2d(2, 3, 3, padding=1),
        c1=nn.Conv2d(3, 4, 3, padding=1),
        n1=norm(4),
        c2=nn.Conv2d(4, 3, 3, padding=1),
        n2=norm(3),
        head=nn.Linear(12, 2),
    )


def heads(x: Tensor, count: int = 2) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def fused_attention() -> nn.Module:
    """Queries, keys and values from one linear layer, behind an RMS norm."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(z) for z in s.qkv(s.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + s.out(y.transpose(1, 2).flatten(2))

    return Of(forward, norm=nn.RMSNorm(4), qkv=nn.Linear(4, 12), out=nn.Linear(4, 4))


def own_attention() -> nn.Module:
    """With a softmax of its own."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q, k, v = (heads(f(x)) for f in (s.q, s.k, s.v))
        y = (q @ k.transpose(-1, -2) / 2**0.5).softmax(-1) @ v
        return s.out(y.transpose(1, 2).flatten(2))

    return Of(forward, **{n: nn.Linear(4, 4) for n in ("q", "k", "v", "out")})


def shared_keys() -> nn.Module:
    """Two heads of queries, one of keys and values."""

    def forward(s: Any, x: Tensor) -> Tensor:
        q = heads(s.q(x))
        k = heads(s.k(x), 1)
        v = heads(s.v(x), 1)
        k, v = (z.expand(-1, 2, -1, -1) for z in (k, v))
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Of(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 2), v=nn.Linear(4, 2), out=nn.Linear(4, 4))


def cross_attention(**kwargs: Any) -> nn.Module:
    """Queries from one sequence, keys and values from another, both normalized."""

    def forward(s: Any, x: Tensor, y: Tensor) -> Tensor:
        x = s.n1(x)
        y = s.n2(y)
        return s.a(x, y, y, need_weights=kwargs.get("weights", False))[0]

    inner = kwargs.get("kdim", 4)
    more = {k: v for k, v in kwargs.items() if k != "weights"}
    attention = nn.MultiheadAttention(4, 2, batch_first=True, **more)
    return Of(forward, n1=nn.LayerNorm(4), n2=nn.LayerNorm(inner), a=attention)


def shortcut() -> nn.Module:
    """Two convolutions whose outputs are added: one scale, and biases that can be exchanged."""

    def forward(s: Any, x: Tensor) -> Tensor:
        return s.head(F.relu(s.c2(F.relu(s.c1(x))) + s.skip(x)).mean((2, 3)))

    return Of(
        forward,
        c1=nn.Conv2d(2, 3, 3, padding=1),
        c2=nn.Conv2d(3, 4, 3, padding=1),
        skip=nn.Conv2d(2, 4, 1),
        head=nn.Linear(4, 2),
    )


def segmentation() -> nn.Module:
    """A small U-net: nothing nonlinear between the transposed convolutions and their readers."""

    def forward(s: Any, x: Tensor) -> Tensor:
        fine = s.fine(x).relu()
        up = s.up(s.coarse(fine).relu())
        joined = s.join(torch.cat([up, fine], 1)).relu()
        return s.head(s.sharpen(joined))

    return Of(
        forward,
        fine=nn.Conv2d(2, 2, 3, padding=1),
        coarse=nn.Conv2d(2, 3, 2, stride=2),
        up=nn.ConvTranspose2d(3, 2, 2, stride=2),
        join=nn.Conv2d(4, 3, 3, padding=1),
        sharpen=nn.Conv2d(3, 2, 1),
        head=nn.ConvTranspose2d(2, 3, 3, padding=1),
    )


def mixer() -> nn.Module:
    """Tokens are mixed, then channels, behind layer norms; the last one's outputs are averaged."""

    def forward(s: Any, x: Tensor) -> Tensor:
        x = x + s.t2(F.gelu(s.t1(s.n1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + s.c2(F.gelu(s.c1(s.n2(x))))
        return s.head(s.n3(x).mean(1))

    return Of(
        forward,
        **{f"n{i}": nn.LayerNorm(4) for i in (1, 2, 3)},
        t1=nn.Linear(5, 3),
        t2=nn.Linear(3, 5),
        c1=nn.Linear(4, 3),
        c2=nn.Linear(3, 4),
        head=nn.Linear(4, 3),
    )
