"""Stage one, *maps*: what do the parameters stand for?"""

from .._core.capture import Call
from .base import Covered, Linearization, Map, Pulled, identity_covectors
from .function import FunctionLinearization
from .integral import IntegralMap
from .jets import Scheme
from .module import ModuleMap
from .objective import ObjectiveMap, Residual
from .operator import OperatorMap
from .shared import shared_plans

__all__ = [
    "Call",
    "Covered",
    "FunctionLinearization",
    "IntegralMap",
    "Linearization",
    "Map",
    "ModuleMap",
    "ObjectiveMap",
    "OperatorMap",
    "Pulled",
    "Residual",
    "Scheme",
    "identity_covectors",
    "shared_plans",
]
