"""What each acceleration of K-FAC gains: steps are timed with that one alone switched off.

    python -m benchmarks.kfac_ablation [--device cuda] [--quick] [--only CASE ...] [--out FILE]

An acceleration is off while other functions or numbers stand in the place of those by which the
code chooses it. These are private names, so that this script belongs to the commit at which it is
run: with other code it says which name is missing, and measures nothing.

First, steps with everything on show which accelerations act on a case; the others are left out.
Each is then timed in turn with the baseline, as in `kfac`, in the kinds of steps that it has a part
in; the other kinds are those with everything on, which is measured several times in between. How
far these times are from their mean is the noise of a gain, for the same kinds of steps. A gain is
what a step takes longer, in percent of one with everything on. Statistics steps do not invert here,
as they do otherwise at the first, second, fourth, ... statistics.

A CPU is used with one thread, and its own seconds are counted, whatever else the machine does. Some
accelerations act on no case of `kfac`; for them there are others, which run only if they are named:
a batch of 64 on a CPU ("autoencoder-64"), and on a GPU the small networks ("autoencoder" and
"convnet").
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import pullback as pb
from pullback._core import compiled, products, replay
from pullback._core.space import compute_dtype
from pullback.grams.kronecker import halves as factor_halves
from pullback.grams.kronecker import inverting
from pullback.likelihoods import categorical
from pullback.maps.layers import conv, correlated, fused, linear, lines, moments, patches, registry
from pullback.optim.kfac.blocks import (
    averages,
    entering,
    group,
    inverse,
    inversion,
    ranks,
    rounded,
    runs,
)
from pullback.optim.kfac.statistics import (
    aside,
    beside,
    covectors,
    descent,
    gather,
    later,
    measure,
    pending,
    sums,
    sweep,
    tape,
)
from pullback.optim.kfac.stepping import control, learning, program, steady

from .kfac import IN_A_ROW, NEVER, RESULTS, Bench, combined, repeated
from .kfac_cases import Case, cases, same
from .timing import compare, environment, peak_bytes

ALL = "all on"
EVERY = {"plain": (NEVER, NEVER), "statistics": (1, NEVER), "inversion": (1, 1)}
SCHEDULES = {"10/100": (10, 100), "25/250": (25, 250), "every step": (1, 1)}
P, S, I = EVERY  # noqa: E741
LATE = 2**20  # statistics taken up, after which the next power of two is far
HUGE = 2**62

# --- what is put in the place of the code's own -----------------------------------------------

_waits, _raced = sweep.waits, categorical._raced
_fill, _of, _begin = program.Program.fill, entering.Entering.of, later.Later.__init__
_roundable = rounded.roundable
_asking: list[bool] = []


def no(*_: Any, **__: Any) -> bool:
    return False


def none(*_: Any, **__: Any) -> None:
    return None


def without(name: str) -> Callable[..., Any]:
    """The kernels but for those of one module."""
    return lambda own, device: None if own == name else compiled.kernels(own, device)


def in_plain_torch(name: str, device: torch.device) -> Any:
    """No kernels for float16 inverses, but when it is asked whether there are to be such."""
    return compiled.kernels(name, device) if _asking else None


def still_rounded(given: inverse.Inverse) -> bool:
    _asking.append(True)
    try:
        return _roundable(given)
    finally:
        _asking.pop()


def each(tensors: Sequence[Tensor]) -> list[list[int]]:
    return [[i] for i in range(len(tensors))]


def own_place(self: beside.Beside, i: int, delta: Tensor) -> Tensor | None:
    """Memory of its own for Σ δδᵀ of one layer, formed as it is otherwise."""
    width = delta.shape[-1]
    if i not in self._at or not beside.stackable(delta):
        return None
    return delta.new_empty((1, width, width), dtype=torch.float32)


def copied(self: program.Program, *, once: bool = False) -> None:
    _fill(self)


def kept(self: program.Program) -> None:
    self._there = {}


def entered_anew(pairs: entering.Pairs, last: Any) -> Any:
    return _of(pairs, None)


def waited_for(self: later.Later, flags: Tensor) -> None:
    _begin(self, flags)
    if self._event is not None:
        self._event.synchronize()


def of_all(p: Tensor, generator: torch.Generator | None = None, runs: Any = None) -> Tensor:
    return _raced(p.to(compute_dtype(p.dtype)), generator)


# --- when one of them acts, from what was answered and asked ----------------------------------

Acts = Callable[[Any, tuple[Any, ...]], bool]


def yes(found: Any, _: tuple[Any, ...]) -> bool:
    return bool(found)


def given(found: Any, _: tuple[Any, ...]) -> bool:
    return found is not None


def always(*_: Any) -> bool:
    return True


def of_module(name: str) -> Acts:
    return lambda found, args: found is not None and args[0] == name


def fewer(found: Any, args: tuple[Any, ...]) -> bool:
    return len(found) < len(args[0])


def several(found: Any, args: tuple[Any, ...]) -> bool:
    """More than one is given, to a method or to a function."""
    return len(next(x for x in args if isinstance(x, (list, tuple, Mapping)))) > 1


def halved_product(_: Any, args: tuple[Any, ...]) -> bool:
    return args[1].shape[1] >= moments._LARGE and not args[1].shape[1] % 16


def of_sizes(found: Any, args: tuple[Any, ...]) -> bool:
    """Sides of several sizes are in one stack."""
    return any(len({args[0][i].shape[-1] for i in some}) > 1 for some in found)


def large_ones(found: Any, args: tuple[Any, ...]) -> bool:
    """Large sides of one size are kept apart."""
    sizes = [s.shape[-1] for s in args[0] if s.ndim == 3 and s.device.type == "cpu"]
    return any(count > 1 and n >= inverting._LARGE for n, count in Counter(sizes).items())


def large_moments(_: Any, args: tuple[Any, ...]) -> bool:
    return any(t.ndim == 3 and t.numel() >= entering._LARGE for t in args[0]._new)


@dataclass(frozen=True)
class Switch:
    """An acceleration: owners, names and what stands there while it is off.

    `kinds` are the kinds of steps that it has a part in, `memory` says whether it may matter to the
    peak. It acts where a function in `watch`, by default the one that is replaced, answers so.
    Gains are told for the schedules in `under`, by default for all.
    """

    about: str
    off: tuple[tuple[Any, str, Any], ...]
    kinds: tuple[str, ...]
    memory: bool = True
    acts: Acts = yes
    watch: tuple[tuple[Any, str], ...] = ()
    under: tuple[str, ...] = tuple(SCHEDULES)

    @property
    def watched(self) -> tuple[tuple[Any, str], ...]:
        return self.watch or tuple((owner, name) for owner, name, _ in self.off)


SWITCHES = {
    "second thread": Switch(
        "a second thread launches statistics (aside.fit)", ((aside, "fit", no),), (S,)
    ),
    "float16 inverses": Switch(
        "inverses are held in float16 (rounded.roundable)",
        ((rounded, "roundable", no),),
        (P, S, I),
    ),
    "averages by halves": Switch(
        "averages of large symmetric matrices take half their memory (averages.halved)",
        ((averages, "halved", no),),
        (S, I),
    ),
    "averages in runs": Switch(
        "averages side by side are one tensor (runs.runs, entering.runs)",
        ((runs, "runs", each), (entering, "runs", each)),
        (S, I),
        acts=fewer,
    ),
    "replay": Switch(
        "plain steps are replayed from a CUDA graph (Replay.run)",
        ((replay.Replay, "run", lambda self, key, tensors, work: work()),),
        (P,),
        acts=always,
    ),
    "low rank": Switch(
        "gradients of few places are preconditioned by their factors (ranks._large)",
        ((ranks, "_large", no),),
        (P, S, I),
        watch=((ranks, "pays"),),
    ),
    "deferred checks": Switch(
        "whether statistics are finite is not waited for (Learning._unsure_of)",
        ((learning.Learning, "_unsure_of", none),),
        (S,),
        acts=given,
    ),
    "unattended steps": Switch(
        "steps wait for nothing, by one program (steady.usable)",
        ((steady, "usable", no),),
        (P, S, I),
    ),
    "kernels: sums": Switch(
        "sums of normalizations by Triton (fused.kernels)",
        ((fused, "kernels", without("sums")),),
        (S,),
        acts=of_module("sums"),
    ),
    "kernels: softmax": Switch(
        "softmax with sums of its runs by Triton (categorical.kernels)",
        ((categorical, "kernels", without("softmax")),),
        (S,),
        acts=of_module("softmax"),
    ),
    "kernels: patches": Switch(
        "moments of patches put together by Triton (lines.kernels, correlated.kernels)",
        ((lines, "kernels", without("patches")), (correlated, "kernels", without("patches"))),
        (S,),
        acts=of_module("patches"),
    ),
    "kernels: rounding": Switch(
        "passes around products with float16 inverses by Triton (rounded.kernels)",
        ((rounded, "kernels", in_plain_torch), (rounded, "roundable", still_rounded)),
        (P,),
        acts=always,
        watch=((rounded.Rounded, "_in_passes"),),
    ),
    "outputs side by side": Switch(
        "Σ δδᵀ of layers of one size lie in one piece of memory (Beside.place)",
        ((beside.Beside, "place", own_place),),
        (S,),
        acts=given,
    ),
    "waiting cotangents": Switch(
        "small cotangents wait for others of their shape (Conv.waits)",
        ((conv.Conv, "waits", no),),
        (S,),
    ),
    "inputs after the sweep": Switch(
        "inputs' moments wait until the sweep is over (sweep.waits)",
        ((sweep, "waits", no), (gather, "sweep", SimpleNamespace(waits=_waits))),
        (S,),
        watch=((sweep, "waits"),),
    ),
    "logits again": Switch(
        "large logits are computed twice, not kept (pending._LARGE)",
        ((pending, "_LARGE", HUGE),),
        (S,),
        acts=given,
        watch=((pending, "head_of"),),
    ),
    "blocked inverses": Switch(
        "matrices of many sizes are inverted by panels together (inverting._by_panels)",
        ((inverting, "_by_panels", no),),
        (I,),
    ),
    "bordered sides": Switch(
        "a right side and its border are one factor (group.bordered)",
        ((group, "bordered", no),),
        (P, I),
    ),
    "factors, not inverses": Switch(
        "where every step inverts, Cholesky factors are solved with (learning.on_cpu)",
        ((learning, "on_cpu", no),),
        (I,),
        under=("every step",),
    ),
    "products by halves": Switch(
        "large symmetric products in half precision by halves (moments._LARGE)",
        ((moments, "_LARGE", HUGE),),
        (S,),
        memory=False,
        acts=halved_product,
        watch=((moments, "product_into"), (sweep, "product_into")),
    ),
    "correlation": Switch(
        "moments of 3×3 patches by one correlation (conv.correlates, lines.correlates)",
        ((conv, "correlates", no), (lines, "correlates", no)),
        (S,),
    ),
    # --- accelerations beside those ---
    "program kept": Switch(
        "the program of a step is written once (Steady._keeps)",
        ((steady.Steady, "_keeps", no),),
        (P, S, I),
    ),
    "answers later": Switch(
        "flags are fetched while the device works on (Later.__init__)",
        ((later.Later, "__init__", waited_for),),
        (P, S),
        memory=False,
        acts=lambda _, args: args[0]._event is not None,
    ),
    "all places count": Switch(
        "whether all places count is hoped for and seen later (gather's sweep.waits)",
        ((gather, "sweep", SimpleNamespace(waits=no)),),
        (S,),
        acts=lambda found, _: found is not None and found.later is not None,
        watch=((gather, "draws"),),
    ),
    "inverses at once": Switch(
        "inverses of one kind are applied as one stack (Inverse.alone)",
        ((inverse.Inverse, "alone", property(lambda self: True)),),
        (P, I),
        acts=several,
        watch=((group.Group, "__init__"),),
    ),
    "inputs at once": Switch(
        "inputs' moments of one shape are formed at once (inputs_of)",
        (
            (linear.Linear, "inputs_of", registry.Layer.inputs_of),
            (conv.Conv, "inputs_of", registry.Layer.inputs_of),
        ),
        (S,),
        acts=several,
    ),
    "gradients in place": Switch(
        "single gradients are read where they lie (Program.fill)",
        ((program.Program, "fill", copied),),
        (P,),
        acts=lambda _, args: bool(args[0]._there),
    ),
    "step's memory given back": Switch(
        "memory of gradients' copies is given back after a step (Program.release)",
        ((program.Program, "release", kept),),
        (P,),
        acts=always,
    ),
    "lines": Switch(
        "on a GPU channels are lines: correlation, waiting and all (by_lines of conv and patches)",
        ((conv, "by_lines", no), (patches, "by_lines", no)),
        (S,),
    ),
    "products by sample": Switch(
        "moments of channels sample by sample on a GPU (lines._by_samples)",
        ((lines, "_by_samples", no),),
        (S,),
    ),
    "covector pulled first": Switch(
        "a large covector is pulled through its layer before the graph (descent.below)",
        ((descent, "below", none),),
        (S,),
        acts=given,
    ),
    "half-precision scores": Switch(
        "scores are formed in the logits' own precision (Categorical.halves)",
        ((categorical.Categorical, "halves", False),),
        (S,),
        acts=lambda _, args: args[0].likelihood.halves and args[1].dtype != torch.float32,
        watch=((covectors, "scored"),),
    ),
    "classes by runs": Switch(
        "of many classes a run is drawn first (categorical.chosen)",
        ((categorical, "chosen", of_all),),
        (S,),
        acts=lambda _, args: args[0].shape[1] > 2 * categorical._RUN,
    ),
    "inputs the graph keeps": Switch(
        "autocast's copies are not kept twice (tape.seen)",
        ((tape, "seen", lambda x, output: x),),
        (S,),
        acts=lambda found, args: found is not args[0],
    ),
    "rows of a view": Switch(
        "a linear layer's output is not copied (tape.rows_of); off, no covector is pulled first",
        ((tape, "rows_of", none),),
        (S,),
        acts=given,
    ),
    "normalizations' means": Switch(
        "a batch normalization's own mean and deviation are taken (tape.normalized_by)",
        ((tape, "normalized_by", none),),
        (S,),
        acts=given,
    ),
    "units at once": Switch(
        "moments of gains and shifts are formed for all layers (sweep._FEW)",
        ((sweep, "_FEW", -1),),
        (S,),
        memory=False,
        acts=several,
        watch=((sweep, "_form"),),
    ),
    "borders at once": Switch(
        "sides with a bias are filled as one stack (sums._stack)",
        ((sums, "_stack", none),),
        (S,),
        memory=False,
        acts=given,
    ),
    "places of averages": Switch(
        "where statistics enter is remembered (Entering.of)",
        ((entering.Entering, "of", staticmethod(entered_anew)),),
        (S,),
        memory=False,
        acts=lambda found, args: found is not None and found[0] is args[1],
    ),
    "large diagonals": Switch(
        "of large moments the diagonals are looked at (entering._LARGE)",
        ((entering, "_LARGE", HUGE),),
        (S,),
        memory=False,
        acts=large_moments,
        watch=((entering.Unsure, "telling"),),
    ),
    "near sizes": Switch(
        "matrices are filled up to be inverted with larger ones (inverting._EXTRA)",
        ((inverting, "_EXTRA", -1),),
        (I,),
        acts=of_sizes,
        watch=((inverting, "_near"),),
    ),
    "copies together": Switch(
        "new inverses are copied as few pieces (inversion.together)",
        ((inversion, "together", list),),
        (I,),
        memory=False,
        acts=fewer,
    ),
    "symmetric products": Switch(
        "products X Xᵀ by panels, half of them left out (products.panels)",
        ((products, "panels", lambda n, like: [(0, n)]),),
        (S,),
        memory=False,
        acts=lambda found, _: len(found) > 1,
    ),
    "proof remembered": Switch(
        "the structure of a model is proven once (measure.settled)",
        ((measure, "settled", no),),
        (S,),
        memory=False,
    ),
    "diagonals tell": Switch(
        "on a CPU diagonals tell whether moments are finite (learning._telling)",
        ((learning, "_telling", list),),
        (S,),
        memory=False,
        acts=lambda found, args: any(x is not y for x, y in zip(found, args[0], strict=False)),
    ),
    "sliding patches": Switch(
        "on a CPU moments of patches are slid along (patches._pays)",
        ((patches, "_pays", no),),
        (S,),
    ),
    "outputs by sample": Switch(
        "on a CPU Σ δδᵀ of convolutions sample by sample (conv._by_samples)",
        ((conv, "_by_samples", no),),
        (S,),
    ),
    "factors by halves": Switch(
        "on a CPU with MKL Cholesky factors by halves (halves.pays)",
        ((factor_halves, "pays", no),),
        (I,),
    ),
    "large ones alone": Switch(
        "on a CPU large matrices are inverted one by one (inverting._LARGE)",
        ((inverting, "_LARGE", HUGE),),
        (I,),
        acts=large_ones,
        watch=((inverting, "_alike"),),
    ),
    "fused move": Switch(
        "on a CPU momentum and move in one pass (control._alike)",
        ((control, "_alike", no),),
        (P,),
    ),
}


@contextmanager
def switched_off(switch: Switch) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in switch.off:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextmanager
def watched(counts: Counter[str]) -> Iterator[None]:
    """Count how often each acceleration acts."""
    with ExitStack() as stack:
        for who, switch in SWITCHES.items():
            for owner, name in switch.watched:
                value = _watching(owner, name, switch.acts, who, counts)
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _watching(owner: Any, name: str, acts: Acts, who: str, counts: Counter[str]) -> Any:
    original = getattr(owner, name)

    def asked(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        counts[who] += acts(found, args)
        return found

    unbound = isinstance(vars(owner).get(name), (classmethod, staticmethod))
    return staticmethod(asked) if unbound else asked


def check_switches() -> None:
    """Every name that is replaced exists, and is what it was when that is over."""
    places = {(id(o), n): (o, n) for s in SWITCHES.values() for o, n, _ in s.off}
    places |= {(id(o), n): (o, n) for s in SWITCHES.values() for o, n in s.watched}
    missing = [f"{o.__name__}.{n}" for o, n in places.values() if n not in vars(o)]
    if missing:
        raise SystemExit(f"The code is not that of this script: no {', '.join(missing)}")
    before = {key: vars(o)[n] for key, (o, n) in places.items()}
    for switch in SWITCHES.values():
        with switched_off(switch):
            assert all(vars(o)[n] is value for o, n, value in switch.off), switch.about
    with watched(Counter()):
        assert all(callable(getattr(o, n)) for s in SWITCHES.values() for o, n in s.watched)
    assert all(vars(o)[n] is before[key] for key, (o, n) in places.items())


# --- measuring ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Effort:
    """How often steps are repeated, and how many of them are timed as one."""

    row: int
    repeats: int
    inversions: int
    warmup: int

    @classmethod
    def of(cls, bench: Bench, quick: bool) -> Effort:
        """Short steps on a GPU are timed as more."""
        if bench.device.type == "cpu":
            return cls(1, 2, 2, 1) if quick else cls(1, 12, 6, 2)
        step = {"baseline": bench.route(bench.baseline)}
        seconds = compare(step, bench.device, repeats=3, warmup=3)["baseline"]
        row = max(IN_A_ROW[bench.device.type], round(0.06 / seconds))
        return cls(row, 2, 1, 1) if quick else cls(row, 6, 3, 1)


class Ablation:
    """The gains of all accelerations on one case."""

    def __init__(self, case: Case, device: torch.device, quick: bool) -> None:
        self.bench, self.device = Bench(case, device), device
        self.counts = self._census()
        self.effort = Effort.of(self.bench, quick)
        self.base = self._peak(self.bench.baseline)
        #: what was measured, by variant; with everything on several times
        self.found: dict[str, dict[str, Any]] = {}
        self.on: list[dict[str, Any]] = []

    def _kfac(self, kind: str) -> Callable[[], Any]:
        """A step of one kind, which inverts at none of the early statistics."""
        make = self.bench.kfac(*EVERY[kind])

        def calm(model: nn.Module) -> pb.KFAC:
            optimizer = make(model)
            optimizer._memory["taken"] = LATE
            return optimizer

        return self.bench.route(calm)

    def _census(self) -> Counter[str]:
        """How often each acceleration acts in some steps of each kind."""
        counts: Counter[str] = Counter()
        with watched(counts):
            for kind in EVERY:
                step = self._kfac(kind)
                for _ in range(6):
                    step()
                del step
        self._clean()
        return counts

    def _clean(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _peak(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> int:
        """Peak bytes of some steps on a GPU."""
        if self.device.type == "cpu":
            return 0
        self._clean()
        step = self.bench.route(make)
        return peak_bytes(repeated(step, 4), self.device)

    def measure(self, kinds: Sequence[str], memory: bool) -> dict[str, Any]:
        """Multiples of the baseline's time in these kinds of steps, and of its memory."""
        effort, bench = self.effort, self.bench
        ratio: dict[str, float] = {}
        milliseconds: dict[str, float] = {}
        if memory and self.base:  # every other step takes statistics and inverts
            ratio["memory"] = self._peak(bench.kfac(2, 2)) / self.base
            self._clean()
        base = bench.route(bench.baseline)
        often, few = [k for k in kinds if k != I], [k for k in kinds if k == I]
        for some, row, repeats in (
            (often, effort.row, effort.repeats),
            (few, max(1, effort.row // 2), effort.inversions),
        ):
            if not some:
                continue
            routes = {"baseline": repeated(base, row)}
            routes |= {k: repeated(self._kfac(k), row) for k in some}
            times = compare(
                routes, self.device, repeats, effort.warmup, patience=20,
                clock=time.process_time if self.device.type == "cpu" else time.perf_counter,
            )  # fmt: skip
            ratio |= {k: times[k] / times["baseline"] for k in some}
            milliseconds |= {k: 1e3 * t / row for k, t in times.items()}
            del routes
            self._clean()
        return {"ratio": ratio, "milliseconds": milliseconds}

    def variant(self, name: str) -> None:
        """Measure one, or everything on; what fails is told, and the others go on."""
        try:
            if name == ALL:
                self.on.append(self.measure(tuple(EVERY), memory=True))
            else:
                switch = SWITCHES[name]
                with switched_off(switch):
                    self.found[name] = self.measure(switch.kinds, switch.memory)
        except Exception as error:
            self.found[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        self._clean()

    def order(self, wanted: Sequence[str] | None) -> list[str]:
        """Those that act, everything on at both ends and in between."""
        names = [n for n in SWITCHES if self.counts[n] and (wanted is None or n in wanted)]
        step = max(1, -(-len(names) // 3))
        parts = [names[a : a + step] for a in range(0, len(names), step)]
        return [ALL, *(n for part in parts for n in [*part, ALL])]

    def record(self) -> dict[str, Any]:
        """All that is known so far."""
        reference = {
            k: statistics.fmean(r["ratio"][k] for r in self.on) for k in self.on[0]["ratio"]
        }
        on = ratios(reference, reference)
        runs = [gains(r["ratio"], tuple(EVERY), reference) for r in self.on]
        out: dict[str, Any] = {
            ALL: {
                "ratio": on,
                "runs": self.on,
                "spread_percent": {
                    k: max(r[k] for r in runs) - min(r[k] for r in runs) for k in on
                },
            }
        }
        for name, switch in SWITCHES.items():
            about = {"about": switch.about, "acted": self.counts[name]}
            found = self.found.get(name)
            if found is None or "failed" in found:
                out[name] = about | (found or {})
                continue
            own, kinds = found["ratio"], switch.kinds
            apart = [gains(r["ratio"], kinds, reference) for r in self.on]
            gain = gains(own, kinds, reference)
            gain = {k: g for k, g in gain.items() if k not in SCHEDULES or k in switch.under}
            noise = {k: max(abs(r[k]) for r in apart) for k in gain}
            out[name] = {
                **about,
                "measured": list(own),
                "milliseconds": found["milliseconds"],
                "ratio": {k: v for k, v in ratios(own, reference).items() if k in gain},
                "gain_percent": gain,
                "noise_percent": noise,
            }
        return out


def spread(values: Iterable[float]) -> float:
    some = list(values)
    return max(some) - min(some)


def ratios(own: Mapping[str, float], on: Mapping[str, float]) -> dict[str, float]:
    """By kind of step and schedule; a kind that was not measured takes as much longer as the last.

    So do statistics where plain steps are slower, of which they are one.
    """
    kinds, shift = {"baseline": 1.0}, 0.0
    for kind in EVERY:
        if kind in own:
            shift = own[kind] - on[kind]
        kinds[f"kfac {kind}"] = on[kind] + shift
    out = {k: combined(kinds, "kfac", schedule) for k, schedule in SCHEDULES.items()}
    out |= {kind: kinds[f"kfac {kind}"] for kind in EVERY}
    return out | ({"memory": own.get("memory", on["memory"])} if "memory" in on else {})


def gains(
    own: Mapping[str, float], kinds: Sequence[str], on: Mapping[str, float]
) -> dict[str, float]:
    """Percent that each takes more than with everything on, from these kinds of steps."""
    some = {k: v for k, v in own.items() if k in kinds or k == "memory"}
    now, reference = ratios(some, on), ratios(on, on)
    gain = {k: 100 * (now[k] / reference[k] - 1) for k in now}
    return gain if "memory" in own else {k: g for k, g in gain.items() if k != "memory"}


def show(name: str, record: Mapping[str, Any]) -> None:
    """A table, the largest gain of a step first."""
    on = record[ALL]
    print(f"\n{name}, × baseline: " + ", ".join(f"{k} {r:.3f}" for k, r in on["ratio"].items()))
    apart = on["spread_percent"].items()
    print("spread with all on, %: " + ", ".join(f"{k} {s:.2f}" for k, s in apart))
    columns = ["10/100", "25/250", "every step", "statistics", "memory"]
    print(f"  {'gain, %':26}" + "".join(f"{c:>16}" for c in columns))
    rows = {n: r for n, r in record.items() if "gain_percent" in r}
    for who, row in sorted(rows.items(), key=lambda x: -x[1]["gain_percent"].get("10/100", 0)):
        gain, noise = row["gain_percent"], row["noise_percent"]
        cells = [f"{gain[c]:+.2f} ±{noise[c]:.2f}" if c in gain else "" for c in columns]
        print(f"  {who:26}" + "".join(f"{c:>16}" for c in cells))
    for who, row in record.items():
        if "failed" in row:
            print(f"  {who}: {row['failed']}")
    idle = [n for n, r in record.items() if r.get("acted") == 0]
    print("  do not act here: " + ", ".join(idle))


def all_cases(device: torch.device, quick: bool) -> tuple[dict[str, Case], list[str]]:
    """The cases of `kfac` and some more, and the names of the former."""
    usual = cases(device, quick)
    if device.type != "cpu":
        return usual | cases(torch.device("cpu"), quick), list(usual)
    batch = usual["autoencoder"].batch
    few = replace(usual["autoencoder"], batch=lambda: same(batch()[0][:64]))
    return usual | {"autoencoder-64": few}, list(usual)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, written only to --out")
    parser.add_argument("--only", nargs="*", default=None, metavar="CASE")
    parser.add_argument("--variants", nargs="*", default=None, choices=list(SWITCHES))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args([] if arguments is None else arguments)
    check_switches()
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    torch.backends.cudnn.allow_tf32 = True
    print(environment(device), flush=True)
    path = options.out or (None if options.quick else RESULTS / f"kfac-ablation-{device.type}.json")
    results: dict[str, Any] = {}
    if path is not None and path.exists():
        results = json.loads(path.read_text())["results"]
    known, usual = all_cases(device, options.quick)
    for name in usual if options.only is None else options.only:
        start = time.perf_counter()
        ablation = Ablation(known[name], device, options.quick)
        for who in ablation.order(options.variants):
            ablation.variant(who)
            if not ablation.on:  # nothing to compare with
                print(f"{name}: {ablation.found[ALL]['failed']}")
                break
            print(f"{name}, {time.perf_counter() - start:5.0f} s: {who}", flush=True)
            results[name] = ablation.record()
            if path is not None:
                record = {"environment": environment(device), "results": results}
                path.write_text(json.dumps(record, indent=1) + "\n")
        if ablation.on:
            show(name, results[name])


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
