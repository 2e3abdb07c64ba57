"""The critical quantum Ising chain: a restricted Boltzmann machine against the exact energy.

The ground energy of a ring of N spins at the critical field is −2/sin(π/2N). The network sees only
samples of its own |ψ|².
"""

import math

import torch

from pullback import vmc


def main(sites: int = 12, steps: int = 100) -> float:
    """Minimize, and return the relative error of the energy."""
    torch.manual_seed(0)
    lattice = vmc.Chain(sites)
    network = vmc.Rbm(lattice, features=4).double()
    result = vmc.minimize(
        vmc.TransverseFieldIsing(lattice, field=1.0),
        network,
        steps=steps,
        samples=500,
        progress=False,
    )
    exact = -2 / math.sin(math.pi / (2 * sites))
    correlations = vmc.correlate_spins(result.samples, lattice.translations())
    print(f"energy {result.energy:.5f} ± {result.error:.5f}, exact {exact:.5f}")
    print(result.stopped)
    print("⟨σᶻσᶻ⟩ against the distance:", *(f"{c:.3f}" for c in correlations[: sites // 2 + 1]))
    return abs(result.energy / exact - 1)


if __name__ == "__main__":
    main()
