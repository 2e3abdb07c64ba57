"""Influence beside brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback.curvature import Relative, capture, queries
from pullback.curvature.data import Batch
from pullback.curvature.reader import GradientReader
from tests.pairs import each_once, quick_products

from .models import CASES, Case, Oracle, make_case

STRUCTURES = ["exact", "ekfac", "kfac", "diagonal"]


def fit(case: Case, structure: str) -> pb.curvature.Curvature:
    return pb.curvature.fit(case.model, case.data, likelihood=case.likelihood, structure=structure)


def brute_force(gram: Tensor, queries: Tensor, training: Tensor, damping: float) -> Tensor:
    shifted = gram + damping * torch.eye(len(gram))
    return queries @ torch.linalg.solve(shifted, training.T)


def distance(actual: Tensor, want: Tensor) -> float:
    return float((actual - want).norm() / want.norm())


def squared_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().flatten(1).sum(1)


@pytest.mark.parametrize("name", CASES)
def test_exact_scores_are_brute_force(name: str) -> None:
    case = make_case(name)
    oracle = Oracle(case)
    gradients = oracle.gradients()
    scores = pb.curvature.influence(fit(case, "exact"), case.data, case.data, damping=0.02)
    assert distance(scores, brute_force(oracle.gram, gradients, gradients, 0.02)) < 1e-10


@pytest.mark.parametrize(("name", "structure"), quick_products(CASES, STRUCTURES))
def test_scores_are_those_of_the_dense_curvature(name: str, structure: str) -> None:
    case = make_case(name)
    curvature = fit(case, structure)
    gram = curvature.matvec(torch.eye(curvature.space.size))
    oracle = Oracle(case)
    training = oracle.gradients()
    measured = oracle.gradients(squared_output)
    scores = pb.curvature.influence(
        curvature, case.data, case.data, damping=0.02, measure=squared_output
    )
    assert distance(scores, brute_force(gram, measured, training, 0.02)) < 1e-10
    self_scores = pb.curvature.self_influence(curvature, case.data, damping=0.02)
    want = brute_force(gram, training, training, 0.02).diagonal()
    assert distance(self_scores, want) < 1e-10


def test_small_blocks_of_queries_and_panels_of_samples_give_the_same(monkeypatch) -> None:
    case = make_case("conv")
    curvature = fit(case, "ekfac")
    want = pb.curvature.influence(curvature, case.data, case.data)
    self_scores = pb.curvature.self_influence(curvature, case.data)
    size = curvature.space.size
    monkeypatch.setattr(capture, "LIMITS", capture.Limits(panel_entries=size))
    batches = list(zip(case.inputs.split(2), case.targets.split(2), strict=True))
    training = list(zip(case.inputs.split(4), case.targets.split(4), strict=True))
    for count in (1, 3, 4, 100):
        scores = pb.curvature.influence(curvature, batches, training, query_bytes=8 * size * count)
        assert distance(scores, want) < 1e-12
    assert distance(pb.curvature.self_influence(curvature, training), self_scores) < 1e-12
    assert distance(fit(case, "ekfac").eigenvalues(), curvature.eigenvalues()) < 1e-12


def test_default_damping_is_relative() -> None:
    case = make_case("mlp")
    curvature = fit(case, "ekfac")
    scores = pb.curvature.influence(curvature, case.data, case.data)
    default = pb.curvature.scores.DEFAULT_DAMPING
    assert isinstance(default, Relative)
    want = pb.curvature.influence(curvature, case.data, case.data, damping=default)
    assert torch.equal(scores, want)


def test_top_samples() -> None:
    case = make_case("mlp")
    curvature = fit(case, "ekfac")
    whole = pb.curvature.influence(curvature, case.data, case.data)
    training = list(zip(case.inputs.split(5), case.targets.split(5), strict=True))
    for is_largest in (True, False):
        top = pb.curvature.top_k(curvature, case.data, training, 4, is_largest=is_largest)
        want = whole.topk(4, largest=is_largest)
        assert torch.equal(top.indices, want.indices)
        assert torch.allclose(top.scores, want.values, rtol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "norms", "tied"])
def test_modules_add_up(name: str) -> None:
    case = make_case(name)
    curvature = fit(case, "ekfac")
    by_module = pb.curvature.influence_by_module(curvature, case.data, case.data)
    whole = pb.curvature.influence(curvature, case.data, case.data)
    assert len(by_module) == len(curvature.blocks)
    assert distance(torch.stack(list(by_module.values())).sum(0), whole) < 1e-12


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["tied", "conv1d"])
def test_tokens_are_brute_force_and_add_up(name: str, structure: str) -> None:
    case = make_case(name)
    curvature = fit(case, structure)
    by_token = pb.curvature.influence_by_token(curvature, case.data, case.data, damping=0.05)
    whole = pb.curvature.influence(curvature, case.data, case.data, damping=0.05)
    assert by_token.shape == (*whole.shape, case.targets.shape[1])
    assert distance(by_token.sum(2), whole) < 1e-10
    oracle = Oracle(case)
    position = 1

    def one_position(outputs: Tensor, targets: Tensor) -> Tensor:
        return case.likelihood.nll(outputs, targets)[:, position]

    gram = curvature.matvec(torch.eye(curvature.space.size))
    want = brute_force(gram, oracle.gradients(), oracle.gradients(one_position), 0.05)
    assert distance(by_token[:, :, position], want) < 1e-10


def test_margin_is_the_log_odds_of_the_target() -> None:
    logits = torch.randn(5, 4)
    targets = torch.randint(0, 4, (5,))
    p = logits.softmax(-1)[torch.arange(5), targets]
    assert torch.allclose(pb.curvature.margin(logits, targets), (p / (1 - p)).log())


def test_margin_leaves_out_positions_without_a_target() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    odds = logits.softmax(-1).logit()
    want = torch.stack([odds[0, 0, 1] + odds[0, 2, 4], odds[1, 2, 0]])
    assert torch.allclose(pb.curvature.margin(logits, targets), want)


@pytest.mark.parametrize(
    "targets", [torch.tensor([0, 5]), torch.tensor([-1, 0]), torch.rand(2), torch.tensor([0])]
)
def test_margin_refuses_what_is_no_class(targets: Tensor) -> None:
    with pytest.raises(pb.PullbackError, match="margin"):
        pb.curvature.margin(torch.randn(2, 5), targets)


def test_scores_predict_retraining_of_a_linear_model() -> None:
    """For least squares with weight decay the model without a sample is known in closed form."""
    torch.manual_seed(0)
    samples, features, decay = 60, 3, 1e-3
    x = torch.randn(samples, features)
    y = x @ torch.randn(features, 1) + 0.3 * torch.randn(samples, 1)

    def train(weights: Tensor) -> Tensor:
        gram = (weights[:, None] * x).T @ x / samples + decay * torch.eye(features)
        return torch.linalg.solve(gram, (weights[:, None] * x).T @ y / samples).T

    model = torch.nn.Linear(features, 1, bias=False)
    model.weight.data = train(torch.ones(samples))
    curvature = pb.curvature.fit(
        model, (x, y), likelihood=pb.likelihoods.Gaussian(), structure="exact"
    )

    def first_output(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]

    query = (torch.randn(1, features), torch.zeros(1, 1))
    scores = pb.curvature.influence(curvature, query, (x, y), damping=decay, measure=first_output)
    step = 1e-5
    for i in range(5):
        weights = torch.ones(samples)
        weights[i] += step
        moved = query[0] @ (train(weights) - model.weight).T
        assert abs(-moved.item() * samples / step - scores[0, i].item()) < 1e-4


def test_bfloat16_scores_are_close() -> None:
    case = make_case("conv")
    curvature = fit(case, "ekfac")
    want = pb.curvature.influence(curvature, case.data, case.data)
    scores = pb.curvature.influence(curvature, case.data, case.data, dtype=torch.bfloat16)
    assert scores.dtype == torch.float64
    assert distance(scores, want) < 0.02


@pytest.mark.parametrize(
    ("name", "error"), each_once(["mlp", "conv", "grouped conv", "tied", "lstm"], [0.3, 0.03, 1e-6])
)
def test_compressed_queries_keep_the_error_that_was_stated(name: str, error: float) -> None:
    case = make_case(name)
    curvature = fit(case, "ekfac")
    gradients = Oracle(case).gradients()
    want = pb.curvature.influence(curvature, case.data, case.data, damping=0.02)
    scores = pb.curvature.influence(
        curvature, case.data, case.data, damping=0.02, query_error=error
    )
    solved = curvature.solve(gradients, 0.02)
    bound = error * solved.norm(dim=1)[:, None] * gradients.norm(dim=1)
    assert bool(((scores - want).abs() <= bound * (1 + 1e-9) + 1e-12).all())
    batches = list(zip(case.inputs.split(2), case.targets.split(2), strict=True))
    by_batches = pb.curvature.influence(
        curvature, batches, batches, damping=0.02, query_error=error
    )
    assert bool(((by_batches - want).abs() <= bound * (1 + 1e-9) + 1e-12).all())


@pytest.mark.parametrize("shape", [(3, 2, 5, 9), (3, 1, 9, 5), (2, 3, 4, 4)])
def test_the_rank_is_the_smallest_for_an_error(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape) @ torch.diag(0.2 ** torch.arange(shape[-1]))
    previous_rank = 0
    for error in (0.5, 0.1, 0.01, 1e-4):
        left, right = queries.compress_matrices(matrices, error)
        gap = matrices - torch.einsum("qrgo,qrgi->qgoi", left, right)
        relative = gap.flatten(1).norm(dim=1) / matrices.flatten(1).norm(dim=1)
        assert float(relative.max()) <= error * (1 + 1e-9)
        fewer = torch.einsum("qrgo,qrgi->qgoi", left[:, :-1], right[:, :-1])
        without_last = (matrices - fewer).flatten(1).norm(dim=1) / matrices.flatten(1).norm(dim=1)
        assert float(without_last.max()) > error
        assert left.shape[1] >= previous_rank
        previous_rank = left.shape[1]


def test_grams_of_positions_score_as_matrices_do() -> None:
    """With one position and a small rank the gradients of training samples are not formed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3))
    data = (torch.randn(9, 20), torch.randint(0, 3, (9,)))
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical())
    reader = GradientReader(curvature)
    gradient = reader.gradients(Batch(*data), None)[0]
    gradients = gradient.matrices(slice(0, 9))[:, 0]
    matrices = curvature.blocks[0].apply(lambda s: 1 / (s + 0.1), gradients)
    stored_queries = queries.store_queries(matrices, torch.float64, 0.2)
    assert isinstance(stored_queries, queries.LowRankQueries)
    factors = gradient.position_factors(slice(0, 9))
    assert factors is not None
    assert stored_queries._should_score_by_grams(factors)
    expanded = torch.einsum("qrgo,qrgi->qgoi", stored_queries.left, stored_queries.right).flatten(1)
    want = expanded @ gradients.flatten(1).T
    assert distance(stored_queries.score(gradient, slice(0, 9)), want) < 1e-12


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.randint(0, 11, (6, 8))
    targets = torch.cat([tokens[:, 1:], torch.full((6, 1), -100)], 1)
    data = ({"input_ids": tokens}, targets)
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical(), draws=3)
    assert any("Kronecker 24 ⊗ 9" in row.block for row in curvature.table.rows)
    scores = pb.curvature.influence(curvature, data, data)
    assert scores.shape == (6, 6)
    assert bool((scores.diagonal() > 0).all())
    assert distance(scores, scores.T) < 1e-10


def test_the_progress_line_ends_with_all_samples(capsys) -> None:
    case = make_case("mlp")
    curvature = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood)
    pb.curvature.influence(curvature, case.data, case.data, progress=True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{len(case.data[1])} samples" in last
