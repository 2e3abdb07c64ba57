"""The Fisher metric of the population instead of that of the training batch.

Averaged over 40 labeled inputs the Fisher metric of 81 parameters is singular: 41 directions are
not measured at all. The metric needs no labels, so `metric_batch=` averages it over other inputs,
while the loss keeps its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb


def fit(metric_batch: Tensor | None, steps: int) -> tuple[pb.StepInfo, float]:
    """Train on 40 labeled points; return the last step's record and the test loss."""
    torch.manual_seed(0)
    x = torch.randn(40, 8).double()
    x_test = torch.randn(4000, 8).double()
    truth = torch.randn(8).double()

    def label(x: Tensor) -> Tensor:
        return torch.bernoulli(torch.sigmoid(x @ truth)).unsqueeze(1)

    y = label(x)
    y_test = label(x_test)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    opt = pb.NaturalGradient(
        model,
        metric=pb.metrics.Fisher(pb.likelihoods.Bernoulli()),
        solver=pb.solvers.Cholesky(damping=1e-2),
        step=pb.steps.Constant(0.3),
        output=pb.optim.Outputs(metric_batch=metric_batch),
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        info = opt.step(closure)
    return info, F.binary_cross_entropy_with_logits(model(x_test), y_test).item()


def main(steps: int = 5) -> tuple[float, float]:
    """Train under both metrics; return their test losses."""
    unlabeled = torch.randn(2000, 8, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for name, batch in (("training batch", None), ("population", unlabeled)):
        info, test = fit(batch, steps)
        results.append(test)
        print(f"Fisher of the {name}: {info.rows} rows, rank {info.rank}, test loss {test:.3f}")
    return results[0], results[1]


if __name__ == "__main__":
    main()
