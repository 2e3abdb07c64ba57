"""Randomized solves: fewer rows, fewer columns."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from random import Random

import torch
from torch import Tensor

from .._core.errors import PullbackError, Status
from .._core.products import add_at
from ..grams import FactoredGram, Gram, Rows
from .base import Damping, Path, Solution, Solver, resolve
from .pinv import PseudoInverse, Spectrum


@dataclass(frozen=True)
class SketchSizes:
    """Sizes in `ColumnSketch`."""

    #: columns of a block: 16 to 128 take equally long, most of it to put the columns in order
    columns_of_block: int = 64
    #: directions of a block, at least: what they keep of a vector varies by 1/√(2·8), a quarter
    directions_of_block: int = 8
    #: entries that are mixed at once: 512 MiB in float64, and their copy takes as much
    most_entries: int = 2**26


_SIZES = SketchSizes()


@dataclass(frozen=True)
class RowSketch:
    """Π: every row is added, with a random sign, to one of `count` buckets."""

    bucket: Tensor
    sign: Tensor
    count: int

    @classmethod
    def draw(cls, n: int, count: int, template: Tensor, generator: torch.Generator) -> RowSketch:
        """Return a random count sketch of n rows, on the template's device and in its dtype."""
        bucket = torch.randint(0, count, (n,), generator=generator)
        sign = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
        return cls(bucket.to(template.device), sign.to(template), count)

    def __call__(self, x: Tensor) -> Tensor:
        """Return Π x for x of shape (n,) or (n, k)."""
        signed = self.sign.view(-1, *[1] * (x.ndim - 1)) * x
        return add_at(x.new_zeros(self.count, *x.shape[1:]), self.bucket, signed)


@dataclass(frozen=True)
class ColumnSketch:
    """Ω with orthonormal columns: all columns in random blocks, and random directions in each.

    Blocks have b columns each. Some are filled up with a column that is not used. A least-squares
    problem in this subspace leaves as much of the loss as in one from a cosine transform of all
    columns (to 2 %, Burgers with 609 parameters), which takes 5.8 times as long with p = 4965.

    Attributes:
        order: the columns of one block after the other, (B·b,).
        positions: where each column is in this order, (p,).
        directions: of every block, orthonormal and zero where a block is filled up, (B, b, m).
        count: so many of the B·m directions are used: the last one of some blocks is not.
    """

    order: Tensor
    positions: Tensor
    directions: Tensor
    count: int

    @classmethod
    def draw(cls, p: int, count: int, template: Tensor, generator: torch.Generator) -> ColumnSketch:
        """Return a random subspace of p columns of dimension count < p, like the template."""
        blocks = min(p // _SIZES.columns_of_block, count // _SIZES.directions_of_block)
        blocks = max(1, blocks)
        columns = ceil(p / blocks)
        filler = torch.zeros(blocks * columns - p, dtype=torch.long)
        shuffled = torch.cat([torch.randperm(p, generator=generator), filler])
        slots = torch.arange(len(shuffled)).view(blocks, columns).T.flatten()
        order = torch.empty_like(shuffled)
        order[slots] = shuffled
        positions = torch.empty(p, dtype=torch.long)
        positions[shuffled[:p]] = slots[:p]
        shape = (blocks, columns, ceil(count / blocks))
        gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
        gaussian.view(-1, shape[-1])[slots[p:]] = 0
        directions = torch.linalg.qr(gaussian).Q
        device = template.device
        return cls(order.to(device), positions.to(device), directions.to(template), count)

    def compress(self, x: Tensor) -> Tensor:
        """Return x Ω for x of shape (..., p); a chunk of rows is mixed at a time."""
        rows = max(1, _SIZES.most_entries // len(self.positions))
        chunks = x.reshape(-1, len(self.positions)).split(rows)
        pieces = [self._compress_rows(chunk) for chunk in chunks]
        return torch.cat(pieces).view(*x.shape[:-1], self.count)

    def _compress_rows(self, x: Tensor) -> Tensor:
        """Return x Ω, (n, count), for x of shape (n, p)."""
        blocks = x[:, self.order].unflatten(1, self.directions.shape[:2])  # (n, B, b)
        mixed = torch.bmm(blocks.transpose(0, 1), self.directions)  # (B, n, m)
        return mixed.permute(1, 2, 0).flatten(1)[:, : self.count]

    def expand(self, y: Tensor) -> Tensor:
        """Return Ω y for y of shape (..., count)."""
        blocks, _, most = self.directions.shape
        coefficients = y.new_zeros(y.shape[:-1].numel(), blocks * most)
        coefficients[:, : self.count] = y.reshape(-1, self.count)
        by_block = coefficients.unflatten(1, (most, blocks)).permute(2, 0, 1)  # (B, n, m)
        expanded = torch.bmm(by_block, self.directions.mT)  # (B, n, b)
        x = expanded.transpose(0, 1).flatten(1)[:, self.positions]
        return x.view(*y.shape[:-1], len(self.positions))


@dataclass(frozen=True)
class Compressed:
    """The sketch's spectrum with the way back to parameters."""

    gram: Gram
    sketch: Rows
    spectrum: Spectrum
    rows: RowSketch | None
    columns: ColumnSketch | None


class Sketched(Solver):
    r"""x = Ω (Π A Ω)⁺ Π r: least squares on random combinations of rows and columns.

    Args:
        rows: how many combined rows; None keeps all.
        columns: dimension of the random subspace of parameters; None keeps all.
        damping: absolute, or `Relative(c)`.
        rcond, double: as for `PseudoInverse`, for the sketched matrix.
        seed: of the random sketches. A sketch follows from the seed and its own number, which is
            that of the step, so that nothing random is saved.
    """

    prefers = "panels"

    def __init__(
        self,
        rows: int | None = None,
        columns: int | None = None,
        *,
        damping: Damping = 0.0,
        seed: int = 0,
        rcond: float | None = None,
        double: bool = False,
    ) -> None:
        for name, value in (("rows", rows), ("columns", columns)):
            if value is not None and value < 1:
                raise PullbackError(
                    f"Sketched(...) got {name}={value}", "it must be positive", "Use None for all"
                )
        self.rows = rows
        self.columns = columns
        self.damping = damping
        self.seed = seed
        self._draw = 0
        self._inner = PseudoInverse(rcond, double=double)

    def init(self, gram: Gram) -> Compressed:
        if not isinstance(gram, FactoredGram):
            raise PullbackError(
                "Sketched needs the rows A",
                f"this Gram holds {gram.structure.holds} only",
                'Use gram="rows", "kernel" or "matrix_free"',
            )
        rows = None
        columns = None
        generator = self._next_generator()
        template = torch.empty(0, dtype=gram.dtype, device=gram.device)
        if self.rows is not None and self.rows < gram.count:
            rows = RowSketch.draw(gram.count, self.rows, template, generator)
        if self.columns is not None and self.columns < gram.size:
            columns = ColumnSketch.draw(gram.size, self.columns, template, generator)
        if columns is None:
            a = gram.rows()
        else:
            a = gram.compress(columns.compress)
        if rows is not None:
            a = rows(a)
        sketch = Rows(a)
        return Compressed(gram, sketch, self._inner.init(sketch), rows, columns)

    def path(self, state: Compressed, rhs: Tensor, whitened: Tensor | None = None) -> Path:
        g = rhs
        if state.columns is not None:
            g = state.columns.compress(rhs)
        r = whitened
        if r is not None and state.rows is not None:
            r = state.rows(r)
            g = state.sketch.lift(r)  # the sketched problem has a gradient of its own
        inner = self._inner.path(state.spectrum, g, r)
        columns = state.columns
        if columns is None:
            return inner
        beyond = None
        if inner.beyond is not None:
            beyond = columns.expand(inner.beyond)
        return Path(
            inner.eigenvalues, inner.gamma, lambda c: columns.expand(inner.combine(c)), beyond
        )

    def solve(
        self,
        state: Compressed,
        rhs: Tensor,
        damping: Damping | None = None,
        *,
        whitened: Tensor | None = None,
    ) -> Solution:
        if damping is None:
            damping = self.damping
        value = resolve(damping, state.gram)
        spectrum = state.spectrum
        if not spectrum.finite or (spectrum.rank == 0 and value == 0):
            return Solution(torch.zeros_like(rhs), value, 0, status=Status.SINGULAR)
        x = self.path(state, rhs, whitened).solution(value)
        return Solution(x, value, spectrum.rank)

    def seek(self, draw: int) -> None:
        self._draw = draw

    def _next_generator(self) -> torch.Generator:
        # torch's generators see 32 bits of a seed: both numbers are hashed into them
        bits = Random(f"{self.seed} {self._draw}").getrandbits(32)
        self._draw += 1
        return torch.Generator().manual_seed(bits)
