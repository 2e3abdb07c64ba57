"""OrthogonalGreedy: against orthogonal matching pursuit that factorizes anew in every round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback.grams import Dense, FactoredGram, Gram, Operator, Rows
from pullback.solvers import GreedySolution, OrthogonalGreedy, Relative
from pullback.testing import assert_close
from tests.pairs import all_pairs
from tests.solvers.helpers import FORMS, hold, random, vector, with_spectrum

RULES = ("correlation", "decrease")
SHAPES = [(15, 40), (60, 25)]


def pursuit(
    g: Tensor, rhs: Tensor, k: int, rule: str = "correlation", block: int = 1
) -> tuple[list[int], Tensor, list[float]]:
    """The oracle: all of G, and a fresh dense solve whenever a vector is added."""
    chosen: list[int] = []
    h = torch.zeros_like(rhs)
    energies = []
    while len(chosen) < k:
        rho = rhs - g @ h
        length = g.diagonal().clone()
        if rule == "decrease" and chosen:
            inner = torch.linalg.solve(g[chosen][:, chosen], g[chosen])
            length -= (g[chosen] * inner).sum(0)
        score = rho**2 / length
        score[chosen] = -1
        best = score.argsort(descending=True)[: min(block, k - len(chosen))]
        for i in best.tolist():
            chosen.append(i)
            h = torch.zeros_like(rhs)
            h[chosen] = torch.linalg.solve(g[chosen][:, chosen], rhs[chosen])
            energies.append(float(rhs @ h))
    return chosen, h, energies


def greedy(
    solver: OrthogonalGreedy,
    gram: Gram,
    rhs: Tensor,
    damping: float | Relative | None = None,
    whitened: Tensor | None = None,
) -> GreedySolution:
    return solver.solve(solver.init(gram), rhs, damping, whitened=whitened)


def test_three_vectors_by_hand() -> None:
    g = torch.tensor([[2.0, 1, 0], [1, 2, 1], [0, 1, 2]]).double()
    rhs = torch.tensor([3.0, 1, -2]).double()
    a = torch.linalg.cholesky(g).T.contiguous()
    answers = [(1.5, 0, 0), (1.5, 0, -1), (1.25, 0.5, -1.25)]
    for form in FORMS:
        if form == "dense":
            gram = Dense(g)
        else:
            gram = hold(a, form)
        for k, want in enumerate(answers, 1):
            solution = greedy(OrthogonalGreedy(k), gram, rhs)
            assert solution.selected.tolist() == [0, 2, 1][:k]
            assert_close(solution.x, torch.tensor(want).double(), 1e-14, f"h after {k}, {form}")
            energies = torch.tensor([4.5, 6.5, 6.75]).double()
            assert_close(solution.energy, energies[:k], 1e-14, f"∇Lᵀh, {form}")
            assert solution.rank == k
            assert solution.status.ok
            assert f"k = {k}" in solution.stopped


@pytest.mark.parametrize(
    ("form", "rule", "shape", "damping", "block"),
    all_pairs(FORMS, RULES, SHAPES, [0.0, 0.3], [1, 4]),
    ids=str,
)
def test_it_is_matching_pursuit(
    form: str, rule: str, shape: tuple[int, int], damping: float, block: int
) -> None:
    a = random(*shape)
    r = vector(shape[0])
    k = 11
    g = a.T @ r
    damped = a.T @ a + damping * torch.eye(shape[1]).double()
    order, h, energies = pursuit(damped, g, k, rule, block)
    gram = hold(a, form)
    for white in (None, r) if isinstance(gram, FactoredGram) else (None,):
        solver = OrthogonalGreedy(k, rule, damping=damping, block=block)
        solution = greedy(solver, gram, g, whitened=white)
        assert solution.selected.tolist() == order
        assert_close(solution.x, h, 1e-11, "h")
        assert_close(solution.energy, torch.tensor(energies, dtype=torch.float64), 1e-11, "∇Lᵀh")
        residual = float((damped @ h - g).norm() / g.norm())
        assert solution.residual == pytest.approx(residual, rel=1e-8)
        assert solution.damping == damping
        assert (solution.energy.diff() > 0).all()


def test_the_decrease_rule_lowers_the_residual_more() -> None:
    """Not in every case, but in the mean over cases; and always in a single round."""
    gains = []
    for seed in range(30):
        g = with_spectrum(torch.logspace(0, -3, 30).double(), 50, 30, seed)
        rhs = g.T @ vector(50, seed)
        energy = {
            rule: float(greedy(OrthogonalGreedy(10, rule), Rows(g), rhs).energy[-1])
            for rule in RULES
        }
        gains.append(energy["decrease"] / energy["correlation"])
        start = greedy(OrthogonalGreedy(5), Rows(g), rhs).selected.tolist()
        gram = g.T @ g
        one = {rule: _next(gram, rhs, start, rule) for rule in RULES}
        assert one["decrease"] >= one["correlation"] - 1e-14
    assert sum(gains) / len(gains) > 1.01


def _next(g: Tensor, rhs: Tensor, chosen: list[int], rule: str) -> float:
    """∇Lᵀh after one more vector by this rule."""
    inner = torch.linalg.solve(g[chosen][:, chosen], g[chosen])
    rho = rhs - inner.T @ rhs[chosen]
    schur = g.diagonal() - (g[chosen] * inner).sum(0)
    score = rho**2 / (schur if rule == "decrease" else g.diagonal())
    score[chosen] = -1
    grown = [*chosen, int(score.argmax())]
    return float(rhs[grown] @ torch.linalg.solve(g[grown][:, grown], rhs[grown]))


@pytest.mark.parametrize(("form", "rule", "block"), all_pairs(FORMS, RULES, [1, 3]))
def test_exact_after_rank_many_rounds(form: str, rule: str, block: int) -> None:
    """G h = g once as many vectors are taken as G has rank; the rest is never entered."""
    a = with_spectrum(torch.tensor([4.0, 2, 1, 0.5, 0.2]).double(), 12, 30)
    r = vector(12)
    g = a.T @ r
    solution = greedy(OrthogonalGreedy(25, rule, block=block), hold(a, form), g)
    assert solution.rank == 5
    assert_close(a.T @ (a @ solution.x), g, 1e-9, "G h = g")
    assert solution.status is pb.Status.OK
    assert "round-off" in solution.stopped or "depend" in solution.stopped
    assert int((solution.x != 0).sum()) == 5


@pytest.mark.parametrize(("form", "rule", "known"), all_pairs(FORMS, RULES, [False, True]))
def test_copies_and_dead_vectors_never_enter(form: str, rule: str, known: bool) -> None:
    a = random(40, 8)
    a = torch.cat([a, a, 3 * a, torch.zeros(40, 4).double(), a[:, :2] + a[:, 2:4]], 1)
    r = vector(40)
    g = a.T @ r
    g[24:28] = 1e3 if not known else 0  # not even if the gradient pretends
    white = r if known and form != "dense" else None
    for k in (5, 8, 20):
        solution = greedy(OrthogonalGreedy(k, rule), hold(a, form), g, whitened=white)
        chosen = solution.selected.tolist()
        assert solution.rank == min(k, 8)
        assert not set(chosen) & set(range(24, 28))
        assert torch.linalg.matrix_rank(a[:, chosen]) == len(chosen)
        assert len({i % 8 for i in chosen if i < 24}) == len([i for i in chosen if i < 24])


def test_a_near_copy_is_rejected_by_rcond() -> None:
    a = random(20, 6)
    a = torch.cat([a, a + 1e-3 * random(20, 6, 1)], 1)
    g = a.T @ vector(20)
    for form in FORMS:
        loose = greedy(OrthogonalGreedy(12), hold(a, form), g)
        strict = greedy(OrthogonalGreedy(12, rcond=0.05), hold(a, form), g)
        assert loose.rank == 12
        assert strict.rank == 6
        assert "depend" in strict.stopped


def test_r_keeps_the_digits_that_g_has_lost() -> None:
    """At κ(A) = 1e6 the columns of A with r solve what g and G cannot."""
    a = with_spectrum(torch.logspace(0, -6, 20).double(), 60, 20)
    want = vector(20)
    r = a @ want
    solver = OrthogonalGreedy(20)
    from_r = greedy(solver, Rows(a), a.T @ r, whitened=r)
    assert from_r.rank == 20
    assert_close(from_r.x, want, 1e-8, "from r")
    from_g = greedy(OrthogonalGreedy(20, rcond=0.0), Rows(a), a.T @ r)
    assert float((from_g.x - want).norm() / want.norm()) > 1e-6


def test_a_huge_r_on_tiny_rows_is_not_trusted() -> None:
    a = random(20, 9)
    r = vector(20)
    a[0] *= 1e-14
    r[0] = 1e14
    g = a.T @ r
    want = pursuit(a.T @ a, g, 6)
    solution = greedy(OrthogonalGreedy(6), Rows(a), g, whitened=r)
    assert solution.selected.tolist() == want[0]
    assert_close(solution.x, want[1], 1e-10, "from g")


@pytest.mark.parametrize("form", FORMS)
def test_tol_stops_when_a_vector_brings_little(form: str) -> None:
    a = random(50, 30) + 2 * random(50, 1)  # strongly correlated
    g = a.T @ vector(50)
    whole = greedy(OrthogonalGreedy(30), hold(a, form), g)
    assert whole.rank == 30
    gains = whole.energy.diff(prepend=whole.energy.new_zeros(1)) / whole.energy
    tol = 0.02
    solution = greedy(OrthogonalGreedy(30, tol=tol), hold(a, form), g)
    if "energy" in solution.stopped:
        assert solution.rank == int((gains <= tol).nonzero()[0]) + 1
    else:
        assert "score" in solution.stopped
    assert 0 < (solution.rank or 0) < 30
    assert solution.selected.tolist() == whole.selected[: solution.rank].tolist()
    assert greedy(OrthogonalGreedy(30, tol=0.0), hold(a, form), g).rank == 30


def test_tol_stops_when_the_correlations_have_faded() -> None:
    g = torch.diag(torch.ones(4)).double()
    rhs = torch.tensor([1.0, 0.9, 0.05, 0.04]).double()
    solution = greedy(OrthogonalGreedy(4, tol=0.1), Dense(g), rhs)
    assert solution.selected.tolist() == [0, 1]
    assert "score" in solution.stopped


@pytest.mark.parametrize("form", FORMS)
def test_more_vectors_than_there_are(form: str) -> None:
    a = random(20, 7)
    r = vector(20)
    g = a.T @ r
    solution = greedy(OrthogonalGreedy(100), hold(a, form), g)
    assert solution.rank == 7
    assert "span all directions" in solution.stopped
    assert_close(solution.x, torch.linalg.lstsq(a, r).solution, 1e-12, "A⁺r")


@pytest.mark.parametrize("k", [0, -3, 2.5])
@pytest.mark.parametrize("name", ["k", "block"])
def test_counts_must_be_positive(k: float, name: str) -> None:
    arguments = {"k": 3, name: k}
    with pytest.raises(pb.PullbackError, match=rf"{name}=.*got {k}"):
        OrthogonalGreedy(**arguments)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tol", "rcond"])
def test_fractions_must_be_fractions(value: float, name: str) -> None:
    with pytest.raises(pb.PullbackError, match=name):
        OrthogonalGreedy(3, **{name: value})  # pyright: ignore[reportArgumentType]


def test_unknown_rules_and_dampings_are_refused() -> None:
    with pytest.raises(pb.PullbackError, match="rule 'largest'"):
        OrthogonalGreedy(3, "largest")
    with pytest.raises(pb.PullbackError, match="damping"):
        greedy(OrthogonalGreedy(3), Rows(random(3, 4)), vector(4), -1.0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_is_a_failure_value(form: str) -> None:
    a = random(6, 9)
    bad = vector(9)
    bad[4] = torch.nan
    holed = a.clone()
    holed[2, 3] = torch.nan
    for gram, g in ((hold(a, form), bad), (hold(holed, form), vector(9))):
        solution = greedy(OrthogonalGreedy(4), gram, g)
        assert solution.status is pb.Status.SINGULAR
        assert torch.equal(solution.x, torch.zeros(9).double())
        assert solution.rank == 0
        assert "not finite" in solution.stopped


def test_a_gram_broken_beside_its_diagonal() -> None:
    g = torch.eye(5).double()
    g[0, 3] = g[3, 0] = torch.nan
    solution = greedy(OrthogonalGreedy(3), Dense(g), torch.ones(5).double())
    assert solution.status is pb.Status.SINGULAR
    assert torch.isfinite(solution.x).all()


def test_relative_damping_and_a_damping_that_replaces_the_own() -> None:
    a = random(10, 20)
    g = a.T @ vector(10)
    mean = float(a.square().sum()) / 20
    _, h, _ = pursuit(a.T @ a + 0.1 * mean * torch.eye(20).double(), g, 15)
    for form in FORMS:
        relative = greedy(OrthogonalGreedy(15, damping=Relative(0.1)), hold(a, form), g)
        passed = greedy(OrthogonalGreedy(15, damping=7.0), hold(a, form), g, Relative(0.1))
        assert_close(relative.x, h, 1e-11, form)
        assert_close(passed.x, h, 1e-11, form)
        assert relative.rank == 15  # more than the rank of G: damped, they are independent


def test_a_gram_with_nothing_but_products() -> None:
    class Bare(Gram):
        def __init__(self, g: Tensor) -> None:
            self.g = g
            self.size = len(g)
            self.count = len(g)
            self.dtype = g.dtype
            self.device = g.device
            self.structure = pb.grams.Structure("operator", factored=False)

        def matvec(self, v: Tensor) -> Tensor:
            return self.g @ v

    a = random(30, 12)
    g = a.T @ vector(30)
    order, h, _ = pursuit(a.T @ a, g, 7)
    solution = greedy(OrthogonalGreedy(7), Bare(a.T @ a), g)
    assert solution.selected.tolist() == order
    assert_close(solution.x, h, 1e-11, "from products with G")


@pytest.mark.parametrize("block", [1, 5])
def test_the_products_a_matrix_free_solve_takes(block: int) -> None:
    """k with A, and one with Aᵀ per round; min(n, p) for the diagonal, once."""
    a = random(12, 50)
    calls = {"project": 0, "lift": 0}

    def project(v: Tensor) -> Tensor:
        calls["project"] += 1
        return a @ v

    def lift(c: Tensor) -> Tensor:
        calls["lift"] += 1
        return a.T @ c

    gram = Operator(project, lift, (12, 50), a.dtype, a.device)
    solver = OrthogonalGreedy(10, block=block)
    state = solver.init(gram)
    assert calls == {"project": 0, "lift": 12}
    solver.solve(state, a.T @ vector(12))
    assert calls == {"project": 10, "lift": 12 + 10 // block}


def test_diagonals_of_all_forms() -> None:
    for shape in SHAPES:
        a = random(*shape)
        want = (a.T @ a).diagonal()
        for form in FORMS:
            assert_close(hold(a, form).diagonal(), want, 1e-13, form)


def test_the_same_bits_again_and_in_single_precision() -> None:
    a = random(30, 50)
    g = a.T @ vector(30)
    solver = OrthogonalGreedy(12)
    state = solver.init(Rows(a))
    first = solver.solve(state, g)
    repeated = solver.solve(state, g)
    assert torch.equal(first.x, repeated.x)
    assert torch.equal(first.selected, repeated.selected)
    short = greedy(solver, Rows(a.float()), g.float())
    assert short.x.dtype == torch.float32
    assert short.selected.tolist() == first.selected.tolist()
    assert_close(short.x.double(), first.x, 1e-4, "float32")


# --- within the optimizer -------------------------------------------------------------------


def network() -> tuple[torch.nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 12), torch.nn.Tanh(), torch.nn.Linear(12, 1)
    ).double()
    x = torch.rand(60, 2).double()
    return model, x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def optimizer(model: torch.nn.Module, **options) -> pb.NaturalGradient:
    return pb.NaturalGradient(
        model,
        pb.metrics.Euclidean(),
        solver=OrthogonalGreedy(10),
        step=pb.steps.GridLineSearch(30),
        **options,
    )


def run(form: str, steps: int, *, decay: float = 0.0) -> list[float]:
    model, x, y = network()
    opt = optimizer(model, gram=form)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x) - y).square().mean()
        loss = loss + decay * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        info = opt.step(closure)
        losses.append(info.loss)
        assert info.rank == 10
    return losses


def test_it_trains_by_closure_in_every_form() -> None:
    want = run("rows", 4)
    assert want[-1] < 0.1 * want[0]
    for form in ("kernel", "dense", "matrix_free"):
        assert run(form, 4) == pytest.approx(want, rel=1e-6)


def test_the_direction_names_the_parameters_it_moves() -> None:
    """Flat coordinates count the parameters' entries in the order of the groups."""
    model, x, y = network()
    opt = optimizer(model)

    def objective(params: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, params, (x,)) - y

    direction = opt.direction(objective=objective)
    assert isinstance(direction, GreedySolution)
    j = torch.func.jacrev(objective)(dict(model.named_parameters()))
    a = torch.cat([v.detach().flatten(2).squeeze(1) for v in j.values()], 1) / 60**0.5
    r = (model(x) - y).detach()[:, 0] / 60**0.5
    order, h, energies = pursuit(a.T @ a, a.T @ r, 10)
    assert direction.selected.tolist() == order
    assert_close(direction.x, h, 1e-8, "h")
    assert_close(direction.energy, torch.tensor(energies, dtype=torch.float64), 1e-9, "∇Lᵀh")
    before = [p.detach().clone() for p in model.parameters()]
    info = opt.step(objective=objective)
    assert info.accepted
    after = list(model.parameters())
    moved = torch.cat([(p - q).flatten() for p, q in zip(after, before, strict=True)])
    assert sorted(moved.nonzero().flatten().tolist()) == sorted(order)


def test_a_regularizer_is_part_of_what_is_selected_for() -> None:
    """Ten coordinates in all, not ten for the fit and ten for the regularizer."""
    losses = run("rows", 4, decay=1e-3)
    assert losses == sorted(losses, reverse=True)
    assert run("dense", 4, decay=1e-3) == pytest.approx(losses, rel=1e-6)


def test_a_run_resumes_to_the_same_bits() -> None:
    def fresh() -> tuple:
        model, x, y = network()
        opt = optimizer(model)

        def objective(params: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, params, (x,)) - y

        return model, opt, lambda: opt.step(objective=objective)

    model, opt, step = fresh()
    for _ in range(2):
        step()
    saved = opt.state_dict()
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    step()
    other, other_opt, other_step = fresh()
    other.load_state_dict(weights)
    other_opt.load_state_dict(saved)
    other_step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
