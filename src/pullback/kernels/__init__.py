"""Tangent kernels and function-space views: how a model's function moves when its parameters do."""

from .basis import GTK, gtk
from .change import Expansion, FunctionChange
from .kernel import NTK, KernelOperator, TangentKernel, ntk, ntk_operator
from .predict import Linearized, Prediction, linearize, predict
from .projection import Combination, Projected, natural_ntk, project, projected_kernel, surject
from .rkhs import functional_gradient, rkhs_inner
from .tangent import Tangent

__all__ = [
    # the tangent space, and kernels on it
    "Tangent",
    "TangentKernel",
    "NTK",
    "GTK",
    "Projected",
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
    "FunctionChange",
    "Expansion",
    "Combination",
    # the linearized model
    "linearize",
    "Linearized",
    "predict",
    "Prediction",
]
