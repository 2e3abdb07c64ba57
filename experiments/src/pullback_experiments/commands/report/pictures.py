"""Figures that lie beside the results, inside the page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from .markup import lines, text

_KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
_LARGEST = 1_500_000  # bytes of an SVG, above which the PNG is shown


def found(path: Path, figures: Sequence[str]) -> list[Path]:
    """One file of every figure that lies beside the results: SVG unless it is huge."""
    seen: dict[str, Path] = {}
    for kind in _KINDS:
        for name in map(str, figures):
            file = path.with_name(Path(name).name)  # never outside of the folder
            if file.suffix != kind or file.is_symlink() or not file.is_file():
                continue
            if kind == ".png" or file.stat().st_size <= _LARGEST:
                seen.setdefault(file.stem, file)
    return list(seen.values())


def shown(path: Path, figures: Sequence[str], name: str, beside: bool) -> str:
    """The figures; to be folded by the script where curves stand `beside` them."""
    files = found(path, figures)
    if not files:
        if not figures:
            return ""
        words = "The run's figures are not beside its results; the command below draws them again."
        return f'<p class="note">{words}</p>'
    inside = lines(_figure(path, file, name) for file in files)
    if not beside:
        return inside
    return (
        f"<details open data-folded><summary>Figure as drawn by the run</summary>{inside}</details>"
    )


def _figure(path: Path, file: Path, name: str) -> str:
    data = base64.b64encode(file.read_bytes()).decode()
    part = file.stem.removeprefix(path.stem).strip("-")
    words = text(f"Figure of {name}{f', {part}' if part else ''}")
    image = f'<img alt="{words}" src="data:{_KINDS[file.suffix]};base64,{data}">'
    return f'<figure data-zoom aria-label="{words}">{image}</figure>'
