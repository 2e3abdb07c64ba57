"""K-FAC by definition, in float64: one covector at a time, the sums over places written out.

Nothing here uses the library's layers: forward hooks keep inputs and outputs, autograd gives the
cotangents, and the metric's columns touch one sample (one position) each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from tests.kfac_options import kfac_of
from tests.optim.common import filled, flat

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KRONECKER = (nn.Linear, nn.Embedding, *CONVS, *TRANSPOSED)
UNITS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.PReLU)

# --- losses and their metrics ---------------------------------------------------------------


def columns(z: Tensor, kind: str) -> Tensor:
    """The columns of S, M = S Sᵀ over all of z: identity, or diag(p) − ppᵀ per position."""
    units = torch.eye(z.numel(), dtype=z.dtype)
    if kind == "categorical":  # S = (1 − p1ᵀ) diag(√p)
        p = torch.softmax(z.detach(), -1).reshape(-1, z.shape[-1])
        units = torch.block_diag(*[(torch.eye(len(q)) - q[:, None]) * q.sqrt() for q in p]).T
    return units.view(-1, *z.shape)


def samples(z: Tensor, kind: str, batch_dim: int = 0) -> int:
    """What the mean is taken over."""
    if kind == "euclidean":
        return z.shape[batch_dim]
    return z.numel() // z.shape[-1]


def loss(z: Tensor, kind: str, reduction: str = "mean", batch_dim: int = 0) -> Tensor:
    """A loss of the kind with fixed targets, a mean over `samples`."""
    if kind == "categorical":
        y = torch.arange(z[..., 0].numel()) % z.shape[-1]
        return F.cross_entropy(z.reshape(-1, z.shape[-1]), y, reduction=reduction)
    y = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view(z.shape).cos()
    total = 0.5 * ((z - y) ** 2).sum()
    if reduction == "sum":
        return total
    return total / samples(z, kind, batch_dim)


# --- inputs and cotangents at the places of a layer -----------------------------------------


@dataclass
class Use:
    """One call of one module."""

    module: Any
    x: Tensor
    out: Tensor


def watched(model: nn.Module, *args: Any) -> tuple[Tensor, list[Use]]:
    """The output, and every call of a layer with a Kronecker block."""
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


def patches(m: Any, x: Tensor, padding: Any) -> Tensor:
    """What a convolution's kernel sees, (N, T, G, C·kernel): it is convolved with unit kernels."""
    size = x.shape[1] * torch.Size(m.kernel_size).numel()
    units = torch.eye(size, dtype=x.dtype).view(size, x.shape[1], *m.kernel_size)
    conv = getattr(F, f"conv{x.ndim - 2}d")
    seen = conv(x, units, stride=m.stride, padding=padding, dilation=m.dilation)
    return seen.flatten(2).mT.unflatten(2, (m.groups, -1))


def inputs(m: Any, x: Tensor, batch_dim: int = 0) -> Tensor:
    """a at every place: (N, T, G, I)."""
    if isinstance(m, nn.Linear):
        return by_sample(x, batch_dim)[:, :, None]
    if isinstance(m, nn.Embedding):
        hot = F.one_hot(x, m.num_embeddings).to(m.weight.dtype)
        return by_sample(hot, batch_dim)[:, :, None]
    if isinstance(m, TRANSPOSED):
        return x.flatten(2).mT.unflatten(2, (m.groups, -1))
    mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
    return patches(m, F.pad(x, m._reversed_padding_repeated_twice, mode=mode), 0)


def cotangents(m: Any, x: Tensor, delta: Tensor, batch_dim: int = 0) -> Tensor:
    """δ at every place: (N, T, G, O)."""
    if isinstance(m, nn.Linear | nn.Embedding):
        return by_sample(delta, batch_dim)[:, :, None]
    if isinstance(m, CONVS):
        return delta.flatten(2).mT.unflatten(2, (m.groups, -1))
    return patches(m, delta, m.padding)


def counted(use: Use, felt: Tensor, keep: Tensor | None) -> Tensor:
    """Which places (N, T) count where the loss keeps some positions only: those kept or felt."""
    if keep is None:
        return torch.ones_like(felt)
    if len(felt) != len(keep):  # rows of unknown samples
        return felt | ~felt.any()
    if keep.ndim == 1:  # samples, with all of their places
        return (keep[:, None] | felt.any(1, keepdim=True)).expand(felt.shape)
    spatial = isinstance(use.module, CONVS + TRANSPOSED)
    places = (use.x if isinstance(use.module, TRANSPOSED) else use.out).shape
    if keep.shape[1:] == (places[2:] if spatial else places[1:-1]):
        return felt | keep.flatten(1)
    return felt | keep.flatten(1).all(1)[:, None]  # other places: of samples kept as a whole


def moments(x: Tensor) -> Tensor:
    """Σ over (N, T) of outer products, per group."""
    return torch.einsum("ntgi,ntgj->gij", x, x)


# --- the blocks -----------------------------------------------------------------------------


@dataclass
class Role:
    """Σ δδᵀ (G, O, O), Σ āāᵀ (G, I+1, I+1) with ā = (a, 1), and the count of places."""

    first: bool  # the weight's first axis is the input's
    outputs: Any = 0.0
    inputs: Any = 0.0
    places: Any = 0

    def input_side(self, joint: bool) -> Tensor:
        side = self.inputs / self.places
        if joint:
            return side
        return side[:, :-1, :-1]


def factors(
    model: nn.Module,
    *args: Any,
    kind: str,
    reduce: bool = False,
    batch_dim: int = 0,
    keep: Tensor | None = None,
    given: list[Tensor] | None = None,
) -> tuple[dict[str, dict[str, Role]], dict[str, Tensor], dict[str, set[str | None]], int]:
    """Roles of every weight, Σ δδᵀ of biases by themselves, partners, and what the mean counts.

    `keep` masks the positions of z that count; `given` covectors replace the metric's columns.
    """
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    z, uses = watched(model, *args)
    weights: dict[str, dict[str, Role]] = {}
    biases: dict[str, Any] = {}
    partners: dict[str, set[str | None]] = {}
    if given is None:
        chosen = [*columns(z, kind)]
    else:
        chosen = given
    count = samples(z, kind, batch_dim)
    if keep is not None:
        count = int(keep.sum())
        chosen = [c for c in chosen if bool((c * keep[..., None]).any())]
    pulled = [
        torch.autograd.grad(z, [u.out for u in uses], c, retain_graph=True, allow_unused=True)
        for c in chosen
        if uses
    ]
    for i, use in enumerate(uses):
        m = use.module
        words = isinstance(use.module, nn.Embedding)
        weight, bias = (names.get(id(p)) for p in (m.weight, getattr(m, "bias", None)))
        for one, two in ((weight, bias), (bias, weight)):
            if one is not None:
                partners.setdefault(one, set()).add(None if isinstance(m, TRANSPOSED) else two)
        if all(d[i] is None for d in pulled):
            continue
        deltas = [torch.zeros_like(use.out) if d[i] is None else d[i] for d in pulled]
        apart = [cotangents(m, use.x, d, batch_dim) for d in deltas]
        felt = torch.stack([d.abs().sum((2, 3)) for d in apart]).sum(0) > 0
        mask = counted(use, felt, keep)
        if words and m.padding_idx is not None:  # autograd gives that row no gradient
            real = by_sample(use.x[..., None] != m.padding_idx, batch_dim)
            mask = mask & real[..., 0]
            apart = [d * real[..., None] for d in apart]
        if weight is not None:
            role = weights.setdefault(weight, {}).setdefault(
                "words" if words else "affine", Role(words or isinstance(m, TRANSPOSED))
            )
            a = F.pad(inputs(m, use.x, batch_dim), (0, 1), value=1.0) * mask[:, :, None, None]
            if reduce and not words:
                each = mask.sum(1).clamp(min=1)[:, None, None, None]
                a = a.sum(1, keepdim=True) / each
                mask = mask.any(1)
                apart = [d.sum(1, keepdim=True) for d in apart]
            role.inputs, role.places = role.inputs + moments(a), role.places + mask.sum()
            role.outputs = role.outputs + sum(moments(d) for d in apart)
        if bias is not None:
            spatial = isinstance(m, CONVS + TRANSPOSED)
            groups = m.groups if isinstance(m, CONVS) else 1
            for d in deltas:
                if spatial:
                    d = d.flatten(2).mT
                else:
                    d = by_sample(d, batch_dim)
                d = (d.sum(1, keepdim=True) if reduce else d).unflatten(2, (groups, -1))
                biases[bias] = biases.get(bias, 0.0) + moments(d)
    return weights, biases, partners, count


def merged(roles: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One left and right side with the partial traces of Σ left ⊗ right."""
    total = max(float(sum(x.trace() * y.trace() for x, y in roles)), 1e-300)
    left = sum(x * y.trace() for x, y in roles)
    right = sum(y * x.trace() for x, y in roles)
    return torch.as_tensor(left), torch.as_tensor(right / total)


def index(model: nn.Module) -> dict[str, Tensor]:
    """Where each trained parameter stands in the vector of all of them."""
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    return dict(zip(sizes, torch.arange(sum(sizes.values())).split([*sizes.values()]), strict=True))


Sides = tuple[Tensor, Tensor]


def kfac(
    model: nn.Module,
    *args: Any,
    joint: bool = True,
    reduction: str = "mean",
    change: Callable[[Tensor, Tensor], Sides] = lambda r, c: (r, c),
    **how: Any,
) -> Tensor:
    """The Gram over all trained parameters, zero where it has no layer; `change` replaces R, C."""
    where_of = index(model)
    out = 0 * blocks(model)
    weights, biases, partners, count = factors(model, *args, **how)
    if reduction == "mean":
        scale = 1.0 / count
    else:
        scale = 1.0
    for weight, roles in weights.items():
        (partner, *more) = partners[weight]
        both = joint and not more and partner is not None and partners[partner] == {weight}
        groups = len(next(iter(roles.values())).outputs)
        for g in range(groups):
            pairs = []
            for role in roles.values():
                r, c = change(scale * role.outputs[g], role.input_side(both)[g])
                pairs.append((c, r) if role.first else (r, c))
            left, right = merged(pairs)
            where = where_of[weight].view(groups, len(left), -1)[g]
            if both and partner is not None:
                where = torch.cat([where, where_of[partner].view(groups, -1, 1)[g]], 1)
            where = where.flatten()
            out[where[:, None], where] = torch.kron(left.contiguous(), right.contiguous())
        if both and partner is not None:
            biases.pop(partner)
    for bias, second in biases.items():
        for where, r in zip(where_of[bias].view(len(second), -1), second, strict=True):
            out[where[:, None], where] = scale * r
    return out


def unit_mask(model: nn.Module, joint: bool = True) -> Tensor:
    """Which entries of the exact Gram belong to one unit of a normalization or slope."""
    where = index(model)
    mask = 0 * blocks(model)
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    for m in model.modules():
        if isinstance(m, UNITS):
            held = [where[names[id(p)]] for p in m.parameters(recurse=False) if id(p) in names]
            for one, two in product(held, held):
                if joint or one is two:
                    mask[one, two] = 1
    return mask


def exact(
    model: nn.Module, *args: Any, kind: str, reduction: str = "mean", batch_dim: int = 0
) -> Tensor:
    """JᵀMJ over all trained parameters, row by row."""
    params = [p for p in model.parameters() if p.requires_grad]
    z = model(*args)
    rows = []
    for column in columns(z, kind):
        pieces = torch.autograd.grad(z, params, column, retain_graph=True, allow_unused=True)
        rows.append(flat(filled(pieces, params)))
    a = torch.stack(rows)
    return a.T @ a / (samples(z, kind, batch_dim) if reduction == "mean" else 1)


def definition(model: nn.Module, *args: Any, joint: bool = True, **how: Any) -> Tensor:
    """Kronecker blocks of layers, and exact ones of every unit of a normalization or slope."""
    out = kfac(model, *args, joint=joint, **how)
    mask = unit_mask(model, joint)
    if mask.any():
        some = ("kind", "reduction", "batch_dim")
        out += mask * exact(model, *args, **{k: v for k, v in how.items() if k in some})
    return out


def blocks(model: nn.Module, joint: bool = True) -> Tensor:
    """The mask of blocks by layer, or by parameter."""
    owners = [n.rpartition(".")[0] if joint else n for n in index(model)]
    sizes = torch.tensor([len(i) for i in index(model).values()])
    owner = torch.tensor([owners.index(n) for n in owners]).repeat_interleave(sizes)
    return (owner[:, None] == owner).double()


# --- the library on the same ----------------------------------------------------------------


def optimizer(model: nn.Module, kind: str, **options: Any) -> pb.KFAC:
    """K-FAC with the exact Fisher that neither moves nor clips, unless told otherwise."""
    known = {"gaussian": pb.likelihoods.Gaussian(), "categorical": pb.likelihoods.Categorical()}
    chosen = {"lr": 0.0, "fisher": "exact", "likelihood": known.get(kind), "kl_clip": None}
    chosen |= options
    return kfac_of(model, **chosen)


def stepped(
    model: nn.Module, *args: Any, kind: str, y: Tensor | None = None, **options: Any
) -> pb.KFAC:
    """The same after one step on a batch, with classes `y` of which -100 are ignored."""
    opt = optimizer(model, kind, **options)
    z = model(*args)
    reduction = options.get("reduction", "mean")
    if y is None:
        loss(z, kind, reduction, options.get("batch_dim", 0)).backward()
    else:
        F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction=reduction).backward()
    opt.step()
    opt.close()
    model.zero_grad()
    return opt


def step(opt: pb.KFAC, model: nn.Module, x: Tensor, kind: str) -> None:
    """One turn of an ordinary loop."""
    opt.zero_grad()
    loss(model(x), kind).backward()
    opt.step()


def gram(opt: pb.KFAC, model: nn.Module) -> Tensor:
    """The optimizer's Gram over all trained parameters, zero where it holds no block."""
    held = {r.name for r in opt.coverage() if r.block not in ("gradient", "none")}
    covered = torch.cat([i for n, i in index(model).items() if n in held])
    out = 0 * blocks(model)
    out[covered[:, None], covered] = opt.gram().dense().double()
    return out


def part(gram: Tensor, model: nn.Module, names: list[str]) -> Tensor:
    """The Gram of these parameters, in this order."""
    some = torch.cat([index(model)[n] for n in names])
    return gram[some[:, None], some]


def input_side(gram: Tensor, model: nn.Module, name: str) -> Tensor:
    """C of a layer's weight without groups, with trace one."""
    m = model.get_submodule(name)
    first = isinstance(m, (nn.Embedding, *TRANSPOSED))
    rows = len(m.weight)
    block = part(gram, model, [f"{name}.weight"]).unflatten(1, (rows, -1)).unflatten(0, (rows, -1))
    side = torch.einsum("aibi->ab" if first else "aiaj->ij", block)
    return side / side.trace()
