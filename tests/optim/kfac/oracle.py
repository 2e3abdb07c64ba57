"""K-FAC by definition, in float64: one covector at a time, places by explicit loops.

Nothing here uses the library's layers: forward hooks keep inputs and outputs, autograd gives the
cotangents, and the metric's columns touch one sample (one position) each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KRONECKER = (nn.Linear, nn.Embedding, *CONVS, *TRANSPOSED)


def columns(z: Tensor, kind: str) -> Iterator[Tensor]:
    """The columns of S, M = S Sᵀ over all of z: identity, or diag(p) − ppᵀ per position."""
    if kind in ("euclidean", "gaussian"):
        for e in torch.eye(z.numel(), dtype=z.dtype):
            yield e.view(z.shape)
        return
    p = torch.softmax(z.detach(), -1).reshape(-1, z.shape[-1])
    for i, q in enumerate(p):
        values, vectors = torch.linalg.eigh(torch.diag(q) - q[:, None] * q)
        for value, vector in zip(values.clamp(min=0), vectors.T, strict=True):
            column = torch.zeros_like(p)
            column[i] = value.sqrt() * vector
            yield column.view(z.shape)


def samples(z: Tensor, kind: str, batch_dim: int = 0) -> int:
    """What the mean is taken over."""
    return z.shape[batch_dim] if kind == "euclidean" else z.numel() // z.shape[-1]


def loss(z: Tensor, kind: str, reduction: str = "mean", batch_dim: int = 0) -> Tensor:
    """A loss of the kind with fixed targets, a mean over `samples`."""
    if kind == "categorical":
        y = torch.arange(z[..., 0].numel()) % z.shape[-1]
        return F.cross_entropy(z.reshape(-1, z.shape[-1]), y, reduction=reduction)
    y = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape).cos()
    total = 0.5 * ((z - y) ** 2).sum()
    return total if reduction == "sum" else total / samples(z, kind, batch_dim)


@dataclass
class Use:
    """One call of one module."""

    module: Any
    x: Tensor
    out: Tensor


def watched(model: nn.Module, *args: Any) -> tuple[Tensor, list[Use]]:
    """The output, and every call of a layer with parameters of its own."""
    uses: list[Use] = []
    handles = [
        m.register_forward_hook(lambda m, a, out: uses.append(Use(m, a[0].detach(), out)))
        for m in model.modules()
        if isinstance(m, KRONECKER)
    ]
    z = model(*args)
    for h in handles:
        h.remove()
    return z, uses


def by_sample(x: Tensor, batch_dim: int) -> Tensor:
    """(*lead, n) -> (N, T, n)."""
    if x.ndim == 2:
        return x[:, None]
    return x.movedim(batch_dim, 0).reshape(x.shape[batch_dim], -1, x.shape[-1])


def padded(m: Any, x: Tensor) -> Tensor:
    pad: list[int] = []
    for k, d, p in zip(
        m.kernel_size, m.dilation, m.padding if m.padding != "same" else m.kernel_size, strict=True
    ):
        total = d * (k - 1)
        pad = ([total // 2, total - total // 2] if m.padding == "same" else [p, p]) + pad
    return F.pad(x, pad, mode="constant" if m.padding_mode == "zeros" else m.padding_mode)


def inputs(m: Any, x: Tensor, batch_dim: int = 0) -> Tensor:
    """a at every place: (N, T, G, I)."""
    if isinstance(m, nn.Linear):
        return by_sample(x, batch_dim)[:, :, None]
    if isinstance(m, nn.Embedding):
        hot = F.one_hot(x, m.num_embeddings).to(m.weight.dtype)
        return by_sample(hot, batch_dim)[:, :, None]
    if isinstance(m, TRANSPOSED):
        return x.flatten(2).mT.unflatten(2, (m.groups, -1))
    x, places = padded(m, x), []
    spans = [d * (k - 1) + 1 for k, d in zip(m.kernel_size, m.dilation, strict=True)]
    starts = [range(0, n - r + 1, s) for n, r, s in zip(x.shape[2:], spans, m.stride, strict=True)]
    for start in product(*starts):
        window = tuple(slice(i, i + r, d) for i, r, d in zip(start, spans, m.dilation, strict=True))
        places.append(
            x[(slice(None), slice(None), *window)].unflatten(1, (m.groups, -1)).flatten(2)
        )
    return torch.stack(places, 1)


def cotangents(m: Any, x: Tensor, delta: Tensor, batch_dim: int = 0) -> Tensor:
    """δ at every place: (N, T, G, O)."""
    if isinstance(m, nn.Linear | nn.Embedding):
        return by_sample(delta, batch_dim)[:, :, None]
    if isinstance(m, CONVS):
        return delta.flatten(2).mT.unflatten(2, (m.groups, -1))
    places = []
    for t in product(*[range(n) for n in x.shape[2:]]):
        reached = []
        for k in product(*[range(n) for n in m.kernel_size]):
            s = [
                i * st - p + j * d
                for i, st, p, j, d in zip(t, m.stride, m.padding, k, m.dilation, strict=True)
            ]
            inside = all(0 <= i < n for i, n in zip(s, delta.shape[2:], strict=True))
            value = (
                delta[(slice(None), slice(None), *s)] if inside else 0 * delta.flatten(2)[..., 0]
            )
            reached.append(value.unflatten(1, (m.groups, -1)))
        places.append(torch.stack(reached, -1).flatten(2))  # (N, G, O·kernel)
    return torch.stack(places, 1)


@dataclass
class Role:
    """Σ δδᵀ (G, O, O), Σ aaᵀ (G, I, I), Σ a (G, I) and the count of places, of one role."""

    first: bool
    outputs: Any = 0.0
    inputs: Any = 0.0
    sums: Any = 0.0
    places: int = 0

    def input_side(self, joint: bool) -> Tensor:
        second, first = self.inputs / self.places, self.sums / self.places
        if not joint:
            return second
        top = torch.cat([second, first[..., None]], 2)
        low = torch.cat([first, torch.ones_like(first[:, :1])], 1)[:, None]
        return torch.cat([top, low], 1)


def moments(x: Tensor) -> Tensor:
    """Σ over (N, T) of outer products, per group."""
    return torch.einsum("ntgi,ntgj->gij", x, x)


@dataclass
class Factors:
    """Roles of every weight, biases by themselves, and what the mean counts."""

    weights: dict[str, dict[str, Role]]
    biases: dict[str, Tensor]
    partners: dict[str, set[str | None]]
    count: int


def factors(
    model: nn.Module,
    *args: Any,
    kind: str,
    reduce: bool = False,
    batch_dim: int = 0,
    keep: Tensor | None = None,
    given: list[Tensor] | None = None,
) -> Factors:
    """Both sides of every layer; `keep` masks the positions of z that count."""
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    z, uses = watched(model, *args)
    weights: dict[str, dict[str, Role]] = {}
    biases: dict[str, Tensor] = {}
    partners: dict[str, set[str | None]] = {}
    chosen = list(columns(z, kind)) if given is None else given
    if keep is not None:
        chosen = [c * keep[..., None] for c in chosen]
    found = [
        torch.autograd.grad(z, [u.out for u in uses], c, retain_graph=True, allow_unused=True)
        for c in chosen
        if uses
    ]
    for i, use in enumerate(uses):
        m = use.module
        weight, bias = (names.get(id(p)) for p in (m.weight, getattr(m, "bias", None)))
        together = not isinstance(m, TRANSPOSED)
        for one, two in ((weight, bias), (bias, weight)):
            if one is not None:
                partners.setdefault(one, set()).add(two if together else None)
        deltas = [d[i] for d in found]
        if all(d is None for d in deltas):
            continue
        deltas = [torch.zeros_like(use.out) if d is None else d for d in deltas]
        a = inputs(m, use.x, batch_dim)
        if weight is not None:
            first = isinstance(m, (nn.Embedding, *TRANSPOSED))
            role = weights.setdefault(weight, {}).setdefault(
                "Embedding" if isinstance(m, nn.Embedding) else "affine", Role(first)
            )
            if isinstance(m, nn.Embedding) and m.padding_idx is not None:
                # the rows of autograd's gradient: padding has none, on either side
                words = use.x[..., None] != m.padding_idx
                a = a * by_sample(words, batch_dim)[:, :, None]
                deltas = [d * words for d in deltas]
            if keep is not None and use.x.shape[:2] == keep.shape:
                a = a * by_sample(keep[..., None], batch_dim)[:, :, None]
                places = int(keep.sum())
            elif isinstance(m, nn.Embedding):
                places = int(a.sum())
            else:
                places = a.shape[0] * a.shape[1]
            if reduce and not isinstance(m, nn.Embedding):
                a, places = a.mean(1, keepdim=True), len(a)
            role.inputs = role.inputs + moments(a)
            role.sums = role.sums + a.sum((0, 1))
            role.places += places
            for d in deltas:
                d = cotangents(m, use.x, d, batch_dim)
                d = d.sum(1, keepdim=True) if reduce and not isinstance(m, nn.Embedding) else d
                role.outputs = role.outputs + moments(d)
        if bias is not None:
            for d in deltas:
                d = (
                    d.flatten(2).mT
                    if isinstance(m, CONVS + TRANSPOSED)
                    else by_sample(d, batch_dim)
                )
                d = d.sum(1, keepdim=True) if reduce else d
                groups = 1 if isinstance(m, TRANSPOSED) else a.shape[2]
                biases[bias] = biases.get(bias, 0.0) + moments(d.unflatten(2, (groups, -1)))
    count = samples(z, kind, batch_dim) if keep is None else int(keep.sum())
    return Factors(weights, biases, partners, count)


def merged(roles: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Left and right sides with the partial traces of Σ left ⊗ right, in the weight's layout."""
    if len(roles) == 1:
        return roles[0]
    total = max(float(sum(x.trace() * y.trace() for x, y in roles)), 1e-300)
    left = sum(x * y.trace() for x, y in roles)
    right = sum(y * x.trace() for x, y in roles)
    return torch.as_tensor(left), torch.as_tensor(right / total)


def kfac(
    model: nn.Module, *args: Any, joint: bool = True, reduction: str = "mean", **how: Any
) -> Tensor:
    """The K-FAC Gram over all parameters that require gradients, zero where it has no layer."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    index, start = {}, 0
    for n, p in params.items():
        index[n] = torch.arange(start, start + p.numel())
        start += p.numel()
    found = factors(model, *args, **how)
    scale = 1.0 / found.count if reduction == "mean" else 1.0
    out = torch.zeros(start, start, dtype=torch.float64)
    for weight, roles in found.weights.items():
        partner = next(iter(found.partners[weight]))
        both = (
            joint
            and found.partners[weight] == {partner}
            and partner is not None
            and found.partners[partner] == {weight}
        )
        some = next(iter(roles.values()))
        for g in range(len(some.outputs)):
            pairs = []
            for role in roles.values():
                r, c = scale * role.outputs[g], role.input_side(both)[g]
                pairs.append((c, r) if role.first else (r, c))
            left, right = merged(pairs)
            where = index[weight].view(len(some.outputs), len(left), -1)[g]
            if both:
                where = torch.cat([where, index[partner].view(len(some.outputs), -1, 1)[g]], 1)
            where = where.flatten()
            out[where[:, None], where] = torch.kron(left.contiguous(), right.contiguous())
        if both and partner is not None:
            found.biases.pop(partner)
    for bias, second in found.biases.items():
        for g, r in enumerate(second):
            where = index[bias].view(len(second), -1)[g]
            out[where[:, None], where] = scale * r
    return out


UNITS = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.PReLU,
)


def unit_mask(model: nn.Module, joint: bool = True) -> Tensor:
    """Which entries of the exact Gram belong to one unit of a normalization or slope."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    index, start = {}, 0
    for p in params.values():
        index[id(p)] = torch.arange(start, start + p.numel())
        start += p.numel()
    mask = torch.zeros(start, start, dtype=torch.float64)
    for m in model.modules():
        if isinstance(m, UNITS):
            held = [
                index[id(p)] for p in m._parameters.values() if p is not None and id(p) in index
            ]
            for one, two in product(held, held):
                if joint or one is two:
                    mask[one, two] = 1
    return mask


def exact(
    model: nn.Module, *args: Any, kind: str, reduction: str = "mean", batch_dim: int = 0
) -> Tensor:
    """JᵀMJ over all parameters, row by row."""
    params = [p for p in model.parameters() if p.requires_grad]
    z = model(*args)
    rows = []
    for column in columns(z, kind):
        pieces = torch.autograd.grad(z, params, column, retain_graph=True, allow_unused=True)
        pairs = zip(pieces, params, strict=True)
        rows.append(
            torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        )
    a = torch.stack(rows)
    return a.T @ a / (samples(z, kind, batch_dim) if reduction == "mean" else 1)


LIKELIHOODS = {
    "gaussian": pb.likelihoods.Gaussian(),
    "categorical": pb.likelihoods.Categorical(),
    "euclidean": None,
}


def optimizer(model: nn.Module, kind: str, **options: Any) -> pb.KFAC:
    """K-FAC with the exact Fisher that does not move, unless told otherwise."""
    chosen = {"lr": 0.0, "fisher": "exact", "likelihood": LIKELIHOODS[kind], **options}
    return pb.KFAC(model, **chosen)


def stepped(model: nn.Module, *args: Any, kind: str, **options: Any) -> pb.KFAC:
    """The same after one step on a batch."""
    opt = optimizer(model, kind, **options)
    reduction, batch_dim = options.get("reduction", "mean"), options.get("batch_dim", 0)
    loss(model(*args), kind, reduction, batch_dim).backward()
    opt.step()
    opt.close()
    model.zero_grad()
    return opt


def blocks(model: nn.Module, groups: list[list[str]]) -> Tensor:
    """The mask of a block-diagonal Gram, by groups of parameters' names."""
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    owner = torch.cat(
        [
            torch.full((size,), next((i for i, g in enumerate(groups) if n in g), -1 - k))
            for k, (n, size) in enumerate(sizes.items())
        ]
    )
    return (owner[:, None] == owner).double()
