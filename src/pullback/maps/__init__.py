"""Stage one, *maps*: what do the parameters stand for?"""

from .._core.capture import Call
from .base import Covered, Linearization, Map, Pulled, identity_covectors
from .module import ModuleMap
from .objective import ObjectiveMap, Residual

__all__ = [
    "Call",
    "Covered",
    "Linearization",
    "Map",
    "ModuleMap",
    "ObjectiveMap",
    "Pulled",
    "Residual",
    "identity_covectors",
]
