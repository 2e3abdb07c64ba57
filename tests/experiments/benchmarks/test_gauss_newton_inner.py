"""The gradient of the linearized model, beside one differentiated through its definition."""

import torch
from torch.func import functional_call, grad, jvp

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
        trainer._set_linearized_gradient(x, y)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=2e-5, atol=1e-7)
    assert not torch.allclose(
        cross_entropy(model(x), y), cross_entropy(reference(x), y)
    )  # the point and the weights differ


def cross_entropy_double(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The races' loss without its step through float32."""
    return torch.nn.functional.cross_entropy(z.flatten(0, -2), y.flatten())
