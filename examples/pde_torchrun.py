"""A PDE on several processes: `torchrun --nproc-per-node 2 examples/pde_torchrun.py`.

Poisson's equation in five dimensions, whose solution is Σ sin πxᵢ. Every process takes its share of
the points, and a step is that of one process. Ctrl-C stops all of them after a step; a run goes on
from its checkpoint with any number of processes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import pullback as pb


def main(checkpoint: str | Path | None = None, steps: int = 60) -> float:
    """Solve, and return the relative L2 error."""
    network = pb.pde.mlp(5, 24, 1, seed=0)
    solution = pb.pde.solve(
        pb.pde.Poisson(5), network, points=1500, steps=steps, checkpoint=checkpoint
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(solution)
    return solution.error


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    main(*sys.argv[1:])
    dist.destroy_process_group()
