"""What must hold, and where: equations, boundary and initial conditions, data, energies."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._core.errors import PullbackError
from ..arguments import is_integer, is_number, require
from ..domains import Domain, Pairs, PointSet, Region, SpaceTime
from .fields import Value, View, call_by_name

Where = Region | Pairs | Callable[[Domain], Region | Pairs] | None
#: gives a field (order 0) or its time derivative (order 1) at points (N, d): (N,)
FieldAtTime = Callable[[Tensor, int], Tensor]


class Condition(ABC):
    """One term of the loss: ½·weight·mean |residual|² over the points of a region.

    Args:
        on: the region, or a function of the domain; each kind has its own default.
        weight: of the mean square in the loss; "balanced" weighs a condition against the equations.
            By default it is 1, unless a balanced weight of the problem is 100 or more.
        points: how many; by default `solve` decides.
        name: what reports call it.

    Attributes:
        paired: whether the points come in pairs, on opposite faces.
        is_equation: whether it is a differential equation inside the domain.
        is_energy: whether its mean is minimized itself, and not its square.
        is_integral: whether a sum over all points is squared, so that one process has them all.
        is_initial: whether it holds at the initial time.
        is_prior: whether it says what a field is likely to be; its residual does not vanish.
        is_measured: whether its values are measured, and have noise.
        prescribes_values: whether its residual at u = 0 shows a source or prescribed values.
    """

    paired: ClassVar[bool] = False
    is_equation: ClassVar[bool] = False
    is_energy: ClassVar[bool] = False
    is_integral: ClassVar[bool] = False
    is_initial: ClassVar[bool] = False
    is_prior: ClassVar[bool] = False
    is_measured: ClassVar[bool] = False
    prescribes_values: ClassVar[bool] = False

    def __init__(
        self,
        *,
        on: Where = None,
        weight: float | str | None = None,
        points: int | None = None,
        name: str | None = None,
    ) -> None:
        number: Any = weight
        usable = weight in (None, "balanced") or (is_number(weight) and number > 0)
        require(usable, "The weight of a condition", weight, 'Use a number > 0 or "balanced"')
        usable = name is None or isinstance(name, str)
        require(usable, "The name of a condition", name, "Use a string")
        self.on = on
        self.points = points
        self.balanced = weight == "balanced"
        self.has_default_weight = weight is None
        self.weight = 1.0
        if weight not in (None, "balanced"):
            self.weight = float(number)
        self.name = name or type(self).__name__.lower()

    @abstractmethod
    def residual(self, view: View) -> Tensor | Sequence[Tensor]:
        """What must vanish: (N,), or several of these."""

    def default(self, domain: Domain) -> Region | Pairs:
        """Where it holds unless said otherwise."""
        return domain.boundary

    def region(self, domain: Domain) -> Region | Pairs:
        """Where it holds."""
        if self.on is None:
            return self.default(domain)
        region = self.on(domain) if callable(self.on) else self.on
        if not isinstance(region, Pairs if self.paired else Region):
            needed = "pairs" if self.paired else "single points"
            raise PullbackError(
                f"The region of {self.name!r} is not usable",
                f"{needed} are needed, got {region!r}",
                "Use domain.pairs(axis) for Periodic, and a boundary, a face or a part for the "
                "others; join several by face | face",
            )
        return region

    @property
    def states_problem(self) -> bool:
        """Return True if it is what is solved in the domain: an equation or an energy."""
        return self.is_equation or self.is_energy

    @property
    def holds_exactly(self) -> bool:
        """Return True if its residual is zero at the solution: it is no energy and no prior."""
        return not self.is_energy and not self.is_prior

    @property
    def target(self) -> float | None:
        """The value of an integral over the region, None for what holds at every point."""
        return None

    @property
    def has_chosen_weight(self) -> bool:
        """Return True if data choose its weight."""
        return False

    @property
    def periodic_axis(self) -> str | None:
        """The coordinate in which the domain is closed to a ring, None for most."""
        return None

    def fields_among(self, names: Sequence[str]) -> set[str]:
        """Return the fields that it is for: the one it names, or all."""
        field = getattr(self, "field", None)
        if field is None:
            return set(names)
        return {field}

    def with_initial_values(self, values: FieldAtTime, fields: Sequence[str]) -> Condition:
        """Return the condition for a later time, at which a solution has these values.

        Only initial conditions change.

        Args:
            values: gives each field at the new initial time.
            fields: names of the problem's fields.
        """
        return self


class Interior(Condition):
    """A condition that holds in the whole domain unless said otherwise."""

    def default(self, domain: Domain) -> Region:
        return domain


class Equation(Interior):
    """A PDE, or several: functions of fields, coordinates and unknowns, by name.

    >>> Equation(lambda u: u.t + u * u.x - 0.01 * u.xx).name
    'equation'
    """

    is_equation = True
    prescribes_values = True

    def __init__(self, *residuals: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        usable = bool(residuals) and all(map(callable, residuals))
        remedy = "Pass functions such as lambda u: u.laplacian + 1"
        require(usable, "An equation without residuals", residuals, remedy)
        self.residuals = residuals

    def residual(self, view: View) -> list[Tensor]:
        components = []
        for function in self.residuals:
            values = call_by_name(function, view.arguments, f"The residual of {self.name!r}")
            if isinstance(values, (list, tuple)):
                components += values
            else:
                components.append(values)
        return components


class Dirichlet(Condition):
    """u = value on the boundary."""

    prescribes_values = True

    def __init__(self, value: Value = 0.0, *, field: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.value = value
        self.field = field

    def residual(self, view: View) -> Tensor:
        return view.field(self.field).value - view.value(self.value, f"The value of {self.name!r}")


class Robin(Condition):
    """a·u + b·∂u/∂n = value on the boundary."""

    prescribes_values = True

    def __init__(
        self,
        a: float,
        b: float,
        value: Value = 0.0,
        *,
        field: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        usable = is_number(a) and is_number(b) and (a != 0 or b != 0)
        require(usable, "a·u + b·∂u/∂n", (a, b), "Use numbers a and b, not both 0")
        self.a = a
        self.b = b
        self.value = value
        self.field = field

    def residual(self, view: View) -> Tensor:
        u = view.field(self.field)
        left_side = self.b * u.normal
        if self.a:
            left_side = left_side + self.a * u.value
        return left_side - view.value(self.value, f"The value of {self.name!r}")


class Neumann(Robin):
    """∂u/∂n = value on the boundary."""

    def __init__(self, value: Value = 0.0, **options: Any) -> None:
        super().__init__(0.0, 1.0, value, **options)


class Periodic(Condition):
    """u and its derivatives along `axis` up to `order` agree on opposite faces."""

    paired = True

    def __init__(self, axis: str, order: int = 1, *, field: str | None = None, **options: Any):
        super().__init__(**options)
        require(is_integer(order, 0), "The order of a periodic condition", order, "Use 0, 1, …")
        self.axis = axis
        self.order = order
        self.field = field

    @property
    def periodic_axis(self) -> str | None:
        if self.on is not None:
            return None
        return self.axis

    def default(self, domain: Domain) -> Pairs:
        return domain.pairs(self.axis)

    def residual(self, view: View) -> list[Tensor]:
        low_face = view.field(self.field, 0)
        high_face = view.field(self.field, 1)
        names = [[self.axis] * k for k in range(self.order + 1)]
        return [low_face.d(*n) - high_face.d(*n) for n in names]


class Initial(Condition):
    """u = value, and u.t = velocity where it is given, at the initial time."""

    is_initial = True
    prescribes_values = True

    def __init__(
        self,
        value: Value,
        velocity: Value | None = None,
        *,
        field: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.value = value
        self.velocity = velocity
        self.field = field

    def default(self, domain: Domain) -> Region:
        if not isinstance(domain, SpaceTime):
            raise PullbackError(
                "An initial condition needs time",
                f"the domain is {domain!r}",
                "Use SpaceTime(space, (t0, t1)), or say where with on=",
            )
        return domain.initial

    def residual(self, view: View) -> list[Tensor]:
        u = view.field(self.field)
        what = f"The value of {self.name!r}"
        components = [u.value - view.value(self.value, what)]
        if self.velocity is not None:
            components.append(u.d("t") - view.value(self.velocity, what))
        return components

    def with_initial_values(self, values: FieldAtTime, fields: Sequence[str]) -> Condition:
        column = fields.index(self.field) if self.field else 0
        later = copy.copy(self)
        later.value = lambda points: values(points, 0)[:, column]
        if self.velocity is not None:
            later.velocity = lambda points: values(points, 1)[:, column]
        return later


class Data(Condition):
    """u = values at measured points (N, d)."""

    is_measured = True

    def __init__(
        self, points: Tensor, values: Tensor, *, field: str | None = None, **options: Any
    ) -> None:
        if "on" in options:
            raise PullbackError(
                "Data takes no on=", "its points are its region", "Leave on= out, or use Dirichlet"
            )
        x = _as_real_tensor(points, "points")
        if x.ndim == 1:
            x = x[:, None]
        self._values = _as_real_tensor(values, "values").reshape(-1)
        if len(x) != len(self._values):
            raise PullbackError(
                "Measured points and values do not match",
                f"{len(x)} points and {len(self._values)} values",
                "Give one value per point",
            )
        if not bool(torch.isfinite(self._values).all()):
            raise PullbackError(
                "Measured values are not finite",
                f"{int((~torch.isfinite(self._values)).sum())} of {len(self._values)} are not",
                "Leave those points out",
            )
        super().__init__(points=len(x), **options)
        self._x = x
        self.field = field

    def default(self, domain: Domain) -> Region:
        return PointSet(self._x, names=domain.names)

    def residual(self, view: View) -> Tensor:
        values = view.points.take_share_of(self._values)
        return view.field(self.field).value - values.to(view.points.x)


class Integral(Interior):
    """∫ f(u, ∂u, x) = value over the domain, or `on=` a part of it: one number for all points.

    A mean that is zero, a total mass, the norm of an eigenfunction. The loss has
    ½·weight·(∫f − value)². Its points are those of a quadrature, Gauss up to three dimensions.

    >>> Integral(lambda u: u**2, 1.0).name
    'integral'
    """

    is_integral = True

    def __init__(self, integrand: Callable[..., Any], value: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        usable = callable(integrand)
        require(usable, "The integrand", integrand, "Pass a function: Integral(lambda u: u**2, 1)")
        remedy = "Use a number; what depends on unknowns belongs to the integrand"
        require(is_number(value), "The value of an integral", value, remedy)
        require(not self.balanced, "The weight of an integral", "balanced", "Use a number > 0")
        self.integrand = integrand
        self.value = float(value)

    @property
    def target(self) -> float | None:
        return self.value

    def residual(self, view: View) -> Tensor:
        """The integrand at the points, (N,)."""
        return view.evaluate(self.integrand, f"The integrand of {self.name!r}")


class Prior(Interior):
    """A field that is found from data with noise is moderate and smooth.

    The loss has ½·weight·mean ((k − mean)² + length²·|∇k|²) over the domain. Without a number the
    weight begins at 1, and falls while the run goes on to what the noise in the data asks for,
    which is estimated with it (`choose_prior_factor`).

    >>> Prior("k").name
    'prior'
    """

    is_prior = True

    def __init__(self, field: str, mean: float = 0.0, length: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        usable = isinstance(field, str)
        require(usable, "The field of a prior", field, 'Name a field: Prior("k")')
        require(is_number(mean), "The mean of a prior", mean, "Use a number")
        usable = is_number(length) and length > 0
        require(usable, "The length of a prior", length, "Use a number > 0")
        require(not self.balanced, "The weight of a prior", "balanced", "Use a number > 0 or None")
        self.field = field
        self.mean = mean
        self.length = length
        self._has_given_weight = options.get("weight") is not None

    @property
    def has_chosen_weight(self) -> bool:
        return not self._has_given_weight

    def residual(self, view: View) -> list[Tensor]:
        k = view.field(self.field)
        return [k.value - self.mean, self.length * k.grad]


class Energy(Interior):
    """weight · mean e(u, ∂u, x) over the domain: minimized itself, not its square (deep Ritz).

    The density must be convex in the field and its derivatives; its second variation is the
    metric. The loss is the mean over the region: the integral divided by its measure.
    """

    is_energy = True

    def __init__(self, density: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        remedy = "Pass a function such as lambda u: 0.5 * u.x**2 - u"
        require(callable(density), "The density of an energy", density, remedy)
        self.density = density

    def residual(self, view: View) -> Tensor:
        """The density at the points, (N,)."""
        return view.evaluate(self.density, f"The density of {self.name!r}")


def _as_real_tensor(values: object, what: str) -> Tensor:
    """Return real numbers of shape (N, ...) in float64; raise for anything else."""
    try:
        tensor = torch.as_tensor(values)
        usable = tensor.ndim > 0 and not tensor.is_complex()
    except (TypeError, ValueError, RuntimeError):
        usable = False
    remedy = "Pass a tensor of real numbers"
    require(usable, f"The tensor of measured {what}", values, remedy)
    return torch.as_tensor(values, dtype=torch.float64)
