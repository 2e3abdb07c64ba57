"""How activations and parameters respond to rescaling: linear forms in unknown log-scales.

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

from collections.abc import Callable, Iterable, Sequence
from math import gcd

import torch
from torch import Tensor

Form = tuple[tuple[int, int], ...]

FIXED = 0
ZERO = -1


class Scales:
    """Atoms, forms in them, and the equations between them so far.

    Attributes:
        forms: the form of each label.
        origin: the number of the operation that introduced each atom.
    """

    def __init__(self) -> None:
        self.forms: list[Form] = [()]
        self.origin: list[int] = []
        self._labels: dict[Form, int] = {(): FIXED}
        #: eliminated atoms, each as a form in others
        self._solutions: dict[int, Form] = {}

    def new_atoms(self, count: int, origin: int) -> Tensor:
        """Return labels (count,) of new atoms, which this operation introduces."""
        start = len(self.origin)
        self.origin.extend([origin] * count)
        labels = [self.label_form(((atom, 1),)) for atom in range(start, start + count)]
        return torch.tensor(labels).long()

    def label_form(self, form: Form) -> int:
        """Return the label of a form, and give it one if it has none."""
        if form not in self._labels:
            self._labels[form] = len(self.forms)
            self.forms.append(form)
        return self._labels[form]

    def solve(self, form: Form) -> Form:
        """Return the form in atoms that no equation has eliminated."""
        if not any(atom in self._solutions for atom, _ in form):
            return form
        total: dict[int, int] = {}
        for atom, power in form:
            solution: Form = ((atom, 1),)
            if atom in self._solutions:
                solution = self.solve(self._solutions[atom])
                self._solutions[atom] = solution
            for other_atom, coefficient in solution:
                total[other_atom] = total.get(other_atom, 0) + power * coefficient
        return _make_form(total)

    def solve_label(self, label: int) -> Form:
        """Return the form of a label in atoms that no equation has eliminated."""
        return self.solve(self.forms[label])

    def require_zero(self, form: Form) -> None:
        """Add the equation form = 0."""
        form = self.solve(form)
        if not form:
            return
        divisor = gcd(*(power for _, power in form))
        form = tuple((atom, power // divisor) for atom, power in form)
        invertible = [(atom, power) for atom, power in form if abs(power) == 1]
        if len(form) == 1 or not invertible:
            # No atom is a whole combination of the others. Whole powers need all of them to be 0.
            self._solutions.update((atom, ()) for atom, _ in form)
            return
        eliminated, sign = invertible[0]
        self._solutions[eliminated] = tuple((a, -sign * k) for a, k in form if a != eliminated)

    # --- tensors of labels -----------------------------------------------------------------

    def unify(self, a: Tensor, b: Tensor) -> Tensor:
        """Add the equations a = b, entry by entry with broadcasting; return the common label."""

        def equate(x: int, y: int) -> int:
            if ZERO in (x, y):
                return max(x, y)
            self.require_zero(_add(self.forms[x], self.forms[y], -1))
            return x

        return map_pairs(a, b, equate)

    def product(self, a: Tensor, b: Tensor, sign: int = 1) -> Tensor:
        """Return the label of x·y^sign with broadcasting, ZERO where either factor is zero."""

        def multiply(x: int, y: int) -> int:
            if ZERO in (x, y):
                return ZERO
            return self.label_form(self.solve(_add(self.forms[x], self.forms[y], sign)))

        return map_pairs(a, b, multiply)

    def power(self, a: Tensor, numerator: int, denominator: int = 1) -> Tensor:
        """Return the label of x^(numerator/denominator).

        Entries whose form would have fractions are not scaled any more.
        """

        def raise_label(x: int) -> int:
            if x == ZERO:
                return ZERO
            form = self.solve_label(x)
            if any((numerator * power) % denominator for _, power in form):
                for atom, _ in form:
                    self.require_zero(((atom, 1),))
                return FIXED
            if not numerator:
                return FIXED
            raised = tuple((atom, numerator * power // denominator) for atom, power in form)
            return self.label_form(raised)

        return map_labels(a, raise_label)

    def fix(self, a: Tensor) -> None:
        """Add the equations that entries with these labels are not scaled."""
        for label in collapse(a).unique().tolist():
            if label > 0:
                self.require_zero(self.forms[label])

    def merge(self, a: Tensor, dims: Sequence[int]) -> Tensor:
        """Require one label along these axes; return it with the axes of size 1."""
        a = collapse(a)
        dims = [d % a.ndim for d in dims]
        if a.numel() == 0 or all(a.shape[d] == 1 for d in dims):
            return a
        common = a.amax(dims, keepdim=True)
        self.unify(common, a)
        return common


def _add(a: Form, b: Form, sign: int) -> Form:
    """Return a + sign·b."""
    if not b:
        return a
    total = dict(a)
    for atom, power in b:
        total[atom] = total.get(atom, 0) + sign * power
    return _make_form(total)


def _make_form(powers: dict[int, int]) -> Form:
    return tuple(sorted((atom, power) for atom, power in powers.items() if power))


def collapse(t: Tensor) -> Tensor:
    """Return the tensor with size 1 along each axis on which nothing changes."""
    for d in range(t.ndim):
        if t.shape[d] > 1 and t.stride(d) == 0:
            t = t.narrow(d, 0, 1)
    for d in range(t.ndim):
        if t.shape[d] > 1:
            first = t.narrow(d, 0, 1)
            if bool((first == t).all()):
                t = first
    return t


def map_labels(labels: Tensor, function: Callable[[int], int]) -> Tensor:
    """Apply a function of one label to all entries, once for each distinct label."""
    if not labels.numel():
        return labels
    distinct, index = collapse(labels).unique(return_inverse=True)
    results = torch.tensor([function(label) for label in distinct.tolist()], dtype=torch.long)
    return results[index].expand(labels.shape)


def map_pairs(a: Tensor, b: Tensor, function: Callable[[int, int], int]) -> Tensor:
    """Apply a function of two labels with broadcasting, once for each distinct pair."""
    shape = torch.broadcast_shapes(a.shape, b.shape)
    first, second = torch.broadcast_tensors(collapse(a), collapse(b))
    if first.numel() == 0:
        return first.expand(shape)
    pairs = torch.stack([first.flatten(), second.flatten()])
    distinct, index = pairs.unique(dim=1, return_inverse=True)
    results = [function(x, y) for x, y in zip(*distinct.tolist(), strict=True)]
    mapped = torch.tensor(results, dtype=torch.long)[index]
    return mapped.view(first.shape).expand(shape)


# --- uses of one parameter -------------------------------------------------------------------

#: arrays of labels whose sum is the log-scale of a parameter's entries, by their shapes
Legs = dict[tuple[int, ...], Tensor]


def equate_uses(scales: Scales, first: Legs, second: Legs) -> Legs:
    """Add the equations between the legs of two uses of a parameter; return their common legs."""
    all_shapes = {**first, **second}
    shapes = [shape for shape in all_shapes if not _has_larger(shape, all_shapes)]
    first = _sum_legs(scales, first, shapes)
    second = _sum_legs(scales, second, shapes)
    if len(shapes) == 2 and not _overlap(*shapes):
        return _equate_up_to_a_number(scales, first, second, shapes)
    # These equations are sufficient, and for one leg necessary.
    return {shape: scales.unify(first[shape], second[shape]) for shape in shapes}


def _is_broadcast(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Return True if the first shape broadcasts to the second one, which is larger."""
    return small != large and all(a in (1, b) for a, b in zip(small, large, strict=True))


def _has_larger(shape: tuple[int, ...], shapes: Iterable[tuple[int, ...]]) -> bool:
    return any(_is_broadcast(shape, other) for other in shapes)


def _overlap(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Return True if both shapes have more than one entry along some axis."""
    return any(a > 1 and b > 1 for a, b in zip(first, second, strict=True))


def _sum_legs(scales: Scales, legs: Legs, shapes: list[tuple[int, ...]]) -> Legs:
    """Return legs of exactly these shapes with the same sum."""
    sums = {shape: torch.full(shape, FIXED) for shape in shapes}
    for shape, labels in legs.items():
        target = next(s for s in shapes if shape == s or _is_broadcast(shape, s))
        sums[target] = scales.product(sums[target], labels)
    return sums


def _equate_up_to_a_number(
    scales: Scales, first: Legs, second: Legs, shapes: list[tuple[int, ...]]
) -> Legs:
    """Equate r_i + c_j = r'_i + c'_j for rows and columns, with γ from the latter."""
    rows, columns = shapes
    gammas = scales.product(second[columns], first[columns], -1)
    gamma = scales.merge(gammas, range(len(columns)))
    # Without a common column that is not zero γ is arbitrary: 0 is chosen.
    gamma = gamma.clamp(min=FIXED)
    scales.unify(scales.product(first[rows], second[rows], -1), gamma)
    # Structural zeros of the first use get the labels of the second one.
    shifted_columns = scales.product(second[columns], gamma, -1)
    shifted_rows = scales.product(second[rows], gamma)
    return {
        rows: torch.where(first[rows] == ZERO, shifted_rows, first[rows]),
        columns: torch.where(first[columns] == ZERO, shifted_columns, first[columns]),
    }
