"""SGD in the quotient: descend, and return along the orbit to a slice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from .._core.capture import unwrap_model
from .._core.checks import require_number
from .._core.errors import PullbackError, refuse_unknown
from .._core.groups import find_processes
from ..optim.checks import prepare_param_group, refuse_model, refuse_sharded, refuse_sparse
from ..steps.memory import shared_numbers
from .chains import list_layers
from .descent.directions import SliceGradient, find_direction
from .descent.retractor import Retractor, Schedule, is_idle
from .descent.sweeps import Follower
from .find import read_scalings
from .slices import EqualNorm, Retraction, Slice, SliceKind, choose_layer_slice

#: attributes that a copy or a pickle keeps, beside torch's
_SAVED_ATTRIBUTES = ("model", "scalings", "group", "gradient", "retractions")


class SliceSGD(Optimizer):
    r"""w ← retract(w − lr·X), where X is the gradient on a slice of the scaling symmetries.

    A network of positively homogeneous units does not change when a unit's incoming weights and
    bias are multiplied by α > 0 and its outgoing weights divided by it. A slice meets each such
    orbit once. The parameters are brought onto it at construction and after every step; the
    function is the same to round-off, whatever its weights' scales were.

    The momentum buffer is transported as gradients are: w ← αw, buffer ← buffer/α. Parameters in
    no orbit take plain SGD steps; a scaling that touches a frozen parameter is left out.

    Args:
        model: the network; its parameters are moved onto the slice now. As SGD it follows p.grad
            alone: under `DistributedDataParallel` all processes take the same steps.
        lr: the learning rate.
        momentum: weight of the past in the buffer.
        weight_decay: as in torch's SGD.
        group: "neuron", one scale per unit or channel and the balanced slice; "layer", the
            paper's one scale per layer and its slice of equal norms (of balanced layers where they
            do not stand in chains). The latter leaves the other scalings of units in the kernel.
        gradient: "riemannian", the paper's approach I, is the Euclidean gradient projected onto the
            slice; "gtk-orthonormal" and "gtk-polar" are approach II, the tangent kernels of
            {r, unit ∂_ψ} and of {r, ∂_ψ}.
        symmetry: what `symmetry.find(model, x)` returned, or a list of scalings; by default they
            are found from the model's graph.
        params: parameters or param groups, by default all that require gradients.
        every: retract after every `every` steps; in between parameters are off the slice by
            O(every·lr²), and where no projection is needed steps are SGD's own. 10 is the cheap
            route: a tenth of the retraction's passes over the weights.
        sweeps: for units: None balances every other layer after each step, exactly, while the
            rest is off by O(lr²); n balances all layers, n times. Layers are always exact.
        captured: how many steps are recorded in one CUDA graph, if any are: a multiple of `every`,
            with sweeps=None for units of twice that, as layers take turns. Without it, recording
            steps that differ is refused.
        processes: the group of processes that train together, where the model is wrapped later or
            gradients are averaged by hand; by default that of the model's wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        group: str = "neuron",
        gradient: str = "riemannian",
        symmetry: Any = None,
        params: Iterable[Any] | None = None,
        every: int = 1,
        sweeps: int | None = None,
        captured: int | None = None,
        processes: ProcessGroup | None = None,
    ) -> None:
        refuse_model(model, "SliceSGD")
        find_processes(model, processes, "SliceSGD", "processes")
        refuse_sharded(model, "a unit's incoming and outgoing weights are scaled together")
        refuse_unknown("group", group, ("neuron", "layer"))
        refuse_unknown("gradient", gradient, map(str, SliceGradient))
        self.model = model
        self.group = group
        self.gradient = gradient
        self.retractions = Schedule(every, sweeps, captured)
        self.scalings, _ = read_scalings(symmetry, model)
        self._retractor = self._make_retractor()
        self._names = self._name_parameters()
        if params is None:
            params = [p for p in unwrap_model(model).parameters() if p.requires_grad]
        self._schedule = {"steps": 0}
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        #: the retraction at construction: how far the parameters were away, and dead units
        self.start: Retraction | None = self.retract_()

    @property
    def slice(self) -> Slice | None:
        """The slice for the parameters that are trained now; None if no scaling is left."""
        self._retractor.refresh()
        return self._retractor.slice

    def retract_(self) -> Retraction | None:
        """Retract parameters and momentum to the slice, to round-off."""
        self._retractor.refresh()
        return self._retractor.retract_(self._list_followers())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take up more of the model's parameters, with their own rates."""
        group = prepare_param_group(param_group, self.model, self._names)
        for name in ("lr", "momentum", "weight_decay"):
            value = group.get(name, self.defaults[name])
            if isinstance(value, Tensor):
                value = float(value)
            require_number(f"{name}=", value)
        super().add_param_group(group)
        self._complete_state()
        self._retractor.set_optimized(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; returns the closure's loss, if there is a closure.

        With all rates and gradients zero, nothing changes, the momentum neither.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_idle(self.param_groups):
            return loss
        self._retractor.refresh()
        self._schedule["steps"] += 1
        steps = self._schedule["steps"]
        should_retract = self._retractor.should_retract(steps)
        directions = self._find_directions()
        for group in self.param_groups:
            self._descend(group, directions)
        if should_retract:
            self._retractor.retract_by_sweeps(steps, self._list_followers())
        return loss

    def _descend(self, group: dict[str, Any], directions: dict[str, Tensor] | None) -> None:
        """v ← momentum·v + g + weight_decay·w, w ← w − lr·v; v is kept in the state of each w."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        weight_decay = group["weight_decay"]
        gradients = [p.grad for p in params]
        if directions is not None:  # these contain weight decay
            weight_decay = 0.0
            gradients = [directions[self._names[id(p)]] for p in params]
        is_sparse = any(gradient.is_sparse for gradient in gradients)
        momentum = group["momentum"]
        buffers: list[Tensor | None] = [None] * len(params)
        if momentum:
            buffers = [self.state[p].get("momentum_buffer") for p in params]
        sgd(
            params,
            gradients,
            buffers,
            has_sparse_grad=is_sparse,
            foreach=not is_sparse,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if momentum:
            self._store_buffers(params, buffers)

    def _store_buffers(self, params: list[Tensor], buffers: list[Tensor | None]) -> None:
        """Store the momentum buffers, which `sgd` has created if there were none."""
        for p, buffer in zip(params, buffers, strict=True):
            self.state[p]["momentum_buffer"] = buffer

    def _find_directions(self) -> dict[str, Tensor] | None:
        """Return the directions X by name; None if X is the gradient itself."""
        slice = self._retractor.slice
        if slice is None or self._has_tangent_gradient(slice):
            return None
        params: dict[str, Tensor] = {}
        gradients: dict[str, Tensor] = {}
        for group in self.param_groups:
            decay = group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                name = self._names[id(p)]
                refuse_sparse(name, p.grad)
                params[name] = p
                gradients[name] = p.grad
                if decay:
                    gradients[name] = p.grad.add(p, alpha=decay)
        return find_direction(self.gradient, list_layers(slice.scalings), params, gradients)

    def _has_tangent_gradient(self, slice: Slice) -> bool:
        """Return True if gradient and weight decay are tangent to the slice without projection.

        On a slice that is orthogonal to orbits the gradient is. Weight decay is too, on layers of
        equal norm only if it is the same for all of them.
        """
        if self.gradient != SliceGradient.RIEMANNIAN or not self._retractor.is_orthogonal:
            return False
        decays = {group["weight_decay"] for group in self.param_groups}
        return not isinstance(slice, EqualNorm) or len(decays) == 1

    def _list_followers(self) -> dict[str, list[Follower]]:
        """Return the momentum buffers, which are multiplied by 1/α."""
        followers = {}
        for group in self.param_groups:
            if not group["momentum"]:
                continue
            for p in group["params"]:
                buffer = self.state[p].get("momentum_buffer")
                if buffer is not None:
                    followers[self._names[id(p)]] = [Follower(buffer, -1)]
        return followers

    def __getstate__(self) -> dict[str, Any]:
        """Return all but caches: a copy or a pickle contains its model."""
        attributes = {name: getattr(self, name) for name in _SAVED_ATTRIBUTES}
        return {**super().__getstate__(), **attributes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "model" in state:
            self._names = self._name_parameters()
            self._retractor = self._make_retractor()
            self._retractor.set_optimized(self.param_groups)
            self.start = None
        params = [p for group in self.param_groups for p in group["params"]]
        saved = (self.state[p].get("schedule") for p in params)
        self._schedule = shared_numbers({"steps": 0}, saved)
        self._complete_state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume to the same bits; nothing changes where it is another optimizer's state."""
        has_schedule = all("schedule" in saved for saved in state_dict["state"].values())
        has_momentum = all("momentum" in group for group in state_dict["param_groups"])
        if not has_schedule or not has_momentum:
            raise PullbackError(
                "The saved state is not SliceSGD's",
                "it has no number of steps under its parameters, or no momentum in its groups",
                "Load what SliceSGD.state_dict() of this version gave, or start anew",
            )
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Param groups, the number of steps, and momentum."""
        self._complete_state()
        return super().state_dict()

    def _complete_state(self) -> None:
        """Give each parameter the number of steps, which all share, and a buffer of zeros."""
        for group in self.param_groups:
            for p in group["params"]:
                # torch's full_state_dict reads the device off a tensor that has an axis
                self.state[p] |= {"schedule": self._schedule, "device": p.new_empty(0)}
                if group["momentum"] and self.state[p].get("momentum_buffer") is None:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def _make_retractor(self) -> Retractor:
        slice_choice = SliceKind.BALANCED if self.group == "neuron" else choose_layer_slice
        return Retractor(self.model, self.scalings, slice_choice, self.retractions)

    def _name_parameters(self) -> dict[int, str]:
        """Return the names of the model's parameters by id."""
        return {id(p): name for name, p in unwrap_model(self.model).named_parameters()}

    def __repr__(self) -> str:
        slice_type = type(self.slice).__name__
        about = f"group={self.group!r}, gradient={self.gradient!r}, slice={slice_type}"
        return f"{super().__repr__()[:-1]}    {about}\n)"
