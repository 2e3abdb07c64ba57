"""The affine maps inside compound layers, replayed with the cotangents at the layer's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .._core.graph import find_nodes_reached_outside
from .layers import Tap
from .proof import Proof, accumulate, norm
from .record import CompoundCall, RecordedPass


@dataclass(frozen=True)
class ReplayedMap:
    """One affine map of a compound layer, with its parameters' names."""

    tap: Tap
    #: at the positions of all steps, (G, P, O)
    delta: Tensor
    #: of weight and bias; None for what is not trained
    names: dict[str, str | None]


@dataclass(frozen=True)
class ReachedCall:
    """A call of a compound layer with the cotangents at its outputs, None without a gradient."""

    call: CompoundCall
    cotangents: list[Tensor | None]


class CompoundReplays:
    """The compound layers of a recorded pass that a covector reaches.

    Args:
        forward: the pass.
        cotangents: at `forward.compound_edges`, None where the covector does not arrive.
    """

    def __init__(self, forward: RecordedPass, cotangents: Sequence[Tensor | None]) -> None:
        self._forward = forward
        self._reached: list[ReachedCall] = []
        remaining = iter(cotangents)
        for call in forward.record.compounds:
            call_cotangents = [None if edge is None else next(remaining) for edge in call.edges]
            if any(delta is not None for delta in call_cotangents):
                self._reached.append(ReachedCall(call, call_cotangents))

    def replay_calls(self) -> Iterator[tuple[CompoundCall, list[ReplayedMap]]]:
        """Yield every call with its maps; those of one are gone when the next is replayed."""
        for reached in self._reached:
            yield reached.call, self._replay(reached)

    def _replay(self, reached: ReachedCall) -> list[ReplayedMap]:
        """Return the maps of one layer with their cotangents, zeros where no gradient arrives."""
        call = reached.call
        outputs, taps = call.compound.replay(call.module, call.args, call.kwargs)
        tap_outputs: list[Tensor] = []
        for tap in taps:
            tap_outputs += tap.outputs
        deltas: list[Tensor] = []
        pulled_back = _pull(outputs, tap_outputs, reached.cotangents)
        for tap_output, delta in zip(tap_outputs, pulled_back, strict=True):
            if delta is None:
                deltas.append(torch.zeros_like(tap_output))
            else:
                deltas.append(delta)
        remaining = iter(deltas)
        name = self._forward.record.name
        maps = []
        for tap in taps:
            delta = torch.cat(list(islice(remaining, len(tap.outputs))), 1)
            names = {"weight": name(tap.weight), "bias": name(tap.bias)}
            maps.append(ReplayedMap(tap, delta, names))
        return maps

    def describe_omissions(self) -> dict[str, str]:
        """Return by parameter what is left out, if the layer did not do what its replay does."""
        remarks: dict[str, str] = {}
        for reached in self._list_calls_with_dropout():
            call = reached.call
            text = f"{type(call.module).__name__}, replayed without {call.omission}"
            remarks |= dict.fromkeys(self._find_trained_parameters(call), text)
        return remarks

    def _list_calls_with_dropout(self) -> list[ReachedCall]:
        """Return the calls whose replay leaves dropout out."""
        return [reached for reached in self._reached if reached.call.omission]

    def _find_trained_parameters(self, call: CompoundCall) -> dict[str, Tensor]:
        """Return the parameters of a layer that take part in the pass, by name."""
        name = self._forward.record.name
        parameters = {name(parameter): parameter for parameter in call.module.parameters()}
        return {n: parameter for n, parameter in parameters.items() if n is not None}

    def prove(self, proof: Proof) -> None:
        """Add the gradients that the maps give to the proof.

        Layers with dropout are proven by themselves: their replay is compared with a run of the
        layer without dropout.
        """
        self._prove_dropout_layers(proof)
        for _, maps in self.replay_calls():
            # what cancels inside a layer, before q and k where there is one key, leaves round-off
            largest = torch.stack([norm(replayed.delta) for replayed in maps]).amax()
            for replayed in maps:
                delta = replayed.delta
                inputs = torch.cat(replayed.tap.inputs, 1)
                gradients: dict[str, Tensor] = {}
                if replayed.names["weight"] is not None:
                    gradients[replayed.names["weight"]] = delta.mT @ inputs
                if replayed.names["bias"] is not None:
                    gradients[replayed.names["bias"]] = delta.sum(1)
                proof.add(gradients, largest, norm(inputs), delta.numel())

    def _prove_dropout_layers(self, proof: Proof) -> None:
        """Add the gradients that layers with dropout give without it, each layer by itself."""
        with_dropout = self._list_calls_with_dropout()
        gradients: dict[str, Tensor] = {}
        for reached in with_dropout:
            accumulate(gradients, self._pull_without_dropout(reached))
        nodes_outside = set()
        if gradients:
            subgraphs = [
                (reached.call.edges, reached.call.argument_edges) for reached in with_dropout
            ]
            nodes_outside = find_nodes_reached_outside(self._forward.root, subgraphs)
        leaves = self._forward.leaves
        used_outside = {n for n in gradients if get_gradient_edge(leaves[n]).node in nodes_outside}
        proof.add_isolated(gradients, used_outside)

    def _pull_without_dropout(self, reached: ReachedCall) -> dict[str, Tensor]:
        """Return the gradients of a layer's parameters, by name, when it runs without dropout."""
        call = reached.call
        outputs = call.compound.run_without_dropout(call.module, call.args, call.kwargs)
        parameters = self._find_trained_parameters(call)
        gradients = _pull(outputs, list(parameters.values()), reached.cotangents)
        named_gradients = zip(parameters, gradients, strict=True)
        return {name: gradient for name, gradient in named_gradients if gradient is not None}


def _pull(
    outputs: Sequence[Tensor], targets: Sequence[Tensor], cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Return the cotangents at the targets, None where an output does not depend on one."""
    reached_outputs: list[Tensor] = []
    output_cotangents: list[Tensor] = []
    for output, delta in zip(outputs, cotangents, strict=True):
        if delta is not None:
            reached_outputs.append(output)
            output_cotangents.append(delta.to(output.dtype))
    return torch.autograd.grad(reached_outputs, targets, output_cotangents, allow_unused=True)
