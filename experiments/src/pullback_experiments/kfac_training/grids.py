"""The settings among which every method chooses, as many for each."""

from __future__ import annotations

from .methods import ADAM, ADAMW, KRONECKER, SGD, Method, adam, adamw, kfac, sgd

METHODS = (
    Method(SGD, sgd, [{"lr": lr} for lr in (3e-3, 1e-2, 3e-2, 0.1, 0.3)], {"momentum": 0.9}),
    Method(ADAM, adam, [{"lr": lr} for lr in (1e-3, 3e-3, 1e-2, 3e-2, 0.1)], {}),
    Method(
        KRONECKER,
        kfac,
        [{"damping": d} for d in (0.01, 0.03, 0.1, 0.3, 1.0)],
        {"lr": 0.2, "kl_clip": 0.1, "momentum": 0.8, "statistics_every": 2, "invert_every": 10},
    ),
)

#: the same for MNIST, where small batches serve the first-order methods best, and large ones K-FAC
LARGE = (
    Method(
        SGD,
        sgd,
        [{"lr": lr, "batch": 250} for lr in (1e-4, 3e-4, 1e-3, 3e-3)]
        + [{"lr": lr, "batch": 1000} for lr in (1e-3, 3e-3)],
        {"momentum": 0.9},
    ),
    Method(
        ADAM,
        adam,
        [{"lr": lr, "batch": 250} for lr in (1e-3, 2e-3, 4e-3)]
        + [{"lr": lr, "batch": 100} for lr in (5e-4, 1e-3, 2e-3)],
        {},
    ),
    Method(
        KRONECKER,
        kfac,
        [
            {"damping": damping, "batch": batch, "epochs": epochs}
            for batch, epochs in ((4000, 100), (2000, 80), (1000, 100))  # 1500, 2400, 6000 steps
            for damping in (0.05, 0.1)
        ],
        {"lr": 0.2, "kl_clip": 0.03, "momentum": 0.8, "statistics_every": 5, "invert_every": 20},
        (SGD, ADAM),
    ),
)

# --- VGG-16 on CIFAR-10 ----------------------------------------------------------------------

_SGD = {"momentum": 0.9, "weight_decay": 5e-4, "fused": True}
_ADAMW = {"weight_decay": 0.05, "fused": True}
_KFAC = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.015}
VGG = (
    Method(
        SGD,
        sgd,
        [{"lr": lr, "batch": 128} for lr in (0.02, 0.05, 0.1)] + [{"lr": 0.1, "batch": 512}],
        _SGD,
    ),
    Method(
        ADAMW,
        adamw,
        [{"lr": lr, "batch": 128} for lr in (5e-4, 1e-3, 2e-3)] + [{"lr": 2e-3, "batch": 512}],
        _ADAMW,
    ),
    Method(
        KRONECKER,
        kfac,
        [
            {"damping": damping, "kl_clip": clip, "batch": batch, "epochs": epochs}
            for batch, epochs, clip in ((512, 8, 0.01), (128, 6, 0.003))  # 776 and 2340 steps
            for damping in (0.03, 0.1)
        ],
        {**_KFAC, "statistics_every": 10, "invert_every": 100},
        (SGD, ADAMW),
    ),
)
QUICK_VGG = (
    Method(SGD, sgd, [{"lr": lr} for lr in (0.03, 0.1)], _SGD),
    Method(ADAMW, adamw, [{"lr": lr} for lr in (3e-3, 1e-2)], _ADAMW),
    Method(
        KRONECKER,
        kfac,
        [{"damping": d} for d in (0.03, 0.1)],
        {**_KFAC, "kl_clip": 0.003, "statistics_every": 2, "invert_every": 10},
    ),
)

# --- the transformer on text -----------------------------------------------------------------

_SGD_TEXT = {"momentum": 0.9, "weight_decay": 1e-4, "fused": True}
_ADAMW_TEXT = {"betas": [0.9, 0.99], "weight_decay": 0.1, "fused": True}
_KFAC_TEXT = {"momentum": 0.9, "weight_decay": 1e-3}
TEXT = (
    Method(SGD, sgd, [{"lr": lr} for lr in (0.03, 0.1, 0.2, 0.4)], _SGD_TEXT),
    Method(ADAMW, adamw, [{"lr": lr} for lr in (5e-4, 1e-3, 2e-3, 4e-3)], _ADAMW_TEXT),
    Method(
        KRONECKER,
        kfac,
        [
            {"kl_clip": clip, "batch": 64, "epochs": epochs}
            for epochs in (6, 12)  # 732 and 1464 steps
            for clip in (3e-4, 1e-3)
        ],
        {**_KFAC_TEXT, "lr": 0.1, "damping": 0.03, "statistics_every": 10, "invert_every": 100},
        (SGD, ADAMW),
    ),
)
QUICK_TEXT = (
    Method(SGD, sgd, [{"lr": lr} for lr in (0.1, 0.3)], _SGD_TEXT),
    Method(ADAMW, adamw, [{"lr": lr} for lr in (3e-3, 1e-2)], _ADAMW_TEXT),
    Method(
        KRONECKER,
        kfac,
        [{"damping": d} for d in (0.003, 0.01)],
        {**_KFAC_TEXT, "lr": 0.03, "kl_clip": 1e-3, "statistics_every": 2, "invert_every": 10},
    ),
)
