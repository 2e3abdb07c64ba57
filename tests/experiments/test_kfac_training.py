"""The training comparison: networks, tasks, grids, and claims on made-up curves."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pullback import KFAC
from pullback.likelihoods import Categorical
from pullback_experiments import Context, Results, kfac_training
from pullback_experiments.framework.store import Store
from pullback_experiments.kfac_training.experiment import (
    claims,
    final,
    find_best_rival_loss,
    find_median_time,
    first_order,
    table,
)
from pullback_experiments.kfac_training.methods import (
    ADAM,
    ADAMW,
    KRONECKER,
    LARGE,
    METHODS,
    QUICK_TEXT,
    QUICK_VGG,
    SGD,
    TEXT,
)
from pullback_experiments.kfac_training.methods import VGG as VGG_METHODS
from pullback_experiments.kfac_training.tasks import (
    AUTOENCODER,
    CONVNET,
    DIGITS,
    GPT,
    MNIST,
    SHAKESPEARE,
    VGG,
    TrainingTask,
    autoencoder,
    bernoulli,
    categorical,
)
from pullback_experiments.learning.training import TrainingOptions, fit
from tests.kfac_options import kfac_of

CPU = torch.device("cpu")
TASKS = [AUTOENCODER, CONVNET, VGG, SHAKESPEARE]


def test_the_autoencoder_is_mirrored_around_a_linear_code() -> None:
    net = autoencoder(MNIST)
    sizes = [(m.in_features, m.out_features) for m in net if isinstance(m, nn.Linear)]
    assert sizes[:4] == [(784, 1000), (1000, 500), (500, 250), (250, 30)]
    assert sizes[4:] == [(b, a) for a, b in reversed(sizes[:4])]
    types = [type(m).__name__ for m in net]
    assert types[6:8] == ["Linear", "Linear"]
    assert types.count("Tanh") == 6
    assert autoencoder(DIGITS)(torch.zeros(3, 64)).shape == (3, 64)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.title)
def test_tasks_fit_their_likelihoods(task: TrainingTask) -> None:
    """A mean of −log likelihoods over samples, but for what does not depend on z."""
    model, images = task.build_parts(True, CPU)
    z = model(images.x[:20]).detach().requires_grad_()
    task.loss(z, images.y[:20]).backward()
    assert z.grad is not None
    likelihood = task.likelihood()
    want = torch.func.grad(lambda v: likelihood.nll(v, images.y[:20]).mean())(z.detach())
    torch.testing.assert_close(z.grad, want)


def test_bernoulli_is_summed_over_pixels() -> None:
    z = torch.zeros(5, 7)
    y = torch.rand(5, 7)
    assert math.isclose(float(bernoulli(z, y)), 7 * math.log(2), rel_tol=1e-6)


def test_tokens_are_samples() -> None:
    z = torch.randn(3, 5, 7, dtype=torch.float64)
    y = torch.randint(7, (3, 5))
    want = -z.log_softmax(-1).gather(-1, y[..., None]).mean()
    torch.testing.assert_close(categorical(z, y), want)


def test_a_place_sees_those_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(9, 6, 8, 2, 2, tied=False).double()
    x = torch.randint(9, (2, 6))
    other = x.clone()
    other[:, 4] = (other[:, 4] + 1) % 9
    unchanged = (model(x) == model(other)).flatten(2).all(2).all(0)
    assert unchanged.tolist() == [True] * 4 + [False] * 2
    assert model(x[:, :3]).shape == (2, 3, 9)
    network = GPT(9, 6, 256, 2, 2)
    assert network.head.weight is network.tokens.weight
    block: nn.Module = network.blocks[0]
    stds = {n: float(p.detach().std()) for n, p in block.named_parameters() if p.ndim == 2}
    assert stds["up.weight"] == pytest.approx(0.02, rel=0.05)
    assert stds["down.weight"] == pytest.approx(0.01, rel=0.05)


def test_the_fisher_of_text_is_a_mean_over_tokens() -> None:
    """The head's block against products of all its tokens' inputs and predictions."""
    torch.manual_seed(0)
    model = GPT(7, 5, 8, 1, 2, tied=False).double()
    x = torch.randint(7, (16, 5))
    y = torch.randint(7, (16, 5))
    recorded: list[Tensor] = []
    hook = model.head.register_forward_hook(
        lambda m, inputs, z: recorded.append(inputs[0].detach())
    )
    p = model(x).detach().softmax(-1).flatten(0, 1)
    hook.remove()
    a = recorded[0].flatten(0, 1)
    fisher = (torch.diag_embed(p) - p[:, :, None] * p[:, None]).mean(0)
    want = torch.outer(fisher.diagonal(), (a.mT @ a / len(a)).diagonal()).flatten()
    with kfac_of(model, 0.0, likelihood=Categorical(), fisher="exact") as optimizer:
        categorical(model(x), y).backward()
        optimizer.step()
        diagonal = optimizer.gram().diagonal()[-want.numel() :]
    torch.testing.assert_close(diagonal, want)


GRIDS = {"small": METHODS, "large": LARGE, "vgg": VGG_METHODS, "text": TEXT}
QUICK = {"quick vgg": QUICK_VGG, "quick text": QUICK_TEXT}


@pytest.mark.parametrize("name", [*GRIDS, *QUICK])
def test_grids_are_of_one_size(name: str) -> None:
    methods = (GRIDS | QUICK)[name]
    adam = ADAM if name in ("small", "large") else ADAMW
    assert [m.name for m in methods] == [SGD, adam, KRONECKER]
    assert len({len(m.grid) for m in methods}) == 1


@pytest.mark.parametrize("one", kfac_training.EXPERIMENTS, ids=lambda e: e.name)
def test_kfac_has_no_more_epochs_than_the_others(one: kfac_training.KFACTraining) -> None:
    for quick, epochs in ((False, one.epochs), (True, one.quick_epochs)):
        methods = [m.name for m in one._methods(quick)]
        assert list(epochs) == methods
        least = min(epochs[name] for name in methods if name != KRONECKER)
        assert one.fewer * epochs[KRONECKER] <= least


def test_the_records_of_before_go_on() -> None:
    """What was added does not change the configuration of the experiments that were there."""
    for one in kfac_training.EXPERIMENTS[:2]:
        assert set(one.config(False)) == {"task", "epochs", "batch", "methods"}
    for one in kfac_training.EXPERIMENTS[2:]:
        config = one.config(False)
        assert config["search seeds"] == [100]
        assert {"warm-up", "precision", "evaluated"} < set(config)


@pytest.mark.parametrize("task", [VGG, SHAKESPEARE], ids=lambda t: t.title)
@pytest.mark.parametrize("number", range(3))
def test_a_step_of_every_method(task: TrainingTask, number: int, tmp_path: Path) -> None:
    """From the loop, with the full version's settings on the quick version's network."""
    method = (VGG_METHODS if task is VGG else TEXT)[number]
    torch.manual_seed(0)
    model, first = task.build_parts(True, CPU)
    first = first.first(32, 16)
    before = [p.detach().clone() for p in model.parameters()]
    context = Context(0, CPU, True, tmp_path, Results(Store(tmp_path / "r.json", {}), [0], True))
    optimizer = method.on(model, task.likelihood(), 0, method.grid[0])
    run = task.run(first)
    assert run["half"] is None  # of CUDA alone
    options = TrainingOptions(epochs=2, batch=16, **run)
    record = fit(model, optimizer, first, task.loss, context, options)
    assert record["step"] == [0, 2, 4]
    assert all(math.isfinite(v) for v in record["train loss"])
    assert 0 <= record["test accuracy"][-1] <= 1
    moved = [bool((p != q).any()) for p, q in zip(before, model.parameters(), strict=True)]
    assert all(moved)
    if isinstance(optimizer, KFAC):
        optimizer.close()


def test_vgg_is_laid_out_by_channels_and_sees_crops() -> None:
    model, images = VGG.build_parts(True, CPU)
    weight = next(model.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert images.x.shape[1:] == (3, 32, 32)
    augment = VGG.run(images)["augment"]
    augmented = augment(images.x[:8], torch.Generator().manual_seed(0))
    assert augmented.shape == (8, 3, 32, 32)
    assert not torch.equal(augmented, images.x[:8])
    assert SHAKESPEARE.run(images)["augment"] is None


def test_the_rate_rises_and_falls() -> None:
    schedule = replace(VGG, warm=0.2).run(VGG.build_parts(True, CPU)[1])["schedule"]
    rates = [schedule(t) for t in (0.0, 0.1, 0.2, 0.6, 1.0)]
    assert rates == pytest.approx([0.0, 0.45, 0.8, 0.4, 0.0])
    falling = AUTOENCODER.run(VGG.build_parts(True, CPU)[1])["schedule"]
    assert falling(0.0) == 1.0


def test_batch_and_epochs_of_the_settings_are_the_runs() -> None:
    net = autoencoder(DIGITS)
    for method in (*LARGE, *VGG_METHODS, *TEXT):
        optimizer = method.on(net, AUTOENCODER.likelihood(), 0, method.grid[0])
        assert not {"batch", "epochs"} & optimizer.defaults.keys()
        if isinstance(optimizer, KFAC):
            optimizer.close()


def runs(*losses: float, pace: float = 1.0) -> list[dict[str, list[float]]]:
    steps = [10.0 * i for i in range(len(losses))]
    return [
        {
            "train loss": list(losses),
            "test loss": list(losses),
            "step": steps,
            "seconds": [pace * s for s in steps],
            "settings": {"lr": 0.1},  # pyright: ignore[reportReturnType]
        }
    ]


def test_claims() -> None:
    actual = {
        SGD: runs(9, 8, 7, 6, 5),
        ADAM: runs(9, 7, 5, 4, 3),
        KRONECKER: runs(9, 3, 2, pace=5.0),
    }
    assert find_best_rival_loss(actual) == 3
    assert find_median_time(actual[KRONECKER], 3, "step") == 10
    assert find_median_time(actual[SGD], 3, "step") == math.inf
    fewer, sooner = claims(actual, fewer=2.0)
    assert fewer[1]
    assert not sooner[1]
    assert "50 and 40 seconds" in sooner[2]
    fast = {**actual, KRONECKER: runs(9, 3, 2, pace=1.3)}
    assert claims(fast, 3.0)[1][1]
    assert not claims(fast, 3.1)[1][1]
    lost = {**actual, KRONECKER: runs(9, math.nan)}
    assert final(lost[KRONECKER]) == math.inf
    assert not any(holds for _, holds, _ in claims(lost))
    assert any("never" in row for row in table(lost, str).lines())


def test_the_others_are_all_but_kfac() -> None:
    actual = {SGD: runs(9, 5), ADAMW: runs(9, 7, 4), KRONECKER: runs(9, 8, 4)}
    assert first_order(actual) == [SGD, ADAMW]
    (claim, holds, numbers), _ = claims(actual)
    assert claim == "K-FAC needs fewer steps to the best loss of SGD and AdamW"
    assert not holds  # as many
    assert "20 and 20 steps to 4" in numbers


def test_the_shortest_run_that_suffices_is_chosen() -> None:
    kfac = next(m for m in LARGE if m.name == KRONECKER)
    scores = [53.0, 52.9, 52.0, 52.1, 51.0, 51.2]  # of 1500, 2400 and 6000 steps
    assert kfac.best(scores, mark=53.1) == kfac.grid[1]
    assert kfac.best(scores, mark=52.5) == kfac.grid[2]
    assert kfac.best(scores, mark=51.1) == kfac.grid[4]
    assert kfac.best(scores, mark=50.0) == kfac.grid[4]  # none does: the lowest
    adam = next(m for m in LARGE if m.name == ADAM)
    assert adam.best(scores, mark=53.1) == adam.grid[4]
