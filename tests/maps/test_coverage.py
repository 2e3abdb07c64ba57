"""Coverage never lies: each parameter has a route and a reason, and the kernel forms no J."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import pullback as pb
from pullback.grams import GramForm
from pullback.maps.layers.affine import AffineBlock
from pullback.maps.layers.embedding import GatherBlock
from pullback.maps.layers.registry import Block, RowsBlock
from pullback.metrics import Euclidean
from pullback.testing import assert_close, jacobian
from tests.laws.cases import Built, ModelCase, Probe
from tests.laws.models import Words
from tests.laws.table import MODELS

BY_NAME = {m.name: m for m in MODELS}


def collect_coverage(built: Built, form: str = "kernel") -> dict[str, tuple[str, str]]:
    info = built.step(
        Euclidean(),
        lambda z: z.square().mean(),
        solver=pb.solvers.Cholesky(),
        step=Probe(None),
        gram=form,
    )
    names = [c.name for c in info.coverage]
    assert len(names) == len(set(names)), f"covered twice: {names}"
    return {c.name: (c.route, c.reason) for c in info.coverage}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", MODELS, ids=lambda c: c.name)
def test_every_parameter_is_covered_once(case: ModelCase) -> None:
    built = case.make()
    coverage = collect_coverage(built)
    assert coverage.keys() == {n for n, p in built.model.named_parameters() if p.requires_grad}
    assert all(reason for _, reason in coverage.values())


KNOWN = {"hadamard", "materialized", "rows"}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "inplace relu", "conv2d", "conv1d", "conv3d", "attention", "embedding", "frozen"),
        *("one module twice", "batch norm eval", "norms and slopes", "sequence first", "dropout"),
        *("several inputs", "slope of (N,)", "output (N, T, m)"),
    ],
)
def test_known_layers_do_not_fall_back(name: str) -> None:
    for route, reason in collect_coverage(BY_NAME[name].make()).values():
        assert route in KNOWN
        assert reason == "known layer"


def test_fallbacks_are_named_with_their_reason() -> None:
    attention = collect_coverage(BY_NAME["MultiheadAttention"].make())
    assert attention["attention.in_proj_weight"] == (
        "rows by vmap",
        "no layer with known structure uses it",
    )
    assert attention["attention.out_proj.weight"][0] == "rows by vmap"
    assert attention["head.weight"][1] == "known layer"

    tied = collect_coverage(BY_NAME["tied embedding"].make())
    assert tied["embedding.weight"] == ("rows", "known layer")
    assert tied["position"] == ("hadamard", "known layer")
    assert tied["mix.weight"][0] in ("hadamard", "materialized")

    by_hand = collect_coverage(BY_NAME["weight used by hand"].make())
    assert by_hand["one.weight"] == ("rows", "known layer")

    outside = collect_coverage(BY_NAME["weight used outside"].make())
    assert outside["one.weight"][1] == "it is also used outside its layer"
    assert outside["one.weight"][0].startswith("rows by")
    assert outside["one.bias"][1] == "known layer"

    coupled = collect_coverage(BY_NAME["coupled samples"].make())
    assert coupled["one.weight"] == (
        "rows by reverse passes",
        "one: no axis of its output counts the samples",
    )
    assert coupled["two.weight"][1] == "known layer"


class Gain(nn.Module):
    """Dropout before a parameter that no layer explains: (N, T, d), or sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(self.gain.exp() * self.drop(x)))


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_rows_come_from_the_mask_that_the_loss_saw(batch_dim: int) -> None:
    """vmap draws its own masks: its rows are used only if they prove right."""
    torch.manual_seed(0)
    built = Built(Gain().double().train(), (torch.randn(4, 3, 3).double(),), {}, batch_dim)
    z = built.value()
    j = jacobian(z, list(built.model.parameters()))
    n = z.shape[0]
    g = j.T @ z.detach().flatten() / n
    want = torch.linalg.solve(j.T @ j / n + 0.1 * torch.eye(len(g)).double(), g)
    for form in ("rows", "kernel", "dense", "matrix_free"):
        probe = Probe(0.1)
        info = built.step(
            Euclidean(),
            lambda z: 0.5 * z.square().sum() / len(z),
            solver=pb.solvers.Cholesky(),
            step=probe,
            gram=form,
        )
        assert_close(probe.directions[0].x, want, 1e-9, f"the step in {form}")
        routes = {c.name: c.route for c in info.coverage}
        if form != "matrix_free":
            assert routes["gain"] == ("rows by reverse passes" if batch_dim else "rows by vmap")


def test_a_subclass_with_its_own_forward_is_not_trusted() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, 2 * self.weight, self.bias)

    class Plain(nn.Linear):
        """Keeps forward: it is a Linear."""

    torch.manual_seed(0)
    model = nn.Sequential(Doubled(3, 4), nn.Tanh(), Plain(4, 2)).double()
    coverage = collect_coverage(Built(model, (torch.randn(4, 3).double(),), {}))
    assert coverage["0.weight"][1] == "no layer with known structure uses it"
    assert coverage["0.bias"][1] == "known layer"
    assert coverage["2.weight"][1] == "known layer"


def test_a_hook_that_changes_the_output_is_noticed() -> None:
    """A forward hook's factor is not the layer's: the proof fails, and rows serve."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    built = Built(model, (torch.randn(4, 3).double(),), {})
    assert collect_coverage(built).keys() == dict(model.named_parameters()).keys()


# --- the kernel never materializes J where layers have structure ------------------------------

BIG = {
    "wide mlp": (
        lambda: nn.Sequential(nn.Linear(60, 80), nn.ReLU(), nn.Linear(80, 70), nn.Linear(70, 3)),
        lambda: torch.randn(4, 60),
    ),
    "conv net": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3),
            nn.Flatten(),
            nn.Linear(96, 3),
        ),
        lambda: torch.randn(4, 3, 9, 9),
    ),
    "embedding": (lambda: Words(500, 40, 3), lambda: torch.randint(0, 500, (4, 5))),
    "attention-like": (
        lambda: nn.Sequential(
            nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 40), Pool(), nn.Linear(40, 3)
        ),
        lambda: torch.randn(4, 3, 40),
    ),
}


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x).mean(1)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.untyped_storage().nbytes() // item.element_size())
        return out


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize(
    "solver", [pb.solvers.Cholesky(1e-2), pb.solvers.PseudoInverse()], ids=repr
)
def test_the_kernel_forms_no_rows_of_structured_layers(
    name: str, solver: pb.solvers.Solver, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    make, inputs = BIG[name]
    model = make().double()
    x = inputs()
    built = Built(model, (x.double() if x.is_floating_point() else x,), {})

    def refuse(self: Block) -> dict[str, Tensor]:
        raise AssertionError(f"rows of {self.names} were materialized")

    monkeypatch.setattr(AffineBlock, "rows", refuse)
    monkeypatch.setattr(GatherBlock, "rows", refuse)
    original = RowsBlock.__init__

    def small_only(self: RowsBlock, rows) -> None:
        assert sum(r.shape[-1] for r in rows.values()) < 200, f"{list(rows)} held as rows"
        original(self, rows)

    monkeypatch.setattr(RowsBlock, "__init__", small_only)
    with Largest() as largest:
        info = built.step(
            Euclidean(),
            lambda z: z.square().mean(),
            solver=solver,
            gram=GramForm("kernel", memory=2**16),
        )
    assert info.accepted, info.reason
    assert info.gram == "kernel"
    n = info.rows
    p = info.parameters
    assert largest.numel < n * p / 2, f"a tensor of {largest.numel} entries; J has {n * p}"


def test_the_meter_above_sees_rows() -> None:
    """The same measure, in a form that does hold J."""
    torch.manual_seed(0)
    make, inputs = BIG["wide mlp"]
    built = Built(make().double(), (inputs().double(),), {})
    with Largest() as largest:
        info = built.step(Euclidean(), lambda z: z.square().mean(), gram="rows")
    assert largest.numel >= info.rows * info.parameters


def test_auto_picks_the_kernel_for_a_big_model_without_being_told() -> None:
    torch.manual_seed(0)
    make, inputs = BIG["wide mlp"]
    built = Built(make().double(), (inputs().double(),), {})
    info = built.step(Euclidean(), lambda z: z.square().mean())
    assert info.gram == "kernel"
