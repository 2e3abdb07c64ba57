"""Batches of (inputs, targets): from a loader, or cut from one pair of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from .._core.errors import PullbackError, reraise_fatal
from ..likelihoods import MSE, Gaussian, Likelihood, Poisson

_PAIR = (
    "Yield (inputs, targets): a tensor, a tuple of arguments or a mapping, and the targets. From a "
    'batch that is a mapping with labels, make (batch, batch.pop("labels"))'
)


@dataclass(frozen=True)
class Batch:
    """What the model is called with, and what its likelihood compares the output to."""

    inputs: Any
    targets: Any

    @property
    def samples(self) -> int:
        """Return the number of samples by the targets."""
        return len(pytree.tree_leaves(self.targets)[0])


@contextmanager
def explain_memory(batch: Batch) -> Iterator[None]:
    """Context that names the batch, and smaller ones as the remedy, if memory runs out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise PullbackError(
            "The device ran out of memory",
            f"a batch of {batch.samples} samples was linearized",
            f"Use batches of {max(1, batch.samples // 4)} samples; in fit() draws=1 or fewer "
            "parameters, in influence() a smaller query_bytes or query_error=0.01",
        ) from error


def refuse_no_samples(what: str, count: int) -> None:
    """Raise if no queries, or no training samples, were read."""
    if not count:
        raise PullbackError(
            f"There are no {what}",
            "the data were empty, or an iterator that was read before",
            "Give a pair of tensors, or a loader that can be read again",
        )


def refuse_shuffled(data: Any, reason: str) -> None:
    """Raise if a `DataLoader` draws another order of its samples every time it is read."""
    if not isinstance(data, DataLoader):
        return
    for sampler in (data.sampler, getattr(data.batch_sampler, "sampler", None)):
        is_random = isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))
        if is_random or getattr(sampler, "shuffle", False):
            raise PullbackError(
                "The loader is shuffled",
                f"{type(sampler).__name__} draws another order at every reading; {reason}",
                "Build the DataLoader with shuffle=False",
            )


def refuse_iterator(data: Any, reason: str) -> None:
    """Raise if the data can be read once only."""
    if isinstance(data, Iterator):
        raise PullbackError(
            "The loader can be read only once",
            f"{type(data).__name__} is an iterator; {reason}",
            "Give a DataLoader, a list of batches or a pair of tensors",
        )


def is_pair(data: Any) -> bool:
    """Return True for one (inputs, targets) pair, False for a loader."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[1], Tensor)


def iterate_batches(data: Any, device: torch.device, size: int) -> Iterator[Batch]:
    """Yield the batches of a loader, or of a pair cut into batches of `size`, on a device."""
    if is_pair(data):
        yield from _cut_batches(Batch(to_plain_inputs(data[0]), data[1]), device, size)
        return
    if not isinstance(data, Iterable) or isinstance(data, (Tensor, Mapping)):
        raise PullbackError("The data are not batches", f"got {type(data).__name__}", _PAIR)
    for item in data:
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise PullbackError("A batch is not a pair", f"got {_describe_item(item)}", _PAIR)
        yield _move_batch(Batch(to_plain_inputs(item[0]), item[1]), device)


def to_plain_inputs(inputs: Any) -> Any:
    """Return a mapping as a dict: pytree does not look into others, such as a tokenizer's."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return inputs


def _cut_batches(batch: Batch, device: torch.device, size: int) -> Iterator[Batch]:
    """Yield slices of the first axis of every tensor that counts the samples."""
    samples = batch.samples

    def cut(leaf: Any, start: int) -> Any:
        counts = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == samples
        if not counts:
            return leaf
        return leaf[start : start + size]

    for start in range(0, samples, size):
        slices = pytree.tree_map(
            lambda leaf, at=start: cut(leaf, at), (batch.inputs, batch.targets)
        )
        yield _move_batch(Batch(*slices), device)


def _move_batch(batch: Batch, device: torch.device) -> Batch:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_inference():
            leaf = leaf.clone()  # autograd may not keep tensors of torch.inference_mode()
        return leaf.to(device, non_blocking=True)

    return Batch(pytree.tree_map(move, batch.inputs), pytree.tree_map(move, batch.targets))


def _describe_item(item: Any) -> str:
    if isinstance(item, Tensor):
        return f"{item.dtype} of shape {tuple(item.shape)}"
    if isinstance(item, (tuple, list)):
        return f"{type(item).__name__} of {len(item)} entries"
    return type(item).__name__


def align_targets(outputs: Tensor, targets: Any) -> Any:
    """Return targets with the axes of the outputs where only the last one, of length 1, is missing.

    A model that returns (N,) has outputs (N, 1), and y − z of (N,) and (N, 1) would be (N, N).
    """
    if not isinstance(targets, Tensor) or not targets.is_floating_point():
        return targets
    if outputs.shape[-1] == 1 and targets.shape == outputs.shape[:-1]:
        return targets.unsqueeze(-1)
    return targets


def match_targets(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Any:
    """Return aligned targets, and refuse those that would be broadcast against the outputs."""
    aligned = align_targets(outputs, targets)
    if not isinstance(aligned, Tensor):
        return aligned
    expected = tuple(outputs.shape)
    if isinstance(likelihood, Gaussian) and isinstance(likelihood.variance, str):
        expected = (*expected[:-1], expected[-1] // 2)  # the other half are log-variances
    shape = tuple(aligned.shape)
    if not isinstance(likelihood, (Gaussian, MSE, Poisson)):
        shape = shape[:1]
        expected = expected[:1]
    if shape != expected:
        raise PullbackError(
            "The targets do not fit the model's outputs",
            f"{type(likelihood).__name__} of outputs {tuple(outputs.shape)} got targets "
            f"{tuple(targets.shape)} of {targets.dtype}",
            "Give one target per sample, and for a regression targets of the shape of the outputs",
        )
    return aligned


def sample_losses(likelihood: Likelihood, outputs: Tensor, targets: Any) -> Tensor:
    """Return −log p(y|z) of every sample, added up over its positions: (N,)."""
    matched = match_targets(likelihood, outputs, targets)
    try:
        losses = likelihood.nll(outputs, matched)
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        reraise_fatal(error)
        raise PullbackError(
            "The targets do not fit the model's outputs",
            f"{type(likelihood).__name__} of outputs {tuple(outputs.shape)} and "
            f"{_describe_item(targets)} failed: {str(error).rstrip('.')}",
            "Check the order of (inputs, targets), the axis of classes (the last: Categorical()), "
            "dtypes and shapes of the loader",
        ) from error
    if losses.ndim == 0 or len(losses) != len(outputs):
        raise PullbackError(
            "The likelihood does not fit the batch",
            f"outputs {tuple(outputs.shape)} gave losses of shape {tuple(losses.shape)}",
            "Use a likelihood whose nll has one value per sample or position, samples first",
        )
    return losses.flatten(1).sum(1) if losses.ndim > 1 else losses
