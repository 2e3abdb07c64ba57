"""Influence at scale on one GPU: `python -m pullback_experiments.attribution.device FOLDER`.

It needs torch alone. Six parts write their numbers to FOLDER/curvature.json as they come:

    resnet9     seconds and memory to fit ResNet-9 and to score 2,000 × 25,000
    growth      the same for other numbers of samples and parameters
    gpt2        a decoder of GPT-2 small's size, 1,000 sequences
    cifar2      linear datamodeling score of ResNet-9 on two classes of CIFAR-10
    text        linear datamodeling score of a small decoder on text
    trak        TRAK with one and with ten networks on the halves of cifar2

`cifar2` and `text` choose their damping on retrained networks that the score does not see. The data
are `cifar2.pt` (see `save_two_classes`) and `tiny_shakespeare.txt.gz` in the folder that
PULLBACK_DATA names.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.curvature import Relative, margin

from .networks import Decoder, resnet9
from .retraining import Schedule, draw_subsets, train_networks
from .scores import datamodeling_score, trak

#: multiples of each block's mean eigenvalue that are tried beside the weight decay of training
MULTIPLES: tuple[float, ...] = (0.1, 1.0, 10.0)


def list_dampings(decay: float) -> dict[str, float | Relative]:
    """Return the dampings to choose among, by name."""
    dampings: dict[str, float | Relative] = {f"relative {k:g}": Relative(k) for k in MULTIPLES}
    dampings["weight decay"] = decay
    return dampings


@dataclass(frozen=True)
class Sizes:
    """How large every part is.

    Attributes:
        samples, queries: of the ResNet-9 timing.
        width: of ResNet-9, 64 for the one in print.
        batch: samples that are linearized at once.
        sequences, length, text_queries: of the GPT-2 timing.
        decoder: words, width, layers and heads of that decoder.
        subsets, tuning: networks retrained for the score, and for the choice of the damping.
        epochs: of ResNet-9's training.
        images, cifar_queries: of two classes of CIFAR-10.
        trak_models: further networks for TRAK.
        text_samples, text_length, text_epochs: of the small decoder.
    """

    samples: int = 25_000
    queries: int = 2_000
    width: int = 64
    batch: int = 500
    sequences: int = 1_000
    length: int = 256
    text_queries: int = 100
    decoder: tuple[int, int, int, int] = (50_257, 768, 12, 12)
    subsets: int = 50
    tuning: int = 10
    epochs: int = 16
    images: int = 10_000
    cifar_queries: int = 500
    trak_models: int = 10
    text_samples: int = 2_000
    text_length: int = 64
    text_epochs: int = 30


TINY = Sizes(
    samples=64,
    queries=16,
    width=4,
    batch=32,
    sequences=8,
    length=16,
    text_queries=2,
    decoder=(50, 16, 2, 2),
    subsets=4,
    tuning=2,
    epochs=1,
    images=200,
    cifar_queries=20,
    trak_models=2,
    text_samples=40,
    text_length=16,
    text_epochs=1,
)


class RecordFile:
    """Numbers by part, written whenever one comes."""

    def __init__(self, folder: Path, sizes: Sizes, device: torch.device) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "curvature.json"
        self._begun = time.monotonic()
        name = str(device)
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        #: what a part leaves for a later one
        self.cache: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {
            "environment": {"device": name, "torch": torch.__version__},
            "sizes": asdict(sizes),
        }

    def add(self, part: str, **numbers: Any) -> None:
        """Add numbers to a part and write the file."""
        self.numbers.setdefault(part, {}).update(numbers)
        self.numbers["seconds"] = self.seconds
        self._path.write_text(json.dumps(self.numbers, indent=1))
        print(f"{self.seconds:7.1f} s  {part}: {json.dumps(numbers)}", flush=True)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self._begun, 2)


class Clock:
    """Seconds and peak memory of a piece of work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def measure(self, work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
        """Return what the work returns, and its seconds and gigabytes."""
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        result = work()
        if is_cuda:
            torch.cuda.synchronize()
        numbers = {"seconds": round(time.monotonic() - start, 3)}
        if is_cuda:
            numbers["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        return result, numbers


def batches(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of at most `size` samples."""
    return list(zip(x.split(size), y.split(size), strict=True))


def time_resnet(sizes: Sizes, device: torch.device, record: RecordFile) -> None:
    """Fit ResNet-9 and score, in float32, and with TF32 products and bfloat16 scores."""
    torch.manual_seed(0)
    model = resnet9(10, sizes.width).to(device).eval()
    x = torch.randn(sizes.samples, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (sizes.samples,), device=device)
    training = batches(x, y, sizes.batch)
    queries = batches(x[: sizes.queries], y[: sizes.queries], sizes.batch)
    clock = Clock(device)
    parameters = sum(p.numel() for p in model.parameters())
    record.add("resnet9", parameters=parameters)
    likelihood = pb.likelihoods.Categorical()
    pb.curvature.fit(model, training[:2], likelihood=likelihood, draws=1)  # kernels are chosen
    runs = (("float32", "highest", None), ("bfloat16", "high", torch.bfloat16))
    for name, precision, dtype in runs:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = precision == "high"
        fit = partial(pb.curvature.fit, model, training, likelihood=likelihood, draws=1)
        curvature, fitting = clock.measure(fit)
        score = partial(
            pb.curvature.influence, curvature, queries, training, measure=margin, dtype=dtype,
            query_bytes=2**36,
        )  # fmt: skip
        _, scoring = clock.measure(score)
        record.add("resnet9", **{name: {"fit": fitting, "score": scoring}})
    torch.set_float32_matmul_precision("high")
    fit = partial(pb.curvature.fit, model, training, likelihood=likelihood)
    _, fitting = clock.measure(fit)
    record.add("resnet9", exact_metric={"fit": fitting})


def time_growth(sizes: Sizes, device: torch.device, record: RecordFile) -> None:
    """Fit and score for a quarter, a half and all samples, and for three widths."""
    torch.manual_seed(0)
    clock = Clock(device)
    likelihood = pb.likelihoods.Categorical()
    rows = []
    points = [(share, 1.0) for share in (0.125, 0.25, 0.5)]
    points += [(0.125, factor) for factor in (0.5, 2.0)]
    for share, factor in points:
        samples = int(sizes.samples * share)
        model = resnet9(10, max(1, int(sizes.width * factor))).to(device).eval()
        x = torch.randn(samples, 3, 32, 32, device=device)
        y = torch.randint(0, 10, (samples,), device=device)
        training = batches(x, y, sizes.batch // 2)
        few = max(1, sizes.queries // 10)
        queries = batches(x[:few], y[:few], sizes.batch // 2)
        fit = partial(pb.curvature.fit, model, training, likelihood=likelihood, draws=1)
        curvature, fitting = clock.measure(fit)
        score = partial(pb.curvature.influence, curvature, queries, training, query_bytes=2**35)
        _, scoring = clock.measure(score)
        parameters = sum(p.numel() for p in model.parameters())
        rows.append({"samples": samples, "parameters": parameters, "queries": few,
                     "fit": fitting, "score": scoring})  # fmt: skip
        record.add("growth", rows=rows)


def time_decoder(sizes: Sizes, device: torch.device, record: RecordFile) -> None:
    """Fit a decoder of GPT-2's size with random weights and score its sequences."""
    torch.manual_seed(0)
    words, width, layers, heads = sizes.decoder
    model = Decoder(words, width, layers, heads, sizes.length, is_tied=True).to(device).eval()
    tokens = torch.randint(0, words, (sizes.sequences, sizes.length + 1), device=device)
    size = max(1, sizes.batch // 60)
    training = batches(tokens[:, :-1], tokens[:, 1:], size)
    few = sizes.text_queries
    queries = batches(tokens[:few, :-1], tokens[:few, 1:], size)
    clock = Clock(device)
    record.add("gpt2", parameters=sum(p.numel() for p in model.parameters()))
    likelihood = pb.likelihoods.Categorical()
    fit = partial(pb.curvature.fit, model, training, likelihood=likelihood)
    curvature, fitting = clock.measure(fit)
    record.add("gpt2", fit=fitting, metric=curvature.table.metric)
    score = partial(
        pb.curvature.influence, curvature, queries, training, dtype=torch.bfloat16,
        query_bytes=2**35,
    )  # fmt: skip
    _, scoring = clock.measure(score)
    record.add("gpt2", score=scoring, queries=few, sequences=sizes.sequences)


def save_two_classes(folder: Path, classes: tuple[int, int] = (3, 5)) -> Path:
    """Write cats and dogs of CIFAR-10 to `cifar2.pt`, 36 MB, which needs no other package."""
    from ..learning import data

    images = data.cifar10()
    parts: dict[str, Tensor] = {}
    sources = {"": (images.x, images.y), "test_": (images.test_x, images.test_y)}
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
    for name, (x, y) in sources.items():
        is_chosen = (y == classes[0]) | (y == classes[1])
        pixels = (x[is_chosen] * deviation + mean) * 255
        parts[f"{name}x"] = pixels.round().clamp(0, 255).to(torch.uint8)
        parts[f"{name}y"] = (y[is_chosen] == classes[1]).long()
    path = folder / "cifar2.pt"
    torch.save(parts, path)
    return path


def load_two_classes(sizes: Sizes, device: torch.device) -> dict[str, Tensor]:
    """Return images in float32 with mean 0 and variance 1, and labels 0 and 1."""
    found = torch.load(Path(os.environ["PULLBACK_DATA"]) / "cifar2.pt", weights_only=True)
    limits = {"": sizes.images, "test_": sizes.cifar_queries}
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], device=device).view(3, 1, 1)
    loaded: dict[str, Tensor] = {}
    for name, limit in limits.items():
        pixels = found[f"{name}x"][:limit].to(device).float() / 255
        loaded[f"{name}x"] = (pixels - mean) / deviation
        loaded[f"{name}y"] = found[f"{name}y"][:limit].to(device)
    return loaded


#: of ResNet-9's training, in print with this network
WEIGHT_DECAY = 5e-4


def train_resnet(x: Tensor, y: Tensor, subset: Tensor, seed: int, sizes: Sizes) -> nn.Module:
    """Return ResNet-9 trained on a subset, in bfloat16 with rates that rise and fall."""
    torch.manual_seed(seed)
    device = x.device
    model = resnet9(2, sizes.width).to(device)
    batch = min(256, len(subset))
    steps = sizes.epochs * (len(subset) // batch)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=WEIGHT_DECAY, nesterov=True
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps + 1)
    subset = subset.to(device)
    for _ in range(sizes.epochs):
        order = subset[torch.randperm(len(subset), device=device)]
        for start in range(0, len(subset) - batch + 1, batch):
            chosen = order[start : start + batch]
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    return model.eval()


def outputs_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return outputs in panels."""
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(1000)])


@dataclass(frozen=True)
class HeldOut:
    """Retrained networks, of which the first few choose settings and the others judge.

    Attributes:
        subsets: (M, size), indices.
        measured: (M, queries).
        tuning: how many networks choose.
    """

    subsets: Tensor
    measured: Tensor
    tuning: int

    def choose(self, by_damping: dict[str, Tensor]) -> tuple[str, dict[str, float]]:
        """Return the best name on the networks for tuning, and the score of every name there."""
        tuned = {}
        for name, scores in by_damping.items():
            subsets = self.subsets[: self.tuning]
            found = datamodeling_score(scores, subsets, self.measured[: self.tuning])
            tuned[name] = round(float(found.mean()), 4)
        return max(tuned, key=lambda name: tuned[name]), tuned

    def score(self, scores: Tensor) -> float:
        """Return the mean datamodeling score on the networks that choose nothing."""
        subsets = self.subsets[self.tuning :]
        found = datamodeling_score(scores, subsets, self.measured[self.tuning :])
        return round(float(found.mean()), 4)


def score_dampings(
    curvature: pb.curvature.Curvature,
    queries: Any,
    training: Any,
    measure: Any,
    decay: float,
) -> dict[str, Tensor]:
    """Return the scores of every damping, by its name."""
    by_damping = {}
    for name, damping in list_dampings(decay).items():
        by_damping[name] = -pb.curvature.influence(
            curvature, queries, training, damping=damping, measure=measure, query_bytes=2**35
        )
    return by_damping


def score_cifar(sizes: Sizes, device: torch.device, record: RecordFile) -> None:
    """Measure how well influence predicts ResNet-9 retrained on halves of two classes."""
    data = load_two_classes(sizes, device)
    x, y = data["x"], data["y"]
    queries = (data["test_x"], data["test_y"])
    total = sizes.subsets + sizes.tuning
    subsets = draw_subsets(len(x), total, seed=0)
    clock = Clock(device)
    full = torch.arange(len(x))
    model, trained = clock.measure(partial(train_resnet, x, y, full, 0, sizes))
    accuracy = (outputs_of(model, queries[0]).argmax(1) == queries[1]).float().mean()
    record.add("cifar2", training=trained, accuracy=float(accuracy))
    rows = []
    for number, subset in enumerate(subsets):
        network = train_resnet(x, y, subset, 1000 + number, sizes)
        rows.append(margin(outputs_of(network, queries[0]), queries[1]))
        if number % 10 == 9:
            record.add("cifar2", retrained=number + 1)
    measured = torch.stack(rows)
    training = batches(x, y, sizes.batch)
    fit = partial(pb.curvature.fit, model, training, likelihood=pb.likelihoods.Categorical())
    curvature, fitting = clock.measure(fit)
    by_damping = score_dampings(curvature, queries, training, margin, WEIGHT_DECAY)
    judge = HeldOut(subsets, measured, sizes.tuning)
    best, tuning = judge.choose(by_damping)
    record.add("cifar2", fit=fitting, tuning=tuning, damping=best)
    for name, scores in by_damping.items():
        record.add("cifar2", **{f"ekfac, {name}": judge.score(scores)})
    record.add("cifar2", ekfac=judge.score(by_damping[best]))
    identity = -pb.curvature.influence(
        curvature, queries, training, damping=1e12, measure=margin, query_bytes=2**35
    )
    record.add("cifar2", **{"gradient dot product": judge.score(identity)})
    record.cache["cifar2"] = RetrainedHalves(model, (x, y), queries, judge)


@dataclass(frozen=True)
class RetrainedHalves:
    """What `score_trak` needs of `score_cifar`: a network, data, and what retraining said."""

    model: nn.Module
    training: tuple[Tensor, Tensor]
    queries: tuple[Tensor, Tensor]
    judge: HeldOut


def score_trak(sizes: Sizes, device: torch.device, record: RecordFile) -> None:
    """Measure TRAK with one and with several networks on the same halves of CIFAR-10."""
    halves: RetrainedHalves = record.cache["cifar2"]
    models = [halves.model]
    for count in (1, sizes.trak_models):
        while len(models) < count:
            full = torch.arange(len(halves.training[0]))
            models.append(train_resnet(*halves.training, full, len(models), sizes))
        scores = trak(models, halves.queries, halves.training, 2048, seed=0, batch=100)
        record.add("cifar2", **{f"TRAK, {count} models": halves.judge.score(scores)})


def score_text(sizes: Sizes, device: torch.device, record: RecordFile) -> None:
    """Measure the same for a small decoder of characters, on the loss of held-out sequences."""
    path = Path(os.environ["PULLBACK_DATA"]) / "tiny_shakespeare.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    length = sizes.text_length + 1
    needed = (sizes.text_samples + 100) * length
    tokens = torch.tensor([letters[letter] for letter in text[:needed]], device=device)
    rows = tokens.view(-1, length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).to(device)
    rows = rows[order]
    x = rows[: sizes.text_samples, :-1]
    y = rows[: sizes.text_samples, 1:]
    queries = (rows[sizes.text_samples :, :-1], rows[sizes.text_samples :, 1:])
    shape = (len(letters), 64, 2, 4, sizes.text_length)
    make = partial(Decoder, *shape, is_tied=False, is_fused=False)
    schedule = Schedule(
        epochs=sizes.text_epochs, batch=min(50, len(x) // 4), rate=3e-3, decay=1e-4,
        is_adaptive=True,
    )  # fmt: skip
    clock = Clock(device)
    train = partial(train_networks, make, x, y, measure=sequence_loss)
    full = torch.arange(len(x))[None]
    networks, trained = clock.measure(partial(train, full, [0], schedule))
    model = networks.network(0)
    held_out = float(position_losses(outputs_of(model, queries[0]), queries[1]).mean())
    record.add("text", training=trained, loss=held_out / sizes.text_length)
    total = sizes.subsets + sizes.tuning
    subsets = draw_subsets(len(x), total, seed=1)
    seeds = list(range(1000, 1000 + total))
    retrained, trained = clock.measure(partial(train, subsets, seeds, schedule))
    measured = torch.stack([position_losses(z, queries[1]) for z in retrained.outputs(queries[0])])
    record.add("text", retraining=trained)
    training = batches(x, y, 200)
    fit = partial(pb.curvature.fit, model, training, likelihood=pb.likelihoods.Categorical())
    curvature, fitting = clock.measure(fit)
    # G adds up the positions of a sequence, and training takes their mean
    decay = schedule.decay * sizes.text_length
    by_damping = score_dampings(curvature, queries, training, None, decay)
    judge = HeldOut(subsets, measured, sizes.tuning)
    best, tuning = judge.choose(by_damping)
    record.add("text", fit=fitting, tuning=tuning, damping=best)
    for name, scores in by_damping.items():
        record.add("text", **{f"ekfac, {name}": judge.score(scores)})
    record.add("text", ekfac=judge.score(by_damping[best]))
    identity = -pb.curvature.influence(curvature, queries, training, damping=1e12)
    record.add("text", **{"gradient dot product": judge.score(identity)})


def position_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses of sequences, added up over positions: (N,)."""
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return losses.sum(1)


def sequence_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of all positions."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


PARTS: dict[str, Callable[[Sizes, torch.device, RecordFile], None]] = {
    "resnet9": time_resnet,
    "cifar2": score_cifar,
    "gpt2": time_decoder,
    "text": score_text,
    "growth": time_growth,
    "trak": score_trak,
}


def main() -> None:
    """Run the parts in order, each by itself; one that fails says so in the record."""
    parser = argparse.ArgumentParser(description="Influence at scale on one GPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="Sizes that take a minute on a CPU.")
    parser.add_argument("--seconds", type=float, default=480.0, help="No part starts after this.")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    sizes = TINY if options.tiny else Sizes()
    record = RecordFile(options.folder, sizes, device)
    for name in options.parts.split(","):
        if record.seconds > options.seconds:
            record.add(name, skipped="the time was over")
            continue
        try:
            PARTS[name](sizes, device, record)
        except Exception as error:
            record.add(name, error=f"{type(error).__name__}: {error}")
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
