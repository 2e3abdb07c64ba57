"""Stage one, *maps*: what do the parameters stand for?"""

from .._core.capture import Call
from .base import Covered, Linearization, Map, Pulled, identity_covectors
from .chunks import ChunkedMap, build_in_chunks
from .jets import Scheme
from .module import ModuleMap, shared_plans
from .objective import FunctionLinearization, ObjectiveMap
from .operator import IntegralMap, OperatorMap
from .roles import ParameterRole, Role, find_roles

__all__ = [
    "Call",
    "ChunkedMap",
    "Covered",
    "FunctionLinearization",
    "IntegralMap",
    "Linearization",
    "Map",
    "ModuleMap",
    "ObjectiveMap",
    "OperatorMap",
    "ParameterRole",
    "Pulled",
    "Role",
    "Scheme",
    "build_in_chunks",
    "find_roles",
    "identity_covectors",
    "shared_plans",
]
