"""Linear datamodeling scores by real retraining, and wrong labels, on MNIST."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

import pullback as pb
from pullback.curvature import margin

from ...framework.check import Check
from ...framework.experiment import Context, Experiment, Item
from ...framework.store import Results
from ...framework.tabular import Table
from ...learning import data
from ...learning.networks import mlp
from ..retraining.halves import HUGE_DAMPING, ExplainedModel, Halves
from ..retraining.scores import rank
from ..retraining.stacked_networks import Schedule, TrainedNetworks, draw_subsets, train_networks
from .comparison import (
    Methods,
    check_scores,
    draw_scores,
    judge_dampings,
    judge_methods,
    list_trak,
    tabulate_dampings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: inputs and targets
Pair = tuple[Tensor, Tensor]
WIDTHS = (784, 128, 64, 10)


def normalize_pixels(x: Tensor, mean: float = 0.1307, deviation: float = 0.3081) -> Tensor:
    """Return pixels with mean 0 and variance 1, by the moments of MNIST."""
    return (x - mean) / deviation


def make_network() -> nn.Module:
    """Return the network that is retrained."""
    return mlp(*WIDTHS)


@dataclass(frozen=True)
class Digits:
    """Images as vectors of mean 0 and variance 1, and their labels."""

    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor

    @classmethod
    def load(cls, setting: InfluenceMNIST, device: torch.device) -> Digits:
        """Return the first images of each part, of MNIST or made up."""
        if setting.is_generated:
            images = data.generate_pictures((1, 28, 28), 10, setting.samples)
        else:
            images = data.mnist()
        images = images.first(setting.samples, setting.queries).flat().to(device)
        return cls(
            normalize_pixels(images.x), images.y, normalize_pixels(images.test_x), images.test_y
        )

    @property
    def training(self) -> tuple[Tensor, Tensor]:
        """Images and labels that networks are trained on."""
        return self.x, self.y

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        """Images and labels whose margin is explained."""
        return self.query_x, self.query_y


@dataclass(frozen=True, kw_only=True)
class InfluenceMNIST(Experiment):
    """Half-size subsets of MNIST, each with a network trained on it alone.

    Attributes:
        samples, queries: images.
        subsets: networks per seed.
        schedule: of all trainings.
        trak_models, trak_dimension: of TRAK.
        wrong_share: of labels that are replaced by another class.
        is_generated: whether the images are made up instead.
    """

    samples: int = 5000
    queries: int = 200
    subsets: int = 50
    schedule: Schedule = field(default_factory=lambda: Schedule(rate=0.02, decay=3e-3))
    trak_models: int = 10
    trak_dimension: int = 512
    wrong_share: float = 0.1
    is_generated: bool = False
    seeds: Sequence[int] = (7,)
    quick_seeds: Sequence[int] = (0,)

    def smoke(self) -> Self:
        few = replace(self.schedule, epochs=1, batch=20)
        return replace(
            self, judged=False, samples=100, queries=5, subsets=3, schedule=few, trak_models=2,
            trak_dimension=16, is_generated=True,
        )  # fmt: skip

    def _reduce_if_quick(self, quick: bool) -> Self:
        if not quick:
            return self
        return replace(self, samples=min(1000, self.samples), queries=min(50, self.queries),
                       subsets=min(20, self.subsets), trak_models=2)  # fmt: skip

    def config(self, quick: bool) -> dict[str, Any]:
        sized = self._reduce_if_quick(quick)
        return {
            "network": list(WIDTHS),
            "samples": sized.samples,
            "queries": sized.queries,
            "subsets": sized.subsets,
            "schedule": vars(sized.schedule),
            "TRAK": {"models": sized.trak_models, "dimension": sized.trak_dimension},
            "wrong labels": sized.wrong_share,
            "damping": "the weight decay of training, and the default",
        }

    def items(self, quick: bool) -> list[Item]:
        sized = self._reduce_if_quick(quick)
        return [
            Item(("datamodeling",), partial(measure_datamodeling, sized)),
            Item(("wrong labels",), partial(find_wrong_labels, sized)),
            Item(("convolutional",), partial(compare_convolutional, sized)),
        ]

    def require_data(self, quick: bool) -> None:
        if not self.is_generated:
            data.file("mnist.npz")

    def judge(self, results: Results) -> list[Check]:
        if results.quick:
            return []
        scores = results.of("datamodeling")[0]["scores"]
        share = results.of("wrong labels")[0]["EK-FAC"][0]
        claim = "80 % of wrong labels are in the top tenth"
        wrong_labels = Check(claim, share >= 0.8, f"{share:.3f}", of_paper=False)
        return [*check_scores(scores, 0.45), wrong_labels]

    def tables(self, results: Results) -> list[Table]:
        tables = []
        for record in results.of("datamodeling"):
            rows = [[name, score, record["seconds"].get(name)]
                    for name, score in record["scores"].items()]  # fmt: skip
            tables.append(Table(["method", "score", "seconds"], rows, "Linear datamodeling score"))
            tables.append(tabulate_dampings(record["by damping"]))
        for record in results.of("wrong labels"):
            rows = [[name, *shares] for name, shares in record.items() if isinstance(shares, list)]
            columns = ["method", "found in the top 10 %", "found in the top 20 %"]
            tables.append(Table(columns, rows, "Wrong labels"))
        for record in results.of("convolutional"):
            if record:
                rows = [[name, *pair] for name, pair in record.items() if isinstance(pair, list)]
                title = "Scores of a convolutional network: correlations, means over queries"
                tables.append(Table(["beside", "correlation", "of ranks"], rows, title))
        return tables

    def draw(self, results: Results) -> Mapping[str, Figure]:
        scores = results.of("datamodeling")[0]["scores"]
        return {"": draw_scores(scores, "MLP on MNIST")}


def train_full(digits: Digits, seed: int, schedule: Schedule, count: int = 1) -> TrainedNetworks:
    """Return networks trained on all samples."""
    everything = torch.arange(len(digits.x)).expand(count, -1)
    seeds = list(range(seed, seed + count))
    return train_networks(make_network, *digits.training, everything, seeds, schedule)


def measure_datamodeling(setting: InfluenceMNIST, context: Context) -> dict[str, Any]:
    """Retrain on halves, and return how well every method's scores predict it."""
    digits = Digits.load(setting, context.device)
    first_seed = 10_000 * (context.seed + 1)
    subsets = draw_subsets(setting.samples, setting.subsets, seed=first_seed)
    seeds = list(range(first_seed + 100, first_seed + 100 + setting.subsets))
    context.watch(0.05, "retraining")
    networks = train_networks(make_network, *digits.training, subsets, seeds, setting.schedule)
    measured = torch.stack([margin(z, digits.query_y) for z in networks.outputs(digits.query_x)])
    full = train_full(digits, first_seed, setting.schedule, setting.trak_models)
    context.watch(0.5, "scores")
    halves = Halves(subsets, measured)
    model = copy_network(full, 0)
    explained = ExplainedModel.fit(model, digits.queries, digits.training, margin)
    by_damping = judge_dampings(explained, halves)
    judged = judge_methods(list_methods(setting, digits, full), halves, context)
    is_right = model(digits.query_x).argmax(1) == digits.query_y
    return {**judged, "by damping": by_damping, "accuracy": float(is_right.float().mean())}


def copy_network(networks: TrainedNetworks, number: int) -> nn.Module:
    """Return one network with parameters of its own."""
    network = make_network()
    network.load_state_dict(networks.network(number).state_dict())
    return network.to(next(iter(networks.parameters.values())).device)


def list_methods(setting: InfluenceMNIST, digits: Digits, full: TrainedNetworks) -> Methods:
    """Return the methods by name; each fits the curvature that it needs."""
    models = [copy_network(full, number) for number in range(setting.trak_models)]
    model = models[0]
    decay = setting.schedule.decay

    def score(structure: str, damping: float | None) -> Tensor:
        explained = ExplainedModel.fit(model, digits.queries, digits.training, margin, structure)
        return explained.score(damping)

    methods: Methods = {
        "EK-FAC": partial(score, "ekfac", decay),
        "EK-FAC, default damping": partial(score, "ekfac", None),
        "K-FAC": partial(score, "kfac", decay),
        "diagonal": partial(score, "diagonal", decay),
        "gradient dot product": partial(score, "diagonal", HUGE_DAMPING),
        **list_trak(models, digits.queries, digits.training, setting.trak_dimension),
    }
    if find_spec("kronfluence") is not None:
        ask_peer = partial(score_by_kronfluence, model, digits.queries, digits.training)
        methods["kronfluence"] = partial(ask_peer, None)
        methods["kronfluence, weight decay"] = partial(ask_peer, decay)
    return methods


def score_by_kronfluence(
    model: nn.Module, queries: Pair, training: Pair, damping: float | None
) -> Tensor:
    """Return the scores of kronfluence's EK-FAC; None is its own damping, 0.1 of the mean."""
    from kronfluence.analyzer import Analyzer, prepare_model  # pyright: ignore
    from kronfluence.arguments import ScoreArguments  # pyright: ignore
    from kronfluence.task import Task  # pyright: ignore
    from torch.utils.data import TensorDataset

    class Margins(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            x, y = batch
            z = model(x)
            if sample:
                y = torch.multinomial(torch.softmax(z.detach(), -1), 1).flatten()
            return nn.functional.cross_entropy(z, y, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return margin(model(batch[0]), batch[1]).sum()

    task = Margins()
    prepared = prepare_model(copy.deepcopy(model), task)
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("mnist", prepared, task, cpu=True, output_dir=folder)
        samples = TensorDataset(*training)
        analyzer.fit_all_factors(
            "ekfac", samples, per_device_batch_size=500, overwrite_output_dir=True
        )
        analyzer.compute_pairwise_scores(
            "scores", "ekfac", TensorDataset(*queries), samples,
            per_device_query_batch_size=100, per_device_train_batch_size=500,
            score_args=ScoreArguments(damping_factor=damping), overwrite_output_dir=True,
        )  # fmt: skip
        return -analyzer.load_pairwise_scores("scores")["all_modules"]


def make_convolutional() -> nn.Module:
    """Return a network of two convolutions for images of 28×28 pixels."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 10),
    )


def compare_convolutional(setting: InfluenceMNIST, context: Context) -> dict[str, Any]:
    """Return the correlations of our scores with kronfluence's on a convolutional network.

    Both have the same damping. Kronfluence draws one outcome per sample for its factors, we take
    the expectation; how much such draws matter, two fits of ours with one draw each say. Empty
    where it is not installed.
    """
    if find_spec("kronfluence") is None:
        return {}
    digits = Digits.load(setting, context.device)
    count = min(1000, setting.samples)
    training = (digits.x[:count], digits.y[:count])
    everything = torch.arange(count)[None]
    networks = train_networks(
        make_convolutional, *training, everything, [context.seed], setting.schedule
    )
    model = networks.network(0)
    decay = setting.schedule.decay
    peer = score_by_kronfluence(model, digits.queries, training, decay)
    explained = ExplainedModel.fit(model, digits.queries, training, margin)
    ours = explained.score(decay)
    drawn = []
    for seed in (1, 2):
        curvature = pb.curvature.fit(
            model, training, likelihood=pb.likelihoods.Categorical(), draws=1, seed=seed
        )
        drawn.append(replace(explained, curvature=curvature).score(decay))
    return {
        "samples": count,
        "kronfluence": correlate_scores(ours, peer),
        "our fit with one draw": correlate_scores(ours, drawn[0]),
        "two fits of ours with one draw": correlate_scores(*drawn),
    }


def correlate_scores(one: Tensor, two: Tensor) -> list[float]:
    """Return the mean correlation and the mean rank correlation over the queries."""
    return [correlate_rows(one, two), correlate_rows(rank(one), rank(two))]


def correlate_rows(one: Tensor, two: Tensor) -> float:
    """Return the mean correlation of the rows of two matrices."""
    first = one.double() - one.double().mean(1, keepdim=True)
    second = two.double() - two.double().mean(1, keepdim=True)
    products = (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))
    return float(products.mean())


def find_wrong_labels(setting: InfluenceMNIST, context: Context) -> dict[str, Any]:
    """Train on labels of which some are wrong, and return where the wrong ones are ranked."""
    digits = Digits.load(setting, context.device)
    generator = torch.Generator().manual_seed(context.seed)
    count = int(setting.wrong_share * setting.samples)
    wrong = torch.randperm(setting.samples, generator=generator)[:count]
    shifts = torch.randint(1, 10, (count,), generator=generator)
    y = digits.y.clone()
    y[wrong] = (y[wrong] + shifts.to(y.device)) % 10
    spoiled = replace(digits, y=y)
    model = copy_network(train_full(spoiled, context.seed, setting.schedule), 0)
    curvature = pb.curvature.fit(model, spoiled.training, likelihood=pb.likelihoods.Categorical())
    is_wrong = torch.zeros(setting.samples, dtype=torch.bool)
    is_wrong[wrong] = True
    losses = nn.functional.cross_entropy(model(spoiled.x), y, reduction="none").detach()
    decay = setting.schedule.decay
    ranked = {
        "EK-FAC": pb.curvature.self_influence(curvature, spoiled.training, damping=decay),
        "EK-FAC, default damping": pb.curvature.self_influence(curvature, spoiled.training),
        "squared gradient": pb.curvature.self_influence(
            curvature, spoiled.training, damping=HUGE_DAMPING
        ),
        "loss": losses,
    }
    shares: dict[str, Any] = {}
    for name, values in ranked.items():
        order = values.cpu().argsort(descending=True)
        tops = [int(setting.samples * share) for share in (0.1, 0.2)]
        shares[name] = [float(is_wrong[order[:top]].sum()) / count for top in tops]
    return shares
