"""Whether a model is still made of the modules and parameters that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ....maps.record import Sites
from .tape import Tape


class Holdings:
    """The modules to be recorded, looked for again only where modules were exchanged.

    Args:
        model: not a compiled one's wrapper.
        chosen: parameters of it that take part.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, Tensor]) -> None:
        self._model, self._chosen = model, chosen
        self._leaves: tuple[tuple[bool, ...], dict[str, Tensor]] = ((), {})
        self._sites: Sites | None = None
        #: where the parameters are held: a module's own, the name there, the parameter
        self._homes: list[tuple[dict[str, Any], str, Tensor]] = []

    def leaves(self) -> tuple[tuple[bool, ...], dict[str, Tensor]]:
        """Which parameters require a gradient, and these: the same object while they do."""
        flags = tuple([p.requires_grad for p in self._chosen.values()])
        if flags != self._leaves[0]:
            self._leaves = flags, {n: p for n, p in self._chosen.items() if p.requires_grad}
        return self._leaves

    def sites(self) -> Sites | None:
        """None where the model holds other tensors, as in `torch.func.functional_call`."""
        sites = self._sites
        if sites is None or not sites.current:
            sites = self._sites = Sites(self._model, Tape.kind)
            places = [(n.rpartition("."), p) for n, p in self._chosen.items()]
            modules = sites.modules
            self._homes = [
                (modules[path]._parameters, own, p)
                for (path, _, own), p in places
                if path in modules
            ]
        if all([held.get(own) is p for held, own, p in self._homes]):
            return sites
        now = dict(self._model.named_parameters())
        same = all(n not in now or now[n] is p for n, p in self._chosen.items())
        return sites if same else None
