"""Maps of differential operators against torch.func.jacrev of the same residual, written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.utils import parametrizations

from pullback import PullbackError
from pullback._core.products import mirror_lower_triangle
from pullback.maps import OperatorMap, Scheme
from pullback.maps.layers import AffineBlock
from pullback.maps.layers.gram import Route
from pullback.maps.objective import FunctionLinearization
from pullback.maps.operator import JetLinearization
from pullback.testing import assert_close
from tests.maps.layers.grams import gram

N = 7
D = 2
X = torch.rand(1, N, D, generator=torch.Generator().manual_seed(3)).double()
TWO = torch.rand(2, N, D, generator=torch.Generator().manual_seed(4)).double()
Q = torch.linspace(0.2, 1, N).double()
SCHEME = Scheme.of([(0, 1)], laplacian=(0, 1))  # u, u_x, u_y, u_xy, Δu


class Net(nn.Module):
    """A module from a function of itself."""

    def __init__(self, forward: Callable[[Any, Any], Any], **modules: Any) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self._forward(self, x)


def networks() -> dict[str, Callable[[], nn.Module]]:
    def lin(a: int, b: int, bias: bool = True) -> nn.Linear:
        return nn.Linear(a, b, bias=bias)

    def par(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape))

    def tied() -> nn.Module:
        net = nn.Sequential(lin(D, 5), nn.Tanh(), lin(5, 5), nn.Tanh(), lin(5, 5), nn.Tanh())
        net[4].weight = net[2].weight  # pyright: ignore[reportAttributeAccessIssue]
        return nn.Sequential(net, lin(5, 2))

    def frozen() -> nn.Module:
        net = nn.Sequential(lin(D, 5), nn.Tanh(), lin(5, 4), nn.Tanh(), lin(4, 2))
        net[0].weight.requires_grad_(False)
        net[2].bias.requires_grad_(False)
        return net

    def shared_bias() -> nn.Module:
        net = nn.Sequential(lin(D, 4), nn.Tanh(), lin(4, 4), nn.Tanh(), lin(4, 2))
        net[2].bias = net[0].bias
        return net

    return {
        "mlp": lambda: nn.Sequential(lin(D, 6), nn.Tanh(), lin(6, 5), nn.Tanh(), lin(5, 2)),
        "wide": lambda: nn.Sequential(lin(D, 40), nn.GELU(), lin(40, 30), nn.SiLU(), lin(30, 2)),
        "one layer": lambda: lin(D, 2),
        "no bias": lambda: nn.Sequential(lin(D, 6, False), nn.Tanh(), lin(6, 2, False)),
        "tied": tied,
        "shared bias": shared_bias,
        "frozen": frozen,
        "several uses": lambda: Net(
            lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.b(torch.tanh(m.a(x))))))),
            a=lin(D, 4), b=lin(4, 4), c=lin(4, 2),
        ),
        "weight used elsewhere": lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x))) * m.a.weight.sum() + m.b.bias[0],
            a=lin(D, 4), b=lin(4, 2),
        ),
        "plain parameters": lambda: Net(
            lambda m, x: m.scale * torch.sin(x @ m.w) + m.shift,
            w=par(D, 2), scale=par(), shift=par(2),
        ),
        "linear without module": lambda: Net(
            lambda m, x: nn.functional.linear(torch.tanh(nn.functional.linear(x, m.w)), m.v, m.s),
            w=par(4, D), v=par(2, 4), s=par(2),
        ),
        "vector weight": lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x)))
            * nn.functional.linear(torch.sin(x), m.v)[:, None],
            a=lin(D, 4), b=lin(4, 2), v=par(D),
        ),
        "weight norm": lambda: nn.Sequential(
            parametrizations.weight_norm(lin(D, 5)), nn.Tanh(), lin(5, 2)
        ),
        "places": lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x[:, :, None])).flatten(1)), a=lin(1, 3), b=lin(6, 2)
        ),
        "points in a row": lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x.reshape(-1, 1))).reshape(-1, 6)),
            a=lin(1, 3), b=lin(6, 2),
        ),
        "mirrored": lambda: Net(
            lambda m, x: sum(m.b(torch.tanh(m.a(torch.cat([x, -x])))).chunk(2)),
            a=lin(D, 3), b=lin(3, 2),
        ),
        "gates": lambda: Net(
            lambda m, x: m.c(torch.sigmoid(m.a(x)) * torch.tanh(m.b(x)) + m.b(x)),
            a=lin(D, 4), b=lin(D, 4), c=lin(4, 2),
        ),
        "unused": lambda: Net(lambda m, x: m.a(torch.sin(x)), a=lin(D, 2), b=lin(D, 3)),
        "forward mode towers": lambda: Net(
            lambda m, x: m.b(torch.atan(m.a(x)) + torch.log1p(m.a(x).square())),
            a=lin(D, 4), b=lin(4, 2),
        ),
        "nested": lambda: nn.Sequential(lin(D, 4), nn.ELU(), nn.LayerNorm(4), lin(4, 2)),
        "points that see each other": lambda: Net(
            lambda m, x: m.b(torch.tanh(m.a(x)) * torch.tanh(m.a(x))[:1]), a=lin(D, 4), b=lin(4, 2)
        ),
    }  # fmt: skip


NETWORKS = networks()


def made(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]().to(dtype)


def system(channels: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Three nonlinear equations per point, of two fields at the first and last site."""
    u = channels[:, 0, :, 0]
    v = channels[:, -1, :, 1]
    return torch.stack([u[4] + u[0] * v[1], v[4] - u[2] ** 2, u[3] * v[0] - v[3]], -1)


def source(net: nn.Module, x: Tensor = X, operator: Any = system) -> OperatorMap:
    def apply(params: dict[str, Tensor], x: Any) -> Any:
        return functional_call(net, params, (x,))

    return OperatorMap(apply, x, SCHEME, operator, Q.to(x))


def written_out(net: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same residual with derivatives by nested reverse mode, (N, 3)."""

    def at(site: Tensor, i: int) -> list[Tensor]:
        def u(y: Tensor) -> Tensor:
            return functional_call(net, params, (y,))[:, i]

        def total(y: Tensor) -> Tensor:
            return u(y).sum()

        def first(y: Tensor, axis: int) -> Tensor:
            return torch.func.grad(total)(y)[:, axis]

        def second(y: Tensor, one: int, two: int) -> Tensor:
            return torch.func.grad(lambda z: first(z, one).sum())(y)[:, two]

        laplacian = second(site, 0, 0) + second(site, 1, 1)
        return [u(site), first(site, 0), first(site, 1), second(site, 0, 1), laplacian]

    u = at(x[0], 0)
    v = at(x[-1], 1)
    out = torch.stack([u[4] + u[0] * v[1], v[4] - u[2] ** 2, u[3] * v[0] - v[3]], -1)
    return Q.to(x).sqrt()[:, None] * out


def split(net: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in net.named_parameters() if p.requires_grad}


def dense(net: nn.Module, x: Tensor) -> Tensor:
    params = {n: p.detach() for n, p in split(net).items()}
    jacobians = jacrev(lambda p: written_out(net, p, x))(params)
    return torch.cat([j.reshape(3 * N, -1) for j in jacobians.values()], 1)


COUPLED = "points that see each other"
ALONE = [n for n in NETWORKS if n != COUPLED]


@pytest.mark.parametrize(
    ("name", "sites"),
    [*((name, TWO) for name in ALONE), *((name, X) for name in ALONE[:1])],
)
def test_every_product_is_that_of_the_jacobian(name: str, sites: Tensor) -> None:
    net = made(name)
    linear = source(net, sites).linearize(split(net))
    j = dense(net, sites)
    params = split(net)
    z = written_out(net, {n: p.detach() for n, p in params.items()}, sites)
    v = torch.randn(j.shape[1]).double()
    u = torch.randn(N, 3).double()
    assert_close(linear.value, z, 1e-12, "value")
    assert_close(linear.rows(), j, 1e-11, "rows")
    assert_close(linear.jvp(v).flatten(), j @ v, 1e-11, "jvp")
    assert_close(linear.vjp(u), j.T @ u.flatten(), 1e-11, "vjp")
    assert_close(linear.kernel(), j @ j.T, 1e-11, "kernel")
    covectors = torch.randn(2, N, 3).double()
    rows = torch.einsum("rnk,nkp->nrp", covectors, j.view(N, 3, -1))
    pulled = linear.pullback(covectors)
    flat = rows.flatten(0, 1)
    c = torch.randn(N, 2).double()
    assert_close(pulled.rows(), flat, 1e-11, "pulled rows")
    assert_close(pulled.project(v).flatten(), flat @ v, 1e-11, "project")
    assert_close(pulled.lift(c), flat.T @ c.flatten(), 1e-11, "lift")
    assert_close(pulled.kernel(budget=2000), flat @ flat.T, 1e-11, "kernel in panels")
    block = pulled.narrow(2, 5)
    assert_close(block.rows(), rows[2:5].flatten(0, 1), 1e-11, "narrow")
    assert_close(block.kernel(pulled), rows[2:5].flatten(0, 1) @ flat.T, 1e-11, "narrow kernel")
    assert_close(pulled.kernel(block), flat @ rows[2:5].flatten(0, 1).T, 1e-11, "kernel narrow")
    assert_close(block.kernel(), block.rows() @ block.rows().T, 1e-11, "narrow itself")


def test_points_that_see_each_other_are_refused() -> None:
    """Rows of one point would hold the derivatives of others, and derivatives mean nothing."""
    net = made(COUPLED)
    with pytest.raises(PullbackError, match="depends on other points"):
        source(net).linearize(split(net))


@pytest.mark.parametrize(
    ("name", "reason"), [("nested", "elu"), ("mlp", ""), ("points in a row", ""), ("mirrored", "")]
)
def test_the_map_says_why_derivatives_are_nested(name: str, reason: str) -> None:
    net = made(name)
    map = source(net)
    linear = map.linearize(split(net))
    assert reason in map.nested_because
    assert bool(reason) == bool(map.nested_because)
    assert isinstance(linear, FunctionLinearization)
    assert isinstance(linear, JetLinearization) == (not reason)


def check_type(m: Any, x: Any) -> Any:
    assert isinstance(x, Tensor)
    return m.a(torch.sin(x))


def branch_on_values(m: Any, x: Any) -> Any:
    if x.shape[0] > 1 and bool((x[:, 0] >= 0).all()):
        return m.a(torch.sin(x))
    return m.a(x)


def modulo(m: Any, x: Any) -> Any:
    return m.a(torch.sin(x % 5))


@pytest.mark.parametrize("forward", [check_type, branch_on_values, modulo])
def test_what_only_tensors_can_do_is_nested(forward: Any) -> None:
    torch.manual_seed(0)
    net = Net(forward, a=nn.Linear(D, 2)).double()
    map = source(net)
    linear = map.linearize(split(net))
    assert map.nested_because
    plain = Net(lambda m, x: m.a(torch.sin(x)), a=net.a)
    assert_close(linear.rows(), dense(plain, X), 1e-11, "rows")


def test_an_output_that_ignores_the_input() -> None:
    net = Net(lambda m, x: m.c.expand(x.shape[0], 2), c=nn.Parameter(torch.ones(2))).double()
    linear = source(net).linearize(split(net))
    assert_close(linear.rows(), dense(net, X), 1e-12, "rows")


def test_errors_of_the_network_itself_are_raised() -> None:
    net = Net(lambda m, x: m.a(x).nonsense(), a=nn.Linear(D, 2)).double()
    with pytest.raises(AttributeError, match="nonsense"):
        source(net).linearize(split(net))


def test_unknown_coefficients_in_the_operator() -> None:
    net = made("mlp")
    params = {**split(net), "k": nn.Parameter(torch.tensor(0.7).double())}

    def operator(channels: Tensor, p: dict[str, Tensor]) -> Tensor:
        return (p["k"] * channels[4, 0, :, 0] - p["k"] ** 2 * channels[0, 0, :, 1])[:, None]

    def apply(p: dict[str, Tensor], x: Any) -> Any:
        return functional_call(net, {n: v for n, v in p.items() if n != "k"}, (x,))

    linear = OperatorMap(apply, X, SCHEME, operator, Q).linearize(params)
    fixed = {n: p.detach() for n, p in params.items()}

    def plain(p: dict[str, Tensor]) -> Tensor:
        def u(y: Tensor, i: int) -> Tensor:
            return apply(p, y)[:, i]

        hessian = torch.func.vmap(torch.func.hessian(lambda y: u(y[None], 0)[0]))(X[0])
        laplacian = hessian.diagonal(dim1=1, dim2=2).sum(1)
        return Q.sqrt() * (p["k"] * laplacian - p["k"] ** 2 * u(X[0], 1))

    j = torch.cat([x.reshape(N, -1) for x in jacrev(plain)(fixed).values()], 1)
    assert_close(linear.rows(), j, 1e-11, "rows")
    assert_close(linear.kernel(), j @ j.T, 1e-11, "kernel")
    routes = {c.name: c.route for c in linear.pullback(torch.ones(1, N, 1).double()).coverage}
    assert routes["k"] == "rows"
    assert set(routes) == set(params)


def test_kernels_between_operators_of_different_orders() -> None:
    """A boundary condition has fewer channels than an equation; both see the same parameters."""
    for name in ("mlp", "no bias", "wide", "tied", "frozen"):
        net = made(name)
        params = split(net)
        one = source(net).linearize(params)

        def boundary(channels: Tensor, p: dict[str, Tensor]) -> Tensor:
            return channels[0, 0] - channels[0, 1]

        def apply(p: dict[str, Tensor], x: Any, net: nn.Module = net) -> Any:
            return functional_call(net, p, (x,))

        pairs = OperatorMap(apply, TWO[:, :4], Scheme.of([()]), boundary, Q[:4])
        two = pairs.linearize(params)
        assert_close(one.kernel(two), one.rows() @ two.rows().T, 1e-11, name)
        assert_close(two.kernel(one), two.rows() @ one.rows().T, 1e-11, name)
        fixed = {n: p.detach() for n, p in params.items()}
        jacobians = jacrev(pairs)(fixed)
        j = torch.cat([x.flatten(0, 1).flatten(1) for x in jacobians.values()], 1)
        assert_close(two.rows(), j, 1e-11, name)


def test_float32() -> None:
    net = made("mlp", torch.float32)
    linear = source(net, X.float()).linearize(split(net))
    j = dense(net.double(), X)
    assert linear.rows().dtype == torch.float32
    assert_close(linear.rows(), j, 1e-5, "rows")
    assert_close(linear.kernel(), j @ j.T, 1e-5, "kernel")


# --- blocks with a homogeneous coordinate --------------------------------------------------------


def block(n: int, r: int, t: int, weight: bool, bias: bool, seed: int, g: int = 2) -> AffineBlock:
    torch.manual_seed(seed)
    x = torch.randn(n, g, t, 3).double()
    delta = torch.randn(n, r, g, t, 4).double()
    h = torch.randint(0, 2, (t,)).double()
    h[0] = 1
    return AffineBlock(
        "w" if weight else None,
        "b" if bias else None,
        x,
        delta,
        h if bias else None,
    )


def flat_rows(b: AffineBlock) -> Tensor:
    """Σ_t δ_t ⊗ (a_t, h_t), one entry after the other."""
    x = b._inputs()
    delta = b._delta
    h = b._h
    out = []
    if "w" in b.names:
        w = (delta[..., :, None] * x[:, None, :, :, None, :]).sum(3)
        out.append(w.flatten(2))
    if "b" in b.names:
        if h is None:
            heights = torch.ones(delta.shape[3]).double()
        else:
            heights = h
        out.append((delta * heights[:, None]).sum(3).flatten(2))
    return torch.cat(out, -1).flatten(0, 1)


@pytest.mark.parametrize("budget", [1, 4000, 2**30])
@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True)])
def test_both_routes_of_a_block(weight: bool, bias: bool, budget: int) -> None:
    one = block(5, 2, 4, weight, bias, 0)
    two = block(3, 1, 2, weight, bias, 1)
    for a, b in ((one, one), (one, two), (two, one), (two, two), (one, one.narrow(1, 4))):
        assert isinstance(b, AffineBlock)
        want = flat_rows(a) @ flat_rows(b).T
        routes = [Route.HADAMARD]
        if weight:
            routes += [Route.MATERIALIZED, Route.CONTRACTED]
        for route in routes:
            out = torch.zeros_like(want)
            a._add_gram_by(route, out, b, budget)
            assert_close(mirror_lower_triangle(out) if b is a else out, want, 1e-13, route.value)
        assert_close(gram(a, b, budget), want, 1e-13, "chosen")
    names = {"w": torch.randn(2 * 4 * 3).double(), "b": torch.randn(2 * 4).double()}
    v = torch.cat([names[n] for n in one.names])
    c = torch.randn(5, 2).double()
    assert_close(one.project(names).flatten(), flat_rows(one) @ v, 1e-13, "project")
    lifted = one.lift(c)
    actual = torch.cat([lifted[n] for n in one.names])
    assert_close(actual, flat_rows(one).T @ c.flatten(), 1e-13, "lift")
    rows = one.rows()
    assert_close(
        torch.cat([rows[n] for n in one.names], -1).flatten(0, 1), flat_rows(one), 1e-13, ""
    )
