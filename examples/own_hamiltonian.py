"""A Hamiltonian and a network of one's own: the anisotropic Heisenberg (XXZ) ring.

H = −Σ (σˣσˣ + σʸσʸ) + Δ Σ σᶻσᶻ, after Marshall's rotation. A function returns, for every
configuration, the configurations that H connects it with and the matrix elements.
"""

import torch
from torch import Tensor, nn

from pullback import vmc

ANISOTROPY = 0.5


def xxz(s: Tensor) -> tuple[Tensor, Tensor]:
    """Connected configurations (N, 1 + sites, sites) and elements (N, 1 + sites)."""
    sites = s.shape[1]
    site = torch.arange(sites)
    neighbour = (site + 1) % sites
    products = (s * s[:, neighbour]).double()
    connected = s[:, None].repeat(1, 1 + sites, 1)
    connected[:, 1 + site, site] *= -1
    connected[:, 1 + site, neighbour] *= -1
    diagonal = ANISOTROPY * products.sum(1, keepdim=True)
    exchanges = products - 1  # −2 for antiparallel spins, 0 for parallel ones
    return connected, torch.cat([diagonal, exchanges], 1)


class PairNetwork(nn.Module):
    """log ψ from products of spins at every distance: a small network in them."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(sites // 2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.half = sites // 2

    def forward(self, s: Tensor) -> Tensor:
        pairs = torch.stack([s * s.roll(d, 1) for d in range(1, self.half + 1)], 2)
        return self.body(pairs).sum((1, 2))


def main(sites: int = 8, steps: int = 80) -> float:
    """Minimize, and return the relative error of the energy."""
    torch.manual_seed(0)
    hamiltonian = vmc.FunctionHamiltonian(xxz, sites, conserves_magnetization=True)
    result = vmc.minimize(
        hamiltonian, PairNetwork(sites).double(), steps=steps, samples=400, progress=False
    )
    exact = float(torch.linalg.eigvalsh(hamiltonian.dense(magnetization=0))[0])
    print(f"energy {result.energy:.4f} ± {result.error:.4f}, exact {exact:.4f}: {result.stopped}")
    return abs(result.energy / exact - 1)


if __name__ == "__main__":
    main()
