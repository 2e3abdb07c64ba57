"""Arguments of other optimizers are refused with the words that say what to write instead."""

import inspect
import re

import pytest
import torch
from torch import nn

import pullback as pb
from pullback.optim.foreign_arguments import (
    KFAC_COUNTERPARTS,
    NATURAL_COUNTERPARTS,
    NATURAL_GRADIENT_COUNTERPARTS,
)
from pullback.optim.kfac import Estimation
from pullback.optim.kfac.rules import AdamW, Eigenbasis, Natural, Spectral

TABLES = {
    pb.KFAC: KFAC_COUNTERPARTS,
    pb.NaturalGradient: NATURAL_GRADIENT_COUNTERPARTS,
    Natural: NATURAL_COUNTERPARTS,
}
CASES = [(optimizer, name) for optimizer, table in TABLES.items() for name in table]
CONSTRUCTORS = {
    "AdamW": AdamW,
    "Cholesky": pb.solvers.Cholesky,
    "Eigenbasis": Eigenbasis,
    "Estimation": Estimation,
    "LevenbergMarquardt": pb.steps.LevenbergMarquardt,
    "Natural": Natural,
    "Outputs": pb.optim.Outputs,
    "QuadraticModel": pb.steps.QuadraticModel,
    "Spectral": Spectral,
    "Spring": pb.steps.Spring,
    "TrustNorm": pb.steps.TrustNorm,
}


@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_a_foreign_argument_is_refused_with_its_counterpart(optimizer: type, name: str) -> None:
    with pytest.raises(TypeError, match=f"has no argument {name}=") as refusal:
        optimizer(nn.Linear(3, 2), **{name: 1})
    assert isinstance(refusal.value, pb.PullbackError)
    assert refusal.value.remedy == TABLES[optimizer][name].remedy


@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_counterparts_are_not_arguments_themselves(optimizer: type, name: str) -> None:
    assert name not in inspect.signature(optimizer).parameters


@pytest.mark.parametrize(("optimizer", "name"), CASES)
def test_remedies_name_arguments_that_exist(optimizer: type, name: str) -> None:
    """Every `name=` of a remedy is an argument of the optimizer or of what it names."""
    remedy = TABLES[optimizer][name].remedy
    known = set(inspect.signature(optimizer).parameters)
    for constructor in re.findall(r"([A-Z]\w+)\b", remedy):
        if constructor in CONSTRUCTORS:
            known |= inspect.signature(CONSTRUCTORS[constructor]).parameters.keys()
    assert set(re.findall(r"(\w+)=", remedy)) <= known


def test_an_unknown_argument_is_refused_with_similar_ones() -> None:
    with pytest.raises(TypeError, match="the nearest are statistics_every"):
        pb.KFAC(nn.Linear(3, 2), statistic_every=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="has no argument stepp"):
        pb.GaussNewton(nn.Linear(3, 2), stepp=3)


def test_the_remedy_for_betas_works() -> None:
    model = nn.Linear(3, 2)
    rule = Eigenbasis(betas=(0.5, 0.99), others=AdamW(betas=(0.8, 0.9)))
    optimizer = pb.KFAC(model, rule=rule)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    assert optimizer.info.accepted
