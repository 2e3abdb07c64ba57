"""How activations and parameters answer to rescaling: linear forms in unknown log-scales.

Every entry of a tensor carries a *label*, the number of a form s = Σ_a k_a·log α_a with whole
k_a over *atoms* a: under the group the entry is multiplied by e^s. Label 0 is the form 0 (the entry
is fixed), label −1 marks a structural zero, which is compatible with any scale. Equations between
forms are solved on the spot by substitution, so what remains unsolved is the group.

A parameter that is used twice is scaled in one way. The entries of a weight have log-scales
w_ij = r_i + c_j, a sum of *legs* that tell rows or columns apart. Two uses agree if
r_i + c_j = r'_i + c'_j, that is for some number γ

    r_i − r'_i = γ = c'_j − c_j        for all rows i and columns j.

Columns that read structural zeros (a recurrent layer at its first step) demand nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import Tensor

Form = tuple[tuple[int, int], ...]

FIXED = 0
ZERO = -1


class Scales:
    """Atoms, forms in them, and the equations found so far."""

    def __init__(self) -> None:
        self.forms: list[Form] = [()]
        self._number: dict[Form, int] = {(): FIXED}
        self._value: dict[int, Form] = {}
        #: the call that made each atom
        self.origin: list[int] = []

    def fresh(self, count: int, origin: int) -> Tensor:
        """Labels (count,) of new atoms."""
        start = len(self.origin)
        self.origin.extend([origin] * count)
        return torch.tensor([self.label(((a, 1),)) for a in range(start, start + count)]).long()

    def label(self, form: Form) -> int:
        """The number of a form."""
        if form not in self._number:
            self._number[form] = len(self.forms)
            self.forms.append(form)
        return self._number[form]

    def solved(self, form: Form) -> Form:
        """The form in atoms that no equation has eliminated."""
        if not any(a in self._value for a, _ in form):
            return form
        total: dict[int, int] = {}
        for atom, power in form:
            if atom in self._value:
                value = self._value[atom] = self.solved(self._value[atom])
            else:
                value = ((atom, 1),)
            for a, k in value:
                total[a] = total.get(a, 0) + power * k
        return _form(total)

    def vanish(self, form: Form) -> None:
        """Add the equation form = 0."""
        form = self.solved(form)
        if not form:
            return
        common = gcd(*(k for _, k in form))
        form = tuple((a, k // common) for a, k in form)
        simple = next(((a, k) for a, k in form if abs(k) == 1), None)
        if len(form) == 1 or simple is None:
            # without a unit coefficient whole powers would not do: give the scales up
            for a, _ in form:
                self._value[a] = ()
            return
        atom, power = simple
        self._value[atom] = tuple((a, -power * k) for a, k in form if a != atom)

    # --- tensors of labels -----------------------------------------------------------------

    def unify(self, a: Tensor, b: Tensor) -> Tensor:
        """a = b, entry by entry with broadcasting; the common label."""

        def equate(x: int, y: int) -> int:
            if ZERO in (x, y):
                return max(x, y)
            self.vanish(_sum(self.forms[x], self.forms[y], -1))
            return x

        return pairwise(a, b, equate)

    def product(self, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
        """The label of x·y^sign, ZERO where either is, with broadcasting."""

        def multiply(x: int, y: int) -> int:
            if ZERO in (x, y):
                return ZERO
            return self.label(self.solved(_sum(self.forms[x], self.forms[y], sign)))

        return pairwise(a, b, multiply)

    def power(self, a: Tensor, top: int, bottom: int = 1) -> Tensor:
        """The label of x^(top/bottom); forms that would get fractions are fixed."""

        def raised(x: int) -> int:
            if x == ZERO:
                return ZERO
            form = self.solved(self.forms[x])
            if any((top * k) % bottom for _, k in form):
                for i, _ in form:
                    self.vanish(((i, 1),))
                return FIXED
            return self.label(tuple((i, top * k // bottom) for i, k in form if top))

        return each(a, raised)

    def fix(self, a: Tensor) -> None:
        """Entries with these labels are not scaled."""
        for x in collapse(a).unique().tolist():
            if x > 0:
                self.vanish(self.forms[x])

    def merge(self, a: Tensor, dims: Sequence[int]) -> Tensor:
        """One label along these axes, which are kept with size 1."""
        a = collapse(a)
        dims = [d % a.ndim for d in dims]
        if a.numel() == 0 or all(a.shape[d] == 1 for d in dims):
            return a
        common = a.amax(dims, keepdim=True)
        self.unify(common, a)
        return common


def _sum(a: Form, b: Form, sign: int) -> Form:
    if not b:
        return a
    total = dict(a)
    for atom, power in b:
        total[atom] = total.get(atom, 0) + sign * power
    return _form(total)


def _form(total: dict[int, int]) -> Form:
    return tuple(sorted((a, k) for a, k in total.items() if k))


def collapse(t: Tensor) -> Tensor:
    """The tensor with size 1 along each axis on which nothing changes."""
    for d in range(t.ndim):
        if t.shape[d] > 1 and t.stride(d) == 0:
            t = t.narrow(d, 0, 1)
    for d in range(t.ndim):
        if t.shape[d] > 1:
            first = t.narrow(d, 0, 1)
            if bool((first == t).all()):
                t = first
    return t


def each(a: Tensor, function: Callable[[int], int]) -> Tensor:
    """A function of labels, evaluated once for each."""
    small = collapse(a)
    values, place = small.unique(return_inverse=True)
    out = torch.tensor([function(x) for x in values.tolist()], dtype=torch.long)
    return out[place].expand(a.shape) if a.numel() else a


def pairwise(a: Tensor, b: Tensor, function: Callable[[int, int], int]) -> Tensor:
    """A function of two labels with broadcasting, evaluated once for each pair."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    small, other = torch.broadcast_tensors(collapse(a), collapse(b))
    if small.numel() == 0:
        return small.expand(shape)
    pairs, place = torch.stack([small.flatten(), other.flatten()]).unique(
        dim=1, return_inverse=True
    )
    out = [function(x, y) for x, y in zip(*pairs.tolist(), strict=True)]
    return torch.tensor(out, dtype=torch.long)[place].view(small.shape).expand(shape)


Legs = dict[tuple[int, ...], Tensor]


def equate_uses(scales: Scales, before: Legs, now: Legs) -> Legs:
    """Add the equations between two uses' legs; those of both."""
    keys = [k for k in {**before, **now} if not any(_within(k, m) for m in {**before, **now})]
    one, two = (_on(scales, legs, keys) for legs in (before, now))
    if len(keys) == 2 and not _overlap(*keys):
        return _up_to_a_number(scales, one, two, keys)
    # sufficient, and for one leg necessary
    return {k: scales.unify(one[k], two[k]) for k in keys}


def _within(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether a leg of one shape is broadcast to another, larger one."""
    return small != large and all(a in (1, b) for a, b in zip(small, large, strict=True))


def _overlap(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    return any(a > 1 and b > 1 for a, b in zip(one, two, strict=True))


def _on(scales: Scales, legs: Legs, keys: list[tuple[int, ...]]) -> Legs:
    """The same sum by legs of these shapes."""
    out = {k: torch.full(k, FIXED) for k in keys}
    for shape, labels in legs.items():
        key = next(k for k in keys if shape == k or _within(shape, k))
        out[key] = scales.product(out[key], labels)
    return out


def _up_to_a_number(scales: Scales, one: Legs, two: Legs, keys: list[tuple[int, ...]]) -> Legs:
    """Rows and columns, with γ from the latter."""
    rows, columns = keys
    dims = range(len(columns))
    gamma = scales.merge(scales.product(two[columns], one[columns], -1), dims)
    gamma = gamma.clamp(min=FIXED)  # no column in common: a number of our choice
    shift = scales.product(one[rows], two[rows], -1)
    scales.unify(shift, gamma)
    filled = torch.where(
        one[columns] == ZERO, scales.product(two[columns], gamma, -1), one[columns]
    )
    other = torch.where(one[rows] == ZERO, scales.product(two[rows], gamma), one[rows])
    return {rows: other, columns: filled}
