"""Sliced: other optimizers on a slice, their state transported; and the natural gradient there."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import pullback as pb
from pullback import PullbackError
from pullback.symmetry.descent.transport import find_powers
from pullback.symmetry.sliced import Sliced
from pullback.symmetry.slices import Balanced, make_slice

from .chain import mlp, relative, scalings, shake

torch_optimizers = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.01),
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(16, 3, generator=generator).double(),
        torch.randn(16, 2, generator=generator).double(),
    )


def backward(model: nn.Module) -> Tensor:
    x, y = data()
    model.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def make_sliced(model: nn.Sequential, inner: torch.optim.Optimizer, **options) -> Sliced:
    return Sliced(inner, scalings(model), model=model, **options)


@pytest.mark.parametrize("name", torch_optimizers)
def test_every_optimizer_of_torch_trains_with_its_state_transported(name: str) -> None:
    model = mlp(3, 8, 6, 2)
    shake(model, scalings(model), 3.0)
    opt = make_sliced(model, torch_optimizers[name](model.parameters()))
    first = float(backward(model))
    for _ in range(25):
        backward(model)
        opt.step()
    assert float(backward(model)) < first
    x, _ = data()
    before = model(x)
    opt.retract_()
    assert relative(model(x), before) < 1e-13
    assert opt.slice is not None
    assert opt.slice.contains()


@pytest.mark.parametrize("slice", ["balanced", "layer-balanced", "equal-norm"])
def test_one_step_changes_the_function_as_the_inner_one_does(slice: str) -> None:
    model = mlp(3, 8, 6, 2)
    opt = make_sliced(model, torch.optim.Adam(model.parameters(), lr=0.01), slice=slice)
    twin = copy.deepcopy(model)
    other = torch.optim.Adam(twin.parameters(), lr=0.01)
    for m, o in ((model, opt), (twin, other)):
        backward(m)
        o.step()
    x, _ = data()
    assert relative(model(x), twin(x)) < 1e-14
    far = 0.0
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        factor = p.detach() / q.detach()
        far = max(far, float((factor - 1).abs().max()))
        inner_state = opt.state[p]["optimizer"]
        theirs = other.state[q]
        assert relative(inner_state["exp_avg"] * factor, theirs["exp_avg"]) < 1e-13
        assert relative(inner_state["exp_avg_sq"] * factor**2, theirs["exp_avg_sq"]) < 1e-13
    assert far > 1e-5


def test_it_delegates_as_an_optimizer() -> None:
    model = mlp(3, 8, 6, 2)
    inner = torch.optim.Adam(model[0].parameters(), lr=0.1)
    opt = make_sliced(model, inner)
    opt.add_param_group({"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.2})
    assert len(inner.param_groups) == 2
    assert opt.slice is not None
    assert len(opt.slice.scalings) == 2
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    assert float(opt.step(lambda: backward(model))) > 0
    scheduler.step()
    assert [g["lr"] for g in inner.param_groups] == pytest.approx([0.05, 0.1])
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert "Adam" in repr(opt)


def test_state_dict_resumes_to_the_same_bits() -> None:
    model = mlp(3, 8, 6, 5, 2)
    opt = make_sliced(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for _ in range(3):
        backward(model)
        opt.step()
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    other = mlp(3, 8, 6, 5, 2, seed=1)
    resumed = make_sliced(other, torch.optim.Adam(other.parameters(), lr=1.0))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for _ in range(3):
        for m, o in ((model, opt), (other, resumed)):
            backward(m)
            o.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


class Odd(torch.optim.Optimizer):
    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("memory", torch.ones_like(p))


def test_unknown_state_is_refused_until_its_power_is_said() -> None:
    model = mlp(3, 8, 2)
    opt = make_sliced(model, Odd(model.parameters()))
    with pytest.raises(PullbackError, match="transport="):
        opt.step()
    opt = make_sliced(model, Odd(model.parameters()), transport={"memory": 0})
    opt.step()
    assert float(opt.optimizer.state[model[0].weight]["memory"].min()) == 1


def test_what_cannot_be_wrapped_is_refused() -> None:
    model = mlp(3, 8, 2)
    with pytest.raises(PullbackError, match="LBFGS"):
        make_sliced(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(PullbackError, match="optimizer"):
        Sliced(model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PullbackError, match="model is not known"):
        Sliced(torch.optim.Adam(model.parameters()))
    with pytest.raises(PullbackError, match="Unknown slice 'round'"):
        make_sliced(model, torch.optim.Adam(model.parameters()), slice="round")
    with pytest.raises(PullbackError, match="copied"):
        copy.deepcopy(make_sliced(model, torch.optim.Adam(model.parameters())))


def test_symmetries_are_those_of_the_model_that_is_given() -> None:
    model = mlp(3, 8, 6, 2)
    opt = Sliced(torch.optim.Adam(model.parameters()), model)
    assert opt.slice is not None
    assert opt.slice.units.total == 14


# --- the natural gradient -------------------------------------------------------------------------


def system(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """J of the outputs, the loss's gradient there, and the flat gradient: dense, by autograd."""
    x, y = data()
    params = {n: p.detach() for n, p in model.named_parameters()}
    rows = jacrev(lambda w: functional_call(model, w, (x,)).flatten())(params)
    j = torch.cat([rows[n].flatten(1) for n in params], 1)
    return j, (model(x).detach() - y).flatten(), x


def closure_of(model: nn.Module, opt: torch.optim.Optimizer):
    x, y = data()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x) - y).square().sum(1).mean()
        loss.backward()
        return loss

    return closure


def natural(model: nn.Module, **options) -> pb.NaturalGradient:
    metric = pb.metrics.Fisher(pb.likelihoods.Gaussian())
    return pb.NaturalGradient(model, metric, pb.solvers.PseudoInverse(), **options)


@pytest.mark.parametrize("slice_name", ["balanced", "equal-norm"])
def test_the_natural_gradient_of_a_slice_moves_the_function_as_moore_penrose(
    slice_name: str,
) -> None:
    """Units are layers here, so that the slice has full rank where the net has no other kernel."""
    model = mlp(3, 1, 2)
    with torch.no_grad():
        model[0].bias.fill_(0.3)  # on for most samples, not for all
    slice_ = make_slice(slice_name, scalings(model), model)
    slice_.retract_()
    opt = natural(model)
    closure = closure_of(model, opt)
    plain = opt.direction(closure).x
    lifted = slice_.lift(opt.direction(closure).x)
    j, residual, _ = system(model)
    basis = slice_.tangent_basis()
    restricted = j @ basis
    assert int(torch.linalg.matrix_rank(restricted)) == basis.shape[1]
    assert int(torch.linalg.matrix_rank(j)) == basis.shape[1]
    expected = basis @ (torch.linalg.pinv(restricted) @ residual)
    assert relative(lifted, expected) < 1e-10
    assert relative(j @ lifted, j @ plain) < 1e-10
    assert relative(lifted, plain) < 1e-10  # one hidden layer: both slices are orthogonal to orbits


def test_natural_gradient_steps_stay_on_the_slice() -> None:
    model = mlp(3, 5, 2)
    slice_ = Balanced(scalings(model), model)
    slice_.retract_()
    opt = natural(model, retract=slice_.retract, step=pb.steps.Backtracking())
    closure = closure_of(model, opt)
    first = opt.step(closure).loss
    for _ in range(4):
        info = opt.step(closure)
        assert slice_.contains()
    assert info.loss < first
    wrapped = Sliced(natural(model), scalings(model))
    wrapped.step(closure)
    assert slice_.contains()


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam"])
def test_powers_are_those_of_gradients_seen_by_a_rescaled_parameter(name: str) -> None:
    # w ← 2w sees g/2 all along: state must differ by the power that the table says
    optimizers = []
    for alpha in (1.0, 2.0):
        w = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64) * alpha)
        inner = torch_optimizers[name]([w])
        for group in inner.param_groups:
            if "eps" in group:
                group["eps"] = 0.0  # has units of its own
        for k in range(3):
            w.grad = torch.tensor([0.3 + k, -0.7 * k + 0.1], dtype=torch.float64) / alpha
            inner.step()
        optimizers.append((inner, inner.state[w]))
    powers = find_powers(optimizers[0][0])
    power = 0
    for key, value in optimizers[0][1].items():
        if isinstance(value, Tensor) and value.ndim:
            torch.testing.assert_close(optimizers[1][1][key], value * 2.0 ** powers[key])
            power += 1
    assert power


def test_factored_state_is_refused_unless_it_is_to_stay() -> None:
    model = mlp(3, 4, 2, bias=False)
    optimizer = make_sliced(model, torch.optim.Adafactor(model.parameters()))
    backward(model)
    with pytest.raises(PullbackError, match="row_var"):
        optimizer.step()
    model = mlp(3, 4, 2, bias=False)
    stay = {"row_var": 0, "col_var": 0}
    optimizer = make_sliced(model, torch.optim.Adafactor(model.parameters()), transport=stay)
    backward(model)
    optimizer.step()


def test_the_optimizer_of_another_model_is_refused() -> None:
    model = mlp(3, 4, 2)
    other = mlp(3, 4, 2)
    with pytest.raises(PullbackError, match="not the model's"):
        Sliced(torch.optim.Adam(other.parameters()), model)


def test_state_comes_along_from_where_its_factor_overflows() -> None:
    """Averages of squares are multiplied by 10^560: zeros stay zeros."""
    model = mlp(3, 4, 5, 2)
    adam = torch.optim.Adam(model.parameters())
    backward(model)
    adam.step()
    opt = Sliced(adam, scalings(model), model=model)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for group, size in zip(scalings(model), (-322.0, 322.0), strict=True):
            for name, moved in group.act(params, torch.full((group.units,), size).double()).items():
                params[name].copy_(moved)
    for p in params.values():
        adam.state[p]["exp_avg_sq"].zero_()
    before = model(data()[0])
    opt.retract_()
    assert relative(model(data()[0]), before) < 1e-12
    assert not any(adam.state[p]["exp_avg_sq"].any() for p in params.values())
