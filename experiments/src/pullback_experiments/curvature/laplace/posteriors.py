"""Posteriors of pullback and of laplace-torch on one trained network."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pullback as pb
from pullback.likelihoods import Likelihood

from .tasks import Split


def fit_posterior(
    model: nn.Module, split: Split, likelihood: Likelihood, structure: str, layers: str | None
) -> pb.curvature.Posterior:
    """Return our posterior with prior and noise by the marginal likelihood."""
    curvature = pb.curvature.fit(
        model, (split.x, split.y), likelihood=likelihood, structure=structure, parameters=layers
    )
    return pb.curvature.laplace(curvature, prior_precision="marginal likelihood")


def fit_peer(model: nn.Module, split: Split, task: str, structure: str, layers: str) -> Any:
    """Return laplace-torch's posterior, tuned as its documentation does: 100 steps of Adam."""
    from laplace import Laplace  # pyright: ignore

    pairs = torch.utils.data.TensorDataset(split.x, split.y)
    loader = torch.utils.data.DataLoader(pairs, batch_size=256)
    peer = Laplace(model, task, subset_of_weights=layers, hessian_structure=structure)
    peer.fit(loader)
    log_prior = torch.zeros(1, requires_grad=True)
    log_noise = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_noise], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        noise = log_noise.exp() if task == "regression" else None
        (-peer.log_marginal_likelihood(log_prior.exp(), noise)).backward()
        optimizer.step()
    return peer
