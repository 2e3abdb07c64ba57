"""Natural gradients for a model of DeepXDE (the PyTorch backend).

model = dde.Model(data, net)
model.compile("adam", lr=1e-3)             # its loss weights count, its optimizer does not
losses = train_deepxde(model, steps=100)
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from ..._core.errors import PullbackError
from ...optim import Objective, Squares
from ..arguments import is_integer, require
from .autograd_map import AutogradMap
from .training import NetworkWithUnknowns, train


def deepxde_objective(model: Any) -> Objective:
    """Return the residuals of a DeepXDE model as an objective of `NaturalGradient.step`.

    These are the residuals of its `data` at the training points: equations, boundary and initial
    conditions, operators. The loss is ½ Σ weight · mean residual², half of what DeepXDE shows.

    Args:
        model: a `dde.Model` with a network of PyTorch; the weights of its `compile` count.

    Raises:
        PullbackError: for a network of another backend, and for trainable variables beside it.
    """
    residuals = DeepXDEResiduals(model)
    if _get_variables(model):
        raise PullbackError(
            "The model has trainable variables beside its network",
            "these are no parameters of the network",
            "Use train_deepxde(model), which trains both",
        )
    return Objective([Squares(AutogradMap(residuals))])  # pyright: ignore[reportArgumentType]


def _get_variables(model: Any) -> list[Tensor]:
    return list(getattr(model, "external_trainable_variables", None) or [])


class DeepXDEResiduals:
    """The weighted residuals of a model, as a function of its network's parameters."""

    def __init__(self, model: Any) -> None:
        if not isinstance(getattr(model, "net", None), torch.nn.Module):
            raise PullbackError(
                "The model has no network of PyTorch",
                f"model.net is {type(getattr(model, 'net', None)).__name__}",
                "Choose the backend before the import: DDE_BACKEND=pytorch",
            )
        self._model = model
        parameter = next(model.net.parameters())
        data = model.data
        self._inputs = torch.as_tensor(data.train_x, dtype=parameter.dtype, device=parameter.device)

    def evaluate(self, params: dict[str, Tensor], unknowns: Sequence[Tensor]) -> Tensor:
        """Return the residuals of these values of the model's variables.

        The equations read the variables themselves: copied into one, the value of an unknown
        becomes part of the graph.
        """
        for variable, unknown in zip(_get_variables(self._model), unknowns, strict=True):
            variable.detach_().copy_(unknown)
        return self(params)

    def __call__(self, params: dict[str, Tensor]) -> Tensor:
        """Return all residuals, (n,); the sum of their squares is Σ weight · mean residual²."""
        model = self._model
        inputs = self._inputs.detach().clone().requires_grad_()
        outputs = functional_call(model.net, params, (inputs,))
        try:
            # a loss function that returns the error itself
            errors = model.data.losses(None, outputs, lambda _, error: error, inputs, model)
        finally:
            _clear_derivatives()
        weights = getattr(model, "loss_weights", None) or [1.0] * len(errors)
        columns = []
        for error, weight in zip(errors, weights, strict=True):
            columns.append(error.flatten() * math.sqrt(float(weight) / error.numel()))
        return torch.cat(columns)


def _clear_derivatives() -> None:
    """Forget the derivatives that DeepXDE keeps of the last outputs."""
    try:
        gradients = importlib.import_module("deepxde.gradients")
    except ModuleNotFoundError:  # a model that only looks like one
        return
    gradients.clear()


def train_deepxde(model: Any, steps: int = 100, **options: Any) -> list[float]:
    """Take so many natural gradient steps; network and variables of the model change in place.

    Args:
        model: a `dde.Model` with a network of PyTorch, in float64 if it is to be accurate
            (`dde.config.set_default_float("float64")` before it is built). Its
            `external_trainable_variables` are trained too.
        steps: how many.
        options: of `NaturalGradient`, such as solver= and step=.

    Returns:
        The loss before every step.
    """
    require(is_integer(steps, 1), "steps=", steps, "Use an integer ≥ 1")
    residuals = DeepXDEResiduals(model)
    module = NetworkWithUnknowns(model.net, _get_variables(model))
    return train(module, residuals.evaluate, steps, options)
