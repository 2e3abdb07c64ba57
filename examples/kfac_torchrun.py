"""K-FAC on several processes: `torchrun --nproc-per-node 2 examples/kfac_torchrun.py folder`.

A run goes on from its last checkpoint; with `--max-restarts 1` also where a process was lost.
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
    random = torch.Generator(torch.get_default_device()).manual_seed(seed)
    y = torch.randint(0, 4, (count,), generator=random)
    turn = torch.rand(count, generator=random)
    return torch.view_as_real(torch.polar(1.0 + y, 6.28 * turn)), y


def main(folder: str = "", steps: int = 100, save_every: int = 20) -> float:
    """Train, and return the accuracy."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(0))
        torch.set_default_device("cuda")
    rank = dist.get_rank()
    size = dist.get_world_size()
    start = 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))
    net = DistributedDataParallel(model)
    opt = pb.KFAC(net, lr=0.1, likelihood=pb.likelihoods.Categorical())
    saved = [int(path.parent.name) for path in Path(folder).glob("*/.metadata") if folder]
    if saved:  # a checkpoint without metadata was not finished
        start = max(saved)
        for _ in range(2):  # the first load reads K-FAC's table, the second what it names
            weights, state = get_state_dict(net, opt)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{start}")
            set_state_dict(net, opt, model_state_dict=weights, optim_state_dict=state)
    for step in range(start, steps):
        x, y = rings(256, seed=step * size + rank)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
        if folder and (step + 1) % save_every == 0:
            weights, state = get_state_dict(net, opt)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{step + 1}")
    x, y = rings(512, seed=-1)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    print(f"process {rank}: accuracy {accuracy:.1%}; sent: {opt.traffic()}")
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main("".join(sys.argv[1:2]))
