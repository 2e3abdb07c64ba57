"""One covector through a recorded forward pass: which block a parameter gets, and its sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...._core.space import compute_dtype
from ....maps.layers.correlated import rounds_apart
from ....maps.layers.moments import Sharing
from ....maps.record import Entry
from ...checks import refuse_sparse
from ..blocks.inverse import Inverse
from .aims import Aim, aims, basis_by
from .aside import Aside
from .coupling import apart
from .descent import Descent
from .draws import Draws
from .graph import last, pulled, refuse_reentrant
from .known import Changed, Known, NotFinite, norms, settled
from .pending import Root
from .plan import Plan
from .proof import Proof
from .samples import everywhere, located, sizes, unknown
from .sums import Key, Sums, held_by
from .sweep import Sweep
from .tape import Tape
from .taps import Replays

#: adds what was met; given the entries of a pass, it empties them as it goes
Add = Callable[[list[Entry] | None], None]
_WAYS = 256  # through a network that are remembered


class Measure:
    """Adds up moments, and knows which block every parameter has.

    Args:
        sharing: how places that share a weight enter.
        joint: whether weight and bias share a block.
        ekfac: whether corrected eigenvalues will be wanted.
    """

    def __init__(self, sharing: Sharing, joint: bool, ekfac: bool) -> None:
        self._sharing, self._joint, self._apart = sharing, joint, ekfac or sharing.reduce
        #: who measures while a covector goes on
        self.aside = Aside()
        #: eigenbases in which second moments of gradients are wanted, by block
        self.bases: Mapping[Key, Inverse] = {}
        #: why a parameter is held as a diagonal
        self.reasons: dict[str, str] = {}
        #: the parameters that share a block with this one
        self.partners: dict[str, tuple[str, ...]] = {}
        self._known: dict[Any, Known] = {}
        self._plan: Plan | None = None

    def knows(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether each of them has a block of parameters among them."""
        return all(n in self.partners and leaves.keys() >= {*self.partners[n]} for n in leaves)

    def load(self, reasons: Mapping[str, str], partners: Mapping[str, Sequence[str]]) -> None:
        """Take up what was established before."""
        self._plan, self.reasons = None, dict(reasons)
        self.partners = {n: tuple(names) for n, names in partners.items()}

    def learn(
        self,
        root: Root,
        found: Draws,
        tape: Tape,
        leaves: Mapping[str, Tensor],
        sums: dict[Key, Sums],
    ) -> Add:
        """Pull back all covectors of one pass; its inputs are added once.

        Returns:
            What is left to do for `finish`, once it is sure that these covectors will stay.

        Raises:
            Changed: it has to be called again with another covector.
        """
        inputs, left = found.reach is None, _nothing
        if found.reach is not None:
            seen: dict[Key, Sums] = {}
            way = Descent(root, found.reach, tape, leaves, found.keep, True, None, {})
            self.aside.do(partial(self.pull(way, seen), None))
            self.aside.join()
            for key, own in seen.items():
                for term, moments in own.inputs.items():
                    held_by(sums, key).add_inputs(term, moments)
        for covector, coupling in found.covectors:
            split = apart(tape, self._sharing, coupling)
            way = Descent(root, covector, tape, leaves, found.keep, inputs, coupling, split)
            self._leave(left, tape, None)
            left, inputs = self.pull(way, sums), False
        return left

    def finish(self, left: Add, tape: Tape) -> None:
        """Add what the last covector met; nobody needs the layers of this pass any longer."""
        self._leave(left, tape, tape.entries)

    def _leave(self, left: Add, tape: Tape, spent: list[Entry] | None) -> None:
        if rounds_apart() and any(isinstance(e.module, nn.Conv2d) for e in tape.entries):
            on = self.aside.on
            self.aside.join()  # a precision is set for a moment, which is that of all threads
            left(spent)
            self.aside.on = on
        else:
            self.aside.do(partial(left, spent))

    def pull(self, way: Descent, sums: dict[Key, Sums]) -> Add:
        """Pull a covector back from the output; what is given adds what the layers met."""
        samples = self._samples(way.covector[0])
        size = sizes(way.tape.entries, self._sharing, samples, apart=self._apart)
        signature = (*way.mark, size)
        known = self._known.get(signature)
        if known is not None:
            if (add := self._sweep(way, known, sums)) is not None:
                return add
            self.aside.drop()
            if not way.covector:
                del self._known[signature]
                raise Changed
        # the first time, or another way through the same layers
        self.aside.join()
        known, add = self._prove_everywhere(way, sums) or self._prove(way, sums)
        if known.settled:
            self._known[signature] = known
            if len(self._known) > _WAYS:
                del self._known[next(iter(self._known))]
        return add

    def _prove_everywhere(self, way: Descent, sums: dict[Key, Sums]) -> tuple[Known, Add] | None:
        """A covector of single positions shows a part of the model: all of it is proven before."""
        large = way.tape.head is not None  # one of these is drawn at all positions that count
        if large or way.coupling is not None or bool(way.covector[0].all()):
            return None
        whole = replace(way, covector=[everywhere(way.covector[0])], inputs=False)
        known, _ = self._prove(whole, {})
        add = self._sweep(way, known, sums)
        return None if add is None else (known, add)

    def _sweep(self, way: Descent, known: Known, sums: dict[Key, Sums]) -> Add | None:
        """One pass on a way that is known, if it is that one."""
        sweep, plan = self._sweep_of(way, known.aims, None), known.plan
        asked = [n for n in plan.plain if n in way.leaves]
        cotangents, gradients = way.run(sweep, known.last, asked, known=True)
        if _met(sweep, cotangents) != known.met:
            return None
        replays = self._replays(way, cotangents)
        return self._adding(way, sweep, plan, known.aims, replays, sums, gradients)

    def _prove(self, way: Descent, sums: dict[Key, Sums]) -> tuple[Known, Add]:
        """The same where nothing is known: the structure is proven on the way."""
        tape, leaves, proof = way.tape, way.leaves, Proof()
        layouts = [""] * len(tape.entries)
        if way.coupling is None:
            layouts = located(
                way.root, way.covector[0], tape.entries, way.edges, leaves, self._sharing,
                apart=self._apart,
            )  # fmt: skip
        sweep = self._sweep_of(way, aims(tape.entries, None, way.split, layouts), proof)
        cotangents, gradients = way.run(sweep, [], list(leaves), known=False)
        if any(g is None for g in gradients):
            refuse_reentrant(way.root)
        replays, truth = self._replays(way, cotangents), dict(zip(leaves, gradients, strict=True))
        proof.replays(replays, way.root, leaves)
        plan = self._establish(tape, proof, replays, truth, way.split, layouts)
        goals = aims(tape.entries, plan, way.split, layouts)
        plain = [truth[n] for n in plan.plain if n in leaves]
        add = self._adding(way, sweep, plan, goals, replays, sums, plain)
        ends = last(way.root, way.edges[: len(tape.entries)])
        return Known(plan, goals, _met(sweep, cotangents), ends, settled(plan, truth)), add

    def _sweep_of(self, way: Descent, goals: Sequence[Aim], proof: Proof | None) -> Sweep:
        entries = way.tape.entries
        return Sweep(
            entries, self._sharing, way.keep, inputs=way.inputs, aims=goals,
            basis=basis_by(entries, self.bases), proof=proof, coupling=way.coupling,
            samples=self._samples(way.covector[0]), aside=self.aside,
        )  # fmt: skip

    @staticmethod
    def _replays(way: Descent, cotangents: Sequence[Tensor | None]) -> Replays:
        related = way.coupling is not None  # where compound layers are held as diagonals
        return Replays(way.tape, [None] * len(cotangents) if related else cotangents)

    def _adding(
        self,
        way: Descent,
        sweep: Sweep,
        plan: Plan,
        goals: Sequence[Aim],
        replays: Replays,
        sums: dict[Key, Sums],
        gradients: Sequence[Tensor | None],
    ) -> Add:
        """How to add what was met to its blocks; `gradients` are those of plain ones."""
        self._adopt(plan)
        names = [n for n in plan.plain if n in way.leaves]
        if way.coupling is not None and names:  # theirs is another covector
            related = way.coupling.related(way.covector[0])
            gradients = pulled(way.root, related, [way.leaves[n] for n in names])
        plain, sharing, keep = dict(zip(names, gradients, strict=True)), self._sharing, way.keep
        inputs = way.inputs

        def add(spent: list[Entry] | None) -> None:
            sweep.assign(goals, sums, spent)
            replays.add(sums, plan, sharing, keep, inputs=inputs)
            _square(plain, sums)

        return add

    def _samples(self, covector: Tensor) -> int:
        return covector.shape[min(self._sharing.batch_dim, covector.ndim - 1)]

    def _establish(
        self,
        tape: Tape,
        proof: Proof,
        replays: Replays,
        truth: dict[str, Any],
        split: Mapping[str, str],
        layouts: Sequence[str],
    ) -> Plan:
        """Which block each parameter gets, by proof."""
        for name, gradient in truth.items():
            refuse_sparse(name, gradient)
        if not all(torch.isfinite(n) for n in norms(truth).values()):
            raise NotFinite
        uses = [(e.names, e.layer.curvature, e.layer.joint) for e in tape.entries]
        uses += replays.uses
        remarks = replays.remarks | unknown(tape.entries, layouts)
        return Plan(uses, {**proof.unexplained(truth), **split}, self._joint, remarks)

    def _adopt(self, plan: Plan) -> None:
        """What holds for the parameters from now on."""
        if plan is self._plan:
            return
        self._plan = plan
        unused = {n for n, why in plan.plain.items() if not why and n in self.partners}
        new = {n: key.names for key in plan.keys for n in key.names if n not in unused}
        kept = {n: names for n, names in self.partners.items() if not new.keys() & {*names}}
        self.partners = {**kept, **new}
        self.reasons = {n: r for n, r in self.reasons.items() if n not in new} | plan.reasons


def _nothing(spent: list[Entry] | None) -> None:
    pass


def _met(sweep: Sweep, cotangents: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Which uses of layers, and which ends of compound ones, a covector met."""
    return (*sorted(sweep.met), *(c is not None for c in cotangents))


def _square(gradients: Mapping[str, Tensor | None], sums: dict[Key, Sums]) -> None:
    """The parameters that are held as diagonals."""
    for name, gradient in gradients.items():
        if gradient is not None:
            flat = gradient.flatten().to(compute_dtype(gradient.dtype))
            squares = flat.square()[:, None, None]
            sums.setdefault(Key("diagonal", (name,)), Sums()).add_squares(squares)
