"""Symmetries of networks that multiply by parameters themselves, and that look at their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.symmetry import ChartAction
from pullback.symmetry.find import SPECIALIZED
from pullback.testing import assert_close


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class Conv1D(nn.Module):
    """x @ w + b, with w held as (in, out)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.b = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.b, x.flatten(0, -2), self.w).view(*x.shape[:-1], -1)


class Block(nn.Module):
    """Masked attention with fused queries, keys and values, and a perceptron, after norms."""

    def __init__(self, linear: Callable[[int, int], nn.Module], width: int = 6) -> None:
        super().__init__()
        self.one = nn.LayerNorm(width)
        self.two = nn.LayerNorm(width)
        self.fused = linear(width, 3 * width)
        self.out = linear(width, width)
        self.up = linear(width, 8)
        self.down = linear(8, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None and bool(mask.all()):
            mask = None
        if mask is not None:
            mask = mask[:, None, None]
        pieces = self.fused(self.one(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in pieces)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.two(x))))


def copy_to_linear(model: nn.Module) -> Block:
    """The same network of `nn.Linear`."""
    twin = Block(nn.Linear)
    state = {
        n.removesuffix(".w") + ".weight" if n.endswith(".w") else n: p.mT if n.endswith(".w") else p
        for n, p in model.state_dict().items()
    }
    state = {n.removesuffix(".b") + ".bias" if n.endswith(".b") else n: p for n, p in state.items()}
    twin.load_state_dict(state)
    return twin


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: torch.einsum("bi,ij->bj", x, w),
    "einsum, output first": lambda x, w: torch.einsum("bi,ij->jb", x, w).T,
    "linear": lambda x, w: F.linear(x, w.T),
    "linear of a copy": lambda x, w: F.linear(x, w.T.contiguous()),
    "bmm": lambda x, w: torch.bmm(x[None], w[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(x.new_zeros(1, 1, 1), x[None], w[None])[0],
    "baddbmm, constant in float32": lambda x, w: torch.baddbmm(
        torch.zeros(1, 1, 1, dtype=torch.float32), x[None], w[None]
    )[0],
    "input in float32": lambda x, w: x.float() @ w,
    "addmm": lambda x, w: torch.addmm(x.new_zeros(w.shape[1]), x, w),
    "addmm, times a number": lambda x, w: torch.addmm(x.new_zeros(5), x, w, beta=2, alpha=3),
    "times a number": lambda x, w: x @ (w * 2),
    "over a number": lambda x, w: x @ (w / 3).mT.contiguous().mT,
    "from the left": lambda x, w: (w.T @ x.T).T,
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "inner": lambda x, w: torch.inner(x, w.T),
    "expanded": lambda x, w: (x.unflatten(0, (1, -1)) @ w.expand(1, *w.shape)).flatten(0, 1),
}


class Multiplied(nn.Module):
    def __init__(self, form: Callable[[Tensor, Tensor], Tensor] = FORMS["matmul"]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 5))
        self.last = nn.Linear(5, 2)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.form(x, self.w))


@pytest.mark.parametrize("form", FORMS)
def test_a_product_with_a_parameter_has_the_generators_of_a_linear_layer(form: str) -> None:
    model = Multiplied(FORMS[form])
    x = torch.randn(7, 3)
    symmetry = pb.symmetry.find(model, x)
    assert len(symmetry.generators()) == 25  # all 5 × 5 matrices between the two maps
    assert not symmetry.rejected


AFFINE_FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w, b: x @ w + b,
    "einsum": lambda x, w, b: torch.einsum("...i,ij->...j", x, w) + b,
    "linear": lambda x, w, b: F.linear(x, w.T, b),
    "bmm": lambda x, w, b: torch.bmm(x[None], w[None])[0] + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "addmm, bias expanded": lambda x, w, b: torch.addmm(b.expand(len(x), 5), x, w),
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x[None], w[None])[0],
    "baddbmm, bias expanded": lambda x, w, b: torch.baddbmm(
        b.expand(len(x), 1, 5), x[:, None], w.expand(len(x), 5, 5)
    )[:, 0],
    "convolution": lambda x, w, b: F.conv1d(x[..., None], w.T[..., None], b)[..., 0],
}


class TwoProducts(nn.Module):
    """Two affine maps with parameters, between which any invertible matrix fits."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        for name, shape in (("w1", (5, 5)), ("b1", (5,)), ("w2", (5, 5)), ("b2", (5,))):
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.form(x, self.w1, self.b1), self.w2, self.b2)


@pytest.mark.parametrize("form", AFFINE_FORMS)
def test_affine_maps_have_all_generators_of_the_jacobian(form: str) -> None:
    symmetry = pb.symmetry.find(TwoProducts(AFFINE_FORMS[form]), torch.randn(11, 5))
    rank = symmetry.rank()
    assert (symmetry.dimension, rank.nullity, rank.unexplained) == (
        30,
        30,
        0,
    )  # 5 × 5, and 5 shifts
    assert not symmetry.rejected


class Experts(nn.Module):
    """Two layers of three matrices each, as (E, in, out) or (in, E, out)."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        up = torch.randn(3, 4, 2)
        down = torch.randn(3, 2, 5)
        self.up, self.down = (
            nn.Parameter(w if first else w.transpose(0, 1).contiguous()) for w in (up, down)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return torch.bmm(torch.bmm(x.expand(3, -1, -1), self.up), self.down)
        h = torch.einsum("bi,ieo->ebo", x, self.up)
        return torch.einsum("ebi,ieo->ebo", h, self.down)


@pytest.mark.parametrize("first", [True, False])
def test_every_matrix_of_a_stack_is_a_layer(first: bool) -> None:
    symmetry = pb.symmetry.find(Experts(first), torch.randn(9, 4))
    assert len(symmetry.generators()) == symmetry.rank().independent == 3 * 2**2
    assert not symmetry.rejected


class BiasedExperts(nn.Module):
    """Two layers of three matrices each, with biases (E, out), the first times a number."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 2))
        self.down = nn.Parameter(torch.randn(3, 2, 5))
        self.one = nn.Parameter(torch.randn(3, 2))
        self.two = nn.Parameter(torch.randn(3, 5))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        one = self.one[:, None]
        two = self.two[:, None]
        x = x.expand(3, -1, -1)
        if self.form == "baddbmm":
            h = torch.baddbmm(one, x, self.up, beta=2, alpha=3)
            return torch.baddbmm(two, h, self.down)
        if self.form == "einsum":
            h = torch.einsum("ebi,eio->ebo", x, self.up) + one / 2
            return torch.einsum("ebi,eio->ebo", h, self.down) + two
        h = [y @ w + 2 * b for y, w, b in zip(x, self.up, self.one, strict=True)]
        pairs = zip(h, self.down, self.two, strict=True)
        return torch.stack([torch.addmm(b, y, w) for y, w, b in pairs])


@pytest.mark.parametrize("form", ["baddbmm", "einsum", "loop"])
def test_biases_of_a_stack_are_mixed_and_shifted_with_its_matrices(form: str) -> None:
    model = BiasedExperts(form)
    x = torch.randn(9, 4)
    symmetry = pb.symmetry.find(model, x)
    # invertible 2 × 2 matrices between the maps, and constants from one bias to the next
    assert len(symmetry.generators()) == symmetry.rank().independent == 3 * (2**2 + 2)
    assert not symmetry.rejected
    params = {n: p.detach() for n, p in model.named_parameters()}
    for action in symmetry.actions:
        moved = action.act(params, 0.1 * torch.randn(action.dimension))
        out = torch.func.functional_call(model, {**params, **moved}, (x,))
        assert_close(out, model(x), 1e-11, action.about)


class Leaky(torch.autograd.Function):
    """A leaky ReLU that saves what its own backward pass needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 0, x, 0.1 * x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grads[0], 0.1 * grads[0])


def test_a_function_with_its_own_backward_pass_is_what_it_computes() -> None:
    class Activated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Leaky.apply(x)  # pyright: ignore[reportReturnType]

    model = nn.Sequential(nn.Linear(3, 5), Activated(), nn.Linear(5, 2))
    x = torch.randn(7, 3)
    symmetry = pb.symmetry.find(model, x)
    assert len(symmetry.generators()) == 5
    model(x).sum().backward()  # torch's own way is back
    assert model[0].weight.grad is not None


class Routed(nn.Module):
    """Experts for sorted rows, by torch's grouped product or with gathered weights."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 4))
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 5, 8], dtype=torch.int32)
        index = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
        for w in (self.up, self.down):
            if self.grouped:
                y = F.grouped_mm(x, w, offs=ends)
            else:
                y = torch.bmm(x[:, None], w[index])
            x = torch.relu(y if self.grouped else y[:, 0])
        return x


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped product")
def test_grouped_products_of_a_float32_model_are_those_of_gathered_weights() -> None:
    symmetries = [
        pb.symmetry.find(Routed(variant).float(), torch.randn(8, 4)) for variant in (True, False)
    ]
    assert [f.rank().independent for f in symmetries] == [8, 8]
    assert any("up is used depends on values" in note for note in symmetries[0].notes)


class Heads(nn.Module):
    """Attention with weights (in, heads, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(6, 2, 3) / 3) for _ in range(3))
        self.out = nn.Parameter(torch.randn(2, 3, 6))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bti,ihd->bhtd", x, w) for w in (self.q, self.k, self.v))
        a = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
        return torch.einsum("bhtd,hdo->bto", a @ v, self.out)


def test_heads_are_told_apart_in_weights_of_three_axes() -> None:
    symmetry = pb.symmetry.find(Heads(), torch.randn(4, 5, 6))
    assert len(symmetry.generators()) == symmetry.rank().independent == 2 * 2 * 3**2
    assert not symmetry.rejected


def test_a_weight_that_is_read_in_two_ways_is_not_mixed() -> None:
    class Tied(Multiplied):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w) @ self.w.T

    model = Tied()
    del model.last
    assert pb.symmetry.find(model, torch.randn(7, 3)).rank().independent == 0


@pytest.mark.slow
def test_a_transformer_of_transposed_weights_has_as_many_as_its_twin() -> None:
    model = Block(Conv1D)
    x = torch.randn(3, 4, 6)
    twin = copy_to_linear(model)
    assert_close(model(x), twin(x), 1e-12, "the twin")
    symmetry, known = (pb.symmetry.find(m, x) for m in (model, twin))
    assert symmetry.rank() == known.rank()
    assert len(symmetry.generators()) == len(known.generators()) > 0


def test_an_action_on_transposes_moves_along_a_fibre_and_its_tangent_is_the_derivative() -> None:
    model = Multiplied()
    x = torch.randn(7, 3)
    params = {n: p.detach() for n, p in model.named_parameters()}
    (action,) = (a for a in pb.symmetry.find(model, x).actions if isinstance(a, ChartAction))
    assert {*action.names} == {"w", "last.weight"}
    assert all(name not in action.about for name in action.charts)
    element = 0.1 * torch.randn(action.dimension)
    moved = action.act(params, element)
    assert all(moved[n].shape == params[n].shape for n in moved)
    assert (moved["w"] - params["w"]).norm() > 1e-2
    out = torch.func.functional_call(model, {**params, **moved}, (x,))
    assert_close(out, model(x), 1e-12, "the function")
    h = 1e-6
    ahead, back = (action.act(params, s * h * element) for s in (1, -1))
    tangent = action.tangent(params, element)
    for n in tangent:
        assert_close((ahead[n] - back[n]) / (2 * h), tangent[n], 1e-8, n)


@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_may_be_looked_at(masked: bool) -> None:
    model = copy_to_linear(Block(Conv1D))
    x = torch.randn(3, 4, 6)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[:, -1] = not masked
    symmetry = pb.symmetry.find(model, {"x": x, "mask": mask})
    assert SPECIALIZED in symmetry.notes
    without = pb.symmetry.find(model, x)
    assert SPECIALIZED not in without.notes
    assert symmetry.rank() == without.rank()


class Guarded(Multiplied):
    """What runs depends on a parameter's values."""

    def forward(self, x: Tensor) -> Tensor:
        if self.w.sum() > 0:
            return super().forward(x)
        return self.last(x.sum(1, keepdim=True) * self.w[0])


def test_a_look_at_parameters_is_refused() -> None:
    with pytest.raises(pb.PullbackError, match="values of tensors"):
        pb.symmetry.find(Guarded(), torch.randn(7, 3))


class Adapted(nn.Module):
    """A frozen layer with a product of small rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 4).requires_grad_(False)
        self.a = nn.Linear(6, 2, bias=False)
        self.b = nn.Linear(2, 4, bias=False)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.base(x) + 2 * self.b(self.a(x))
        return {"logits": h, "hidden": self.a(x)}


def test_the_output_that_counts_is_chosen() -> None:
    model = Adapted()
    x = torch.randn(9, 6)
    assert (
        pb.symmetry.find(model, x, output="logits").rank().independent == 4
    )  # 2 × 2 matrices between b and a
    assert pb.symmetry.find(model, x).rank().independent == 0  # the inner features are seen as well
