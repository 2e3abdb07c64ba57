"""Inverses in float16: as near to the truth as TF32, at any scale, saved, renewed and moved along.

On a CPU products are those of the same float16 factors, summed up in float32. The kernels run on a
GPU, or in Triton's interpreter with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pullback.optim.kfac.blocks import rounded as rounding
from pullback.optim.kfac.blocks.group import Group
from pullback.optim.kfac.blocks.inverse import Inverse
from pullback.optim.kfac.blocks.ranks import Low
from pullback.optim.kfac.blocks.rescaling import rescale_
from pullback.optim.kfac.blocks.rounded import Rounded, roundable, rounded, tf32
from pullback.optim.kfac.statistics.sums import Key

from .test_steady import batch, built, cuda, net, recorder, train

__all__ = ["recorder"]

DOUBLE = torch.float64
JOINT, APART = Key("kronecker", ("w", "b")), Key("kronecker", ("w",))


def wanted(inverse: Inverse) -> bool:
    """Those that a GPU would hold in float16, whatever their size."""
    sides = [inverse.left, inverse.right]
    dense = all(t is not None and t.ndim == 3 and t.dtype == torch.float32 for t in sides)
    return dense and not inverse.factors and inverse.scale is None


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "roundable", wanted)


def spd(groups: int, n: int, condition: float, uneven: float = 0.0) -> Tensor:
    """With coordinates whose units differ by 2^uneven, in float32's bits."""
    q = torch.linalg.qr(torch.randn(groups, n, n, dtype=DOUBLE)).Q
    values = condition ** torch.linspace(-0.5, 0.5, n, dtype=DOUBLE)
    units = 2 ** (uneven * (torch.rand(groups, n, dtype=DOUBLE) - 0.5))
    return ((q * values) @ q.mT * units[:, None] * units[..., None]).float().double()


def gradient(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """As large in each coordinate as the curvature says, so that products cancel."""
    roots = [torch.linalg.cholesky(torch.linalg.inv(s)) for s in (left, right)]
    v = roots[0] @ torch.randn(len(left), left.shape[1], right.shape[1], dtype=DOUBLE) @ roots[1].mT
    return (v / v.abs().amax() * scale).float()


def ten_bits(t: Tensor) -> Tensor:
    """What TF32 keeps of a number."""
    m, e = torch.frexp(t.double())
    return torch.ldexp((m * 2**11).round() / 2**11, e)


def halves(key: Key, left: Tensor, right: Tensor) -> Rounded:
    return rounded([Inverse.of_sides(key, left.float(), right.float())])[0]


def split(key: Key, v: Tensor) -> list[Tensor]:
    return [v[..., :-1].contiguous(), v[..., -1].contiguous()] if key.joint else [v]


def joined(parts: Any) -> Tensor:
    return torch.cat([parts[0], *[b[..., None] for b in parts[1:]]], 2).double()


def apply(key: Key, inverse: Rounded, v: Tensor) -> Tensor:
    given = split(key, v)
    return joined(inverse(given[0], given[1] if key.joint else None))


@pytest.mark.parametrize("key", [JOINT, APART], ids=["joint", "apart"])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6, 1e8])
@pytest.mark.parametrize(
    ("scale", "uneven"), [(1e-30, 0.0), (1e-12, 20.0), (1.0, 0.0), (1.0, 20.0), (1e30, 20.0)]
)
def test_as_near_as_tf32(key: Key, condition: float, scale: float, uneven: float) -> None:
    """Entry by entry, relative to the sum of all terms' sizes, and as a whole."""
    torch.manual_seed(0)
    left, right = spd(2, 64, condition, uneven), spd(2, 48 + key.joint, condition, uneven)
    v = gradient(left, right, scale)
    want = left @ v.double() @ right
    terms = left.abs() @ v.double().abs() @ right.abs()
    got = apply(key, halves(key, left, right), v)
    same = ten_bits((ten_bits(left) @ ten_bits(v)).float()) @ ten_bits(right)
    for error in (lambda x: ((x - want).abs() / terms).amax(), lambda x: (x - want).norm()):
        assert error(got) < 2 * error(same)
    assert ((got - want).abs() / terms).amax() < 2**-13


@pytest.mark.parametrize("key", [JOINT, APART], ids=["joint", "apart"])
def test_widened(key: Key) -> None:
    torch.manual_seed(0)
    left, right = spd(2, 24, 1e4, 10.0), spd(2, 16 + key.joint, 1e4, 10.0)
    wide = halves(key, left, right).widened()
    assert wide.dtype == torch.float32
    assert wide.left is not None
    assert wide.right is not None
    whole = wide.right.double()
    if key.joint:
        assert wide.border is not None
        assert wide.corner is not None
        both = torch.cat([wide.border, wide.corner[:, None]], 1).double()
        whole = torch.cat([torch.cat([whole, both[:, None, :-1]], 1), both[..., None]], 2)
    for got, want in ((wide.left.double(), left), (whole, right)):
        scale = got.diagonal(dim1=1, dim2=2).sum(-1) / want.diagonal(dim1=1, dim2=2).sum(-1)
        errors = (got / scale[:, None, None] - want).abs()
        d = want.diagonal(dim1=1, dim2=2).sqrt()
        assert (errors <= 2**-10 * want.abs() + 2**-16 * d[..., None] * d[:, None]).all()


def test_zeros() -> None:
    inverse = halves(JOINT, spd(2, 16, 1e4), spd(2, 9, 1e4))
    weight, bias = inverse(torch.zeros(2, 16, 8), torch.zeros(2, 16))
    assert not weight.any()
    assert not bias.any()
    v, b = torch.zeros(2, 16, 8), torch.zeros(2, 16)
    b[1, 3] = 1e-3
    weight, bias = inverse(v, b)
    assert not weight[0].any()
    assert bias[1].all()
    # an inverse on the range of nothing
    nothing = halves(JOINT, torch.zeros(1, 16, 16), torch.zeros(1, 9, 9))
    weight, bias = nothing(torch.randn(1, 16, 8), torch.randn(1, 16))
    assert not weight.any()
    assert not bias.any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_not_finite_stays_so(value: float, bias: bool) -> None:
    inverse = halves(JOINT, spd(2, 16, 1e4), spd(2, 9, 1e4))
    v, b = torch.randn(2, 16, 8), torch.randn(2, 16)
    (b[1] if bias else v[1, 2])[3] = value
    weight, shift = inverse(v, b)
    assert weight[0].isfinite().all()
    assert shift[0].isfinite().all()
    assert not weight[1].isfinite().any()
    assert not shift[1].isfinite().any()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_in_groups(count: int, joint: bool, inside: bool) -> None:
    torch.manual_seed(0)
    keys = [Key("kronecker", (f"w{i}", f"b{i}")[: 1 + joint]) for i in range(count)]
    lefts = [spd(2, 16, 1e3) for _ in keys]
    rights = [spd(2, 8 + joint, 1e3) for _ in keys]
    given = list(zip(keys, lefts, rights, strict=True))
    alone = {k: halves(k, a, c) for k, a, c in given}
    whole = rounded([Inverse.of_sides(k, a.float(), c.float()) for k, a, c in given])
    members: Any = dict(zip(keys, whole, strict=True))
    group = Group(members, {k: (2, 16, 8 + joint) for k in keys})
    assert group.dtype == torch.float32
    v = torch.randn(2 * count, 16, 8 + joint)
    given = split(keys[0], v)
    want = torch.cat([apply(k, alone[k], v[2 * i : 2 * i + 2]) for i, k in enumerate(keys)])
    found = group.directions(given, given if inside else None)
    assert torch.equal(joined(found), want)
    # members are parts of what is applied
    members[keys[-1]].unit.zero_()
    assert not joined(group.directions(split(keys[0], v)))[-2:].any()


def test_one_large_member() -> None:
    torch.manual_seed(0)
    left, right = spd(1, 256, 1e4), spd(1, 129, 1e4)
    v = torch.randn(1, 256, 129)
    group = Group({JOINT: halves(JOINT, left, right)}, {JOINT: (1, 256, 129)})
    like = {"w": torch.empty(256, 128), "b": torch.empty(256)}
    found = group({"w": v[0, :, :-1], "b": v[0, :, -1]}, like)
    got = torch.cat([found["w"], found["b"][:, None]], 1).double()
    want = left[0] @ v[0].double() @ right[0]
    assert (got - want).norm() < 2**-10 * want.norm()
    # a bias without a gradient counts as zero
    assert found["w"].shape == group({"w": v[0, :, :-1]}, like)["w"].shape


def test_low_ranks_and_dtype() -> None:
    torch.manual_seed(0)
    inverse = halves(JOINT, spd(1, 16, 1e2), spd(1, 9, 1e2))
    delta, inputs = torch.randn(3, 16), torch.randn(3, 8)
    low = Low(delta, inputs, torch.ones(()), torch.ones((), dtype=torch.bool))
    weight, bias = low(inverse)
    v = torch.cat([delta.T @ inputs, delta.sum(0)[:, None]], 1)
    want = apply(JOINT, inverse, v[None])[0]
    got = torch.cat([weight, bias[:, None]], 1).double()
    assert (got - want).norm() < 0.005 * want.norm()


def test_moved() -> None:
    inverse = halves(JOINT, spd(1, 16, 1e2), spd(1, 9, 1e2))
    same = inverse.moved(torch.device("cpu"), torch.float32)
    assert isinstance(same, Rounded)
    assert same.kind == inverse.kind
    double = inverse.moved(torch.device("cpu"), DOUBLE)
    assert type(double) is Inverse
    assert double.dtype == DOUBLE


def held(opt: Any) -> list[Any]:
    return [x for x in opt.curvature.inverses.values() if isinstance(x, Rounded)]


@pytest.mark.parametrize("options", [{}, {"joint": False}, {"kl_clip": 1e-4}], ids=str)
def test_the_same_training(half, recorder, monkeypatch, options) -> None:
    model = net(torch.float32)
    opt = built(model, **options)
    got = train(model, opt, 30)
    assert len(held(opt)) == 4
    assert len(recorder.recorded) == 1  # renewed where they lie
    monkeypatch.setattr(rounding, "roundable", lambda inverse: False)
    model = net(torch.float32)
    opt = built(model, **options)
    want = train(model, opt, 30)
    assert not held(opt)
    assert (got - want).norm() < 0.01 * want.norm()


def test_resumed_to_the_same_bits(half, recorder) -> None:
    model = net(torch.float32)
    opt = built(model)
    train(model, opt, 9)
    fresh = net(torch.float32)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    loaded = built(fresh)
    loaded.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    twin = copy.deepcopy(opt)
    assert len(held(loaded)) == len(held(twin)) == 4
    want = train(model, opt, 9, start=9)
    assert torch.equal(train(fresh, loaded, 9, start=9), want)
    assert torch.equal(train(twin.model, twin, 9, start=9), want)


@pytest.mark.parametrize("first", [False, True])
def test_a_setting_that_changes(recorder, monkeypatch, first) -> None:
    """What is held keeps working, also from a file; what is new follows the setting."""
    monkeypatch.setattr(rounding, "roundable", wanted if first else lambda inverse: False)
    model = net(torch.float32)
    opt = built(model)
    train(model, opt, 9)
    before = 4 if first else 0
    monkeypatch.setattr(rounding, "roundable", (lambda inverse: False) if first else wanted)
    fresh = net(torch.float32)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    loaded = built(fresh)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    results = []
    for m, o in ((model, opt), (fresh, loaded)):
        train(m, o, 2, start=9)
        assert len(held(o)) == before
        results.append(train(m, o, 12, start=11))
        assert len(held(o)) == 4 - before
        assert o.info.accepted
    assert torch.equal(*results)


def test_broken_gradients_move_nothing(half, recorder) -> None:
    model = net(torch.float32)
    opt = built(model)
    train(model, opt, 10)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = batch(10, model.gain)
    opt.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    model.first.weight.grad[0, 0] = torch.inf
    opt.step()
    assert not opt.info.accepted
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_half_the_memory(half, monkeypatch) -> None:
    sizes = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(rounding, "roundable", lambda inverse: False)
        model = torch.nn.Sequential(torch.nn.Linear(128, 256))
        opt = built(model)
        torch.nn.functional.cross_entropy(model(torch.randn(9, 128)), torch.arange(9)).backward()
        opt.step()
        sizes.append(opt.memory()["inverses"])
    assert sizes[0] < 0.55 * sizes[1]


def test_rescaled_with_the_parameters(half, recorder) -> None:
    model = net(torch.float32)
    opt = built(model)
    train(model, opt, 9)
    key = next(k for k in opt.curvature.inverses if k.names[0] == "first.weight")
    inverse = opt.curvature.inverses[key]
    assert isinstance(inverse, Rounded)
    rooms, groups = inverse.left, opt.curvature.groups
    v = torch.randn(1, 4, 5)
    before = apply(key, inverse, v)
    factor = torch.tensor([2.0, 3.0, 0.5, 1.0])
    given: Any = {"first.weight": [(factor[:, None], True)], "first.bias": [(factor, True)]}
    rescale_(opt.curvature, dict(model.named_parameters()), given)
    assert inverse.left is rooms
    assert opt.curvature.groups is groups
    # Δ of L⁻¹g is L times the old one
    after = apply(key, inverse, v / factor[:, None])
    want = before * factor[:, None]
    assert (after - want).norm() < 2**-9 * want.norm()


def test_where_it_is_wanted(monkeypatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(rounding, "kernels", lambda name, device: rounding)
    try:
        with FakeTensorMode():
            low, high, odd = (torch.empty(1, n, n, device="cuda") for n in (768, 3072, 3073))
            double, diagonal = high.double(), torch.empty(1, 3072, device="cuda")
            there, some = torch.empty(1, 3072, 3072), torch.empty(1, 2304, 2304, device="cuda")
        torch.set_float32_matmul_precision("high")
        assert tf32()
        assert roundable(Inverse(high, low))
        assert roundable(Inverse(low, high))
        assert roundable(Inverse(some, low))
        assert roundable(Inverse(high, high))
        others = [(low, low), (odd, low), (double, low), (high, diagonal), (diagonal, high)]
        assert not any(roundable(Inverse(*both)) for both in [*others, (there, there)])
        assert not roundable(Inverse(high, low, factors=True))
        assert not roundable(Inverse(high, low, scale=low))
        assert not roundable(Inverse(None, high))
        torch.set_float32_matmul_precision("highest")
        assert not roundable(Inverse(high, low))
        torch.set_float32_matmul_precision("high")
        monkeypatch.setattr(rounding, "kernels", lambda name, device: None)
        assert not roundable(Inverse(high, low))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def device(monkeypatch) -> torch.device:
    """Where the kernels work."""
    if torch.cuda.is_available():
        found = torch.device("cuda")
        assert rounding.kernels("rounding", found) is not None
        return found
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or Triton's interpreter")
    from pullback._core.kernels import rounding as kernels

    monkeypatch.setattr(rounding, "kernels", lambda name, device: kernels)
    return torch.device("cpu")


def there(device: torch.device, inverse: Rounded) -> Rounded:
    found = inverse.moved(device, torch.float32)
    assert isinstance(found, Rounded)
    return found


@pytest.mark.cuda
@pytest.mark.parametrize("key", [JOINT, APART], ids=["joint", "apart"])
@pytest.mark.parametrize("condition", [1e2, 1e6])
@pytest.mark.parametrize(("scale", "uneven"), [(1e-30, 0.0), (1.0, 20.0), (1e30, 20.0)])
def test_in_passes(device, key: Key, condition: float, scale: float, uneven: float) -> None:
    torch.manual_seed(0)
    left, right = spd(2, 72, condition, uneven), spd(2, 264 + key.joint, condition, uneven)
    v = gradient(left, right, scale)
    want, terms = left @ v.double() @ right, left.abs() @ v.double().abs() @ right.abs()
    given = [t.to(device) for t in split(key, v)]
    inverse = there(device, halves(key, left, right))
    found = inverse(given[0], given[1] if key.joint else None)
    got = joined(found).cpu()
    assert ((got - want).abs() / terms).amax() < 2**-13
    # from other layouts, and over the gradients themselves
    weight = given[0].mT.contiguous().mT
    bias = given[1].repeat_interleave(2, 1)[:, ::2] if key.joint else None
    assert torch.equal(joined(inverse(weight, bias)).cpu(), got)
    inverse(*(given if key.joint else [*given, None]), *given)
    assert torch.equal(joined(given).cpu(), got)


@pytest.mark.cuda
@pytest.mark.parametrize("value", [0.0, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("bias", [False, True])
def test_passes_keep_what_is_not_finite(device, value: float, bias: bool) -> None:
    inverse = there(device, halves(JOINT, spd(2, 16, 1e4), spd(2, 9, 1e4)))
    v, b = torch.randn(2, 16, 8), torch.randn(2, 16)
    if value == 0:
        v[1], b[1] = 0, 0
    (b[1] if bias else v[1, 2])[3] = value
    weight, shift = inverse(v.to(device), b.to(device))
    assert weight[0].isfinite().all()
    assert shift[0].isfinite().all()
    if value == 0:
        assert not weight[1].any()
        assert not shift[1].any()
    else:
        assert not weight[1].isfinite().any()
        assert not shift[1].isfinite().any()


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_on_a_gpu(monkeypatch, condition: float) -> None:
    """The same numbers from the tensor cores, and the same bits when replayed."""
    torch.manual_seed(0)
    left, right = spd(2, 768, condition), spd(2, 513, condition)
    v = gradient(left, right, 1.0)
    on_host = halves(JOINT, left, right)
    inverse = on_host.moved(torch.device("cuda"), torch.float32)
    assert isinstance(inverse, Rounded)
    want, terms = left @ v.double() @ right, left.abs() @ v.double().abs() @ right.abs()
    given = [t.cuda() for t in split(JOINT, v)]
    got = joined(inverse(*given)).cpu()
    for found in (got, apply(JOINT, on_host, v)):
        assert ((found - want).abs() / terms).amax() < 2**-13
    out = [torch.empty_like(t) for t in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inverse(*given, *out)
    for _ in range(3):
        for t in out:
            t.fill_(torch.nan)
        graph.replay()
        assert torch.equal(joined(out).cpu(), got)
    # without kernels, from what was saved where there were some
    monkeypatch.setattr(rounding, "kernels", lambda name, device: None)
    assert ((joined(inverse(*given)).cpu() - want).abs() / terms).amax() < 2**-13
