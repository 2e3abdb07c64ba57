"""From averages to what gradients are multiplied by: blocks of one size together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....grams.kronecker import Block, Inverses, Rotated, Units, inverses, sides
from ....grams.kronecker.blocks import rotated
from ....grams.kronecker.inverse import (
    Inverse,
    aligned,
    half_sides,
    roundable,
    rounded,
    to_half,
)
from ....grams.kronecker.packed import Side, memory, whole
from ....grams.kronecker.roots import eigenbasis, inverse_root, turn_basis
from ..rules.rule import Rule
from .average import Average, block_of, ema_update
from .damping import Damping
from .factor import SPECTRUM, BlockKey, block_shape

_GROWTH, _TRIES = 10.0, 8
_COARSE = 0.05  # the least damping with which roots are first tried with few bits
_PORTION = 2**27  # entries of matrices that are inverted at once


class Preconditioner:
    """Prepared factors of all blocks, renewed every so often, and applied by a rule.

    Args:
        rule: how gradients become directions, and what it needs.
        damping: what is added before inverting.
        ekfac: whether eigenvalues are corrected by second moments of the gradient.
    """

    def __init__(self, rule: Rule, damping: Damping, *, ekfac: bool) -> None:
        self._rule, self._damping, self.ekfac = rule, damping, ekfac
        self.inverses: dict[BlockKey, Inverse] = {}
        #: shapes of the blocks' coordinates; inverses may be filled up
        self._shapes: dict[BlockKey, tuple[int, ...]] = {}
        #: blocks whose inverse has been computed
        self.ready: set[BlockKey] = set()
        #: corrected eigenvalues, where they are wanted
        self.spectra: dict[BlockKey, Average] = {}
        #: what went wrong or was left out in the last renewal, by block
        self.notes: dict[BlockKey, str] = {}
        self._groups: list[_Group] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the stacks: in a pickle inverses are no views of them."""
        return {**vars(self), "_groups": None}

    # --- memory -------------------------------------------------------------------------------

    def allocate(self, key: BlockKey, average: Average) -> None:
        """Make room for a block, which is not ready yet."""
        self.drop(key)
        factors, zeros = average.value, average.mass.new_zeros
        self._shapes[key] = shape = block_shape(key, factors)
        if not key.kronecker:
            self.inverses[key] = Inverse(zeros(*shape, shape[-1]))
            return
        if self.ekfac:
            self.spectra[key] = Average({SPECTRUM: zeros(shape)}, zeros(()))
        groups, rows, columns = shape
        sizes = {"left": rows, "right": columns}
        dense = {f.side for f, t in factors.items() if len(t.shape) == 3}
        matrices = {side: zeros(groups, n, n) for side, n in sizes.items() if side in dense}
        if self._rule.moments:
            self.inverses[key] = self._with_moments(matrices, shape, average.mass)
        elif self._rule.needs == "eigenbasis":
            own = matrices.get("left"), matrices.get("right"), zeros(shape)
            self.inverses[key] = Inverse(*own)
        else:
            both = [matrices.get(side, zeros(groups, n)) for side, n in sizes.items()]
            self.inverses[key] = self._form(*both)

    def _form(self, left: Tensor, right: Tensor) -> Inverse:
        """Return inverse sides as they are held: padded and perhaps in float16, or factors."""
        if self._rule.needs == "factors":
            return Inverse(left, right, factors=True)
        more = aligned(right.shape[-1]) - right.shape[-1]
        inverse = Inverse(left, F.pad(right, (0, more) * (right.ndim - 1)))
        return rounded(inverse) if roundable(inverse) else inverse

    def _with_moments(
        self, matrices: Mapping[str, Tensor], shape: Sequence[int], like: Tensor
    ) -> Inverse:
        """Return sides of norm 1, and moments of the gradient."""
        half = {side: m.to(half_sides(like)) for side, m in matrices.items()}
        own = {"steps": like.new_zeros(shape[0])}
        for name, of in self._rule.moments.items():
            own[name] = like.new_zeros(shape if of == "entries" else (*shape[:-1], 1))
        if self._rule.needs == "root":
            return Inverse(None, half.get("right", like.new_zeros(shape[0], shape[-1])), **own)
        return Inverse(half.get("left"), half.get("right"), **own)

    def drop(self, key: BlockKey) -> None:
        """Forget a block."""
        for held in (self.inverses, self.spectra, self.notes):
            held.pop(key, None)
        self.ready.discard(key)
        self._groups = None

    def regroup(self) -> None:
        """Build stacks again when they are next needed: inverses were replaced."""
        self._groups = None

    # --- renewal ------------------------------------------------------------------------------

    def renew(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], value: float
    ) -> None:
        """Prepare these blocks anew with λ = `value`; where one fails, the last good one stays."""
        for key in keys:
            self.notes.pop(key, None)
        self._accept(self._units(averages, [k for k in keys if not k.kronecker], value))
        ways = {"eigenbasis": self._decompose, "basis": self._turn, "root": self._root}
        prepare = ways.get(self._rule.needs, self._invert)
        for some in self._portions([k for k in keys if k.kronecker]):
            self._accept(prepare(averages, some, value))

    def _portions(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """Blocks that are inverted together, large ones first: copies of all take much memory."""
        out: list[list[BlockKey]] = []
        room = 0
        for key in sorted(keys, key=lambda key: -sum(n * n for n in self._shapes[key][1:])):
            groups, *sizes = self._shapes[key]
            entries = groups * sum(n * n for n in sizes)
            if not out or entries > room:
                out.append([])
                room = _PORTION
            out[-1].append(key)
            room -= entries
        return out

    def _units(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], value: float
    ) -> dict[BlockKey, Inverse]:
        """Invert gains, shifts and single entries, all of a size at once."""
        alike: dict[Any, dict[BlockKey, Tensor]] = {}
        for key in keys:
            block: Any = block_of(key, averages[key].corrected())
            block, shift = self._damping.units(block, self._reference(key, averages), value)
            m = block.matrices
            alike.setdefault((shift, m.shape[1:], m.dtype, m.device), {})[key] = m
        found = {}
        for (shift, *_), some in alike.items():
            inverted = Units(torch.cat(list(some.values()))).inverse(shift)
            parts = inverted.split([len(m) for m in some.values()])
            found |= {key: Inverse(part) for key, part in zip(some, parts, strict=True)}
            for key, m in some.items() if self._damping.referenced else ():
                rank, size = round(float((m * found[key].left).sum())), m[..., 0].numel()  # tr M M⁺
                if rank < size:
                    self._note(key, f"it is singular: rank {rank} of {size}, inverted on its range")
        return found

    def _reference(self, key: BlockKey, averages: Mapping[BlockKey, Average]) -> Any:
        """Return the block of long-run averages, where the damping needs one."""
        if not self._damping.referenced:
            return None
        average, given = averages[key], self._damping.reference
        if given is not None and key in given:
            return block_of(key, {f: whole(t).to(average.mass) for f, t in given[key].items()})
        if given is not None:
            self._note(key, "its reference is its own average: the one given lacks this block")
        return block_of(key, average.mean or average.corrected())

    def _invert(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], value: float
    ) -> dict[BlockKey, Inverse]:
        """Invert damped sides by Cholesky; more damping where that fails.

        Without damping, or with an invariant one, a singular side is inverted on its range.
        """
        found: dict[BlockKey, Inverse] = {}
        waiting, singular = list(keys), value == 0 or self._damping.referenced
        for attempt in range(_TRIES):
            now = value * _GROWTH**attempt
            got, left = self._damped(averages, waiting, now, singular), []
            for i, key in enumerate(waiting):
                both = slice(2 * i, 2 * i + 2)
                if any(got.failed[both]):
                    left.append(key)
                    continue
                found[key] = self._form(*got.sides[both])
                if attempt:
                    self._note(key, f"its damping was raised to {now:.3g} to invert it")
                for name, rank in zip(("output", "input"), got.ranks[both], strict=True):
                    if rank is not None:
                        least = f"rank {int(rank.min())}, inverted on its range"
                        self._note(key, f"its {name} side is singular: {least}")
            waiting = left
            if not waiting or value == 0:
                break
        for key in waiting:
            kept = "the last good inverse stays" if key in self.ready else "it has none yet"
            self._note(key, f"its sides could not be inverted; {kept}")
        return found

    def _damped(
        self,
        averages: Mapping[BlockKey, Average],
        keys: Sequence[BlockKey],
        value: float,
        singular: bool,
    ) -> Inverses:
        """Return the inverses of damped left and right sides, one block after the other."""
        every: list[Tensor] = []
        scales, added = [], []
        for key in keys:
            average, scale = averages[key], averages[key].mass
            if len({factor.role for factor in average.value}) == 1:
                # divided where it is copied to be inverted
                pair: Any = block_of(key, average.value, corner=scale)
            else:  # several roles, whose sum has a scale of its own
                pair, scale = block_of(key, average.corrected()), torch.ones_like(scale)
            means: Any = [sides.diagonal(s).mean(-1) / scale for s in (pair.left, pair.right)]
            every += [pair.left, pair.right]
            scales += [scale, scale]
            added += self._damping.added(tuple(means), self._reference(key, averages), value)
        factors = self._rule.needs == "factors"
        return inverses(every, scales=scales, shifts=added, singular=singular, factors=factors)

    def _decompose(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], value: float
    ) -> dict[BlockKey, Inverse]:
        """Find the eigenbases of blocks; corrected eigenvalues are carried to the new ones."""
        found: dict[BlockKey, Inverse] = {}
        for key in keys:
            pair: Any = block_of(key, averages[key].corrected())
            try:
                (rows, u), (columns, w) = sides.eigen(pair.left), sides.eigen(pair.right)
            except torch.linalg.LinAlgError:
                self._note(key, "its eigenvalues were not found; the last good inverse stays")
                continue
            values = rows[..., None] * columns[:, None]
            if self._corrects(key):
                held, own = self.inverses[key], memory(self.spectra[key].value[SPECTRUM])
                turned = Rotated(_overlap(u, held.left), _overlap(w, held.right), own)
                own.copy_(turned.diagonal())
                values = self.spectra[key].corrected()[SPECTRUM]
            found[key] = Inverse(u, w, _reciprocal(values, value))
        return found

    def _root(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], value: float
    ) -> dict[BlockKey, Inverse]:
        """Find the inverse roots of input sides; more bits and more damping where that fails."""
        found: dict[BlockKey, Inverse] = {}
        waiting, tries = list(keys), [(value, value < _COARSE), (value, True), (10 * value, True)]
        for now, fine in tries:
            for some, stack in self._stacks(averages, waiting, "right"):
                roots, good = inverse_root(stack, now, fine=fine)
                for key, root, flag in self._parts(some, roots, good.tolist()):
                    right = self.inverses[key].right
                    assert right is not None
                    if flag:
                        found[key] = replace(self.inverses[key], right=root.to(right.dtype))
            waiting = [key for key in waiting if key not in found]
            if not waiting:
                return found
        for key in waiting:
            self._note(key, f"its root did not converge; {self._kept(key)}")
        return found

    def _turn(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], value: float
    ) -> dict[BlockKey, Inverse]:
        """Turn eigenbases after their sides, and first moments with them; the first by `eigh`."""
        bases: dict[BlockKey, dict[str, Tensor]] = {key: {} for key in keys}
        turns: dict[BlockKey, dict[str, Tensor]] = {key: {} for key in keys}
        failed: set[BlockKey] = set()
        for side, ready in product(("left", "right"), (True, False)):
            own = [k for k in keys if (k in self.ready) is ready]
            for some, stack in self._stacks(averages, own, side):
                if sides.is_diagonal(stack):
                    continue
                if ready:
                    held = torch.cat([getattr(self.inverses[k], side) for k in some])
                    new, turn = turn_basis(stack, held.to(stack.dtype))
                else:
                    new = turn = eigenbasis(stack)
                good = torch.isfinite(new).flatten(1).all(-1).tolist()
                for key, basis, fine in self._parts(some, new, good):
                    bases[key][side] = basis.to(getattr(self.inverses[key], side).dtype)
                    failed |= set() if fine else {key}
                if ready:
                    for key, part, _ in self._parts(some, turn, good):
                        turns[key][side] = part
        for key in failed:
            self._note(key, f"its eigenbases were not found; {self._kept(key)}")
        good = [k for k in keys if k not in failed]
        moments = self._turn_moments({k: turns[k] for k in good if k in self.ready})
        return {k: replace(self.inverses[k], **bases[k], **moments.get(k, {})) for k in good}

    def _turn_moments(
        self, turns: Mapping[BlockKey, Mapping[str, Tensor]]
    ) -> dict[BlockKey, dict[str, Tensor]]:
        """Return moments in new bases, those of a shape together.

        First moments are QᵀMP, and second ones those of uncorrelated entries, (Q∘Q)ᵀV(P∘P).
        """
        found: dict[BlockKey, dict[str, Tensor]] = {key: {} for key in turns}
        kinds: dict[Any, list[BlockKey]] = {}
        for key, own in turns.items():
            moment: Any = self.inverses[key].first
            kinds.setdefault((*own, moment.shape[1:], moment.dtype, moment.device), []).append(key)
        for keys in kinds.values():
            by: list[Any] = [
                torch.cat([turns[k][side] for k in keys]) if side in turns[keys[0]] else None
                for side in ("left", "right")
            ]
            for name in ("first", "second"):
                held = torch.cat([self.inverses[k].tensors()[name] for k in keys])
                both = [None if q is None else q.to(half_sides(held)) for q in by]
                x, scale = to_half(held, *both)
                x = rotated(both[0], x, both[1]).to(held.dtype)
                x = x if scale is None else x * scale
                for key, part in zip(keys, x.split([self._shapes[k][0] for k in keys]), strict=True):
                    found[key][name] = part
                by = [None if q is None else q.square() for q in by]
        return found

    def _stacks(
        self, averages: Mapping[BlockKey, Average], keys: Sequence[BlockKey], side: str
    ) -> Iterator[tuple[list[BlockKey], Tensor]]:
        """Yield blocks whose sides have one shape, and these as one stack."""
        kinds: dict[Any, dict[BlockKey, Tensor]] = {}
        for key in keys:
            average = averages[key]
            if len({factor.role for factor in average.value}) == 1:  # up to a factor
                pair: Any = block_of(key, average.value)
            else:
                pair = block_of(key, average.corrected())
            own = getattr(pair, side)
            kinds.setdefault((own.shape[1:], own.dtype, own.device), {})[key] = own
        for some in kinds.values():
            yield list(some), torch.cat(list(some.values()))

    def _parts(
        self, keys: Sequence[BlockKey], stack: Tensor, good: Sequence[bool]
    ) -> Iterator[tuple[BlockKey, Tensor, bool]]:
        """Yield each block's part of a stack, and whether all of it is good."""
        counts, flags = [self._shapes[k][0] for k in keys], iter(good)
        for key, part in zip(keys, stack.split(counts), strict=True):
            yield key, part, all([next(flags) for _ in range(len(part))])

    def _kept(self, key: BlockKey) -> str:
        return "the last good one stays" if key in self.ready else "it has none yet"

    def _corrects(self, key: BlockKey) -> bool:
        """Whether corrected eigenvalues of a block are known."""
        return key in self.spectra and key in self.ready and self.spectra[key].started

    def correct(self, found: Mapping[BlockKey, Side], ema: float, value: float) -> None:
        """Take up second moments of the gradient in the eigenbases."""
        ema_update([(self.spectra[k], {SPECTRUM: t}) for k, t in found.items()], ema)
        for key in found:
            scale = self.inverses[key].scale
            assert scale is not None
            scale.copy_(_reciprocal(self.spectra[key].corrected()[SPECTRUM], value))

    def block(self, key: BlockKey, average: Average) -> Block:
        """Return the Gram of a block without damping, with corrected eigenvalues if known."""
        if not self._corrects(key):
            return block_of(key, average.corrected())
        held = self.inverses[key]
        left, right = (None if t is None else t.clone() for t in (held.left, held.right))
        return Rotated(left, right, self.spectra[key].corrected()[SPECTRUM])

    def _accept(self, found: Mapping[BlockKey, Inverse]) -> None:
        """Copy new inverses to the memory of the old ones."""
        for key, new in found.items():
            held = self.inverses[key]
            if held.kind == new.kind:
                for name, t in new.tensors().items():
                    if t is not getattr(held, name):
                        getattr(held, name).copy_(t)
            else:  # another precision, or a dense reference beside a diagonal
                self.inverses[key], self._groups = new, None
            if key not in self.ready:
                self.ready.add(key)
                self._groups = None

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
        counts as zero. Where the flag `good` is False, moments stay as they are.
        """
        found: dict[str, Tensor] = {}
        stacks: list[Tensor] = []
        for group in self._groups or ():
            if not gradients.keys().isdisjoint(group.names):
                own, some = group.directions(self._rule, gradients, good)
                found |= own
                stacks += some
        return {n: found[n] for n in gradients if n in found}, stacks

    @property
    def stacked(self) -> bool:
        """Whether inverses of one kind lie in one piece of memory."""
        return self._groups is not None

    def stack(self, like: Mapping[str, Tensor]) -> None:
        """Bring inverses of one kind, for parameters of one shape, into one piece of memory."""
        kinds: dict[Any, dict[BlockKey, Inverse]] = {}
        for key, inverse in self.inverses.items():
            if key in self.ready:
                shapes = tuple(like[n].shape for n in key.names) if key.kronecker else ()
                shape = self._shapes[key][1:]
                kind = (shape, key.kind, key.bias, len(key.names), shapes, *inverse.kind)
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
        self._units, self._like = not keys[0].kronecker, like
        self._rows, self._columns = shape[0], shape[-1] - keys[0].joint
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
        given = [[self._gradient(n, gradients) for n in names] for names in self._roles]
        if self._units:
            found = rule.directions(
                self._stack, [torch.stack([torch.cat(g) for g in given])], good
            )
            flat = found[0].flatten().split([self._like[n].numel() for n in chain(*self._roles)])
            pairs = zip(chain(*self._roles), flat, strict=True)
            return {n: part.view(self._like[n].shape) for n, part in pairs}, found
        widths = [(self._rows, self._columns), (self._rows,)]
        stacks = [
            (g[0] if len(g) == 1 else torch.stack(g)).reshape(-1, *width)
            for g, width in zip(given, widths, strict=False)
        ]
        out: dict[str, Tensor] = {}
        found = rule.directions(self._stack, stacks, good)
        for names, stack in zip(self._roles, found, strict=True):
            each = stack.reshape(len(names), *self._like[names[0]].shape).unbind()
            out |= zip(names, each, strict=True)
        return out, found

    def _gradient(self, name: str, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter's gradient, flat for units; a missing one is zero."""
        g = gradients.get(name)
        if g is None:
            g = torch.zeros_like(self._like[name], dtype=self._dtype)
        elif g.dtype != self._dtype:
            g = g.to(self._dtype)
        return g.reshape(-1) if self._units and g.ndim != 1 else g


def _overlap(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """NewᵀOld of two bases; None is the identity, of a side that is a diagonal."""
    return None if new is None or old is None else new.mT @ old


def _reciprocal(values: Tensor, damping: float) -> Tensor:
    """1/(values + λ); without damping on the range only."""
    if damping == 0:
        keep = sides.cut(values.flatten(1)).view_as(values)
        return torch.where(keep, 1 / values, 0.0)
    return 1 / (values + damping)
