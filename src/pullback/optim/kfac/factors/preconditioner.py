"""From averages to what gradients are multiplied by: blocks of one size together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....grams.kronecker import Block, Inverses, Pair, Rotated, Units, inverses, sides
from ....grams.kronecker.inverse import Inverse, aligned, roundable, rounded
from ....grams.kronecker.packed import Side, memory
from ..rules.natural import Rule
from .average import Average, block_of, ema_update, reference_of
from .damping import Damping
from .factor import SPECTRUM, BlockKey, Factors, block_shape

_GROWTH, _TRIES = 10.0, 8
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
        """A pickle does not keep that inverses are views of stacks."""
        return {**vars(self), "_groups": None}

    # --- memory -------------------------------------------------------------------------------

    def allocate(self, key: BlockKey, average: Average) -> None:
        """Make room for a block, which is not ready yet."""
        self.drop(key)
        self.inverses[key] = self._room(key, average.value)
        self._shapes[key] = shape = block_shape(key, average.value)
        if self.ekfac and key.kronecker:
            zero = average.mass.new_zeros
            self.spectra[key] = Average({SPECTRUM: zero(shape)}, zero(()))

    def _room(self, key: BlockKey, factors: Factors) -> Inverse:
        like = memory(next(iter(factors.values())))
        if not key.kronecker:
            return Inverse(torch.zeros_like(like))
        groups, rows, columns = block_shape(key, factors)
        dense = {f.side for f, t in factors.items() if len(t.shape) == 3}
        if self._rule.needs == "eigenbasis":
            left = like.new_zeros(groups, rows, rows) if "left" in dense else None
            right = like.new_zeros(groups, columns, columns) if "right" in dense else None
            return Inverse(left, right, like.new_zeros(groups, rows, columns))
        counts = {"left": rows, "right": columns}
        shapes = [(n, n) if side in dense else (n,) for side, n in counts.items()]
        left, right = (like.new_zeros(groups, *shape) for shape in shapes)
        return self._form(Inverse(left, right))

    def _form(self, inverse: Inverse) -> Inverse:
        """An inverse as it is held: factors, or sides filled up and perhaps in float16."""
        if self._rule.needs == "factors":
            return replace(inverse, factors=True)
        inverse = _filled(inverse)
        return rounded(inverse) if roundable(inverse) else inverse

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
        for some in self._portions([k for k in keys if k.kronecker]):
            found: dict[BlockKey, Inverse] = {}
            if self._rule.needs == "eigenbasis":
                for key in some:
                    pair = block_of(key, averages[key].corrected())
                    self._decompose(key, pair, value, found)
            else:
                self._invert(averages, some, value, found)
            self._accept(found)

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
            block, reference = (
                block_of(key, averages[key].corrected()),
                self._reference(key, averages),
            )
            assert isinstance(block, Units)
            block, shift = self._damping.units(block, reference, value)
            m = block.matrices
            alike.setdefault((shift, m.shape[1:], m.dtype, m.device), {})[key] = m
        found = {}
        for (shift, *_), some in alike.items():
            whole = Units(torch.cat(list(some.values()))).inverse(shift)
            parts = whole.split([len(m) for m in some.values()])
            for (key, m), part in zip(some.items(), parts, strict=True):
                found[key] = Inverse(part)
                if self._damping.referenced:
                    rank, size = round(float((m * part).sum())), m.shape[:2].numel()  # tr M M⁺
                    if rank < size:
                        self._note(
                            key, f"it is singular: rank {rank} of {size}, inverted on its range"
                        )
        return found

    def _reference(self, key: BlockKey, averages: Mapping[BlockKey, Average]) -> Any:
        """The block of long-run averages, where the damping needs one."""
        if not self._damping.referenced:
            return None
        given = self._damping.reference
        if given is not None and key not in given:
            self._note(key, "its reference is its own average: the one given lacks this block")
        return reference_of(key, averages[key], given)

    def _invert(
        self,
        averages: Mapping[BlockKey, Average],
        keys: Sequence[BlockKey],
        value: float,
        found: dict[BlockKey, Inverse],
    ) -> None:
        """Invert damped sides by Cholesky; more damping where that fails.

        Without damping, or with an invariant one, a singular side is inverted on its range.
        """
        waiting, singular = list(keys), value == 0 or self._damping.referenced
        for attempt in range(_TRIES):
            now = value * _GROWTH**attempt
            got, left = self._damped(averages, waiting, now, singular), []
            for i, key in enumerate(waiting):
                both = slice(2 * i, 2 * i + 2)
                if any(got.failed[both]):
                    left.append(key)
                    continue
                found[key] = self._form(Inverse(got.sides[2 * i], got.sides[2 * i + 1]))
                if attempt:
                    self._note(key, f"its damping was raised to {now:.3g} to invert it")
                for name, rank in zip(("output", "input"), got.ranks[both], strict=True):
                    if rank is not None:
                        text = f"its {name} side is singular: rank {int(rank.min())}, inverted on"
                        self._note(key, f"{text} its range")
            waiting = left
            if not waiting or value == 0:
                break
        for key in waiting:
            kept = "the last good inverse stays" if key in self.ready else "it has none yet"
            self._note(key, f"its sides could not be inverted; {kept}")

    def _damped(
        self,
        averages: Mapping[BlockKey, Average],
        keys: Sequence[BlockKey],
        value: float,
        singular: bool,
    ) -> Inverses:
        """The inverses of left and right sides with what is added, one block after the other."""
        every: list[Tensor] = []
        scales, added = [], []
        for key in keys:
            average = averages[key]
            if len({factor.role for factor in average.value}) == 1:
                # divided where it is copied to be inverted
                pair, scale = block_of(key, average.value, average.mass), average.mass
            else:  # several roles, whose sum has a scale of its own
                pair, scale = block_of(key, average.corrected()), torch.ones_like(average.mass)
            assert isinstance(pair, Pair)
            both = pair.left, pair.right
            means: Any = tuple(sides.diagonal(side).mean(-1) / scale for side in both)
            every += both
            scales += [scale, scale]
            added += self._damping.added(means, self._reference(key, averages), value)
        if all(t.ndim == 1 for t in added):
            shifts = None if value == 0 else added
            factors = self._rule.needs == "factors"
            return inverses(every, scales=scales, shifts=shifts, singular=singular, factors=factors)
        triples = zip(every, scales, added, strict=True)
        return inverses([sides.add(s / c, t) for s, c, t in triples], singular=singular)

    def _decompose(
        self, key: BlockKey, pair: Block, value: float, found: dict[BlockKey, Inverse]
    ) -> None:
        """Find the eigenbases of a block; corrected eigenvalues follow to the new ones."""
        assert isinstance(pair, Pair)
        try:
            (rows, u), (columns, w) = sides.eigen(pair.left), sides.eigen(pair.right)
        except torch.linalg.LinAlgError:
            self._note(key, "its eigenvalues were not found; the last good inverse stays")
            return
        values = rows[..., None] * columns[:, None]
        spectrum = self.spectra.get(key)
        if spectrum is not None and key in self.ready and spectrum.started:
            held, own = self.inverses[key], memory(spectrum.value[SPECTRUM])
            turned = Rotated(_overlap(u, held.left), _overlap(w, held.right), own)
            own.copy_(turned.diagonal())
            values = spectrum.corrected()[SPECTRUM]
        found[key] = Inverse(u, w, reciprocal(values, value))

    def correct(self, found: Mapping[BlockKey, Side], ema: float, value: float) -> None:
        """Take up second moments of the gradient in the eigenbases."""
        ema_update([(self.spectra[k], {SPECTRUM: t}) for k, t in found.items()], ema)
        for key in found:
            scale = self.inverses[key].scale
            assert scale is not None
            scale.copy_(reciprocal(self.spectra[key].corrected()[SPECTRUM], value))

    def block(self, key: BlockKey, average: Average) -> Block:
        """The Gram of a block without damping, with corrected eigenvalues where they are known."""
        spectrum = self.spectra.get(key)
        if spectrum is None or key not in self.ready or not spectrum.started:
            return block_of(key, average.corrected())
        held = self.inverses[key]
        left, right = (None if t is None else t.clone() for t in (held.left, held.right))
        return Rotated(left, right, spectrum.corrected()[SPECTRUM])

    def _accept(self, found: Mapping[BlockKey, Inverse]) -> None:
        """Copy new inverses to the memory of the old ones."""
        for key, new in found.items():
            held = self.inverses[key]
            if held.kind == new.kind:
                for name, t in new.tensors().items():
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

    def directions(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the rule's directions; the gradient itself where a parameter has no block.

        Args:
            gradients: by name; where the partner in a block has none, it counts as zero.

        Returns:
            The directions by name, and the same in few tensors, in which they are stacked.
        """
        found: dict[str, Tensor] = {}
        stacks: list[Tensor] = []
        for group in self._groups or ():
            if not gradients.keys().isdisjoint(group.names):
                own, some = group.directions(self._rule, gradients)
                found |= own
                stacks += some
        stacks += [g for n, g in gradients.items() if n not in found]
        return {n: found.get(n, g) for n, g in gradients.items()}, stacks

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
    """Inverses of one kind for parameters of one shape, stacked.

    The members' tensors become views of the stack.

    Args:
        members: the inverses, by block.
        shape: of the blocks' coordinates, without the number of groups.
        like: the parameters, by name.
    """

    def __init__(
        self,
        members: Mapping[BlockKey, Inverse],
        shape: tuple[int, ...],
        like: Mapping[str, Tensor],
    ) -> None:
        keys, every = list(members), list(members.values())
        self.names = [n for key in keys for n in key.names]
        #: names and shapes by role: weights and biases, or gains and shifts
        self._roles = [[key.names[i] for key in keys] for i in range(len(keys[0].names))]
        self._shapes = [like[names[0]].shape for names in self._roles]
        self._units, self._like = not keys[0].kronecker, like
        self._rows, self._columns = shape[0], shape[-1] - keys[0].joint
        self._sizes = [like[n].numel() for n in self._roles[0]]
        self._stack = every[0]
        if len(every) > 1:
            stacked = {n: torch.cat([getattr(m, n) for m in every]) for n in every[0].tensors()}
            for name, whole in stacked.items():
                counts = [len(getattr(m, name)) for m in every]
                for member, part in zip(every, whole.split(counts), strict=True):
                    setattr(member, name, part)
            self._stack = replace(every[0], **stacked)
        self._dtype = self._stack.dtype

    def directions(
        self, rule: Rule, gradients: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The directions of all members, by name in the parameters' shapes, and stacked."""
        given = [self._gathered(names, gradients) for names in self._roles]
        if self._units:
            found = rule.directions(self._stack, [torch.stack([torch.cat(g) for g in given])])
            parts = [whole.split(self._sizes) for whole in found[0].unbind()]
            flat = zip(self._roles, parts, strict=True)
            pairs = [pair for names, own in flat for pair in zip(names, own, strict=True)]
            return {n: part.view(self._like[n].shape) for n, part in pairs}, found
        widths = [(self._rows, self._columns), (self._rows,)]
        stacks = [
            (g[0] if len(g) == 1 else torch.stack(g)).reshape(-1, *width)
            for g, width in zip(given, widths, strict=False)
        ]
        out: dict[str, Tensor] = {}
        found = rule.directions(self._stack, stacks)
        for names, shape, stack in zip(self._roles, self._shapes, found, strict=True):
            out |= zip(names, stack.reshape(len(names), *shape).unbind(), strict=True)
        return out, found

    def _gathered(self, names: Sequence[str], gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """The gradients of one role, flat for units; a missing one is zero."""
        out = []
        for name in names:
            g = gradients.get(name)
            if g is None:
                g = torch.zeros_like(self._like[name], dtype=self._dtype)
            elif g.dtype != self._dtype:
                g = g.to(self._dtype)
            out.append(g.reshape(-1) if self._units and g.ndim != 1 else g)
        return out


def _filled(inverse: Inverse) -> Inverse:
    """The same with a right side that is filled up with zeros."""
    right = inverse.right
    if right is None or inverse.scale is not None:
        return inverse
    more = aligned(right.shape[-1]) - right.shape[-1]
    return Inverse(inverse.left, F.pad(right, (0, more, 0, more) if right.ndim == 3 else (0, more)))


def _overlap(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """NewᵀOld of two bases; None is the identity, of a side that is a diagonal."""
    return None if new is None or old is None else new.mT @ old


def reciprocal(values: Tensor, damping: float) -> Tensor:
    """1/(values + λ); without damping on the range only."""
    if damping == 0:
        keep = sides.cut(values.flatten(1)).view_as(values)
        return torch.where(keep, 1 / values, 0.0)
    return 1 / (values + damping)
