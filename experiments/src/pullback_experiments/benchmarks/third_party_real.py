"""K-FAC on models that others wrote, at the sizes at which people train them.

    pullback bench third-party --real [--device cuda] [--quick] [--out FILE]

GPT-2 of Hugging Face with 124M parameters on 8 × 1024 tokens in bfloat16 autocast; ResNet-50 and
ViT-B/16 of torchvision on 64 images. Each model is built from its configuration with random
weights. Steps are timed as in `pullback bench kfac`, beside fused AdamW: plain ones, ones that take
statistics as well, ones that invert too, and a run by the schedule 10/100. The first step traces
the model, takes statistics and inverts; it stands beside a later statistics step of the same run.
The device's libraries are started before, by K-FAC on a small network.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb

from ..framework.benchmark import Record, use_tensor_cores
from ..framework.timing import describe_machine, first_and_later
from .kfac import NEVER, STILL, Bench, measure_schedule_ratio, predict_schedule_ratio
from .kfac_cases import Case, categorical, images, text

Make = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class RealSizes:
    """The sizes of batches and the lengths of runs.

    Attributes:
        images, pixels: how many, and along a side.
        tokens, vocabulary: of the text.
        half: the precision of autocast, or None.
        repeats: timings of each kind of step.
        natural_steps, default_steps: of the runs by the schedule 10/100 and without settings.
    """

    images: int = 64
    pixels: int = 224
    tokens: int = 1024
    vocabulary: int = 50257
    half: torch.dtype | None = torch.bfloat16
    repeats: int = 8
    natural_steps: int = 100
    default_steps: int = 60


FULL = RealSizes()
QUICK = RealSizes(2, 32, 16, 512, None, repeats=1, natural_steps=6, default_steps=6)


def cases(quick: bool) -> dict[str, Case]:
    """Return the models with their batches; small ones where `quick`."""
    sizes = FULL
    if quick:
        sizes = QUICK

    def gpt2() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        depth: dict[str, Any] = {}
        if quick:
            depth = {"n_layer": 2, "n_embd": 48, "n_head": 4}
        config = GPT2Config(vocab_size=sizes.vocabulary, use_cache=False, **depth)
        return GPT2LMHeadModel(config)

    def resnet50() -> nn.Module:
        from torchvision.models import resnet

        if not quick:
            return resnet.resnet50()
        model: Any = resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1])
        model.layer3 = nn.Identity()
        model.layer4 = nn.Identity()
        model.fc = nn.Linear(512, 1000)
        return model

    def vit() -> nn.Module:
        from torchvision.models import vision_transformer

        if quick:
            return vision_transformer.VisionTransformer(32, 16, 2, 4, 48, 96)
        return vision_transformer.vit_b_16()

    def pictures() -> tuple[Tensor, Tensor]:
        return images(sizes.images, sizes.pixels, 1000)

    likelihood = pb.likelihoods.Categorical
    return {
        "GPT-2, transformers": Case(
            gpt2,
            lambda: text(8, sizes.tokens, sizes.vocabulary),
            lambda z, y: categorical(z.logits, y),
            likelihood,
            {},
            sizes.half,
        ),
        "ResNet-50, torchvision": Case(resnet50, pictures, categorical, likelihood, {}),
        "ViT-B/16, torchvision": Case(vit, pictures, categorical, likelihood, {}, sizes.half),
    }


def shares(opt: pb.KFAC) -> dict[str, float]:
    """Return the shares of trained entries by kind of block."""
    counts = dict.fromkeys(("kronecker", "units", "diagonal"), 0)
    for row in opt.coverage():
        block = row.block.partition(",")[0].partition(" ")[0]
        if block in counts:
            counts[block] += torch.Size(row.shape).numel()
    return {block: count / max(1, sum(counts.values())) for block, count in counts.items()}


def first_step(bench: Bench, **options: Any) -> dict[str, Any]:
    """Milliseconds of the first step and of later statistics steps, and the blocks found."""
    model = copy.deepcopy(bench.model)
    opt = pb.KFAC(model, STILL, statistics_every=1, invert_every=NEVER, **options)

    def step() -> None:
        opt.zero_grad()
        bench.case.loss(bench.forward(model), bench.y).backward()
        opt.step()

    # by the 45th step all first eigenbases are found
    first, later = first_and_later(step, bench.device, steps=45)
    times = {"first": 1e3 * first, "statistics": 1e3 * later, "ratio": first / later}
    return times | {"shares": shares(opt)}


def default(model: nn.Module) -> pb.KFAC:
    """Return K-FAC without settings, at rate zero."""
    return pb.KFAC(model, STILL)


def load_libraries(device: torch.device) -> None:
    """Load the device's libraries."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 8)).to(device)
    for rule in ("natural", "eigenbasis", "spectral"):
        opt = pb.KFAC(model, STILL, rule=rule, statistics_every=1, invert_every=1)
        for _ in range(2):
            opt.zero_grad()
            model(torch.randn(16, 3, 8, 8, device=device)).logsumexp(1).mean().backward()
            opt.step()


def memory(bench: Bench, makers: dict[str, Make]) -> dict[str, int]:
    """Return the peak bytes of twelve steps with each optimizer alone."""
    first_steps = {}
    for name, make in makers.items():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(bench.device)
        step = bench.route(make)
        for _ in range(12):
            step()
        first_steps[name] = torch.cuda.max_memory_allocated(bench.device)
        del step
    return first_steps


def measure(case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    """Return coverage, times and memory of natural K-FAC and of `KFAC(model)`."""
    sizes = FULL
    if quick:
        sizes = QUICK
    bench = Bench(case, device)
    baseline = bench.route(bench.baseline)
    for _ in range(3):
        baseline()
    del baseline
    natural = bench.kfac(10, 100)
    row: dict[str, Any] = {"parameters": sum(p.numel() for p in bench.model.parameters())}
    row["first step"] = {
        "natural": first_step(bench, likelihood=case.likelihood()),
        "default": first_step(bench),
    }
    gc.collect()
    seconds_by_step = bench.seconds("kfac", sizes.repeats)
    row["milliseconds"] = {
        step_type: 1e3 * seconds for step_type, seconds in seconds_by_step.items()
    }
    ratio = {
        step_type: seconds_by_step[f"kfac {step_type}"] / seconds_by_step["baseline"]
        for step_type in ("plain", "statistics")
    }
    ratio["inversion"] = seconds_by_step["kfac inversion"] / seconds_by_step["baseline"]
    ratio["10/100"] = predict_schedule_ratio(seconds_by_step, "kfac", (10, 100))
    gc.collect()
    ratio["10/100, run"] = measure_schedule_ratio(bench, natural, sizes.natural_steps)
    gc.collect()
    ratio["default, run"] = measure_schedule_ratio(bench, default, sizes.default_steps)
    if device.type == "cuda":
        gc.collect()
        peaks = memory(bench, {"baseline": bench.baseline, "natural": natural, "default": default})
        row["peak_bytes"] = peaks
        ratio["memory"] = peaks["natural"] / peaks["baseline"]
        ratio["default, memory"] = peaks["default"] / peaks["baseline"]
    return row | {"ratio": ratio}


def run(device: torch.device, quick: bool, out: Path, only: list[str] | None = None) -> None:
    use_tensor_cores(device)
    print(describe_machine(device))
    load_libraries(device)
    record = Record.on_device(out, device, resume=False)
    for name, case in cases(quick).items():
        if only and name not in only:
            continue
        gc.collect()
        row = measure(case, device, quick)
        print(f"\n{name}: {row['parameters']:,} parameters")
        for rule, times in row["first step"].items():
            shares = ", ".join(f"{k} {100 * v:.1f} %" for k, v in times["shares"].items())
            print(f"  {rule}: {shares}; first step {times['first']:.0f} ms, "
                  f"{times['ratio']:.1f} of a later statistics step")  # fmt: skip
        for step, value in row["milliseconds"].items():
            print(f"  {step:18} {value:9.2f} ms")
        for step, value in row["ratio"].items():
            print(f"  {step:18} {value:9.2f} × baseline", flush=True)
        record.put(name, row)
