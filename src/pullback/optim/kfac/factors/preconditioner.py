"""From averages to what gradients are multiplied by: blocks of one size together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....grams.kronecker import (
    EigenBlock,
    FactorInverses,
    GramBlock,
    Pair,
    factor_matrix,
    invert_factors,
)
from ....grams.kronecker.cholesky_inverse import is_inverted_alone
from ....grams.kronecker.inverse import (
    MOMENTS,
    Inverse,
    aligned,
    half_sides,
    rotate,
    roundable,
    rounded,
)
from ....grams.kronecker.packed_matrix import FactorMatrix, get_entries, unpack
from ....grams.kronecker.roots import eigenbasis, inverse_root, product, turn_basis
from ..rules import Rule
from .block import (
    SPECTRUM,
    Average,
    BlockKey,
    block_of,
    block_shape,
    ema_update,
    stacked,
    undivided,
)
from .damping import Damping

_GROWTH, _TRIES = 10.0, 8
_COARSE = 0.05  # the least damping with which roots are first tried with few bits
_PORTION, _TURNED = 2**29, 2**27  # entries of sides that are inverted, or turned, at once
_BEGUN = 2**21  # entries of sides whose first eigenbases one step finds

Averages = Mapping[BlockKey, Average]
#: blocks of one kind, one after the other in an inverse of all
Blocks = tuple[BlockKey, ...]


class Preconditioner:
    """Prepared factors of all blocks, renewed every so often, and applied by a rule.

    Args:
        rule: how gradients become directions, and what it needs.
        damping: what is added before inverting.
        ekfac: whether eigenvalues are corrected by second moments of the gradient.
    """

    def __init__(self, rule: Rule, damping: Damping, *, ekfac: bool) -> None:
        self.rule, self.damping, self.ekfac = rule, damping, ekfac
        self.inverses: dict[BlockKey, Inverse] = {}
        #: shapes of the blocks' coordinates; inverses may be filled up
        self.shapes: dict[BlockKey, tuple[int, ...]] = {}
        #: blocks whose inverse has been computed
        self.ready: set[BlockKey] = set()
        #: corrected eigenvalues, where they are wanted
        self.spectra: dict[BlockKey, Average] = {}
        #: what went wrong or was left out in the last renewal, by block
        self.notes: dict[BlockKey, str] = {}
        #: blocks whose inverses are held by other processes
        self.absent: set[BlockKey] = set()
        self._groups: list[_Group] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stacks: in a pickle inverses are no views of them."""
        return {**vars(self), "_groups": None}

    # --- memory -------------------------------------------------------------------------------

    def allocate(self, key: BlockKey, average: Average) -> None:
        """Make room for a block, which is not ready yet."""
        self.drop(key)
        factors, zeros = average.value, average.mass.new_zeros
        self.shapes[key] = shape = block_shape(key, factors)
        if not key.kronecker:
            self.inverses[key] = Inverse(zeros(*shape, shape[-1]))
            return
        if self.ekfac:
            self.spectra[key] = Average({SPECTRUM: zeros(shape)}, zeros(()))
        groups, rows, columns = shape
        sizes = {"left": rows, "right": columns}
        dense = {f.side for f, t in factors.items() if len(t.shape) == 3}
        matrices = {side: zeros(groups, n, n) for side, n in sizes.items() if side in dense}
        if self.rule.moments:
            self.inverses[key] = self._with_moments(matrices, shape, average.mass)
        elif self.rule.needs == "eigenbasis":
            own = matrices.get("left"), matrices.get("right"), zeros(shape)
            self.inverses[key] = Inverse(*own)
        else:
            both = [matrices.get(side, zeros(groups, n)) for side, n in sizes.items()]
            self.inverses[key] = self._form(*both)

    def _form(self, left: Tensor, right: Tensor) -> Inverse:
        """Return inverse sides as they are held: padded and perhaps in float16, or factors."""
        if self.rule.needs == "factors":
            return Inverse(left, right, factors=True)
        more = aligned(right.shape[-1]) - right.shape[-1]
        inverse = Inverse(left, F.pad(right, (0, more) * (right.ndim - 1)))
        return rounded(inverse) if roundable(inverse) else inverse

    def _with_moments(
        self, matrices: Mapping[str, Tensor], shape: Sequence[int], like: Tensor
    ) -> Inverse:
        """Return sides of norm 1, and moments of the gradient."""
        half = {side: m.to(half_sides(like)) for side, m in matrices.items()}
        own: Any = {}
        for name, of in self.rule.moments.items():
            own[name] = like.new_zeros(shape if of == "entries" else (*shape[:-1], 1))
        if self.rule.needs == "root":
            return Inverse(None, half.get("right", like.new_zeros(shape[0], shape[-1])), **own)
        steps = like.new_zeros(shape[0])
        return Inverse(half.get("left"), half.get("right"), **own, steps=steps)

    def drop(self, key: BlockKey) -> None:
        for held in (self.inverses, self.spectra, self.notes):
            held.pop(key, None)
        self.ready.discard(key)
        self.absent.discard(key)
        self._groups = None

    def change(self, key: BlockKey, change: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors of a block's inverse, and of its corrected eigenvalues."""
        new: Any = {n: change(t) for n, t in self.inverses[key].tensors().items()}
        self.inverses[key], self._groups = replace(self.inverses[key], **new), None
        if key in self.spectra:
            self.spectra[key].change(change)

    def symmetric(self, key: BlockKey) -> tuple[str, ...]:
        """Which tensors of a block's inverse are symmetric matrices."""
        held = self.inverses[key]
        if not key.kronecker or held.factors or held.rows is not None:  # columns are scaled
            return ()
        return {"inverse": ("left", "right"), "root": ("right",)}.get(self.rule.needs, ())

    def regroup(self) -> None:
        """Build stacks again when they are next needed: inverses were replaced."""
        self._groups = None

    # --- renewal ------------------------------------------------------------------------------

    def renew(
        self, averages: Averages, keys: Sequence[BlockKey], value: float, *, alone: bool = True
    ) -> None:
        """Prepare these blocks anew with λ = `value`; where one fails, the last good one stays.

        Unless this process is `alone`, moments stay as they are until `turn_moments`.
        """
        for key in keys:
            self.notes.pop(key, None)
        self._invert_units(averages, [k for k in keys if not k.kronecker], value)
        ways = {"eigenbasis": self._decompose, "basis": self._turn, "root": self._root}
        prepare = ways.get(self.rule.needs, self._invert)
        pairs = [k for k in keys if k.kronecker]
        for some in self._portions(pairs):
            before = self.bases(some) if alone else {}
            prepare(averages, some, value)
            self.turn_moments(before)

    def affordable(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the blocks that are ready, and as many others, small ones first, as a step begins.

        The first basis of a side is an `eigh`. Parameters that have none yet take a first step of
        AdamW's each time, and the next step goes on.
        """
        new = sorted((k for k in keys if k.kronecker and k not in self.ready), key=self._entries)
        if self.rule.needs != "basis":
            return list(keys)
        totals = accumulate(self._entries(k) for k in new)
        later = {*new[max(1, sum(total <= _BEGUN for total in totals)) :]}
        return [k for k in keys if k not in later]

    def _entries(self, key: BlockKey) -> int:
        """How many entries the sides of a block have."""
        groups, *sizes = self.shapes[key]
        return groups * sum(n * n for n in sizes)

    def _portions(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """Blocks that are inverted together, large ones first: copies of all take much memory."""
        out: list[list[BlockKey]] = []
        room = 0
        for key in sorted(keys, key=lambda key: -sum(n * n for n in self.shapes[key][1:])):
            entries = self._entries(key)
            if not out or entries > room:
                out.append([])
                room = _TURNED if self.rule.needs == "basis" else _PORTION
            out[-1].append(key)
            room -= entries
        return out

    def _alike(self, averages: Averages, keys: Sequence[BlockKey], apart: bool) -> list[Blocks]:
        """Blocks that are prepared as one, unless each is wanted `apart`."""
        kinds: dict[Any, list[BlockKey]] = {}
        for key in keys:
            average, size = averages[key], max(self.shapes[key][1:])
            alone = apart or is_inverted_alone(size, average.mass.device)
            kinds.setdefault(key if alone else (key.joint, average.kind), []).append(key)
        return [tuple(some) for some in kinds.values()]

    def _invert_units(self, averages: Averages, keys: Sequence[BlockKey], value: float) -> None:
        """Invert gains, shifts and single entries, all of a size at once."""
        apart = self.damping.referenced
        for some in self._alike(averages, keys, apart):
            key, average = some[0], stacked([averages[k] for k in some])
            block: Any = block_of(key, average.corrected())
            block, shift = self.damping.units(block, self._reference(key, averages), value)
            m, inverse = block.matrices, block.inverse(shift)
            self._accept(some, Inverse(inverse))
            if apart:
                rank, size = round(float((m * inverse).sum())), m[..., 0].numel()  # tr M M⁺
                if rank < size:
                    self._note(key, f"it is singular: rank {rank} of {size}, inverted on its range")

    def _reference(self, key: BlockKey, averages: Averages) -> Any:
        """Return the block of long-run averages, where the damping needs one."""
        if not self.damping.referenced:
            return None
        average, given = averages[key], self.damping.reference
        if given is not None and key in given:
            return block_of(key, {f: unpack(t).to(average.mass) for f, t in given[key].items()})
        if given is not None:
            self._note(key, "its reference is its own average: the one given lacks this block")
        return block_of(key, average.mean or average.corrected())

    def _invert(self, averages: Averages, keys: Sequence[BlockKey], value: float) -> None:
        """Invert damped sides by Cholesky; more damping where that fails.

        Without damping, or with an invariant one, a singular side is inverted on its range.
        """
        singular, attempt = value == 0 or self.damping.referenced, 0
        waiting = self._alike(averages, keys, singular)
        while waiting and attempt < (_TRIES if value else 1):
            now = value * _GROWTH**attempt
            got, left = self._damped(averages, waiting, now, singular), []
            for i, some in enumerate(waiting):
                both = slice(2 * i, 2 * i + 2)
                if any(got.failed[both]):
                    left.append(some)
                    continue
                self._accept(some, self._form(*got.matrices[both]))
                if attempt:
                    self._note(some[0], f"its damping was raised to {now:.3g} to invert it")
                for name, rank in zip(("output", "input"), got.ranks[both], strict=True):
                    if rank is not None:
                        least = f"rank {int(rank.min())}, inverted on its range"
                        self._note(some[0], f"its {name} side is singular: {least}")
            attempt += all(len(some) == 1 for some in left)  # first find out which of them it is
            waiting = [(key,) for some in left for key in some]
        for (key,) in waiting:
            self._note(key, f"its sides could not be inverted; {self._kept(key)}")

    def _damped(
        self, averages: Averages, blocks: Sequence[Blocks], value: float, singular: bool
    ) -> FactorInverses:
        """Return the inverses of damped left and right sides, one kind of blocks after another."""
        every: list[Tensor] = []
        scales, added = [], []
        for some in blocks:
            key, average = some[0], stacked([averages[k] for k in some])
            # divided where it is copied to be inverted
            pair, scale = _pair(key, average)
            rows, columns = (
                factor_matrix.diagonal(factor).mean(-1) / scale
                for factor in (pair.output_factor, pair.input_factor)
            )
            every += [pair.output_factor, pair.input_factor]
            scales += [scale, scale]
            added += self.damping.added((rows, columns), self._reference(key, averages), value)
        factors = self.rule.needs == "factors"
        return invert_factors(
            every, scales=scales, shifts=added, singular=singular, as_cholesky=factors
        )

    def _decompose(self, averages: Averages, keys: Sequence[BlockKey], value: float) -> None:
        """Find the eigenbases of blocks; corrected eigenvalues are carried to the new ones."""
        for key in keys:
            pair: Any = block_of(key, averages[key].corrected())
            try:
                rows, u = factor_matrix.eigendecompose(pair.output_factor)
                columns, w = factor_matrix.eigendecompose(pair.input_factor)
            except torch.linalg.LinAlgError:
                self._note(key, "its eigenvalues were not found; the last good inverse stays")
                continue
            values = rows[..., None] * columns[:, None]
            if self._corrects(key):
                held, own = self.inverses[key], get_entries(self.spectra[key].value[SPECTRUM])
                turned = EigenBlock(_overlap(u, held.left), _overlap(w, held.right), own)
                own.copy_(turned.diagonal())
                values = self.spectra[key].corrected()[SPECTRUM]
            self._accept((key,), Inverse(u, w, _reciprocal(values, value)))

    def _root(self, averages: Averages, keys: Sequence[BlockKey], value: float) -> None:
        """Find the inverse roots of input sides; more bits and more damping where that fails."""
        waiting = self._alike(averages, keys, apart=False)
        for now, fine in ((value, value < _COARSE), (value, True), (10 * value, True)):
            left = []
            for some in waiting:
                pair, _ = _pair(some[0], stacked([averages[k] for k in some]))
                roots, good = inverse_root(pair.input_factor, now, fine=fine)
                if bool(good.all()):
                    self._put(some, {"right": roots})
                else:
                    left += some
            waiting = [(key,) for key in left]
        for (key,) in waiting:
            self._note(key, f"its root did not converge; {self._kept(key)}")

    def _turn(self, averages: Averages, keys: Sequence[BlockKey], value: float) -> None:
        """Turn eigenbases after their sides; the first by `eigh`."""
        for ready in (True, False):
            own = [k for k in keys if (k in self.ready) is ready]
            for some in self._alike(averages, own, apart=False):
                pair, _ = _pair(some[0], stacked([averages[k] for k in some]))
                new = {}
                for side, matrix in (("left", pair.output_factor), ("right", pair.input_factor)):
                    if factor_matrix.is_diagonal(matrix):
                        continue
                    if not ready:
                        new[side] = eigenbasis(matrix)
                        continue
                    held = torch.cat([getattr(self.inverses[k], side) for k in some])
                    new[side] = turn_basis(matrix, held.to(matrix.dtype))
                if not all(bool(torch.isfinite(t).all()) for t in new.values()):
                    for key in some:
                        self._note(key, f"its eigenbases were not found; {self._kept(key)}")
                    continue
                self._put(some, new)

    def bases(self, keys: Iterable[BlockKey]) -> dict[BlockKey, list[Any]]:
        """Return copies of the bases that a renewal may turn, of blocks that are held here."""
        held = self.ready - self.absent if self.rule.needs == "basis" else ()
        some = {k: (self.inverses[k].left, self.inverses[k].right) for k in keys if k in held}
        return {k: [None if t is None else t.clone() for t in both] for k, both in some.items()}

    def turn_moments(self, before: Mapping[BlockKey, list[Any]]) -> None:
        """Turn moments with their bases, which were E `before` and are E' now: T = EᵀE'.

        Coordinates g' = Tᵀg have the second moments (T ∘ T)ᵀv, if those of g are uncorrelated.
        """
        kinds: dict[Any, list[BlockKey]] = {}
        for key in [k for k in before if k not in self.notes]:  # others have not turned
            kinds.setdefault(self.inverses[key].kind, []).append(key)
        for some in kinds.values():
            held: list[Any] = [self.inverses[k] for k in some]
            first, second = (torch.cat([m.tensors()[n] for m in held]) for n in MOMENTS[:2])
            turns, olds = [], zip(*(before[k] for k in some), strict=True)
            for old, new in zip(
                olds, ([m.left for m in held], [m.right for m in held]), strict=True
            ):
                both = [torch.cat(t).to(first.dtype) for t in (old, new) if t[0] is not None]
                turns.append(product(both[0].mT, both[1]) if both else None)
            squares = (None if t is None else t.square() for t in turns)
            moments = rotate(first, *turns), rotate(second, *squares).clamp_(min=0)
            self._put(tuple(some), dict(zip(MOMENTS, moments, strict=False)))

    def _put(self, some: Blocks, new: Mapping[str, Tensor]) -> None:
        """Copy new tensors of blocks of one kind to the memory of the old ones."""
        counts = [self.shapes[k][0] for k in some]
        for name, t in new.items():
            torch._foreach_copy_([getattr(self.inverses[k], name) for k in some], t.split(counts))
        if not self.ready.issuperset(some):
            self.ready.update(some)
            self._groups = None

    def _kept(self, key: BlockKey) -> str:
        return "the last good one stays" if key in self.ready else "it has none yet"

    def _corrects(self, key: BlockKey) -> bool:
        return key in self.spectra and key in self.ready and bool(self.spectra[key].mass > 0)

    def correct(self, found: Mapping[BlockKey, FactorMatrix], ema: float, value: float) -> None:
        """Take up second moments of the gradient in the eigenbases."""
        ema_update([(self.spectra[k], {SPECTRUM: t}) for k, t in found.items()], ema)
        for key in found:
            scale = self.inverses[key].scale
            assert scale is not None
            scale.copy_(_reciprocal(self.spectra[key].corrected()[SPECTRUM], value))

    def block(self, key: BlockKey, average: Average) -> GramBlock:
        """Return the Gram of a block without damping, with corrected eigenvalues if known."""
        if not self._corrects(key):
            return block_of(key, average.corrected())
        held = self.inverses[key]
        left, right = (None if t is None else t.clone() for t in (held.left, held.right))
        return EigenBlock(left, right, self.spectra[key].corrected()[SPECTRUM])

    def product(self, key: BlockKey, average: Average, v: Tensor, corner: float) -> Tensor:
        """Return vᵀF̂v of a block, v in its coordinates.

        `corner` is the second moment of the bias's input: 1, or this process's share of it.
        """
        if self._corrects(key):
            return (v * self.block(key, average).matvec(v)).sum()
        block, scale = undivided(key, average, corner)
        return (v * block.matvec(v)).sum() / scale ** (1 + key.kronecker)

    def _accept(self, keys: Blocks, new: Inverse) -> None:
        """Copy new inverses to the memory of the old ones; factors serve one step and stay."""
        if not new.factors and all(self.inverses[k].kind == new.kind for k in keys):
            self._put(keys, new.tensors())
            return
        # perhaps another precision, or a dense reference beside a diagonal
        counts = [self.shapes[k][0] for k in keys]
        parts = {name: t.split(counts) for name, t in new.tensors().items()}
        for i, key in enumerate(keys):
            own = {name: some[i] for name, some in parts.items()}
            self.inverses[key], self._groups = replace(new, **own), None
        self.ready.update(keys)

    def _note(self, key: BlockKey, text: str) -> None:
        said = self.notes.get(key)
        if said is None or text not in said:
            self.notes[key] = text if said is None else f"{said}; {text}"

    # --- directions ---------------------------------------------------------------------------

    def directions(
        self, gradients: Mapping[str, Tensor], good: Tensor | None = None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the rule's directions by name, and the few tensors in which they are stacked.

        A parameter without a block has none. Where the partner in a block has no gradient, it
        counts as zero, and has a direction. Where `good` is False, moments stay as they are.
        """
        found: dict[str, Tensor] = {}
        stacks: list[Tensor] = []
        for group in self._groups or ():
            if not gradients.keys().isdisjoint(group.names):
                own, some = group.directions(self.rule, gradients, good)
                found |= own
                stacks += some
        return found, stacks

    @property
    def stacked(self) -> bool:
        """Whether inverses of one kind lie in one piece of memory."""
        return self._groups is not None

    def stack(self, like: Mapping[str, Tensor]) -> None:
        """Bring inverses of one kind, for parameters of one shape, into one piece of memory."""
        kinds: dict[Any, dict[BlockKey, Inverse]] = {}
        for key, inverse in self.inverses.items():
            if key in self.ready and key not in self.absent:
                shapes = tuple(like[n].shape for n in key.names) if key.kronecker else ()
                shape = self.shapes[key][1:]
                kind = (shape, key.kind, key.bias, key.turned, len(key.names), shapes)
                kind += tuple(inverse.kind)
                kinds.setdefault(kind, {})[key] = inverse
        self._groups = [_Group(some, kind[0], like) for kind, some in kinds.items()]


class _Group:
    """Inverses of one kind for parameters `like` these, whose tensors become views of one stack.

    `shape` is that of the blocks' coordinates, without the number of groups.
    """

    def __init__(
        self, members: Mapping[BlockKey, Inverse], shape: Sequence[int], like: Mapping[str, Tensor]
    ) -> None:
        keys, every = list(members), list(members.values())
        self.names = [n for key in keys for n in key.names]
        #: names by role: weights and biases, or gains and shifts
        self._roles = [list(names) for names in zip(*(key.names for key in keys), strict=True)]
        self._units, self._like, self._members = not keys[0].kronecker, like, members
        self._rows, self._columns = shape[0], shape[-1] - keys[0].joint
        self._turned = keys[0].turned
        self._stack = every[0]
        if len(every) > 1:
            stacked = {n: torch.cat([getattr(m, n) for m in every]) for n in every[0].tensors()}
            for name, stack in stacked.items():
                counts = [len(getattr(m, name)) for m in every]
                for member, part in zip(every, stack.split(counts), strict=True):
                    setattr(member, name, part)
            self._stack = replace(every[0], **stacked)
        self._dtype = self._stack.dtype

    def directions(
        self, rule: Rule, gradients: Mapping[str, Tensor], good: Tensor | None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the directions of all members, by name in the parameters' shapes, and stacked."""
        kept = self._moments_without(gradients) if rule.moments else []
        given = [[self._gradient(n, gradients) for n in names] for names in self._roles]
        if self._units:
            found = rule.directions(self._stack, [torch.stack([torch.cat(g) for g in given])], good)
            like = [(n, self._like[n]) for n in chain(*self._roles)]
            flat = found[0].flatten().split([p.numel() for _, p in like])
            parts = zip(like, flat, strict=True)
            return {n: t if p.ndim == 1 else t.view(p.shape) for (n, p), t in parts}, found
        widths = [(self._rows, self._columns), (self._rows,)]
        if self._turned:
            widths[0] = (self._columns, self._rows)
        stacks = [
            (g[0] if len(g) == 1 else torch.stack(g)).reshape(-1, *width)
            for g, width in zip(given, widths, strict=False)
        ]
        if self._turned:
            stacks[0] = stacks[0].mT.contiguous()
        out: dict[str, Tensor] = {}
        found = rule.directions(self._stack, stacks, good)
        for moment, before in kept:
            moment.copy_(before)
        weights = [found[0].mT, *found[1:]] if self._turned else found
        for names, stack in zip(self._roles, weights, strict=True):
            each = stack.reshape(len(names), *self._like[names[0]].shape).unbind()
            out |= zip(names, each, strict=True)
        return out, found

    def _moments_without(self, gradients: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the moments of members that have no gradient, each with a copy."""
        lacking = [m for k, m in self._members.items() if gradients.keys().isdisjoint(k.names)]
        held = [t for m in lacking for n, t in m.tensors().items() if n in MOMENTS]
        return [(t, t.clone()) for t in held]

    def _gradient(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter's gradient, flat for units; a missing one is zero."""
        g = gradients.get(name)
        if g is None:
            g = torch.zeros_like(self._like[name], dtype=self._dtype)
        elif g.dtype != self._dtype:
            g = g.to(self._dtype)
        return g.reshape(-1) if self._units and g.ndim != 1 else g


def _pair(key: BlockKey, average: Average) -> tuple[Pair, Tensor]:
    """Return the sides of a Kronecker block, and what both are yet to be divided by."""
    block, scale = undivided(key, average)
    assert isinstance(block, Pair)
    return block, scale


def placeholder(t: Tensor, device: torch.device | None = None) -> Tensor:
    """Return zeros of this shape that take no memory."""
    return torch.zeros((), dtype=t.dtype, device=device or t.device).expand(t.shape)


def _overlap(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """NewᵀOld of two bases; None is the identity, of a side that is a diagonal."""
    return None if new is None or old is None else new.mT @ old


def _reciprocal(values: Tensor, damping: float) -> Tensor:
    """1/(values + λ); without damping on the range only."""
    if damping == 0:
        keep = factor_matrix.is_above_round_off(values.flatten(1)).view_as(values)
        return torch.where(keep, 1 / values, 0.0)
    return 1 / (values + damping)
