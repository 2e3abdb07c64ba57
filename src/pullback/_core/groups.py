"""The process group that a model trains in, as its wrapper or its shards declare it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from .errors import PullbackError
from .processes import Processes


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module behind `torch.compile`, or the model itself."""
    while (inner := getattr(model, "_orig_mod", None)) is not None:
        model = inner
    return model


def unwrap_distributed(model: nn.Module) -> nn.Module:
    """Return the module that `DistributedDataParallel` calls, or the model itself."""
    wrapper = unwrap_compiled(model)
    if isinstance(wrapper, nn.parallel.DistributedDataParallel):
        return wrapper.module
    return model


def active_wrapper() -> Any:
    """Return the `DistributedDataParallel` whose forward pass is under way, or None."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def find_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the group of `DistributedDataParallel`, or of the mesh of shards; else None."""
    if not dist.is_available():
        return None
    model = unwrap_compiled(model)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        if mesh.ndim > 1:
            mesh = mesh._flatten()
        return mesh.get_group()
    return None


def find_processes(
    model: nn.Module, group: dist.ProcessGroup | None, optimizer: str, keyword: str = "group"
) -> Processes:
    """Return the processes of the user's group, or those of the model's wrapper.

    Args:
        model: wrapped or not.
        group: what the user passed; None means the group of the wrapper.
        optimizer: the class name for error messages.
        keyword: the argument by which the user passes a group, for error messages.

    Raises:
        PullbackError: several processes run, and there is neither a group nor a wrapper.
    """
    if group is None:
        group = find_group(model)
    if group is None:
        refuse_unknown_group(optimizer, "the model is not wrapped", keyword)
    return Processes(group)


def refuse_unknown_group(optimizer: str, why: str, keyword: str = "group") -> None:
    """Raise if several processes run; the caller knows no group in which they train together."""
    if not dist.is_available() or not dist.is_initialized():
        return
    size = dist.get_world_size()
    if size == 1:
        return
    raise PullbackError(
        f"{optimizer} was not told how the {size} processes work together",
        f"{why}, so that replicas would drift apart",
        f"Wrap the model first, {optimizer}(DistributedDataParallel(model), ...); or give "
        f"{keyword}=torch.distributed.group.WORLD once the processes have met, where "
        f"Lightning, Accelerate or Trainer wraps it later; or {keyword}=torch.distributed."
        "new_group([rank], use_local_synchronization=True) where each trains by itself",
    )
