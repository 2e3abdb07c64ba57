"""ψ = φ∘f: the same function of other parameters, w = f(θ) with θ₀ = f⁻¹(w₀).

This is the setting of van Oostrum, Müller and Ay (2023), Definitions 5 and 6: two parametrizations
with ψ = φ∘f for a diffeomorphism f, compared at θ = f⁻¹(ξ).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.func import functional_call, jvp

from ..._core.checks import require_finite_tensor
from ..._core.errors import PullbackError, require
from .diffeomorphism import Diffeomorphism, Elementwise, Params

DiffeomorphismLike = Diffeomorphism | tuple[Callable[[Any], Any], Callable[[Any], Any]]


class Reparametrized(nn.Module):
    """model(x) at w = f(θ), with θ as its only trainable parameters.

    Frozen parameters and buffers stay as they are. The original is copied; its weights are gone
    from the copy, whose layers receive f(θ) at each call.
    """

    def __init__(self, model: nn.Module, f: Diffeomorphism) -> None:
        super().__init__()
        start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        theta = f.find_coordinates(start)
        self.diffeomorphism = f
        #: the model's trainable parameters, by name
        self.names = tuple(start)
        #: name of w in the model ↦ name of θ in this module, which may have no dot
        self._theta_names = {n: f"theta_{n.replace('.', '_')}" for n in self.names}
        if len(set(self._theta_names.values())) < len(self.names):
            self._theta_names = {n: f"theta_{i}" for i, n in enumerate(self.names)}
        #: name of w in the model ↦ all names under which layers of the copy read it
        self.inner, self._slots = _copy_without_parameters(model, self.names)
        for name, value in theta.items():
            self.register_parameter(self._theta_names[name], nn.Parameter(value))
        self.train(model.training)

    def weights(self) -> Params:
        """w = f(θ), by the model's own names."""
        theta = {n: getattr(self, self._theta_names[n]) for n in self.names}
        w = self.diffeomorphism.forward(theta)
        return {n: w[n] for n in self.names}

    def push(self, theta: Params, v: Params) -> Params:
        """df_θ v, for θ and v by this module's names; by the model's own names."""
        point = self._rename_to_model(theta)
        direction = self._rename_to_model(v)
        pushed = jvp(self.diffeomorphism.forward, (point,), (direction,))[1]
        return {n: pushed[n] for n in self.names}

    def _rename_to_model(self, params: Params) -> Params:
        """Return tensors by the model's own names, from this module's names."""
        model_names = {theta_name: n for n, theta_name in self._theta_names.items()}
        return {model_names[theta_name]: t for theta_name, t in params.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output at w = f(θ)."""
        tensors: Params = {}
        for name, weight in self.weights().items():
            tensors |= dict.fromkeys(self._slots[name], weight)
        return functional_call(self.inner, tensors, args, kwargs, tie_weights=False)


def reparametrize(model: nn.Module, f: DiffeomorphismLike) -> Reparametrized:
    r"""The same function in other parameters: ψ(θ) = φ(f(θ)), at θ₀ = f⁻¹(w₀).

    Args:
        model: is copied and never changed.
        f: a `Diffeomorphism`; or a function with its inverse, of one tensor (applied to each
            parameter) or of the dict of parameters.

    Raises:
        PullbackError: where f(f⁻¹(w₀)) is not w₀ or f's derivative has no inverse there.

    >>> import torch
    >>> model = nn.Linear(3, 2)
    >>> twin = reparametrize(model, (torch.sinh, torch.asinh))
    >>> x = torch.randn(5, 3)
    >>> bool(torch.allclose(twin(x), model(x), atol=1e-5))
    True
    """
    trainable = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise PullbackError(
            "There is nothing to reparametrize",
            "no parameter requires a gradient",
            "Unfreeze at least one parameter or pass others",
        )
    for name, p in trainable.items():
        require_finite_tensor(f"The parameter {name!r}", p)
    return Reparametrized(model, as_diffeomorphism(f, trainable))


def as_diffeomorphism(f: DiffeomorphismLike, params: Params) -> Diffeomorphism:
    """Return f itself, or the diffeomorphism of a pair (function, inverse).

    The function is of the dict of parameters if it takes one, of each tensor otherwise.
    """
    if isinstance(f, Diffeomorphism):
        return f
    is_pair = isinstance(f, tuple) and len(f) == 2 and all(map(callable, f))
    remedy = "Give a pair of a function and its inverse, or a Diffeomorphism"
    require(is_pair, "The diffeomorphism", f, remedy)
    function, inverse = f
    try:
        takes_dict = isinstance(function(dict(params)), dict)
    except (TypeError, AttributeError):
        takes_dict = False
    if takes_dict:
        return Diffeomorphism(function, inverse)
    return Elementwise(function, inverse)


def _copy_without_parameters(
    model: nn.Module, names: tuple[str, ...]
) -> tuple[nn.Module, dict[str, list[str]]]:
    """Return a copy without the named parameters, and all names of each of them in it.

    A tied parameter has several. Empty buffers take the parameters' places, and what is not named
    (frozen parameters) stays.
    """
    inner = copy.deepcopy(model)
    names_by_id = {id(p): n for n, p in inner.named_parameters() if n in names}
    slots: dict[str, list[str]] = {n: [] for n in names}
    for path, module in inner.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in names_by_id:
                continue
            slot = f"{path}.{key}" if path else key
            slots[names_by_id[id(parameter)]].append(slot)
            del module._parameters[key]
            module.register_buffer(key, parameter.detach().new_zeros(0), persistent=False)
    return inner, slots
