"""What a statistics step keeps alive: no logits, no second copy of inputs, the same factors."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.optim.kfac.statistics import pending
from pullback.optim.kfac.statistics.measure import Measure
from pullback.optim.kfac.statistics.seen import seen
from pullback.optim.kfac.stepping.control import advance


class Decoder(nn.Module):
    """A normalization before a layer, as in a transformer, and a head, tied or with a bias."""

    def __init__(self, *, bias: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 6), nn.LayerNorm(6)
        self.up, self.head = nn.Linear(6, 6), nn.Linear(6, 11, bias=bias)
        self.checkpointed = checkpointed
        if not bias:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        if self.checkpointed:
            return self.head(checkpoint(self._inner, h, use_reentrant=False))
        return self.head(self._inner(h))

    def _inner(self, h: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(h)))


def learned(model: nn.Module, half: bool, fisher: str = "mc", draws: int = 1) -> dict[str, Tensor]:
    """All averages after one statistics step, by name."""
    likelihood = pb.likelihoods.Categorical()
    opt = pb.KFAC(model, 0.0, likelihood=likelihood, fisher=fisher, draws=draws)
    x = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        z = model(x)
    F.cross_entropy(z.flatten(0, 1).double(), x.flatten()).backward()
    opt.step()
    held = opt.curvature.averages.items()
    return {f"{k.names}{n}": t for k, a in held for n, t in a.value.items()}


def twins(**options: Any) -> tuple[Decoder, Decoder]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Decoder(**options))
    return models[0], models[1]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("fisher", "draws"), [("mc", 1), ("mc", 3), ("exact", 1)])
def test_output_computed_again_gives_the_same_factors(
    monkeypatch: pytest.MonkeyPatch, half: bool, bias: bool, fisher: str, draws: int
) -> None:
    one, two = twins(bias=bias)
    if not half:
        one, two = one.double(), two.double()
    kept = learned(one, half, fisher, draws)
    monkeypatch.setattr(pending, "_LARGE", 1)
    again = learned(two, half, fisher, draws)
    assert kept.keys() == again.keys()
    for name, value in kept.items():
        torch.testing.assert_close(again[name], value, rtol=1e-12, atol=0.0)


def test_logits_are_gone_while_the_covector_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the forward pass's tensor nor the one computed again is held by anybody."""
    monkeypatch.setattr(pending, "_LARGE", 1)
    alive: list[bool] = []
    seen_by: list[Any] = []
    model = Decoder().double()
    opt = pb.KFAC(model, 0.0, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    x = torch.randint(0, 11, (4, 5))
    inner, again = Measure.pull, pending.Pending.value

    def pull(self: Measure, *args: Any, **kwargs: Any) -> Any:
        alive.append(any(s() is not None for s in seen_by))
        return inner(self, *args, **kwargs)

    def value(self: pending.Pending) -> Tensor:
        assert all(s() is None for s in seen_by)  # the loss's backward pass needs none
        z = again(self)
        seen_by.append(weakref.ref(z.untyped_storage()))
        return z

    monkeypatch.setattr(Measure, "pull", pull)
    monkeypatch.setattr(pending.Pending, "value", value)
    for _ in range(2):
        seen_by.clear()
        opt.zero_grad()
        z = model(x)
        seen_by.append(weakref.ref(z.untyped_storage()))
        loss = F.cross_entropy(z.flatten(0, 1), x.flatten())
        del z
        loss.backward()
        opt.step()
    assert alive == [False, False]


def test_only_a_plain_linear_head_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after the last layer, and subclasses of it, keep the output."""

    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    monkeypatch.setattr(pending, "_LARGE", 1)
    for model in (Doubled(3, 2), nn.Sequential(nn.Linear(3, 2), nn.Sigmoid())):
        values: list[Tensor] = []
        value = pending.Pending.value

        def spy(self: pending.Pending, value: Any = value, values: Any = values) -> Tensor:
            values.append(value(self))
            return values[-1]

        with monkeypatch.context() as patch:
            patch.setattr(pending.Pending, "value", spy)
            opt = pb.KFAC(model, 0.0)
            z = model(torch.randn(5, 3))
            z.sum().backward()
            opt.step()
        assert all(torch.equal(v, z.detach()) for v in values)
        assert values


def test_input_is_what_the_graph_keeps() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 5, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    found = seen(x.detach(), y)
    assert torch.equal(found, x.detach().bfloat16())
    kept = y.grad_fn.next_functions[0][0]._saved_mat1  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert found.data_ptr() == kept.data_ptr()
    assert seen(x, layer(x)) is x


def test_input_of_a_frozen_weight_is_cast() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    layer.weight.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert torch.equal(seen(x, y), x.bfloat16())


def test_inputs_under_checkpoints() -> None:
    """Where saved tensors are packed they are not asked for, and the factors are the same."""
    one, _ = twins()
    torch.manual_seed(0)
    two = Decoder(checkpointed=True)
    plain, packed = learned(one, True), learned(two, True)
    for name, value in plain.items():
        torch.testing.assert_close(packed[name], value, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_advance(dtype: torch.dtype, turned: bool) -> None:
    p, d, m = (torch.randn(3, 5, dtype=dtype) for _ in range(3))
    if turned:
        d = d.T.contiguous().T
    momentum = 0.9 * m + d
    wanted = p - 0.1 * momentum
    advance([p], [d], [m], 0.1, 0.9)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(m, momentum, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(p, wanted, rtol=tolerance, atol=tolerance)
