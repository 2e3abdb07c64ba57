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
    """The numbers of a step and of those inside it, as they are before the first step."""
    inner = {} if step.inner is None else {_INNER: first_numbers(step.inner)}
    return {**step.numbers, **inner}


def first_vectors(step: Step, like: Tensor) -> Tree:
    """A parameter's share of the vectors before the first step: zeros."""
    inner = {} if step.inner is None else {_INNER: first_vectors(step.inner, like)}
    return {**{name: torch.zeros_like(like) for name in step.vectors}, **inner}


def completed(first: Tree, saved: Mapping[str, Any]) -> Tree:
    """The first values, replaced by what was saved under the same names."""
    out = {}
    for name, value in first.items():
        found = saved.get(name, value)
        if isinstance(value, dict):
            out[name] = completed(value, found if isinstance(found, dict) else {})
        else:
            kind = Tensor if isinstance(value, Tensor) else (int, float)
            out[name] = found if isinstance(found, kind) else value
    return out


def shared_numbers(first: Tree, saved: Iterable[Any]) -> Tree:
    """One dict for all parameters, from the first of the saved ones that is there."""
    return completed(first, next((tree for tree in saved if isinstance(tree, dict)), {}))


def recall(
    step: Step,
    numbers: Mapping[str, Any],
    vectors: Sequence[Mapping[str, Any]],
    flatten: Callable[[list[Tensor | None]], Tensor],
) -> Tree:
    """What the step finds in `Local.state`: numbers, flat vectors, and the same under "inner".

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
    numeric = all(isinstance(state[name], (int, float)) for name in step.numbers)
    unknown = sorted(set(state) - {*step.numbers, *step.vectors, _INNER})
    if unknown or not numeric:
        raise PullbackError(
            f"{type(step).__name__} keeps what cannot be saved",
            f"{unknown} are not declared" if unknown else "a number of its state is none",
            "Name ints and floats in `numbers`, with their first values, and flat tensors in "
            "`vectors`",
        )
    numbers.update({name: state[name] for name in step.numbers})
    for name in step.vectors:
        for share, piece in zip(vectors, split(state[name]), strict=True):
            share[name] = piece
    if step.inner is not None:
        shares = [share.setdefault(_INNER, {}) for share in vectors]
        store(step.inner, state[_INNER], numbers.setdefault(_INNER, {}), shares, split)
