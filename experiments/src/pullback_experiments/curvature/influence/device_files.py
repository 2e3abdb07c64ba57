"""Records of influence from files that the parts on a GPU left.

    # there; needs torch alone
    python -m pullback_experiments.curvature.device FOLDER
    # here; then the last command judges and draws
    python -m pullback_experiments.curvature.influence.device_files PART=FOLDER ... --out results
    pullback run influence-cifar --out results

Every experiment whose parts are all named gets its items. Parts may be of different folders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pullback
from pullback import PullbackError

from ... import registry
from ...framework.experiment import Experiment
from ...framework.store import Key
from ..sizes import Sizes
from . import cifar, scale, text
from .part_items import PartNumbers

#: what differs between runs although their numbers may be compared
_FREE_SIZES = frozenset({"rounds", "side_by_side", "is_generated"})
#: which sizes the parts depend on; those that are not here depend on all
_SIZES_OF_PARTS: dict[str, frozenset[str]] = {
    "resnet9": frozenset({"samples", "queries", "width", "batch"}),
    "growth": frozenset({"samples", "queries", "width", "batch"}),
    "gpt2": frozenset({"sequences", "length", "text_queries", "decoder", "batch"}),
}


@dataclass(frozen=True)
class PartFile:
    """The numbers of one part.

    Attributes:
        numbers: by the names that the part gave them.
        environment: the device, torch's version and the sizes.
    """

    numbers: PartNumbers
    environment: dict[str, Any]

    @classmethod
    def read(cls, name: str, folder: Path) -> PartFile:
        """Return a part of FOLDER/curvature.json."""
        contents = json.loads((folder / "curvature.json").read_text("utf-8"))
        if name not in contents:
            raise PullbackError(
                f"{folder} has no numbers of {name}",
                f"its parts are {', '.join(contents)}",
                "Name the folder of a run with this part",
            )
        return cls(contents[name], contents["environment"])

    def refuse_other_sizes(self, name: str, sizes: Sizes) -> None:
        """Raise if a size that the part depends on is not the experiment's."""
        recorded = self.environment["sizes"]
        relevant = _SIZES_OF_PARTS.get(name, vars(sizes).keys() - _FREE_SIZES)
        for field in sorted(relevant):
            expected = json.loads(json.dumps(getattr(sizes, field)))
            if recorded.get(field, expected) != expected:
                raise PullbackError(
                    f"The part {name} was run with other sizes",
                    f"{field} was {recorded[field]} instead of {expected}",
                    "Run the part again",
                )


@dataclass(frozen=True)
class ItemSource:
    """An item of an experiment, and the parts that it is made of.

    Attributes:
        experiment: its name.
        key: of the item.
        parts: their names.
        summarize: (numbers by part, sizes) ↦ record.
    """

    experiment: str
    key: Key
    parts: tuple[str, ...]
    summarize: Callable[[Mapping[str, PartNumbers], Sizes], dict[str, Any]]


def _summarize_text(parts: Mapping[str, PartNumbers], sizes: Sizes) -> dict[str, Any]:
    return text.summarize(parts["text"], sizes)


def _copy_numbers(parts: Mapping[str, PartNumbers], sizes: Sizes) -> dict[str, Any]:
    (numbers,) = parts.values()
    return dict(numbers)


SOURCES = (
    ItemSource("influence-cifar", ("datamodeling",), tuple(cifar.PARTS), cifar.summarize),
    ItemSource("influence-text", ("datamodeling",), ("text",), _summarize_text),
    *(ItemSource("influence-scale", (name,), (name,), _copy_numbers) for name in scale.PARTS),
)


def import_item(source: ItemSource, files: Mapping[str, PartFile], commit: str, out: Path) -> Path:
    """Write the item of an experiment from its parts, and return the file of the record."""
    experiment: Any = registry.find(source.experiment)
    seconds = 0.0
    for name in source.parts:
        files[name].refuse_other_sizes(name, experiment.sizes)
        seconds += files[name].numbers["seconds"]
    numbers = {name: files[name].numbers for name in source.parts}
    record = source.summarize(numbers, experiment.sizes)
    recorded = files[source.parts[-1]].environment
    environment = {
        "pullback": pullback.__version__,
        "torch": recorded["torch"],
        "device": recorded["device"],
        "commit": commit,
    }
    return _put(experiment, source.key, record, seconds, environment, out)


def _put(
    experiment: Experiment,
    key: Key,
    record: dict[str, Any],
    seconds: float,
    environment: dict[str, Any],
    out: Path,
) -> Path:
    store = experiment.open_store(False, out)
    store.put((key, experiment.seeds[0]), record, seconds, environment)
    return store.path


def main(arguments: Sequence[str] | None = None) -> None:
    """Import the items whose parts the arguments name."""
    parser = argparse.ArgumentParser(description="Records from files of parts on a GPU.")
    parser.add_argument("parts", nargs="+", help="PART=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--commit", default="unknown", help="of the source that ran")
    options = parser.parse_args(arguments)
    files: dict[str, PartFile] = {}
    for argument in options.parts:
        name, _, folder = argument.partition("=")
        files[name] = PartFile.read(name, Path(folder))
    for source in SOURCES:
        if files.keys() >= set(source.parts):
            path = import_item(source, files, options.commit, options.out)
            print(f"{' '.join(source.key)} of {source.experiment} is in {path}")


if __name__ == "__main__":
    main()
