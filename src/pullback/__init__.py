"""Natural gradients for PyTorch: pull a metric back through your model, solve, and step."""

from typing import TYPE_CHECKING

from ._core.lazy import attach

if TYPE_CHECKING:
    from . import (
        curvature,
        flow,
        geometry,
        grams,
        kernels,
        likelihoods,
        linear,
        maps,
        metrics,
        optim,
        pde,
        solvers,
        steps,
        symmetry,
        vmc,
    )
    from ._core.errors import PullbackError, Status
    from .optim import (
        KFAC,
        DampedGaussNewton,
        GaussNewton,
        HessianFree,
        NaturalGradient,
        StepInfo,
        parameter_roles,
    )
    from .symmetry import SliceSGD
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "optim": "DampedGaussNewton GaussNewton HessianFree KFAC NaturalGradient StepInfo "
            "parameter_roles",
            "symmetry": "SliceSGD",
            "_core.errors": "PullbackError Status",
        },
    )

__version__ = "0.2.0"

__all__ = [
    # the stages, in the order of the pipeline
    "maps",
    "likelihoods",
    "metrics",
    "grams",
    "solvers",
    "steps",
    "optim",
    # readers of the pipeline
    "pde",
    "geometry",
    "kernels",
    "symmetry",
    "flow",
    "linear",
    "curvature",
    "vmc",
    # what most people need
    "NaturalGradient",
    "KFAC",
    "GaussNewton",
    "DampedGaussNewton",
    "HessianFree",
    "SliceSGD",
    "StepInfo",
    "parameter_roles",
    "PullbackError",
    "Status",
]
