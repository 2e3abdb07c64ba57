"""The gradient of the linearized model, beside one differentiated through its definition."""

from dataclasses import replace

import torch
from torch.func import functional_call, grad, jvp

from pullback import KFAC
from pullback_experiments.benchmarks.gauss_newton_inner import OuterRun, OuterTrainer
from pullback_experiments.races.loop import cross_entropy
from pullback_experiments.races.networks import Decoder


def test_the_gradient_is_that_of_the_linearized_loss() -> None:
    torch.manual_seed(0)
    model = Decoder(11, 6, 8, 2, 2).double()
    reference = Decoder(11, 6, 8, 2, 2).double()
    plan = OuterRun("text", "muon-0.9", 0.01, inner=3, outer=2, minibatches=2, seed=0, device="cpu")
    assert plan.passes == 2 * (1 + 2 * 5 / 3)
    trainer = OuterTrainer(plan, model, reference, [])
    x = torch.randint(11, (3, 6))
    y = torch.randint(11, (3, 6))
    point = {n: p.detach().clone() for n, p in reference.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        displacement = {n: p - point[n] for n, p in params.items()}
        outputs = lambda w: functional_call(reference, w, (x,))  # noqa: E731
        z, change = jvp(outputs, (point,), (displacement,))
        return cross_entropy_double(z + change, y)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = grad(loss)({n: p.detach() for n, p in model.named_parameters()})
        trainer._add_linearized_gradient(x, y, 0.25)
        trainer._add_linearized_gradient(x, y, 0.75)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=2e-5, atol=1e-7)
    assert not torch.allclose(
        cross_entropy(model(x), y), cross_entropy(reference(x), y)
    )  # the point and the weights differ


def cross_entropy_double(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The races' loss without its step through float32."""
    return torch.nn.functional.cross_entropy(z.flatten(0, -2), y.flatten())


def test_every_inner_training_begins_anew_and_sees_the_model_first() -> None:
    torch.manual_seed(0)
    model = Decoder(11, 6, 8, 1, 2)
    plan = OuterRun("text", "kfac", 0.01, inner=3, outer=2, minibatches=2, seed=0, device="cpu")
    draw = torch.randint(11, (2, 3, 7))
    minibatches = [(window[:, :-1], window[:, 1:]) for window in draw]
    math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math, KFAC(model, plan.lr, **plan.settings()) as optimizer:
        trainer = OuterTrainer(plan, model, Decoder(11, 6, 8, 1, 2), [optimizer])
        ends = []
        for _ in range(2):
            start = {n: p.detach().clone() for n, p in model.named_parameters()}
            trainer._solve_linearized(minibatches, 1.0)
            ends.append({n: p.detach().clone() for n, p in model.named_parameters()})
            model.load_state_dict(start)
    for name, end in ends[0].items():  # nothing is left of the first outer step
        torch.testing.assert_close(ends[1][name], end)
        assert not torch.equal(end, model.get_parameter(name))


def test_ordinary_steps_on_large_batches_have_factors_of_every_step() -> None:
    plan = OuterRun("text", "kfac", 0.01, inner=0, outer=2, minibatches=16, seed=0, device="cpu")
    assert plan.settings() == {"statistics_every": 1, "invert_every": 1}
    assert replace(plan, minibatches=1).settings() == {}
    assert replace(plan, inner=20).settings() == {"statistics_every": 20, "invert_every": 20}
