"""Parts of `curvature.device` as items of experiments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...framework.experiment import Context
from ..device.parts import PartContext, Record
from ..sizes import Sizes

#: the numbers of a part, by the names that it gives them
PartNumbers = dict[str, Any]
#: what a part is: it adds numbers to the record of its context
PartWork = Callable[[PartContext], None]


def run_part(name: str, work: PartWork, sizes: Sizes, context: Context) -> PartNumbers:
    """Return the numbers of a part; parts of one item share the folder of its checkpoints."""
    folder = context.folder()

    def report(line: str) -> None:
        context.watch(0.5, line[:60])

    record = Record(folder / f"{name}.json", context.left, report)
    work(PartContext(sizes, context.device, record, folder))
    return record.numbers
