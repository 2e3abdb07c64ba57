"""The training comparison: networks, tasks, grids, and claims on made-up curves."""

import math

import pytest
import torch
from torch import nn

from pullback import KFAC
from pullback.experiments import kfac_training
from pullback.experiments.kfac_training.checks import claims, final, mark, table, to
from pullback.experiments.kfac_training.methods import ADAM, KRONECKER, LARGE, METHODS, SGD
from pullback.experiments.kfac_training.networks import DIGITS, MNIST, autoencoder
from pullback.experiments.kfac_training.tasks import AUTOENCODER, CONVNET, Task, bernoulli


def test_the_autoencoder_is_mirrored_around_a_linear_code() -> None:
    net = autoencoder(MNIST)
    sizes = [(m.in_features, m.out_features) for m in net if isinstance(m, nn.Linear)]
    assert sizes[:4] == [(784, 1000), (1000, 500), (500, 250), (250, 30)]
    assert sizes[4:] == [(b, a) for a, b in reversed(sizes[:4])]
    kinds = [type(m).__name__ for m in net]
    assert kinds[6:8] == ["Linear", "Linear"]
    assert kinds.count("Tanh") == 6
    assert autoencoder(DIGITS)(torch.zeros(3, 64)).shape == (3, 64)


@pytest.mark.parametrize("task", [AUTOENCODER, CONVNET], ids=lambda t: t.title)
def test_tasks_fit_their_likelihoods(task: Task) -> None:
    """A mean of −log likelihoods over samples, but for what does not depend on z."""
    model, images = task.made(True)
    z = model(images.x[:20]).detach().requires_grad_()
    task.loss(z, images.y[:20]).backward()
    assert z.grad is not None
    likelihood = task.likelihood()
    want = torch.func.grad(lambda v: likelihood.nll(v, images.y[:20]).mean())(z.detach())
    torch.testing.assert_close(z.grad, want)


def test_bernoulli_is_summed_over_pixels() -> None:
    z, y = torch.zeros(5, 7), torch.rand(5, 7)
    assert math.isclose(float(bernoulli(z, y)), 7 * math.log(2), rel_tol=1e-6)


def test_grids_are_of_one_size() -> None:
    for methods in (METHODS, LARGE):
        assert [m.name for m in methods] == [SGD, ADAM, KRONECKER]
        assert len({len(m.grid) for m in methods}) == 1
    for one in kfac_training.EXPERIMENTS:
        for epochs in (one.epochs, one.quick_epochs):
            assert 2 * epochs[KRONECKER] <= min(epochs[SGD], epochs[ADAM])


def test_batch_and_epochs_of_the_settings_are_the_runs() -> None:
    net = autoencoder(DIGITS)
    for method in LARGE:
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
    found = {
        SGD: runs(9, 8, 7, 6, 5),
        ADAM: runs(9, 7, 5, 4, 3),
        KRONECKER: runs(9, 3, 2, pace=5.0),
    }
    assert mark(found) == 3
    assert to(found[KRONECKER], 3, "step") == 10
    assert to(found[SGD], 3, "step") == math.inf
    fewer, sooner = claims(found)
    assert fewer[1]
    assert not sooner[1]
    assert "50 and 40 seconds" in sooner[2]
    fast = {**found, KRONECKER: runs(9, 3, 2, pace=1.3)}
    assert claims(fast, 3.0)[1][1]
    assert not claims(fast, 3.1)[1][1]
    lost = {**found, KRONECKER: runs(9, math.nan)}
    assert final(lost[KRONECKER]) == math.inf
    assert not any(holds for _, holds, _ in claims(lost))
    assert "never" in [cell for row in table(lost, str).lines() for cell in row]


def test_the_shortest_run_that_suffices_is_chosen() -> None:
    kfac = next(m for m in LARGE if m.name == KRONECKER)
    scores = [53.0, 52.9, 52.0, 52.1, 51.0, 51.2]  # of 1500, 2400 and 6000 steps
    assert kfac.best(scores, mark=53.1) == kfac.grid[1]
    assert kfac.best(scores, mark=52.5) == kfac.grid[2]
    assert kfac.best(scores, mark=51.1) == kfac.grid[4]
    assert kfac.best(scores, mark=50.0) == kfac.grid[4]  # none does: the lowest
    adam = next(m for m in LARGE if m.name == ADAM)
    assert adam.best(scores, mark=53.1) == adam.grid[4]
