"""Tangent kernels and function-space views: how a model's function moves when its parameters do."""

from .basis import Basis, ImplicitBasis
from .change import Expansion, FunctionChange
from .descent import Descent, rkhs_descent
from .gradient import functional_gradient
from .gtk import GTK, gtk
from .kernel import NTK, TangentKernel, ntk, ntk_operator
from .linearized import Linearized, linearize
from .operator import KernelOperator
from .predict import Prediction, predict
from .projected import Projected, natural_ntk, projected_kernel
from .projection import Combination, project, surject
from .resolution import fisher_rao_gradient, gradient_norm
from .rkhs import pushforward_metric, rkhs_inner
from .tangent import Tangent
from .tiles import SymmetricTiles, ntk_tiles

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
    "ntk_tiles",
    "SymmetricTiles",
    # functions: gradients, projections, inner products
    "functional_gradient",
    "project",
    "surject",
    "rkhs_inner",
    "pushforward_metric",
    "FunctionChange",
    "Expansion",
    "Combination",
    "rkhs_descent",
    "Descent",
    "gradient_norm",
    "fisher_rao_gradient",
    # the linearized model
    "linearize",
    "Linearized",
    "predict",
    "Prediction",
]
