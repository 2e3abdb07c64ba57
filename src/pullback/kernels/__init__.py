"""Tangent kernels and function-space views: how a model's function moves when its parameters do."""

from .basis import GTK, Basis, ImplicitBasis, gtk
from .change import Expansion, FunctionChange
from .kernel import NTK, KernelOperator, TangentKernel, ntk, ntk_operator
from .predict import Linearized, Prediction, linearize, predict
from .projection import Combination, Projected, natural_ntk, project, projected_kernel, surject
from .rkhs import functional_gradient, pushforward_metric, rkhs_inner
from .tangent import Tangent

__all__ = [
    # the tangent space, and kernels on it
    "Tangent",
    "TangentKernel",
    "NTK",
    "GTK",
    "Projected",
    "Basis",
    "ImplicitBasis",
    # their matrices
    "ntk",
    "gtk",
    "natural_ntk",
    "projected_kernel",
    "ntk_operator",
    "KernelOperator",
    # functions: gradients, projections, inner products
    "functional_gradient",
    "project",
    "surject",
    "rkhs_inner",
    "pushforward_metric",
    "FunctionChange",
    "Expansion",
    "Combination",
    # the linearized model
    "linearize",
    "Linearized",
    "predict",
    "Prediction",
]
