"""What steps keep between steps, and how an optimizer saves it.

A step declares its `numbers`, with their first values, and the names of its `vectors` (p,), which
are zero at first. Numbers are saved in one dict that the states of all parameters share. A vector
is saved parameter by parameter, in the parameter's shape and dtype. The memory of an inner step
stands under "inner".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.errors import PullbackError
from .base import Step

_INNER = "inner"
Tree = dict[str, Any]


def first_numbers(step: Step) -> Tree:
    """Return the numbers of a step and of its inner steps, as they are before the first step."""
    tree: Tree = dict(step.numbers)
    if step.inner is not None:
        tree[_INNER] = first_numbers(step.inner)
    return tree


def first_vectors(step: Step, parameter: Tensor) -> Tree:
    """Return a parameter's share of the vectors before the first step: zeros."""
    tree: Tree = {name: torch.zeros_like(parameter) for name in step.vectors}
    if step.inner is not None:
        tree[_INNER] = first_vectors(step.inner, parameter)
    return tree


def merge_saved(first: Tree, saved: Mapping[str, Any]) -> Tree:
    """Return the first values, replaced by saved ones of the same name and kind."""
    merged: Tree = {}
    for name, first_value in first.items():
        saved_value = saved.get(name, first_value)
        if isinstance(first_value, dict):
            subtree = saved_value if isinstance(saved_value, dict) else {}
            merged[name] = merge_saved(first_value, subtree)
        elif _is_same_kind(first_value, saved_value):
            merged[name] = saved_value
        else:
            merged[name] = first_value
    return merged


def _is_same_kind(first_value: Any, saved_value: Any) -> bool:
    """Return True if both are tensors, or both numbers."""
    if isinstance(first_value, Tensor):
        return isinstance(saved_value, Tensor)
    return isinstance(saved_value, (int, float))


def shared_numbers(first: Tree, saved: Iterable[Any]) -> Tree:
    """Return the numbers that all parameters share, from the first saved dict if there is one."""
    trees = [tree for tree in saved if isinstance(tree, dict)]
    return merge_saved(first, trees[0] if trees else {})


def recall(
    step: Step,
    numbers: Mapping[str, Any],
    vectors: Sequence[Mapping[str, Any]],
    flatten: Callable[[list[Tensor | None]], Tensor],
) -> Tree:
    """Return what the step finds in `Local.state`: numbers, vectors, and the same under "inner".

    Args:
        step: whose memory it is.
        numbers: as saved.
        vectors: the saved shares of the parameters that take part.
        flatten: joins shares to a vector (p,); None stands for zeros.
    """
    state: Tree = {name: numbers.get(name, value) for name, value in step.numbers.items()}
    for name in step.vectors:
        state[name] = flatten([share.get(name) for share in vectors])
    if step.inner is not None:
        shares = [share.get(_INNER, {}) for share in vectors]
        state[_INNER] = recall(step.inner, numbers.get(_INNER, {}), shares, flatten)
    return state


def store(
    step: Step,
    state: Tree,
    numbers: Tree,
    vectors: Sequence[Tree],
    split: Callable[[Tensor], Iterable[Tensor]],
) -> None:
    """Save what the step left in `Local.state`; `split` gives each parameter its share."""
    _refuse_undeclared(step, state)
    numbers.update({name: state[name] for name in step.numbers})
    for name in step.vectors:
        for share, piece in zip(vectors, split(state[name]), strict=True):
            share[name] = piece
    if step.inner is not None:
        shares = [share.setdefault(_INNER, {}) for share in vectors]
        store(step.inner, state[_INNER], numbers.setdefault(_INNER, {}), shares, split)


def _refuse_undeclared(step: Step, state: Tree) -> None:
    """Raise where a state has entries that the step does not declare, or a number that is none."""
    unknown = sorted(set(state) - {*step.numbers, *step.vectors, _INNER})
    if unknown:
        why = f"{unknown} are not declared"
    elif all(isinstance(state[name], (int, float)) for name in step.numbers):
        return
    else:
        why = "a number of its state is none"
    raise PullbackError(
        f"{type(step).__name__} keeps what cannot be saved",
        why,
        "Name ints and floats in `numbers`, with their first values, and flat tensors in `vectors`",
    )
