"""Stage one, *maps*: what do the parameters stand for?"""

from .._core.capture import Call
from .base import Covered, Linearization, Map, Pulled, identity_covectors
from .jets import Scheme
from .module import ModuleMap, shared_plans
from .objective import FunctionLinearization, ObjectiveMap
from .operator import IntegralMap, OperatorMap

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
    "Scheme",
    "identity_covectors",
    "shared_plans",
]
