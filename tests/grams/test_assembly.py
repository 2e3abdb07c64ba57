"""From maps and metrics to a Gram: forms, memory budgets, several parts, and the choice."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.grams import Dense, FactoredGram, RowBlock, assemble, coverage
from pullback.grams.assembly import choose_form
from pullback.likelihoods import Categorical
from pullback.maps import Call, ModuleMap, identity_covectors
from pullback.metrics import Euclidean, Fisher, FubiniStudy, Metric, Sobolev
from pullback.testing import assert_close, check_gram, jacobian
from tests.laws.table import FORMS, MODELS, softmax_matrix
from tests.pairs import all_pairs

CONV = next(m for m in MODELS if m.name == "conv2d")
WORDS = next(m for m in MODELS if m.name == "tied embedding")
MLP = next(m for m in MODELS if m.name == "mlp")


def part(model: nn.Module, x: Tensor, metric: Metric | None = None) -> RowBlock:
    linear = ModuleMap(model, Call.of(x)).linearize(
        {n: p for n, p in model.named_parameters() if p.requires_grad}
    )
    if metric is None:
        chosen = Euclidean()
    else:
        chosen = metric
    return RowBlock(linear, chosen.factor(linear.value, inputs=x))


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("case", "form", "metric"),
    all_pairs([MLP, CONV, WORDS], FORMS, [Euclidean(), Fisher(Categorical()), Sobolev(2.0, 1e-6)]),
)
def test_assembled_grams_obey_the_laws(case, form: str, metric: Metric) -> None:
    built = case.make()
    x = built.args[0]
    if isinstance(metric, Sobolev) and not x.is_floating_point():
        pytest.skip("Sobolev wants points of a vector space")
    with torch.no_grad():
        check_gram(assemble([part(built.model, x, metric)], form, 2**30), tol=1e-11)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", [MLP, CONV, WORDS], ids=lambda c: c.name)
@pytest.mark.parametrize("form", ["kernel", "dense"])
def test_a_small_budget_changes_nothing(case, form: str) -> None:
    """Panels of one sample give what one panel gives."""
    built = case.make()
    z = built.value()
    j = jacobian(z, [p for p in built.model.parameters() if p.requires_grad])
    m = softmax_matrix(z.detach()) * z[..., 0].numel()
    with torch.no_grad():
        for budget in (1, 2**12, 2**30):
            gram = assemble([part(built.model, built.args[0], Fisher(Categorical()))], form, budget)
            assert_close(gram.dense(), j.T @ m @ j, 1e-11, f"G at a budget of {budget} bytes")
            if isinstance(gram, FactoredGram):
                a = gram.rows()
                assert_close(gram.kernel(), a @ a.T, 1e-11, f"K at a budget of {budget} bytes")


@pytest.mark.parametrize("budget", [1, 2**30])
@pytest.mark.parametrize("form", FORMS)
def test_several_parts_stack(form: str, budget: int) -> None:
    """Calls of different sizes: A is their rows one below the other."""
    built = MLP.make()
    x = built.args[0]
    j = jacobian(built.model(x), list(built.model.parameters()))
    with torch.no_grad():
        pieces = [part(built.model, piece) for piece in x.split([1, 3])]
        gram = assemble(pieces, form, budget)
        check_gram(gram, tol=1e-11)
        assert_close(gram.dense(), j.T @ j, 1e-12, "G of the parts together")
        if isinstance(gram, FactoredGram):
            assert_close(gram.kernel(), j @ j.T, 1e-12, "K of the parts together")
        assert gram.count == 8


def test_unknown_forms_and_coupled_parts_are_refused() -> None:
    built = MLP.make()
    x = built.args[0]
    with torch.no_grad():
        with pytest.raises(pb.PullbackError, match="Unknown Gram form"):
            assemble([part(built.model, x)], "sparse", 2**30)
        pieces = [part(built.model, piece, Sobolev()) for piece in x.split(2)]
        with pytest.raises(pb.PullbackError, match="couples"):
            assemble(pieces, "rows", 2**30)


@pytest.mark.parametrize(
    ("n", "p", "budget", "prefers", "want"),
    [
        (10, 100, 2**30, "small", "kernel"),
        (10, 100, 2**30, "rows", "rows"),
        (100, 10, 2**30, "small", "rows"),
        (100, 10, 2**30, "rows", "rows"),
        (1000, 10, 9000, "small", "dense"),  # the rows do not fit, 10 × 10 does
        (10, 1000, 9000, "rows", "kernel"),
        (10, 100, 2**30, "products", "matrix_free"),
    ],
)
def test_the_choice_of_form(n: int, p: int, budget: int, prefers: str, want: str) -> None:
    assert choose_form(n, p, 8, budget, prefers) == want


def test_a_small_side_beyond_the_budget_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        pb.PullbackError, match=r"does not fit the memory budget.*ConjugateGradient"
    ):
        choose_form(100, 100, 8, 9000, "small")
    assert choose_form(100, 100, 8, 9000, "products") == "matrix_free"


def test_auto_is_reported() -> None:
    built = MLP.make()
    forms = {}
    for name, solver in {
        "Cholesky": pb.solvers.Cholesky(),
        "PseudoInverse": pb.solvers.PseudoInverse(),
        "ConjugateGradient": pb.solvers.ConjugateGradient(),
    }.items():
        forms[name] = built.step(Euclidean(), lambda z: (z**2).mean(), solver=solver).gram
    assert forms == {
        "Cholesky": "kernel",
        "PseudoInverse": "rows",
        "ConjugateGradient": "matrix_free",
    }


def test_coverage_comes_with_the_forms_that_pull_blocks_back() -> None:
    built = MLP.make()
    with torch.no_grad():
        one = part(built.model, built.args[0])
        assert coverage([one]) == ()
        one.rows()
        assert {c.name for c in coverage([one])} == dict(built.model.named_parameters()).keys()


def test_auto_asks_the_model_for_its_closed_form_first() -> None:
    """A recognizable (and wrong) closed form shows that it was used."""

    class Known(nn.Linear):
        def pullback_gram(self, linear, factor):
            return Dense(7.0 * torch.eye(linear.space.size, dtype=linear.space.dtype))

    model = Known(3, 1, bias=False).double()
    x = torch.randn(5, 3).double()
    y = torch.randn(5, 1).double()
    for form, curvature in (("auto", 7.0), ("rows", None)):
        opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.0), gram=form, lr=1.0)
        before = model.weight.detach().clone()

        def closure(opt=opt):
            opt.zero_grad()
            loss = 0.5 * (model(x) - y).square().sum(-1).mean()
            loss.backward()
            return loss

        opt.step(closure)
        moved = before - model.weight.detach()
        is_closed_form = torch.allclose(moved, model.weight.grad / 7.0)
        assert is_closed_form == (curvature is not None)


@pytest.mark.parametrize("form", ["rows", "panels", "kernel"])
def test_rows_are_compressed_without_being_held(form: str) -> None:
    """A Ω against the matrix A, which in panels is never whole."""
    built = MLP.make()
    one = part(built.model, built.args[0])
    a = part(built.model, built.args[0]).rows()
    with torch.no_grad():
        gram = assemble([one, one], form, 2**30)
        assert isinstance(gram, FactoredGram)
        omega = torch.linspace(-1, 1, 3 * a.shape[1], dtype=a.dtype).view(-1, 3).sin()
        assert_close(gram.compress(lambda x: x @ omega), torch.cat([a, a]) @ omega, 1e-12, "A Ω")
        if form == "panels":
            check_gram(gram, tol=1e-11)


def test_panels_where_rows_do_not_fit() -> None:
    assert choose_form(10, 10, 8, 800, "panels") == "rows"
    assert choose_form(10, 10, 8, 799, "panels") == "panels"


def test_centered_rows_in_float32_give_the_kernel_of_a_metric_that_subtracts_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: panels of float32 rows less their means, added up in float64."""
    torch.manual_seed(0)
    model = pb.vmc.FactoredTransformer(pb.vmc.Square(4), 4, 2, 1)
    samples = torch.where(torch.rand(24, 16) < 0.5, -1.0, 1.0)
    monkeypatch.setattr("pullback.maps.base.is_centered_gram_fast", lambda *_: True)
    for budget in (1, 2**30):
        block = part(model, samples, FubiniStudy())
        kernel = block.kernel(budget)
        rows = part(copy.deepcopy(model).double(), samples.double(), FubiniStudy()).rows()
        assert kernel.dtype == torch.float64
        assert_close(kernel, rows @ rows.T, 1e-5, f"K at a budget of {budget} bytes")


@pytest.mark.parametrize("metric", [Euclidean(), FubiniStudy()], ids=["euclidean", "centered"])
def test_layers_pulled_back_in_turn_give_the_same_products(metric: Metric) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    model = model.double()
    x = torch.randn(6, 3, dtype=torch.float64)
    rows = part(model, x, metric).rows()
    block = part(model, x, metric)
    assert_close(block.kernel(1), rows @ rows.T, 1e-11, "K")
    assert "pulled_covectors" not in vars(block)
    assert len(block.coverage) == 6
    assert_close(block.project(rows[0]), rows @ rows[0], 1e-11, "A v")
    assert_close(block.lift(rows[:, 0]), rows.T @ rows[:, 0], 1e-11, "Aᵀ c")


def test_layers_pulled_back_in_turn_are_freed_at_once() -> None:
    """Without the garbage collector: a cycle would hold the cotangents of all layers."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    linear = part(model, torch.randn(4, 7, 3, dtype=torch.float64)).linearization
    parts = linear.divide_pullback(identity_covectors(linear.value), 1)
    out = linear.value.new_zeros(56, 56)
    gc.disable()
    try:
        for pull_back in parts:
            pulled = pull_back()
            blocks = [weakref.ref(block) for block in pulled.blocks.values()]
            pulled.add_kernel(out, 2**20)
            del pulled
            assert len(parts) == 2
            assert not any(block() for block in blocks)
    finally:
        gc.enable()
