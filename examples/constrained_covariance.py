"""A covariance matrix by maximum likelihood, kept positive definite by a retraction.

The Fisher metric of a Gaussian is ½ Σ⁻¹ ⊗ Σ⁻¹, and the natural gradient of its mean negative
log-likelihood Σ − C: one step lands on the sample covariance C. Here C is singular.
"""

import torch
from torch import Tensor, nn

import pullback as pb


class Covariance(nn.Module):
    """Σ itself is the parameter and the output: one sample of shape (d, d)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.sigma = nn.Parameter(torch.eye(d, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.sigma[None]


def fisher(z: Tensor) -> Tensor:
    """½ Σ⁻¹ ⊗ Σ⁻¹ as a matrix (1, d², d²)."""
    inverse = torch.linalg.inv(z[0])
    return 0.5 * torch.kron(inverse, inverse)[None]


def main(steps: int = 3) -> tuple[float, float]:
    """Fit Σ; return its lowest eigenvalue and its distance to C."""
    torch.manual_seed(0)
    samples = torch.randn(4, 6, dtype=torch.float64) * torch.arange(1.0, 7.0).double()
    c = samples.T @ samples / len(samples)
    model = Covariance(6)
    opt = pb.NaturalGradient(
        model,
        metric=fisher,
        solver=pb.solvers.Cholesky(damping=0.0),
        retract={"sigma": pb.steps.PositiveDefinite(floor=1e-3)},
    )

    def closure() -> Tensor:
        opt.zero_grad()
        sigma = model()[0]
        loss = 0.5 * (torch.logdet(sigma) + torch.trace(torch.linalg.solve(sigma, c)))
        loss.backward()
        return loss

    for k in range(steps):
        info = opt.step(closure)
        lowest = torch.linalg.eigvalsh(model.sigma)[0].item()
        distance = ((model.sigma - c).norm() / c.norm()).item()
        print(f"step {k}  loss {info.loss:8.3f}  lowest {lowest:.1e}  distance to C {distance:.1e}")
    return lowest, distance


if __name__ == "__main__":
    main()
