"""K-FAC by definition, in float64: one covector at a time, the sums over positions written out.

Nothing here uses the library's layers: forward hooks keep inputs and outputs, autograd gives the
cotangents, and the metric's columns touch one sample (one position) each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from tests.kfac_options import kfac_of
from tests.optim.common import fill_missing, flat

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


# --- inputs and cotangents at the positions of a layer ---------------------------------------


@dataclass
class Use:
    """One call of one module."""

    module: Any
    x: Tensor
    out: Tensor

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)

    @property
    def is_spatial(self) -> bool:
        return isinstance(self.module, CONVS + TRANSPOSED)

    @property
    def positions(self) -> torch.Size:
        """Shape of the positions of a sample at which the kernel is applied."""
        if isinstance(self.module, TRANSPOSED):
            return self.x.shape[2:]
        return self.out.shape[2:] if self.is_spatial else self.out.shape[1:-1]


def record_uses(model: nn.Module, *args: Any) -> tuple[Tensor, list[Use]]:
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


def extract_patches(m: Any, x: Tensor, padding: Any) -> Tensor:
    """What a convolution's kernel sees, (N, T, G, C·kernel): it is convolved with unit kernels."""
    size = x.shape[1] * torch.Size(m.kernel_size).numel()
    units = torch.eye(size, dtype=x.dtype).view(size, x.shape[1], *m.kernel_size)
    conv = getattr(F, f"conv{x.ndim - 2}d")
    patches = conv(x, units, stride=m.stride, padding=padding, dilation=m.dilation)
    return patches.flatten(2).mT.unflatten(2, (m.groups, -1))


def inputs(m: Any, x: Tensor, batch_dim: int = 0) -> Tensor:
    """a at every position: (N, T, G, I)."""
    if isinstance(m, nn.Linear):
        return by_sample(x, batch_dim)[:, :, None]
    if isinstance(m, nn.Embedding):
        hot = F.one_hot(x, m.num_embeddings).to(m.weight.dtype)
        return by_sample(hot, batch_dim)[:, :, None]
    if isinstance(m, TRANSPOSED):
        return x.flatten(2).mT.unflatten(2, (m.groups, -1))
    mode = "constant" if m.padding_mode == "zeros" else m.padding_mode
    return extract_patches(m, F.pad(x, padding_of(m), mode=mode), 0)


def padding_of(m: Any) -> list[int]:
    """What `F.pad` adds before and after each axis, the last axis first."""
    if m.padding == "same":
        added = [d * (k - 1) for d, k in zip(m.dilation, m.kernel_size, strict=True)]
        pairs = [(n // 2, n - n // 2) for n in added]
    else:
        pairs = [(n, n) for n in m.padding]
    return list(chain.from_iterable(reversed(pairs)))


def cotangents(m: Any, x: Tensor, delta: Tensor, batch_dim: int = 0) -> Tensor:
    """δ at every position: (N, T, G, O)."""
    if isinstance(m, nn.Linear | nn.Embedding):
        return by_sample(delta, batch_dim)[:, :, None]
    if isinstance(m, CONVS):
        return delta.flatten(2).mT.unflatten(2, (m.groups, -1))
    return extract_patches(m, delta, m.padding)


def mark_counted_positions(use: Use, felt: Tensor, keep: Tensor | None) -> Tensor:
    """Which positions (N, T) count where the loss keeps some only: those kept or felt."""
    if keep is None:
        return torch.ones_like(felt)
    if len(felt) != len(keep):  # rows of unknown samples
        return felt | ~felt.any()
    if keep.ndim == 1:  # samples, with all of their positions
        return (keep[:, None] | felt.any(1, keepdim=True)).expand(felt.shape)
    if keep.shape[1:] == use.positions:
        return felt | keep.flatten(1)
    return felt | keep.flatten(1).all(1)[:, None]  # other positions: of samples kept as a whole


def moments(x: Tensor) -> Tensor:
    """Σ over (N, T) of outer products, per group."""
    return torch.einsum("ntgi,ntgj->gij", x, x)


# --- the blocks -----------------------------------------------------------------------------


@dataclass
class Role:
    """Σ δδᵀ (G, O, O), Σ āāᵀ (G, I+1, I+1) with ā = (a, 1), and the count of positions."""

    first: bool  # the weight's first axis is the input's
    outputs: Any = 0.0
    inputs: Any = 0.0
    positions: Any = 0

    def input_side(self, joint: bool) -> Tensor:
        side = self.inputs / self.positions
        if joint:
            return side
        return side[:, :-1, :-1]


@dataclass(frozen=True)
class Convention:
    """What is summed.

    `keep` masks the positions of z that count; `covectors` replace the metric's columns; with
    `reduce` the positions of a sample are summed (cotangents) or averaged (inputs) first.
    """

    kind: str
    reduce: bool = False
    batch_dim: int = 0
    keep: Tensor | None = None
    covectors: list[Tensor] | None = None

    def count_samples(self, z: Tensor) -> int:
        """Return what the mean counts."""
        if self.keep is not None:
            return int(self.keep.sum())
        return samples(z, self.kind, self.batch_dim)

    def choose_covectors(self, z: Tensor) -> list[Tensor]:
        """Return those that touch a kept position."""
        covectors = self.covectors
        if covectors is None:
            covectors = [*columns(z, self.kind)]
        if self.keep is None:
            return covectors
        mask = self.keep[..., None]
        return [c for c in covectors if bool((c * mask).any())]


@dataclass
class FactorSums:
    """The sums over all uses of the layers of a model."""

    convention: Convention
    #: by weight, then by role: an embedding's rows, or an affine map
    weights: dict[str, dict[str, Role]] = field(default_factory=dict)
    #: Σ δδᵀ of biases by themselves
    biases: dict[str, Any] = field(default_factory=dict)
    #: the bias of a weight, the weight of a bias; None where there is none
    partners: dict[str, set[str | None]] = field(default_factory=dict)

    def pair(self, use: Use, weight: str | None, bias: str | None) -> None:
        """Note that the weight and the bias meet in one layer."""
        for one, other in ((weight, bias), (bias, weight)):
            if one is not None:
                partner = None if isinstance(use.module, TRANSPOSED) else other
                self.partners.setdefault(one, set()).add(partner)

    def add_weight(self, name: str, use: Use, deltas: list[Tensor]) -> None:
        """Add one use's inputs and cotangents to the role that the weight has there."""
        batch_dim = self.convention.batch_dim
        m = use.module
        is_table = isinstance(m, nn.Embedding)
        covectors = [cotangents(m, use.x, d, batch_dim) for d in deltas]
        felt = torch.stack([d.abs().sum((2, 3)) for d in covectors]).sum(0) > 0
        mask = mark_counted_positions(use, felt, self.convention.keep)
        if is_table and m.padding_idx is not None:  # autograd gives that row no gradient
            real = by_sample(use.x[..., None] != m.padding_idx, batch_dim)
            mask = mask & real[..., 0]
            covectors = [d * real[..., None] for d in covectors]
        a = F.pad(inputs(m, use.x, batch_dim), (0, 1), value=1.0) * mask[:, :, None, None]
        if self.convention.reduce and not is_table:
            a = a.sum(1, keepdim=True) / mask.sum(1).clamp(min=1)[:, None, None, None]
            mask = mask.any(1)
            covectors = [d.sum(1, keepdim=True) for d in covectors]
        new_role = Role(is_table or isinstance(m, TRANSPOSED))
        roles = self.weights.setdefault(name, {})
        role = roles.setdefault("table" if is_table else "affine", new_role)
        role.inputs = role.inputs + moments(a)
        role.positions = role.positions + mask.sum()
        role.outputs = role.outputs + sum(moments(d) for d in covectors)

    def add_bias(self, name: str, use: Use, deltas: list[Tensor]) -> None:
        """Add one use's cotangents."""
        m = use.module
        groups = m.groups if isinstance(m, CONVS) else 1
        for delta in deltas:
            if use.is_spatial:
                d = delta.flatten(2).mT
            else:
                d = by_sample(delta, self.convention.batch_dim)
            if self.convention.reduce:
                d = d.sum(1, keepdim=True)
            self.biases[name] = self.biases.get(name, 0.0) + moments(d.unflatten(2, (groups, -1)))


def sum_factors(model: nn.Module, z: Tensor, uses: list[Use], convention: Convention) -> FactorSums:
    """Return the sums over the uses of every layer that the covectors at z reach."""
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    outputs = [use.out for use in uses]
    pulled_back = [
        torch.autograd.grad(z, outputs, c, retain_graph=True, allow_unused=True)
        for c in convention.choose_covectors(z)
        if uses
    ]
    sums = FactorSums(convention)
    for i, use in enumerate(uses):
        weight, bias = (names.get(id(p)) for p in (use.module.weight, use.bias))
        sums.pair(use, weight, bias)
        deltas = [gradients[i] for gradients in pulled_back]
        if all(d is None for d in deltas):
            continue
        deltas = [torch.zeros_like(use.out) if d is None else d for d in deltas]
        if weight is not None:
            sums.add_weight(weight, use, deltas)
        if bias is not None:
            sums.add_bias(bias, use, deltas)
    return sums


def merge_sides(roles: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
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
ChangeSides = Callable[[Tensor, Tensor], Sides]


def kfac(
    model: nn.Module,
    *args: Any,
    joint: bool = True,
    reduction: str = "mean",
    change: ChangeSides = lambda r, c: (r, c),
    **how: Any,
) -> Tensor:
    """The Gram over all trained parameters, zero where it has no layer; `change` replaces R, C."""
    convention = Convention(**how)
    z, uses = record_uses(model, *args)
    sums = sum_factors(model, z, uses, convention)
    scale = 1.0
    if reduction == "mean":
        scale = 1.0 / convention.count_samples(z)
    indices = index(model)
    out = 0 * blocks(model)
    for weight, roles in sums.weights.items():
        bias = find_joint_bias(sums, weight) if joint else None
        place_weight(out, indices, (weight, bias), sides_of_groups(roles, bias, scale, change))
        if bias is not None:
            sums.biases.pop(bias)
    for bias, second in sums.biases.items():
        place_bias(out, indices[bias], scale * second)
    return out


def find_joint_bias(sums: FactorSums, weight: str) -> str | None:
    """Return the bias that meets this weight everywhere, and no other weight."""
    partner, *others = sums.partners[weight]
    if partner is None or others or sums.partners[partner] != {weight}:
        return None
    return partner


def sides_of_groups(
    roles: dict[str, Role], bias: str | None, scale: float, change: ChangeSides
) -> list[Sides]:
    """Return one pair of sides for each group of a weight, its roles merged."""
    merged = []
    for g in range(len(next(iter(roles.values())).outputs)):
        pairs = []
        for role in roles.values():
            r, c = change(scale * role.outputs[g], role.input_side(bias is not None)[g])
            pairs.append((c, r) if role.first else (r, c))
        merged.append(merge_sides(pairs))
    return merged


def place_weight(
    out: Tensor, indices: dict[str, Tensor], names: tuple[str, str | None], groups: list[Sides]
) -> None:
    """Write left ⊗ right of every group where its weight and joint bias stand."""
    weight, bias = names
    for g, (left, right) in enumerate(groups):
        where = indices[weight].view(len(groups), len(left), -1)[g]
        if bias is not None:
            where = torch.cat([where, indices[bias].view(len(groups), -1, 1)[g]], 1)
        where = where.flatten()
        out[where[:, None], where] = torch.kron(left.contiguous(), right.contiguous())


def place_bias(out: Tensor, index: Tensor, groups: Tensor) -> None:
    """Write the block of every group where its piece of the bias stands."""
    for where, block in zip(index.view(len(groups), -1), groups, strict=True):
        out[where[:, None], where] = block


def unit_mask(model: nn.Module, joint: bool = True) -> Tensor:
    """Which entries of the exact Gram belong to one unit of a normalization or slope."""
    where = index(model)
    mask = 0 * blocks(model)
    names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    for m in model.modules():
        if isinstance(m, UNITS):
            own_parameters = m.parameters(recurse=False)
            indices = [where[names[id(p)]] for p in own_parameters if id(p) in names]
            for one, two in product(indices, indices):
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
        rows.append(flat(fill_missing(pieces, params)))
    a = torch.stack(rows)
    return a.T @ a / (samples(z, kind, batch_dim) if reduction == "mean" else 1)


def definition(model: nn.Module, *args: Any, joint: bool = True, **how: Any) -> Tensor:
    """Kronecker blocks of layers, and exact ones of every unit of a normalization or slope."""
    out = kfac(model, *args, joint=joint, **how)
    mask = unit_mask(model, joint)
    if mask.any():
        options = {k: how[k] for k in ("kind", "reduction", "batch_dim") if k in how}
        out += mask * exact(model, *args, **options)
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
    names = {r.name for r in opt.coverage() if r.block not in ("gradient", "none")}
    covered = torch.cat([i for n, i in index(model).items() if n in names])
    out = 0 * blocks(model)
    out[covered[:, None], covered] = opt.gram().dense().double()
    return out


def part(gram: Tensor, model: nn.Module, names: list[str]) -> Tensor:
    """The Gram of these parameters, in this order."""
    where = torch.cat([index(model)[n] for n in names])
    return gram[where[:, None], where]


def input_side(gram: Tensor, model: nn.Module, name: str) -> Tensor:
    """C of a layer's weight without groups, with trace one."""
    m = model.get_submodule(name)
    first = isinstance(m, (nn.Embedding, *TRANSPOSED))
    rows = len(m.weight)
    block = part(gram, model, [f"{name}.weight"]).unflatten(1, (rows, -1)).unflatten(0, (rows, -1))
    side = torch.einsum("aibi->ab" if first else "aiaj->ij", block)
    return side / side.trace()
