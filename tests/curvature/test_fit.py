"""A fitted curvature beside dense matrices in float64."""

from __future__ import annotations

from collections import UserDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback._core.errors import PullbackError
from pullback.curvature import checkpoint, passes
from pullback.curvature.curvature import Curvature

from .models import CASES, KINDS, Case, Oracle, make_case

STRUCTURES = ["exact", "ekfac", "kfac", "diagonal"]
#: every kind of model, and every structure, whose draws are compared with their covariance
SAMPLED = [(name, "ekfac") for name in KINDS] + [
    ("adapter", s) for s in ("exact", "kfac", "diagonal")
]


def fit(case: Case, structure: str, **options: object) -> Curvature:
    return pb.curvature.fit(
        case.model,
        case.data,
        likelihood=case.likelihood,
        structure=structure,
        **options,  # pyright: ignore[reportArgumentType]
    )


def dense(curvature: Curvature) -> Tensor:
    return curvature.matvec(torch.eye(curvature.space.size))


def distance(actual: Tensor, want: Tensor) -> float:
    return float((actual - want).norm() / want.norm())


@pytest.mark.parametrize("name", CASES)
def test_exact_is_the_dense_gram(name: str) -> None:
    case = make_case(name)
    assert distance(dense(fit(case, "exact")), Oracle(case).gram) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_exact_in_sample_space_is_the_dense_gram(name: str, monkeypatch) -> None:
    monkeypatch.setattr(passes, "EXACT_LIMITS", passes.ExactLimits(dense_parameters=0))
    case = make_case(name)
    curvature = fit(case, "exact")
    gram = Oracle(case).gram
    assert "directions" in curvature.table.rows[0].block
    assert distance(dense(curvature), gram) < 1e-12
    v = torch.randn(3, len(gram))
    want = torch.linalg.solve(gram + 0.1 * torch.eye(len(gram)), v.T).T
    assert distance(curvature.solve(v, 0.1), want) < 1e-10


@pytest.mark.parametrize("name", CASES)
def test_eigenvalues_from_gradients_are_closer_than_products(name: str) -> None:
    case = make_case(name)
    gram = Oracle(case).gram
    products = distance(dense(fit(case, "kfac")), gram)
    moments = distance(dense(fit(case, "ekfac")), gram)
    assert moments <= products * (1 + 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_diagonal_is_that_of_the_gram(name: str) -> None:
    case = make_case(name)
    diagonal = dense(fit(case, "diagonal"))
    assert distance(diagonal, Oracle(case).gram.diagonal().diag()) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_eigenvalues_keep_the_trace(name: str) -> None:
    case = make_case(name)
    trace = fit(case, "ekfac").eigenvalues().sum()
    assert abs(trace / Oracle(case).gram.trace() - 1) < 1e-12


def test_kronecker_factors_of_one_linear_layer_are_exact_for_gaussians() -> None:
    torch.manual_seed(0)
    case = make_case("mlp")
    case.model = torch.nn.Linear(4, 3)
    case.likelihood = pb.likelihoods.Gaussian()
    case.targets = torch.randn(12, 3)
    assert distance(dense(fit(case, "kfac")), Oracle(case).gram) < 1e-12


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", KINDS)
def test_algebra_beside_dense_matrices(name: str, structure: str) -> None:
    curvature = fit(make_case(name), structure)
    gram = dense(curvature)
    shifted = gram + 0.01 * torch.eye(len(gram))
    v = torch.randn(4, len(gram))
    assert distance(curvature.matvec(v), v @ gram) < 1e-12
    assert distance(curvature.solve(v, 0.01), torch.linalg.solve(shifted, v.T).T) < 1e-10
    assert abs(curvature.logdet(0.01) - torch.logdet(shifted)) < 1e-9
    values = torch.linalg.eigvalsh(gram).flip(0)
    assert (curvature.eigenvalues() - values).abs().max() < 1e-12 * values[0]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_relative_damping_is_a_multiple_of_the_mean_eigenvalue_of_a_block(structure: str) -> None:
    curvature = fit(make_case("mlp"), structure)
    v = torch.randn(curvature.space.size)
    solution = curvature.solve(v, pb.curvature.Relative(0.3))
    pieces = curvature.space.split(solution)
    for block in curvature.blocks:
        plain = curvature.solve(v, 0.3 * block.mean_eigenvalue())
        for name in block.form.names:
            assert torch.allclose(pieces[name], curvature.space.split(plain)[name], rtol=1e-10)


@pytest.mark.parametrize(("name", "structure"), SAMPLED)
def test_moments_of_samples(name: str, structure: str) -> None:
    curvature = fit(make_case(name), structure)
    draws = curvature.sample(20_000, 0.05, torch.Generator().manual_seed(0))
    covariance = draws.T @ draws / len(draws)
    want = curvature.solve(torch.eye(curvature.space.size), 0.05)
    deviation = (want.diagonal()[:, None] * want.diagonal() + want.square()) / len(draws)
    assert ((covariance - want).abs() / deviation.sqrt()).max() < 6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_saving_and_loading(structure: str, tmp_path: Path) -> None:
    case = make_case("norms")
    curvature = fit(case, structure)
    curvature.save(tmp_path / "curvature.pt")
    loaded = pb.curvature.load(tmp_path / "curvature.pt", case.model)
    v = torch.randn(curvature.space.size)
    assert torch.equal(loaded.solve(v, 0.1), curvature.solve(v, 0.1))
    assert str(loaded.table) == str(curvature.table)
    assert loaded.totals == curvature.totals
    assert repr(loaded.likelihood) == repr(case.likelihood)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_do_not_matter(structure: str) -> None:
    case = make_case("conv1d")
    batches = list(zip(case.inputs.split(4), case.targets.split(4), strict=True))
    curvature = pb.curvature.fit(
        case.model, batches, likelihood=case.likelihood, structure=structure
    )
    assert distance(dense(curvature), dense(fit(case, structure))) < 1e-12


def test_draws_are_an_estimate_of_the_same_gram() -> None:
    case = make_case("mlp")
    curvature = fit(case, "exact", draws=4000)
    assert "Monte Carlo, 4000 draws" in curvature.table.metric
    assert distance(dense(curvature), Oracle(case).gram) < 0.05


def test_exact_is_exact_with_many_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 20)
    case = Case(model, torch.randn(6, 2), torch.arange(6), pb.likelihoods.Categorical())
    curvature = fit(case, "exact")
    assert curvature.table.metric == "exact, 20 columns per sample"
    assert distance(dense(curvature), Oracle(case).gram) < 1e-12
    assert "Monte Carlo, 1 draws" in fit(case, "ekfac").table.metric


def test_ignored_positions_do_not_count() -> None:
    case = make_case("tied")
    case.targets[:, -1] = -100
    full = Oracle(case)
    assert distance(dense(fit(case, "exact")), full.gram) < 1e-12


def test_last_layer() -> None:
    case = make_case("mlp")
    curvature = fit(case, "exact", parameters="last layer")
    assert curvature.space.names == ("2.weight", "2.bias")
    want = Oracle(case).gram[25:, 25:]
    assert distance(dense(curvature), want) < 1e-12


@pytest.mark.parametrize("structure", ["ekfac", "exact"])
def test_an_interrupted_fit_goes_on(structure: str, tmp_path: Path, monkeypatch) -> None:

    monkeypatch.setattr(checkpoint, "CHECKPOINT_LIMITS", checkpoint.CheckpointLimits(seconds=0.0))
    case = make_case("mlp")
    batches = list(zip(case.inputs.split(3), case.targets.split(3), strict=True))
    path = tmp_path / "state"
    options = {"likelihood": case.likelihood, "structure": structure, "draws": 2}
    want = pb.curvature.fit(case.model, batches, **options)

    class Failing:
        def __init__(self, at: int) -> None:
            self.left = at
            self.read = 0

        def __iter__(self):
            for batch in batches:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
                self.read += 1
                yield batch

    passes = 2 if structure == "ekfac" else 1
    for stop in range(1, 4 * passes):
        with pytest.raises(KeyboardInterrupt):
            pb.curvature.fit(case.model, Failing(stop), checkpoint=path, **options)
        assert list(tmp_path.iterdir())
        resumed = pb.curvature.fit(case.model, batches, checkpoint=path, **options)
        assert torch.equal(dense(resumed), dense(want))
        assert resumed.totals == want.totals
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("structure", ["kfac", "exact"])
def test_a_fit_that_was_stopped_after_its_last_pass(
    structure: str, tmp_path: Path, monkeypatch
) -> None:
    case = make_case("lstm")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoint, "remove", lambda self: None)
        want = fit(case, structure, checkpoint=tmp_path / "state")
    resumed = fit(case, structure, checkpoint=tmp_path / "state")
    assert str(resumed.table) == str(want.table)
    assert torch.equal(dense(resumed), dense(want))
    assert not list(tmp_path.iterdir())


def test_the_table_names_every_parameter() -> None:
    case = make_case("lstm")
    curvature = fit(case, "ekfac")
    assert [row.parameter for row in curvature.table.rows] == list(curvature.space.names)
    assert "Kronecker 2 ⊗ 4" in str(curvature.table)


@pytest.mark.parametrize("name", ["mlp", "conv", "grouped conv", "conv1d", "tied"])
def test_the_product_of_the_factors_is_the_block(name: str) -> None:
    curvature = fit(make_case(name), "kfac")
    for block in curvature.blocks:
        pair = curvature.factors(block.form.names[0])
        v = torch.randn(block.form.shape)
        want = block.apply(lambda values: values, v)
        assert distance(pair.matvec(v), want) < 1e-12


def test_factors_of_ekfac_have_its_trace() -> None:
    curvature = fit(make_case("mlp"), "ekfac")
    for block in curvature.blocks:
        pair = curvature.factors(block.form.names[0])
        trace = pair.output_factor[0].trace() * pair.input_factor[0].trace()
        assert abs(float(trace / block.eigenvalues().sum()) - 1) < 1e-12


def test_factors_that_are_not_there_are_refused() -> None:
    with pytest.raises(PullbackError, match="no Kronecker factors of 'nothing'"):
        fit(make_case("mlp"), "kfac").factors("nothing")
    curvature = fit(make_case("mlp"), "exact")
    curvature = replace(curvature, blocks=())
    with pytest.raises(PullbackError, match="no Kronecker factors"):
        curvature.factors("0.weight")


def test_mappings_that_are_no_dicts() -> None:
    class Named(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Named(4, 3)
    x = torch.randn(300, 4)  # more than one batch
    data = (UserDict(x=x), torch.arange(300) % 3)
    options = {"likelihood": pb.likelihoods.Categorical(), "structure": "exact"}
    curvature = pb.curvature.fit(model, data, **options)
    reference = pb.curvature.fit(model, (x, data[1]), **options)
    torch.testing.assert_close(curvature.logdet(0.1), reference.logdet(0.1))
    assert pb.curvature.laplace(curvature)(data[0]).mean.shape == (300, 3)


@pytest.mark.parametrize("samples", [2, 200])
def test_the_smaller_space_is_decomposed(samples: int) -> None:
    model = nn.Linear(6, 3)
    data = (torch.randn(samples, 6), torch.arange(samples) % 3)
    options = {"likelihood": pb.likelihoods.Categorical(), "structure": "exact"}
    curvature = pb.curvature.fit(model, data, **options)
    assert ("directions" in curvature.table.rows[0].block) == (samples == 2)
    batches = [(data[0][i : i + 1], data[1][i : i + 1]) for i in range(samples)]
    other = pb.curvature.fit(model, batches, **options)
    torch.testing.assert_close(dense(other), dense(curvature))


def test_parameters_that_the_output_does_not_use() -> None:
    """Their curvature is zero in every precision, and the prior alone decides about them."""

    class Partial(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3, dtype=torch.float32)
            self.unused = nn.Linear(2, 2, dtype=torch.float32)

    data = (torch.randn(12, 4, dtype=torch.float32), torch.arange(12) % 3)
    for structure in STRUCTURES:
        curvature = pb.curvature.fit(
            Partial(), data, likelihood=pb.likelihoods.Categorical(), structure=structure
        )
        moved = curvature.space.split(curvature.matvec(torch.ones(curvature.space.size).float()))
        assert not moved["unused.weight"].any()
        posterior = pb.curvature.laplace(curvature, prior_precision="marginal likelihood")
        assert 0 < posterior.prior_precision < float("inf")
