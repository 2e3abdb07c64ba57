"""What K-FAC holds for every parameter, and why."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ...._core.capture import plain
from ....maps.layers import find, find_compound
from ..statistics.sums import Key


@dataclass(frozen=True)
class Row:
    """One parameter: its block and the reason for it."""

    name: str
    shape: tuple[int, ...]
    block: str
    reason: str


class Coverage(tuple[Row, ...]):
    """One row per parameter; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        table = [("parameter", "shape", "block", "reason")]
        table += [(r.name, "×".join(map(str, r.shape)), r.block, r.reason) for r in self]
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        return "\n".join(
            "  ".join([*(c.ljust(w) for c, w in zip(line[:3], widths, strict=True)), line[3]])
            for line in table
        )


def expected(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Block and reason by name, from the kinds of modules alone: before any statistics."""
    out: dict[str, tuple[str, str]] = {}
    names = {id(p): n for n, p in plain(model).named_parameters()}
    for module in plain(model).modules():
        layer, compound = find(module), find_compound(module)
        kind = type(module).__name__
        if layer is not None:
            held = "diagonal" if layer.curvature == "rows" else layer.curvature
            for p in layer.parameters(module).values():
                if p is not None and id(p) in names:
                    out.setdefault(names[id(p)], (held, kind))
        elif compound is not None:
            note = compound.note(module)
            reason = f"{kind}, replayed" + (f" without {note}" if note else "")
            for p in module.parameters():
                out[names[id(p)]] = ("kronecker", reason)
    return out


def described(key: Key, shape: tuple[int, ...], sides: tuple[Tensor, Tensor] | None) -> str:
    """The block in words."""
    if key.kind == "diagonal":
        return "diagonal"
    if key.kind == "units":
        return "units, gain and shift" if len(key.names) == 2 else "units"
    if sides is None:
        return "kronecker"
    ends = ["diagonal" if s.ndim == 2 else "dense" for s in sides]
    groups = f"{shape[0]} × " if shape[0] > 1 else ""
    size = f"{groups}({shape[1]} ⊗ {shape[2]})"
    marks = [f"{w} {e}" for w, e in zip(("output", "input"), ends, strict=True) if e == "diagonal"]
    return f"kronecker {size}" + (f", {', '.join(marks)}" if marks else "")
