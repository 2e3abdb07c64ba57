"""Rows of the assignment table as checkpoints hold them: numbers, and a text of fixed length.

The keys, shapes and dtypes of a row do not depend on the parameter, so that a fresh optimizer can
read the table of any checkpoint before it knows anything of the model's structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ...grams.kronecker.packed_matrix import get_entries
from ...maps.roles import ParameterRole, Role
from .assignment import Assignment
from .factors.block import BlockKey, BlockKind, FactorKey, Factors

#: the numbers that stand for roles and kinds of blocks in checkpoints; they never change
_ROLES = {
    0: Role.MATRIX,
    1: Role.CONVOLUTION,
    2: Role.EXPERTS,
    3: Role.EMBEDDING,
    4: Role.HEAD,
    5: Role.VECTOR,
}
_KINDS = {
    0: BlockKind.KRONECKER,
    1: BlockKind.UNITS,
    2: BlockKind.DIAGONAL,
    3: BlockKind.ENTRIES,
}
_ROLE_NUMBERS = {role: number for number, role in _ROLES.items()}
_KIND_NUMBERS = {kind: number for number, kind in _KINDS.items()}
#: stands for no role, no block, or no partner
_NONE = -1


@dataclass(frozen=True)
class Limits:
    """Sizes of a saved row."""

    #: bytes of the text with split and factors: eight uses of a tied weight fit, most weights take
    #: fewer than a hundred. A longer text is left out; then a state is read from its averages.
    text: int = 1024


_LIMITS = Limits()
_NO_TEXT = torch.zeros(1, dtype=torch.uint8)


@dataclass(frozen=True)
class FactorShape:
    """A factor of a saved block, and the shape of its saved tensor."""

    key: FactorKey
    shape: tuple[int, ...]


@dataclass(frozen=True)
class SavedRow:
    """What a saved row says of a parameter: its role, the block that it leads, and its factors."""

    role: ParameterRole | None
    key: BlockKey | None
    factors: Sequence[FactorShape]


class TableWriter:
    """Writes the rows of parameters.

    Args:
        names: of all parameters, in an order that the reader has too.
        assignment: the table.
    """

    def __init__(self, names: Sequence[str], assignment: Assignment) -> None:
        self._numbers = {name: i for i, name in enumerate(names)}
        self._roles = assignment.roles

    def make_row(
        self, name: str, key: BlockKey | None, factors: Factors, device: torch.device | None
    ) -> dict[str, Any]:
        """Return the row of a parameter: its role, and the block that it leads, if it leads one.

        A parameter leads the block whose first name it is; a second one is its partner.

        torch's functions for checkpoints expect all tensors of an optimizer on one device. Without
        a device the row has no text, as of frozen parameters, which they leave out.
        """
        role = self._roles.get(name)
        row: dict[str, Any] = {"role": _NONE, "axis": 0, "used": 0, "normalized": 0}
        split: tuple[int, ...] = ()
        if role is not None:
            split = role.split
            row["role"] = _ROLE_NUMBERS[role.role]
            row["axis"] = role.split_axis
            row["used"] = int(role.is_used)
            row["normalized"] = int(role.is_normalized)
        row |= {"kind": _NONE, "partner": _NONE, "bias": 0, "transposed": 0}
        if key is not None:
            row["kind"] = _KIND_NUMBERS[key.kind]
            row["bias"] = int(key.is_bias)
            row["transposed"] = int(key.is_transposed)
        if key is not None and len(key.names) > 1:
            row["partner"] = self._numbers[key.names[1]]
        if device is not None:
            row["text"] = _write_text(split, factors).to(device)
        return row


def read_row(name: str, row: Mapping[str, Any], params: Mapping[str, Tensor]) -> SavedRow:
    """Return what a row says; raise where it does not fit these parameters."""
    numbers = {key: int(value) for key, value in row.items() if key != "text"}
    split, factors = _read_text(row.get("text", _NO_TEXT))
    return SavedRow(
        role=_read_role(name, numbers, split, params[name]),
        key=_read_key(name, numbers, list(params)),
        factors=factors,
    )


def _read_role(
    name: str, numbers: Mapping[str, int], split: tuple[int, ...], p: Tensor
) -> ParameterRole | None:
    """Return a role without its reason."""
    if numbers["role"] == _NONE:
        return None
    role = _ROLES.get(numbers["role"])
    if role is None:
        raise _make_newer_version_error("role", numbers["role"])
    if split and prod(p.shape) % sum(split):
        size = "×".join(map(str, p.shape))
        raise make_foreign_error(f"{name} had matrices of {split} rows, and is {size} now")
    return ParameterRole(
        name, role, split, numbers["axis"], "",
        is_used=bool(numbers["used"]), is_normalized=bool(numbers["normalized"]),
    )  # fmt: skip


def _read_key(name: str, numbers: Mapping[str, int], names: Sequence[str]) -> BlockKey | None:
    """Return the block that a parameter leads."""
    if numbers["kind"] == _NONE:
        return None
    kind = _KINDS.get(numbers["kind"])
    if kind is None:
        raise _make_newer_version_error("kind of block", numbers["kind"])
    partner = numbers["partner"]
    if partner >= len(names):
        raise make_foreign_error(f"{name} shared a block with parameter {partner} of {len(names)}")
    members = (name,) if partner == _NONE else (name, names[partner])
    is_transposed = bool(numbers["transposed"])
    is_bias = bool(numbers["bias"])
    return BlockKey(kind, members, is_bias=is_bias, is_transposed=is_transposed)


def _make_newer_version_error(what: str, number: int) -> PullbackError:
    return PullbackError(
        "The saved state is that of a newer version",
        f"its table has a {what} of number {number}",
        "Load it with the version of pullback that wrote it",
    )


def _write_text(split: Sequence[int], factors: Factors) -> Tensor:
    """Return a line of row counts, and one with use, side and shape of each factor, as bytes."""
    lines = [_write_numbers(split)]
    for factor, matrix in factors.items():
        numbers = _write_numbers(get_entries(matrix).shape)
        lines.append("\t".join((factor.use, str(factor.side), numbers)))
    encoded = "\n".join(lines).encode()
    text = torch.zeros(_LIMITS.text, dtype=torch.uint8, device="cpu")
    if len(encoded) <= _LIMITS.text:
        text[: len(encoded)] = torch.tensor([*encoded], dtype=torch.uint8, device="cpu")
    return text


def _read_text(text: Tensor) -> tuple[tuple[int, ...], list[FactorShape]]:
    """Return row counts and factors; `_write_text` is the inverse."""
    decoded = bytes(text.tolist()).rstrip(b"\0").decode()
    first, *lines = decoded.split("\n")
    factors = []
    for line in lines:
        use, side, shape = line.split("\t")
        factors.append(FactorShape(FactorKey(use, side), _read_numbers(shape)))
    return _read_numbers(first), factors


def _write_numbers(numbers: Sequence[int]) -> str:
    """Return "3x64" for three times 64, else numbers with commas."""
    if len(numbers) > 1 and len({*numbers}) == 1:
        return f"{len(numbers)}x{numbers[0]}"
    return ",".join(map(str, numbers))


def _read_numbers(text: str) -> tuple[int, ...]:
    if "x" in text:
        count, number = text.split("x")
        return (int(number),) * int(count)
    return tuple(int(number) for number in text.split(",") if number)


def make_foreign_error(why: str) -> PullbackError:
    """Return the error for a state of another model."""
    return PullbackError(
        "The saved state is that of another network",
        why,
        "Load it into the optimizer of a model that was built in the same way",
    )
