"""What functions do with a parameter gives the blocks that torch's own layers have.

Every case is a function of parameters beside a twin of torch's layers that computes the same; K-FAC
by definition, from the twin's hooks, is the oracle.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.testing import assert_close
from tests.kfac_options import kfac_of
from tests.optim.kfac import oracle as o
from tests.optim.kfac.common import Then
from tests.pairs import each_once

N = 3
T = 2
D = 4
H = 3
E = 3


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


class By(nn.Module):
    """A function of parameters, w and perhaps b."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.w = nn.Parameter(0.5 * torch.randn(shapes[0]))
        if len(shapes) > 1:
            self.b = nn.Parameter(torch.randn(shapes[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.parameters())


class Experts(nn.Module):
    """A linear map for each of E groups of places: those with index g are multiplied by map g."""

    def __init__(self, width: int = H) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(D, width, bias=False) for _ in range(E))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], self.width)
        for g, linear in enumerate(self.maps):
            at = (g == MANY).nonzero(as_tuple=True)
            out = out.index_put(at, linear(x[at]))
        return out


class Positions(nn.Module):
    """Rows of a table, added to what stands at its places."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(T, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(torch.arange(T).expand(x.shape[:-1]))


class Weighed(nn.Module):
    """A linear map of inputs that were multiplied by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * SCALES)


@dataclass
class Case:
    """A function with its twin; `held` gives the function's parameters from the twin's."""

    by: Callable[[], By]
    twin: Callable[[], nn.Module]
    parameters_like: Callable[..., list[Tensor]] = lambda w, *b: [w, *b]
    x: Callable[[], Tensor] = lambda: torch.randn(N, T, D)


SCALES = torch.tensor([0.5, 2.0, -1.0, 1.5], dtype=torch.float64)
#: which expert each place is given to
MANY = torch.tensor([[0, 1], [1, 1], [2, 0]])


def loop_over_experts(x: Tensor, w: Tensor) -> Tensor:
    out = x.new_zeros(*x.shape[:-1], H)
    for g in range(E):
        at = (g == MANY).nonzero(as_tuple=True)
        out = out.index_put(at, F.linear(x[at], w[g]))
    return out


def gather_experts(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(w[MANY.flatten()], x.reshape(-1, D, 1)).view(N, T, H)


def sorted_groups(x: Tensor, w: Tensor) -> Tensor:
    order = MANY.flatten().argsort(stable=True)
    ends = MANY.flatten().bincount(minlength=E).cumsum(0).int()
    rows = F.grouped_mm(x.reshape(-1, D)[order].float(), w.float(), offs=ends)
    return rows.double()[order.argsort()].view(N, T, D)


def transpose(w: Tensor, *b: Tensor) -> list[Tensor]:
    return [w.mT, *b]


def stack(*w: Tensor) -> list[Tensor]:
    return [torch.stack(w)]


def turned_stack(*w: Tensor) -> list[Tensor]:
    return [torch.stack(w).mT]


CASES = {
    "F.linear": Case(lambda: By(F.linear, (H, D), (H,)), lambda: nn.Linear(D, H)),
    "x @ w": Case(
        lambda: By(lambda x, w: x @ w, (D, H)), lambda: nn.Linear(D, H, bias=False), transpose
    ),
    "x @ w.T": Case(lambda: By(lambda x, w: x @ w.T, (H, D)), lambda: nn.Linear(D, H, bias=False)),
    "inner": Case(lambda: By(torch.inner, (H, D)), lambda: nn.Linear(D, H, bias=False)),
    "tensordot": Case(
        lambda: By(lambda x, w: torch.tensordot(x, w, 1), (D, H)),
        lambda: nn.Linear(D, H, bias=False),
        transpose,
    ),
    "tensordot by axes": Case(
        lambda: By(lambda x, w: torch.tensordot(w, x, ([1], [2])).permute(1, 2, 0), (H, D)),
        lambda: nn.Linear(D, H, bias=False),
    ),
    "einsum of three": Case(
        lambda: By(lambda x, w: torch.einsum("nti,i,oi->nto", x, SCALES, w), (H, D)),
        Weighed,
    ),
    "addmm": Case(
        lambda: By(
            lambda x, w, b: torch.addmm(b, x.reshape(-1, D), w).view(N, T, H), (D, H), (H,)
        ),
        lambda: nn.Linear(D, H),
        transpose,
    ),
    "w @ x": Case(
        lambda: By(lambda x, w: w @ x, (H, D)),
        lambda: nn.Conv1d(D, H, 1, bias=False),
        lambda w: [w[..., 0]],
        lambda: torch.randn(N, D, T),
    ),
    "x @ w + b": Case(
        lambda: By(lambda x, w, b: x @ w + b, (D, H), (H,)), lambda: nn.Linear(D, H), transpose
    ),
    "einsum to heads": Case(
        lambda: By(lambda x, w: torch.einsum("ble,ehd->blhd", x, w).flatten(2), (D, 3, 2)),
        lambda: nn.Linear(D, 6, bias=False),
        lambda w: [w.T.reshape(D, 3, 2)],
    ),
    "einsum from heads": Case(
        lambda: By(
            lambda x, w: torch.einsum("...hd,hde->...e", x.unflatten(-1, (2, 2)), w), (2, 2, H)
        ),
        lambda: nn.Linear(D, H, bias=False),
        lambda w: [w.T.reshape(2, 2, H)],
    ),
    "conv2d": Case(
        lambda: By(
            lambda x, w, b: F.conv2d(x, w, b, 1, (1, 0), groups=2), (6, 2, 2, 2), (6,)
        ),
        lambda: nn.Conv2d(4, 6, 2, padding=(1, 0), groups=2),
        x=lambda: torch.randn(N, 4, 3, 3),
    ),
    "conv_transpose1d": Case(
        lambda: By(lambda x, w: F.conv_transpose1d(x, w, stride=2), (D, H, 2)),
        lambda: nn.ConvTranspose1d(D, H, 2, stride=2, bias=False),
        x=lambda: torch.randn(N, D, T),
    ),
    "embedding": Case(
        lambda: By(lambda x, w: F.embedding(x, w, padding_idx=1), (5, H)),
        lambda: nn.Embedding(5, H, padding_idx=1),
        x=lambda: torch.randint(0, 5, (N, T)),
    ),
    "torch.embedding": Case(  # where a padding of -1 stands for none
        lambda: By(lambda x, w: torch.embedding(w, x, -1, False, False), (5, H)),
        lambda: nn.Embedding(5, H),
        x=lambda: torch.randint(0, 5, (N, T)),
    ),
    "w[index]": Case(
        lambda: By(lambda x, w: w[x], (5, H)),
        lambda: nn.Embedding(5, H),
        x=lambda: torch.randint(0, 5, (N, T)),
    ),
    "positions": Case(
        lambda: By(lambda x, w: x + w, (1, T, D)), Positions, lambda w: [w[None]]
    ),
    "chunks": Case(
        lambda: By(
            lambda x, w: torch.cat([F.linear(x, p).tanh() for p in w.chunk(2)], -1), (2 * H, D)
        ),
        lambda: Beside(2),
        lambda *w: [torch.cat(w)],
    ),
    "bmm": Case(
        lambda: By(lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), (T, D, H)),
        lambda: Axis(),
        turned_stack,
    ),
    "matmul with a stack": Case(
        lambda: By(lambda x, w: (x[:, :, None] @ w)[:, :, 0], (T, D, H)),
        lambda: Axis(),
        turned_stack,
    ),
    "baddbmm": Case(
        lambda: By(
            lambda x, w, b: torch.baddbmm(b, x.transpose(0, 1), w).transpose(0, 1),
            (T, D, H),
            (T, 1, H),
        ),
        lambda: Axis(bias=True),
        lambda *p: [torch.stack(p[::2]).mT, torch.stack(p[1::2])[:, None]],
    ),
    "every expert": Case(
        lambda: By(lambda x, w: torch.einsum("nti,eio->nteo", x, w).flatten(2).tanh(), (2, D, H)),
        lambda: Beside(2),
        turned_stack,
    ),
    "einsum over a stack": Case(
        lambda: By(lambda x, w: torch.einsum("bik,iok->bo", x, w), (T, H, D)),
        lambda: Added(),
        stack,
    ),
    "einsum with a shorter ellipsis": Case(
        lambda: By(lambda x, w: torch.einsum("...i,...oi->...o", x, w), (T, H, D)),
        lambda: Axis(),
        stack,
    ),
    "experts in a loop": Case(
        lambda: By(loop_over_experts, (E, H, D)), lambda: Experts(), stack
    ),
    "gathered experts": Case(lambda: By(gather_experts, (E, H, D)), lambda: Experts(), stack),
    "grouped_mm": Case(lambda: By(sorted_groups, (E, D, D)), lambda: Experts(D), turned_stack),
}  # fmt: skip


class Beside(nn.Module):
    """Several maps of the same inputs, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(D, H, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([m(x).tanh() for m in self.maps], -1)


class Axis(nn.Module):
    """A map for each place."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(D, H, bias=bias) for _ in range(T))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([m(x[:, t]) for t, m in enumerate(self.maps)], 1)


class Added(Axis):
    """The sum of the maps of all places."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum(1)


def head(z: Tensor) -> Tensor:
    """What follows: no parameter, and nothing linear."""
    return torch.tanh(z).flatten(1)[:, :3] * torch.tensor([1.0, 2.0, 3.0]) + z.flatten(1)[:, -3:]


def pair(name: str) -> tuple[nn.Sequential, nn.Sequential, Tensor, list[Tensor]]:
    """Function, twin with the same numbers, inputs, and the twin's places of the parameters."""
    case = CASES[name]
    by = case.by()
    twin = case.twin()
    values = case.parameters_like(*twin.parameters())
    with torch.no_grad():
        for p, value in zip(by.parameters(), values, strict=True):
            p.copy_(value)
    model, other = (nn.Sequential(m, Then(head)) for m in (by, twin))
    where = list(o.index(other).values())
    shaped = [i.view(p.shape) for i, p in zip(where, twin.parameters(), strict=True)]
    return model, other, case.x(), case.parameters_like(*shaped)


@pytest.mark.parametrize(("name", "loss_name"), each_once(CASES, ["euclidean", "categorical"]))
def test_blocks_are_those_of_torchs_layers(name: str, loss_name: str) -> None:
    model, twin, x, indices = pair(name)
    limit = 1e-5 if name == "grouped_mm" else 1e-11
    assert_close(model(x), twin(x), limit, "the same function")
    # a bias that is added by hand has a block of its own
    joint = name != "x @ w + b"
    opt = o.stepped(model, x, kind=loss_name, joint=joint)
    assert all(r.block.startswith("kronecker") for r in opt.coverage())
    where = torch.cat([i.flatten() for i in indices])
    want = o.definition(twin, x, kind=loss_name, joint=joint)[where[:, None], where]
    assert_close(o.gram(opt, model), want, limit, name)


TOKENS = torch.tensor([[0, 4], [2, 2], [1, 3]])
#: functions of (x, w) whose arguments are named, and the same without names
NAMED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...]]] = {
    "index_select": (
        lambda x, w: w.index_select(dim=0, index=TOKENS.flatten()).view(N, T, H),
        lambda x, w: w[TOKENS.flatten()].view(N, T, H),
        (5, H),
    ),
    "embedding": (
        lambda x, w: torch.embedding(weight=w, indices=TOKENS),
        lambda x, w: F.embedding(TOKENS, w),
        (5, H),
    ),
    "mul": (lambda x, w: torch.mul(input=x, other=w), lambda x, w: x * w, (D,)),
    "add": (lambda x, w: torch.add(input=x, other=w), lambda x, w: x + w, (D,)),
    "clone": (lambda x, w: x @ torch.clone(input=w), lambda x, w: x @ w.clone(), (D, H)),
}


@pytest.mark.parametrize("name", NAMED)
def test_arguments_may_be_named(name: str) -> None:
    named, plain, shape = NAMED[name]
    x = torch.randn(N, T, D)
    optimizers = []
    for function in (named, plain):
        torch.manual_seed(1)
        model = nn.Sequential(By(function, shape), Then(head))
        optimizers.append((o.stepped(model, x, kind="euclidean"), model))
    (first, model), (second, other) = optimizers
    assert [r.block for r in first.coverage()] == [r.block for r in second.coverage()]
    assert_close(o.gram(first, model), o.gram(second, other), 1e-12, name)


@pytest.mark.parametrize("name", ["x @ w", "addmm", "einsum to heads", "conv2d", "bmm"])
def test_reduced_places_and_corrected_eigenvalues_too(name: str) -> None:
    model, twin, x, indices = pair(name)
    where = torch.cat([i.flatten() for i in indices])
    actual, want = (o.stepped(m, x, kind="categorical", sharing="reduce") for m in (model, twin))
    if name != "bmm":  # its samples stand on an axis that the definition does not look at
        want = o.gram(want, twin)[where[:, None], where]
        assert_close(o.gram(actual, model), want, 1e-11, "reduced")
        grams = []
        for m in (model, twin):
            opt = o.optimizer(m, "categorical", ekfac=True, statistics_every=1, damping=0.1)
            for _ in range(2):
                o.step(opt, m, x, "categorical")
            grams.append(o.gram(opt, m))
        assert_close(grams[0], grams[1][where[:, None], where], 1e-10, "corrected")


@pytest.mark.parametrize(
    ("name", "rule"),
    each_once(
        ["x @ w", "addmm", "einsum to heads", "chunks", "every expert"],
        ["eigenbasis", "spectral", "natural"],
    ),
)
def test_steps_are_those_of_the_twin(name: str, rule: str) -> None:
    """Every rule sees a transposed weight as it sees the twin's."""
    model, twin, x, indices = pair(name)
    ends = []
    for m in (model, twin):
        m.append(nn.Linear(3, 3))
    twin[-1].load_state_dict(model[-1].state_dict())
    for m in (model, twin):
        if rule == "natural":
            options = {"likelihood": pb.likelihoods.Categorical()}
        else:
            options = {}
        opt = kfac_of(m, 0.05, rule=rule, statistics_every=2, invert_every=4, **options)
        for _ in range(6):
            o.step(opt, m, x, "categorical")
        ends.append(torch.cat([p.detach().flatten() for p in m[0].parameters()]))
    where = torch.cat([i.flatten() for i in indices])
    assert_close(ends[0], ends[1][where], 1e-8, f"{rule} steps")


class Root(nn.Module):
    """A root mean square norm by hand, with a gain or 1 + a gain, and a layer scale."""

    def __init__(self, more: float) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.last = nn.Linear(D, H)
        self.more = more
        self.gain = nn.Parameter(torch.rand(D))
        self.channel = nn.Parameter(torch.rand(T, 1))
        self.one = nn.Parameter(torch.rand(()))
        self.shift = nn.Parameter(torch.rand(T, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        if self.more:
            h = (self.more + self.gain) * h
        else:
            h = self.gain * h
        return self.last(self.one * torch.tanh(h * self.channel + self.shift)).sum(1)


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_gains_by_hand_are_units(more: float) -> None:
    model = Root(more)
    x = torch.randn(N, T, D)
    opt = o.stepped(model, x, kind="categorical")
    names = ["gain", "channel", "one", "shift"]
    assert {r.name for r in opt.coverage() if r.block == "units"} == {*names}
    want = o.part(o.exact(model, x, kind="categorical"), model, names).diagonal().diag()
    assert_close(o.part(o.gram(opt, model), model, names), want, 1e-12, "exact for every unit")


NEW = "parametrizations.weight.original0"


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("old", [False, True])
def test_weight_norms_directions_have_the_weights_block(dim: int, old: bool) -> None:
    """Its sides are those of W = g v/‖v‖, the one of the slices scaled by g/‖v‖."""
    normed = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conv = normed(nn.Conv1d(D, H, 2), dim=dim)
    model, twin = (nn.Sequential(m, Then(head)) for m in (conv, nn.Conv1d(D, H, 2)))
    parameters = dict(conv.named_parameters())
    v = next(p for p in parameters.values() if p.numel() == H * D * 2)
    g = parameters["weight_g" if old else NEW]
    with torch.no_grad():
        g.mul_(torch.rand_like(g) + 0.5)
    x = torch.randn(N, D, 4)
    twin[0].weight.data = torch._weight_norm(v, g, dim).detach()
    twin[0].bias.data = conv.bias.data
    opt = o.stepped(model, x, kind="categorical")
    name = next(n for n, p in model.named_parameters() if p is v)
    rows = {r.name: r.block for r in opt.coverage()}
    assert rows[name].startswith("kronecker")
    assert rows["0.bias"].startswith("kronecker")
    c = (g / v.norm(dim=[i for i in range(3) if i != dim], keepdim=True)).expand_as(v).flatten()
    want = o.part(o.definition(twin, x, kind="categorical", joint=False), twin, ["0.weight"])
    actual = o.part(o.gram(opt, model), model, [name])
    assert_close(actual, c[:, None] * want * c, 1e-11, "the direction's block")


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral"])
def test_weight_norms_directions_follow_other_rules(rule: str) -> None:
    """Where g = ‖v‖, v moves as a plain weight with the gradient of v does."""
    plain = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 3))
    normed = copy.deepcopy(plain)
    nn.utils.parametrizations.weight_norm(normed[0])
    v = normed.get_parameter(f"0.{NEW[:-1]}1")
    w = plain[0].weight
    x = torch.randn(N, D)
    y = torch.randint(3, (N,))
    moves = []
    start = w.detach().clone()
    for model, p in ((normed, v), (plain, w)):
        opt = kfac_of(model, likelihood=nn.CrossEntropyLoss(), rule=rule)
        F.cross_entropy(model(x), y).backward()
        p.grad = v.grad
        opt.step()
        moves.append([r.block for r in opt.coverage() if r.name in (f"0.{NEW[:-1]}1", "0.weight")])
    assert moves[0] == moves[1]
    assert moves[0][0].startswith("kronecker")
    assert_close(v - start, w - start, 1e-9, "the move")
    assert (v - start).abs().max() > 1e-4


class Tied(nn.Module):
    """A table that words are looked up in, and whose transpose gives the logits, by functions."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, D))
        self.mid = nn.Linear(D, D)
        self.words = nn.Embedding(5, D)
        self.head = nn.Linear(D, 5, bias=False)
        self.by_hand = by_hand
        self.words.weight = self.head.weight = self.table

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            return torch.tanh(self.mid(F.embedding(x, self.table))) @ self.table.T
        return self.head(torch.tanh(self.mid(self.words(x))))


def test_a_tied_table_is_that_of_modules() -> None:
    x = torch.randint(0, 5, (N, T))
    one = Tied(True)
    two = Tied(False)
    two.load_state_dict(one.state_dict())
    actual, want = (o.stepped(m, x, kind="categorical") for m in (one, two))
    assert_close(o.gram(actual, one), o.gram(want, two), 1e-12, "by functions and by modules")
    assert_close(o.gram(actual, one), o.definition(two, x, kind="categorical"), 1e-12, "definition")


def test_checkpoints_compiled_code_and_autocast_show_functions() -> None:
    model, _, x, _ = pair("addmm")
    want = o.gram(o.stepped(model, x, kind="categorical"), model)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    outer = Checkpointed()
    actual = o.gram(o.stepped(outer, x, kind="categorical"), outer)
    assert_close(actual, want, 1e-12, "checkpoint")
    compiled: Any = torch.compile(model, backend="eager")
    actual = o.gram(o.stepped(compiled, x, kind="categorical"), model)
    assert_close(actual, want, 1e-12, "compiled")
    torch.set_default_dtype(torch.float32)
    opt = kfac_of(model.float(), 0.0, likelihood=pb.likelihoods.Categorical(), fisher="exact")
    with torch.autocast("cpu", torch.bfloat16):
        z = model(x.float())
    o.loss(z.float(), "categorical").backward()
    opt.step()
    assert_close(o.gram(opt, model), want, 0.05, "autocast")


def test_a_state_with_transposed_weights_resumes_to_the_same_bits() -> None:
    model, _, x, _ = pair("addmm")
    other = pair("addmm")[0]
    other.load_state_dict(model.state_dict())
    one, two = (
        kfac_of(m, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=2)
        for m in (model, other)
    )
    for _ in range(3):
        o.step(one, model, x, "categorical")
    other.load_state_dict(model.state_dict())
    two.load_state_dict(one.state_dict())
    for _ in range(3):
        o.step(one, model, x, "categorical")
        o.step(two, other, x, "categorical")
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (lambda x, w: x @ w.exp(), "no layer with known structure"),
        (lambda x, w: x @ w + x @ (2 * w), "outside its layer"),
        (lambda x, w: x[..., :2] @ w[:2] + x @ w, "several shapes"),
        (lambda x, w: x[..., :2] @ w[:, :2].T[:, :H], "no layer with known structure"),
    ],
)
def test_what_is_not_proven_is_a_diagonal_with_a_warning(
    use: Callable[..., Tensor], why: str
) -> None:
    model = nn.Sequential(By(use, (D, H)), Then(head))
    with pytest.warns(RuntimeWarning, match="100 % of the trained parameters"):
        opt = o.stepped(model, torch.randn(N, T, D), kind="categorical")
    (row,) = opt.coverage()
    assert (row.block, why in row.reason) == ("diagonal", True)


def test_models_of_known_modules_are_not_listened_to_again() -> None:
    """Functions are heard in the first pass alone, where modules show every use.

    There outputs are followed as well, for the roles of weights.
    """
    heard: list[str] = []

    def hear(x: Tensor) -> Tensor:
        heard.append(str(len(torch.overrides._get_current_function_mode_stack())))
        return x

    for layer, want in ((nn.Linear(D, H), "20"), (By(F.linear, (H, D)), "21")):
        heard.clear()
        model = nn.Sequential(Then(hear), layer)
        opt = o.optimizer(model, "categorical", statistics_every=1)
        for _ in range(2):
            o.step(opt, model, torch.randn(N, D), "categorical")
        assert "".join(heard) == want


@pytest.mark.parametrize("equation", ["nti,gi->ntgi", "nti,gi->ntig"])
def test_axes_of_a_matrix_that_stay_are_blocks_of_one_entry(equation: str) -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(H, D))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(equation, x, self.w).flatten(2)

    model = Spread()
    opt = kfac_of(model, 1e-2, rule="natural", likelihood=pb.likelihoods.Gaussian())
    (0.5 * model(torch.randn(5, T, D)).square().sum(-1).mean()).backward()
    opt.step()
    assert f"kronecker {H * D} × (1 ⊗ 1)" in str(opt.coverage())
