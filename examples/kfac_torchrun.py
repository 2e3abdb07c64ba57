"""K-FAC on several processes: `torchrun --nproc-per-node 2 examples/kfac_torchrun.py`.

Wrap the model, then build the optimizer: a step is that of one process on the joined batch. A run
goes on from its last checkpoint with any number of processes.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import pullback as pb


def rings(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on four rings, and which ring each is on."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (count,), generator=random)
    angle = 6.28 * torch.rand(count, generator=random)
    return torch.stack([angle.cos(), angle.sin()], 1) * (1 + y)[:, None], y


def main(folder: str = "", steps: int = 100) -> float:
    """Train, and return the accuracy."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )
    net = DistributedDataParallel(model)
    opt = pb.KFAC(net, lr=0.1, likelihood=pb.likelihoods.Categorical())
    if folder and Path(folder, ".metadata").exists():
        weights, state = get_state_dict(net, opt)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(net, opt, model_state_dict=weights, optim_state_dict=state)
    for step in range(steps):
        x, y = rings(256, seed=step * size + rank)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    if folder:
        weights, state = get_state_dict(net, opt)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    x, y = rings(512, seed=-1)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"process {rank}: accuracy {accuracy:.1%}; sent: {opt.traffic()}")
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
