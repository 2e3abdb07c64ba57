"""What is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pullback as pb
from pullback import PullbackError
from pullback.curvature import passes

from .models import make_case


def fit(case, data=None, **options):
    options.setdefault("likelihood", case.likelihood)
    return pb.curvature.fit(case.model, case.data if data is None else data, **options)


def test_unknown_structure() -> None:
    with pytest.raises(PullbackError, match="Use one of 'ekfac'"):
        fit(make_case("mlp"), structure="shampoo")


def test_empty_loader() -> None:
    with pytest.raises(PullbackError, match="no data to fit"):
        fit(make_case("mlp"), [])


def test_an_iterator_that_can_be_read_once() -> None:
    case = make_case("mlp")
    with pytest.raises(PullbackError, match="not an exhausted iterator"):
        fit(case, iter([case.data]))


@pytest.mark.parametrize("data", [5, torch.ones(3), [torch.ones(3, 4)], [(1, 2, 3)]])
def test_data_that_are_no_pairs(data: object) -> None:
    with pytest.raises(PullbackError, match="Yield \\(inputs, targets\\)"):
        fit(make_case("mlp"), data)


def test_a_loader_that_changes_between_passes() -> None:
    case = make_case("mlp")

    class Shrinking:
        length = 8

        def __iter__(self):
            yield case.inputs[: self.length], case.targets[: self.length]
            self.length -= 2

    with pytest.raises(PullbackError, match="two passes saw different data"):
        fit(case, Shrinking())


@pytest.mark.parametrize("where", ["inputs", "parameters"])
def test_values_that_are_not_finite(where: str) -> None:
    case = make_case("mlp")
    if where == "inputs":
        case.inputs[3, 1] = torch.nan
    else:
        case.model[0].weight.data[0, 0] = torch.nan
    with pytest.raises(PullbackError, match="not finite"):
        fit(case)


def test_targets_that_are_not_finite() -> None:
    case = make_case("conv")
    case.targets[2, 0] = torch.nan
    with pytest.raises(PullbackError, match="losses are not finite"):
        fit(case)


def test_dropout_in_training_mode() -> None:
    case = make_case("mlp")
    case.model.append(nn.Dropout(0.1))
    with pytest.raises(PullbackError, match=r"Dropout '3' is random.*model\.eval\(\)"):
        fit(case)
    case.model.eval()
    fit(case)


def test_batch_normalization_in_training_mode() -> None:
    case = make_case("norms")
    case.model.train()
    with pytest.raises(PullbackError, match="couples the samples"):
        fit(case)


def test_noise_in_forward() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 0.1 * torch.randn(len(input), 1)

    case = make_case("mlp")
    case.model = Noisy(4, 3)
    with pytest.raises(PullbackError, match="not deterministic"):
        fit(case)


def test_a_model_that_changed_since_the_fit(tmp_path: Path) -> None:
    case = make_case("norms")
    curvature = fit(case)
    curvature.save(tmp_path / "saved")
    case.model[1].running_mean += 1e-3
    with pytest.raises(PullbackError, match=r"1\.running_mean has other values"):
        pb.curvature.influence(curvature, case.data, case.data)
    with pytest.raises(PullbackError, match="changed since"):
        pb.curvature.self_influence(curvature, case.data)
    with pytest.raises(PullbackError, match="changed since"):
        pb.curvature.load(tmp_path / "saved", case.model)


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_masks_that_are_not_finite(value: float) -> None:
    model = nn.Linear(4, 3)
    model.register_buffer("mask", torch.full((3, 3), value).triu(1))
    data = (torch.randn(8, 4), torch.arange(8) % 3)
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical())
    curvature.check_model()
    model.mask.fill_(0.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(PullbackError, match="mask has other values"):
        curvature.check_model()


def test_entries_that_changed_places() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    case.model[0].weight.data = case.model[0].weight.data.flip(0)
    with pytest.raises(PullbackError, match=r"0\.weight has other values"):
        curvature.check_model()


def test_a_likelihood_of_another_output() -> None:
    case = make_case("mlp")
    case.model = nn.Linear(4, 1)
    with pytest.raises(PullbackError, match="Categorical does not fit"):
        fit(case)


def test_a_measure_without_one_number_per_query() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with pytest.raises(PullbackError, match="one number per sample"):
        pb.curvature.influence(curvature, case.data, case.data, measure=lambda z, y: z.sum())


def test_no_queries_and_no_training_samples() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with pytest.raises(PullbackError, match="no queries"):
        pb.curvature.influence(curvature, [], case.data)
    with pytest.raises(PullbackError, match="no training samples"):
        pb.curvature.influence(curvature, case.data, [])
    with pytest.raises(PullbackError, match="no samples"):
        pb.curvature.self_influence(curvature, [])
    with pytest.raises(PullbackError, match="no queries"):
        pb.curvature.influence_by_token(curvature, [], case.data)
    with pytest.raises(PullbackError, match="no training samples"):
        pb.curvature.influence_by_token(curvature, case.data, [])


@pytest.mark.parametrize("damping", [-1.0, torch.nan, torch.inf, "small"])
def test_a_damping_that_is_no_number(damping) -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with pytest.raises(PullbackError, match="number ≥ 0"):
        curvature.solve(torch.ones(curvature.space.size), damping)


def test_a_vector_of_another_length() -> None:
    curvature = fit(make_case("mlp"))
    with pytest.raises(PullbackError, match=f"vectors of {curvature.space.size} entries"):
        curvature.matvec(torch.ones(3))


def test_dropout_that_is_switched_on_after_the_fit() -> None:
    case = make_case("mlp")
    case.model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).eval()
    curvature = fit(case)
    posterior = pb.curvature.laplace(curvature)
    case.model.train()
    uses = [
        lambda: pb.curvature.influence(curvature, case.data, case.data),
        lambda: pb.curvature.self_influence(curvature, case.data),
        lambda: pb.curvature.exact_influence(curvature, case.data, case.data),
        lambda: posterior(case.inputs),
    ]
    for use in uses:
        with pytest.raises(PullbackError, match="is random"):
            use()


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y + 9,  # a class that the model does not have
        lambda y: y[:-1],
        lambda y: y.double(),
        lambda y: "labels",
    ],
)
def test_targets_of_another_loader(change) -> None:
    case = make_case("mlp")
    with pytest.raises(PullbackError, match="targets do not fit the model's outputs"):
        fit(case, [(case.inputs, change(case.targets))])


def test_a_likelihood_that_is_none() -> None:
    for likelihood in ("categorical", pb.likelihoods.Categorical, nn.CrossEntropyLoss):
        with pytest.raises(PullbackError, match=r"not a likelihood.*Categorical\(\) for a cross"):
            fit(make_case("mlp"), likelihood=likelihood)


def test_losses_of_torch_are_likelihoods() -> None:
    case = make_case("mlp")
    curvature = fit(case, likelihood=nn.CrossEntropyLoss())
    expected = fit(case, likelihood=pb.likelihoods.Categorical())
    data = (case.inputs, case.targets)
    scores = pb.curvature.self_influence(curvature, data)
    assert torch.equal(scores, pb.curvature.self_influence(expected, data))
    with pytest.raises(PullbackError, match="has no likelihood"):
        fit(case, likelihood=nn.L1Loss())


def test_a_model_without_parameters() -> None:
    case = make_case("mlp")
    case.model = nn.Flatten()
    with pytest.raises(PullbackError, match="no parameter requires a gradient"):
        fit(case)


def test_options_of_scores() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    refused = {
        "float type": {"dtype": torch.int32},
        "bytes of queries": {"query_bytes": 0},
        "no gradient": {"measure": lambda z, y: z.detach()[:, 0]},
        "values of the measure are not finite": {"measure": lambda z, y: z[:, 0] * torch.nan},
    }
    for words, options in refused.items():
        with pytest.raises(PullbackError, match=words):
            pb.curvature.influence(curvature, case.data, case.data, **options)


def test_too_many_rows(monkeypatch) -> None:
    limits = passes.ExactLimits(dense_parameters=0, row_entries=100)
    monkeypatch.setattr(passes, "EXACT_LIMITS", limits)
    with pytest.raises(PullbackError, match=r"does not fit into memory.*ekfac"):
        fit(make_case("mlp"), structure="exact")


def test_memory_that_runs_out(monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(passes.FactorPass, "add", fail)
    with pytest.raises(PullbackError, match=r"batch of 12 samples.*batches of 3 samples"):
        fit(make_case("mlp"))


def test_memory_that_runs_out_while_scoring(monkeypatch) -> None:
    case = make_case("mlp")
    curvature = fit(case)

    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pb.curvature.queries.DenseQueries, "score", fail)
    with pytest.raises(PullbackError, match=r"batches of 3 samples.*query_bytes"):
        pb.curvature.influence(curvature, case.data, case.data)
    monkeypatch.setattr(pb.curvature.spectra.KroneckerBlock, "inner_products", fail)
    with pytest.raises(PullbackError, match="batches of 3 samples"):
        pb.curvature.self_influence(curvature, case.data)


def test_queries_that_are_not_finite() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    broken = (case.inputs * torch.nan, case.targets)
    for queries, training in ((broken, case.data), (case.data, broken)):
        with pytest.raises(PullbackError, match="outputs are not finite"):
            pb.curvature.influence(curvature, queries, training)
    with pytest.raises(PullbackError, match="gradients of the measure are not finite"):
        pb.curvature.influence(
            curvature, case.data, case.data, measure=lambda z, y: (z[:, 0] - z[:, 0]).sqrt()
        )


@pytest.mark.parametrize("queries", [5, torch.ones(3), [(1, 2, 3)], {"x": torch.ones(2, 4)}])
def test_queries_that_are_no_pairs(queries: object) -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with pytest.raises(PullbackError, match="Yield \\(inputs, targets\\)"):
        pb.curvature.influence(curvature, queries, case.data)


@pytest.mark.parametrize("error", [0.0, -1.0, float("nan")])
def test_an_error_of_queries_that_is_not_positive(error: float) -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with pytest.raises(PullbackError, match="error of queries"):
        pb.curvature.influence(curvature, case.data, case.data, query_error=error)


def test_a_posterior_of_a_model_that_changed() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    posterior = pb.curvature.laplace(curvature)
    case.model[0].bias.data += 1.0
    with pytest.raises(PullbackError, match=r"0\.bias has other values"):
        posterior(case.inputs)
    with pytest.raises(PullbackError, match="changed since"):
        posterior.sample(2)
    with pytest.raises(PullbackError, match="changed since"):
        pb.curvature.laplace(curvature)


def test_parameters_that_are_not_there() -> None:
    with pytest.raises(PullbackError, match="no trainable parameter 'head'"):
        fit(make_case("mlp"), parameters=["head"])
    with pytest.raises(PullbackError, match="Use one of 'last layer'"):
        fit(make_case("mlp"), parameters="first layer")


def test_a_checkpoint_of_another_fit(tmp_path: Path, monkeypatch) -> None:
    case = make_case("mlp")
    path = tmp_path / "state"
    monkeypatch.setattr(pb.curvature.fitter.Checkpoint, "remove", lambda self: None)
    fit(case, checkpoint=path)
    with pytest.raises(PullbackError, match="of another fit"):
        fit(case, checkpoint=path, seed=1)


def test_a_batch_of_another_shape() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with pytest.raises(RuntimeError, match="shape"):
        pb.curvature.influence(curvature, (torch.ones(2, 7), case.targets[:2]), case.data)


SHUFFLED = {
    "training": lambda curvature, data, loader: pb.curvature.top_k(curvature, data, loader, 2),
    "queries": lambda curvature, data, loader: pb.curvature.influence(curvature, loader, data),
    "self": lambda curvature, data, loader: pb.curvature.self_influence(curvature, loader),
    "tokens": lambda curvature, data, loader: pb.curvature.influence_by_token(
        curvature, data, loader
    ),
    "exact": lambda curvature, data, loader: pb.curvature.exact_influence(
        curvature, data, loader, damping=0.1
    ),
}


@pytest.mark.parametrize("score", SHUFFLED.values(), ids=SHUFFLED.keys())
def test_scores_of_a_shuffled_loader(score) -> None:
    case = make_case("mlp")
    loader = DataLoader(TensorDataset(*case.data), 3, shuffle=True)
    curvature = fit(case, loader)  # a mean has no order
    with pytest.raises(PullbackError, match="The loader is shuffled"):
        score(curvature, case.data, loader)


def test_a_checkpoint_of_a_shuffled_loader(tmp_path: Path) -> None:
    case = make_case("mlp")
    loader = DataLoader(TensorDataset(*case.data), 3, shuffle=True)
    with pytest.raises(PullbackError, match="count some samples twice"):
        fit(case, loader, checkpoint=tmp_path / "fit.pt")


@pytest.mark.parametrize("shape", [(8, 2), (8, 1, 1), (1, 1)])
@pytest.mark.parametrize("kind", ["Gaussian", "MSE", "Poisson"])
def test_regression_targets_that_would_be_broadcast(kind: str, shape: tuple[int, ...]) -> None:
    model = nn.Linear(4, 1)
    batch = (torch.randn(8, 4), torch.ones(shape))
    likelihood = getattr(pb.likelihoods, kind)()
    with pytest.raises(PullbackError, match="do not fit the model's outputs"):
        pb.curvature.fit(model, [batch], likelihood=likelihood)


def test_whole_numbers_as_regression_targets() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(8, 4)
    with pytest.raises(PullbackError, match=r"targets \(8,\) of torch.int64"):
        pb.curvature.fit(model, (x, torch.arange(8)), likelihood=pb.likelihoods.Gaussian())
    column = torch.arange(8)[:, None]
    curvature = pb.curvature.fit(model, (x, column), likelihood=pb.likelihoods.Gaussian())
    prediction = pb.curvature.laplace(curvature)(x)
    for targets in (torch.ones(8, 2), torch.ones(1, 1), torch.ones(3)):
        with pytest.raises(PullbackError, match="do not fit the model's outputs"):
            prediction.log_likelihood(targets)


def test_functional_dropout_that_is_switched_on_after_the_fit() -> None:
    class Noisy(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(input), 0.5, self.training)

    model = Noisy(4, 3).eval()
    data = (torch.randn(16, 4), torch.arange(16) % 3)
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical())
    model.train()
    with pytest.raises(PullbackError, match="not deterministic"):
        pb.curvature.influence(curvature, data, data)
    with pytest.raises(PullbackError, match="not deterministic"):
        pb.curvature.laplace(curvature)(data[0])


def test_a_model_of_another_precision(tmp_path: Path) -> None:
    model = nn.Linear(4, 3, dtype=torch.float32)
    data = (torch.randn(16, 4, dtype=torch.float32), torch.arange(16) % 3)
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical())
    curvature.save(tmp_path / "curvature.pt")
    model.double()
    with pytest.raises(PullbackError, match="another precision"):
        pb.curvature.self_influence(curvature, (data[0].double(), data[1]))
    with pytest.raises(PullbackError, match="another precision"):
        pb.curvature.load(tmp_path / "curvature.pt", model)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match=r"There is no file .*curvature\.save"):
        pb.curvature.load(tmp_path / "missing.pt", nn.Linear(4, 3))


@pytest.mark.parametrize("contents", ["dictionary", "text", "nothing"])
def test_a_file_that_is_no_curvature(contents: str, tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    if contents == "dictionary":
        torch.save({"weight": torch.ones(2)}, path)
    else:
        path.write_bytes(b"hello" if contents == "text" else b"")
    with pytest.raises(PullbackError, match="not a curvature"):
        pb.curvature.load(path, nn.Linear(4, 3))


def test_a_regression_without_residuals() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(8, 4)
    data = (x, model(x).detach())
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Gaussian())
    with pytest.raises(PullbackError, match="noise cannot be estimated"):
        pb.curvature.laplace(curvature)
    assert pb.curvature.laplace(curvature, noise=0.1).noise == pytest.approx(0.1)


def test_probabilities_of_no_draws() -> None:
    case = make_case("mlp")
    prediction = pb.curvature.laplace(fit(case))(case.data[0])
    with pytest.raises(PullbackError, match="number of draws"):
        prediction.probabilities(draws=0)


def test_printed_objects_are_short() -> None:
    curvature = fit(make_case("mlp"))
    assert repr(curvature).startswith("Curvature('ekfac' of ")
    assert len(repr(pb.curvature.laplace(curvature))) < 300


def test_a_model_without_values(tmp_path: Path) -> None:
    curvature = fit(make_case("mlp"))
    curvature.save(tmp_path / "saved")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    with pytest.raises(PullbackError, match="device 'meta'"):
        pb.curvature.fit(model, make_case("mlp").data, likelihood=curvature.likelihood)
    with pytest.raises(PullbackError, match="device 'meta'"):
        pb.curvature.load(tmp_path / "saved", model)
    with pytest.raises(PullbackError, match="changed since"):
        pb.curvature.load(tmp_path / "saved", nn.Flatten())


def test_inference_mode() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    with torch.inference_mode():
        inputs = case.inputs.clone()
        with pytest.raises(PullbackError, match="inference_mode"):
            fit(case)
        with pytest.raises(PullbackError, match="inference_mode"):
            pb.curvature.self_influence(curvature, case.data)
    scores = pb.curvature.self_influence(curvature, (inputs, case.targets))
    assert torch.equal(scores, pb.curvature.self_influence(curvature, case.data))


def test_the_last_layer_from_an_iterator() -> None:
    case = make_case("mlp")
    with pytest.raises(PullbackError, match="read only once"):
        fit(case, iter([case.data]), structure="kfac", parameters="last layer")


def test_an_output_that_no_parameter_moves() -> None:
    class Constant(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).detach()

    case = make_case("mlp")
    case.model = Constant(4, 3)
    with pytest.raises(PullbackError, match="does not depend on the parameters"):
        fit(case)


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", "exact"])
def test_gradients_that_overflow(structure: str) -> None:
    model = nn.Linear(4, 1, dtype=torch.float32)
    nn.init.zeros_(model.weight)
    data = (torch.full((8, 4), 1e25, dtype=torch.float32), torch.ones(8, 1).float())
    with pytest.raises(PullbackError, match=r"'weight' is not finite.*float64"):
        pb.curvature.fit(model, data, likelihood=pb.likelihoods.Gaussian(), structure=structure)


def test_gradients_that_are_nan_while_outputs_are_finite() -> None:
    class Rooted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).abs().sqrt()

    model = Rooted(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    data = (torch.randn(6, 4), torch.arange(6) % 3)
    with pytest.raises(PullbackError, match=r"'weight' is not finite.*square root"):
        pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical())


def test_more_columns_than_memory(monkeypatch) -> None:
    limits = pb.curvature.fitter.FitLimits(column_entries=50)
    monkeypatch.setattr(pb.curvature.fitter, "FIT_LIMITS", limits)
    with pytest.raises(PullbackError, match=r"batches of 5 samples, or give draws=1"):
        fit(make_case("mlp"), structure="exact")


def test_covariances_that_are_too_large(monkeypatch) -> None:
    case = make_case("mlp")
    posterior = pb.curvature.laplace(fit(case))
    limits = pb.curvature.posterior.PredictionLimits(covector_entries=45)
    monkeypatch.setattr(pb.curvature.posterior, "PREDICTION_LIMITS", limits)
    want = posterior(case.inputs).covariance  # in batches of 5
    limits = pb.curvature.posterior.PredictionLimits(covariance_entries=12 * 9)
    monkeypatch.setattr(pb.curvature.posterior, "PREDICTION_LIMITS", limits)
    assert torch.allclose(posterior(case.inputs).covariance, want, rtol=1e-12)
    with pytest.raises(PullbackError, match=r"13 samples with 3 outputs.*fewer samples"):
        posterior(torch.randn(13, 4))


def test_the_determinant_of_a_singular_curvature() -> None:
    case = make_case("mlp")
    for structure in ("exact", "ekfac"):
        curvature = fit(case, structure=structure)
        with pytest.raises(PullbackError, match=r"singular.*damping above zero"):
            curvature.logdet(0)
    regular = fit(case, structure="diagonal")
    assert torch.allclose(regular.logdet(0), regular.eigenvalues().log().sum())


class Changing:
    """A loader with fewer samples on the second reading."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.batch = (inputs, targets)

    def __iter__(self):
        yield self.batch
        self.batch = (self.batch[0][:7], self.batch[1][:7])


def test_training_data_that_change_between_blocks_of_queries() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    loader = Changing(*case.data)
    with pytest.raises(PullbackError, match="first 12 samples were read, then 7"):
        pb.curvature.influence(
            curvature, case.data, loader, query_bytes=8 * curvature.space.size * 6
        )


def test_tokens_of_sequences_of_two_lengths() -> None:
    case = make_case("conv1d")
    curvature = fit(case)
    longer = (torch.randn(2, 5, 4), torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(PullbackError, match="Pad the sequences"):
        pb.curvature.influence_by_token(curvature, case.data, [case.data, longer])


def test_exact_influence_with_other_data_of_the_same_length() -> None:
    case = make_case("mlp")
    curvature = fit(case)
    other = (2 * case.inputs, case.targets)
    with pytest.raises(PullbackError, match="not the data of the fit"):
        pb.curvature.exact_influence(curvature, case.data, case.data, data=other, damping=0.1)


@pytest.mark.parametrize("change", [lambda y: y + 9, lambda y: y[:-1], lambda y: y.double()])
def test_targets_that_a_prediction_does_not_have(change) -> None:
    case = make_case("mlp")
    prediction = pb.curvature.laplace(fit(case))(case.inputs)
    with pytest.raises(PullbackError, match="targets do not fit"):
        prediction.log_likelihood(change(case.targets))


def test_checkpoints_that_do_not_fit(tmp_path: Path, monkeypatch) -> None:
    case = make_case("mlp")
    with pytest.raises(PullbackError, match="there is no folder"):
        fit(case, checkpoint=tmp_path / "nowhere" / "state")
    (tmp_path / "junk.factors").write_bytes(b"junk")
    with pytest.raises(PullbackError, match="cannot be read"):
        fit(case, checkpoint=tmp_path / "junk")
    monkeypatch.setattr(pb.curvature.fitter.Checkpoint, "remove", lambda self: None)
    fit(case, checkpoint=tmp_path / "whole")
    with pytest.raises(PullbackError, match="of another fit"):
        fit(case, checkpoint=tmp_path / "whole", parameters=["2.weight", "2.bias"])


def test_a_checkpoint_of_a_longer_loader(tmp_path: Path, monkeypatch) -> None:
    limits = pb.curvature.checkpoint.CheckpointLimits(seconds=0.0)
    monkeypatch.setattr(pb.curvature.checkpoint, "CHECKPOINT_LIMITS", limits)
    case = make_case("mlp")
    broken = (case.inputs * torch.nan, case.targets)
    with pytest.raises(PullbackError, match="not finite"):
        fit(case, [case.data, case.data, broken], checkpoint=tmp_path / "state")
    with pytest.raises(PullbackError, match="has 2 batches, and the loader yielded 1"):
        fit(case, [case.data], checkpoint=tmp_path / "state")


def test_a_model_in_place_of_what_fit_returned() -> None:
    case = make_case("mlp")
    with pytest.raises(PullbackError, match="Call fit"):
        pb.curvature.fit([case.data], case.model, likelihood=case.likelihood)
    with pytest.raises(PullbackError, match="Pass what fit returned"):
        pb.curvature.laplace(case.model)
    with pytest.raises(PullbackError, match="Pass what fit returned"):
        pb.curvature.influence(case.model, [case.data], [case.data])
