"""Which weights have a length without effect: against networks with weights of another length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import pullback as pb

#: of normalizations; with a usual one, lengths have a small effect
EPS = 1e-30
MATRICES = ("matrix", "convolution")


class Net(nn.Module):
    """A network with two convolutions, a norm and a head, used as a function says.

    Args:
        forward: of the network itself and its input.
        layers: in the place of those with the same names, or beside them.
    """

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = forward
        self.conv = make_conv()
        self.other = make_conv()
        self.norm = nn.BatchNorm2d(4, eps=EPS)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2))
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def make_conv(inputs: int = 3, outputs: int = 4, bias: bool = False, **options: Any) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias, **options)


def make_input() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=generator)


def list_normalized(model: nn.Module, x: Tensor) -> set[str]:
    """The names that the table has."""
    return {row.name for row in pb.parameter_roles(model, x) if row.is_normalized}


def list_without_effect(model: nn.Module, x: Tensor) -> set[str]:
    """The names of matrices and filters that change the output, but not by their length."""
    rows = [row for row in pb.parameter_roles(model, x) if row.role.value in MATRICES]
    before = compute_outputs(model, x)
    names = set()
    for row in rows:
        weight = model.get_parameter(row.name)
        original = weight.detach().clone()

        def measure_change(value: Tensor, weight: Tensor = weight) -> float:
            with torch.no_grad():
                weight.copy_(value)
            return float((compute_outputs(model, x) - before).norm() / before.norm())

        change_by_length = max(measure_change(2 * original), measure_change(original / 2))
        if change_by_length < 1e-9 < measure_change(torch.randn_like(weight)):
            names.add(row.name)
        measure_change(original)
    return names


def compute_outputs(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    outputs = model(x)
    if isinstance(outputs, Tensor):
        return outputs.detach().flatten()
    return torch.cat([output.detach().double().flatten() for output in outputs])


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4, eps=EPS),
    "batch without averages": lambda: nn.BatchNorm2d(4, eps=EPS, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm2d(4, eps=EPS),
    "group": lambda: nn.GroupNorm(2, 4, eps=EPS),
    "layer": lambda: nn.LayerNorm([4, 4, 4], eps=EPS),
    "rms": lambda: nn.RMSNorm([4, 4, 4], eps=EPS),
}
BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "relu": nn.ReLU,
    "leaky": lambda: nn.LeakyReLU(0.1, inplace=True),
    "gelu": nn.GELU,
    "bounded": lambda: nn.Hardtanh(-0.2, 0.2),
    "maximum": lambda: nn.MaxPool2d(3, 1, 1),
    "mean": lambda: nn.AvgPool2d(3, 1, 1),
    "dropout": lambda: nn.Dropout(0.3),
}


PAIRS = [("batch", between) for between in BETWEEN]
PAIRS += [(norm, between) for norm in NORMS for between in ("nothing", "relu", "maximum")]


@pytest.mark.parametrize(("norm", "between"), dict.fromkeys(PAIRS))
def test_layers_before_a_norm(norm: str, between: str) -> None:
    """With a bias and without one, grouped and transposed."""
    x = make_input()
    convolutions = (
        make_conv(),
        make_conv(bias=True),
        nn.Sequential(make_conv(), nn.ReLU(), make_conv(4, 4, groups=2)),
        nn.ConvTranspose2d(3, 4, 3, padding=1, bias=False),
    )
    for conv in convolutions:
        torch.manual_seed(0)
        head = nn.Linear(64, 2)
        model = nn.Sequential(conv, BETWEEN[between](), NORMS[norm](), nn.Flatten(), head).double()
        assert list_normalized(model, x) == list_without_effect(model, x)


class PlusOne(torch.autograd.Function):
    """x + 1, which function modes do not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return cotangents[0]


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh()


def change_in_place(y: Tensor) -> Tensor:
    y[:, :2].add_(torch.ones(4, dtype=y.dtype).cumsum(0))
    return y


def change_data(y: Tensor) -> Tensor:
    y.data.add_(torch.ones(4, dtype=y.dtype).cumsum(0))
    return y


def write_into(y: Tensor) -> Tensor:
    out = torch.ones(5, 4, 4, 5, dtype=y.dtype)
    out[..., :4] = y
    return out


def use_twice(net: Any, y: Tensor, second: Callable[[Tensor], Tensor]) -> Tensor:
    return net.head(net.norm(y) + second(y))


def shape_like_input(net: Any, y: Tensor) -> Tensor:
    return net.norm(y.flatten(2)[..., None]).reshape_as(y).type_as(y).to(y)


def square(net: Any, y: Tensor) -> Tensor:
    return net.head(net.norm(y * y))


def return_both(net: Any, y: Tensor) -> list[Tensor]:
    return [net.head(net.norm(y)), y]


def return_classes(net: Any, y: Tensor) -> list[Tensor]:
    return [net.head(net.norm(y)), (y > 0.3).sum(1)]


def scale_by_gate(net: Any, y: Tensor) -> Tensor:
    return net.head(net.norm(y * y.mean((2, 3), keepdim=True).sigmoid()))


def move_channels(net: Any, y: Tensor) -> Tensor:
    return net.head(net.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def join(net: Any, x: Tensor, dim: int, between: Callable[[Tensor], Tensor]) -> Tensor:
    joined = torch.cat([net.conv(x), net.other(x), x], dim)
    return net.last(net.norm(between(joined)))


CASES: dict[str, Callable[[], nn.Module]] = {
    "a sum with another": lambda: Net(lambda n, x: n.head(n.norm(n.conv(x) + n.other(x)))),
    "a sum with the input": lambda: Net(lambda n, x: n.head(n.norm(n.conv(x) + x[:, :1]))),
    "normalized twice": lambda: Net(lambda n, x: use_twice(n, n.conv(x), n.norm)),
    "normalized once": lambda: Net(lambda n, x: use_twice(n, n.conv(x), torch.tanh)),
    "shared": lambda: Net(lambda n, x: n.head(n.norm(n.conv(x)) + n.norm(n.conv(x.flip(2))))),
    "shared, once": lambda: Net(lambda n, x: n.head(n.norm(n.conv(x)) + n.conv(x.flip(2)))),
    "shared, its pooled output": lambda: Net(
        lambda n, x: n.head(n.norm(n.conv(x)) + x[:, :1] * F.adaptive_avg_pool2d(n.conv(x), 1))
    ),
    "two in a row": lambda: Net(
        lambda n, x: n.head(n.norm(n.other(n.conv(x)))), other=make_conv(4, 4)
    ),
    "two in a row with biases": lambda: Net(
        lambda n, x: n.head(n.norm(n.other(n.conv(x)))),
        conv=make_conv(bias=True),
        other=make_conv(4, 4, bias=True),
    ),
    "a depthwise one between": lambda: Net(
        lambda n, x: n.head(n.norm(n.other(n.conv(x)))), other=make_conv(4, 4, groups=4)
    ),
    "a product": lambda: Net(lambda n, x: n.head(n.norm(n.conv(x) * n.other(x)))),
    "a square": lambda: Net(lambda n, x: square(n, n.conv(x))),
    "a gate": lambda: Net(lambda n, x: scale_by_gate(n, n.conv(x))),
    "rounded": lambda: Net(
        lambda n, x: n.head(n.norm(torch.div(n.conv(x), 0.3, rounding_mode="floor")))
    ),
    "a gain from an output": lambda: Net(
        lambda n, x: n.head(F.group_norm(n.other(x), 2, weight=n.conv(x).mean((0, 2, 3)), eps=EPS))
    ),
    "returned": lambda: Net(lambda n, x: return_both(n, n.conv(x))),
    "returned without gradients": lambda: Net(lambda n, x: return_classes(n, n.conv(x))),
    "a detached factor": lambda: Net(
        lambda n, x: use_twice(n, n.conv(x), lambda y: n.other(x) * y.detach())
    ),
    "a mask": lambda: Net(lambda n, x: use_twice(n, n.conv(x), lambda y: x[:, :1] * (y > 0.2))),
    "a custom function": lambda: Net(lambda n, x: use_twice(n, n.conv(x), PlusOne.apply)),
    "scripted": lambda: Net(
        lambda n, x: use_twice(n, n.conv(x), n.script), script=torch.jit.script(nn.Tanh())
    ),
    "changed data": lambda: Net(lambda n, x: n.head(n.norm(change_data(n.conv(x))))),
    "the weight itself": lambda: Net(
        lambda n, x: n.head(n.norm(n.conv(x))) + n.conv.weight.flatten(1).T[0, :2]
    ),
    "tied": lambda: Net(
        lambda n, x: F.conv_transpose2d(n.norm(n.conv(x)), n.conv.weight, padding=1)
    ),
    "computed in two ways": lambda: Net(
        lambda n, x: use_twice(n, n.conv(x), lambda y: F.conv2d(x, n.conv.weight.exp(), padding=1))
    ),
    "a norm in evaluation": lambda: Net(
        lambda n, x: n.head(n.norm(n.conv(x))), norm=nn.BatchNorm2d(4, eps=EPS).eval()
    ),
    "a functional norm": lambda: Net(
        lambda n, x: n.head(F.batch_norm(n.conv(x), None, None, None, None, True, 0.1, EPS))
    ),
    "a functional norm by keyword": lambda: Net(
        lambda n, x: n.head(
            F.batch_norm(
                input=n.conv(x), running_mean=None, running_var=None, training=True, eps=EPS
            )
        )
    ),
    "a functional norm in evaluation": lambda: Net(
        lambda n, x: n.head(F.batch_norm(n.conv(x), n.norm.running_mean, n.norm.running_var))
    ),
    "layer norm of channels": lambda: Net(
        lambda n, x: move_channels(n, n.conv(x)), norm=nn.LayerNorm(4, eps=EPS)
    ),
    "layer norm of channels with biases": lambda: Net(
        lambda n, x: move_channels(n, n.conv(x)),
        norm=nn.LayerNorm(4, eps=EPS),
        conv=make_conv(bias=True),
    ),
    "batch norm of another axis": lambda: Net(
        lambda n, x: n.head(n.norm(n.conv(x).transpose(1, 2))), conv=make_conv(bias=True)
    ),
    "unit vectors": lambda: Net(lambda n, x: n.head(F.normalize(n.conv(x), dim=1, eps=EPS))),
    "unit vectors by the default eps": lambda: Net(lambda n, x: n.head(F.normalize(n.conv(x)))),
    "vectors over a constant": lambda: Net(lambda n, x: n.head(F.normalize(n.conv(x), eps=5.0))),
    "vectors over a tensor": lambda: Net(
        lambda n, x: n.head(F.normalize(n.conv(x), eps=torch.tensor(5.0, dtype=x.dtype)))  # pyright: ignore[reportArgumentType]
    ),
    "linear": lambda: Net(
        lambda n, x: n.other(n.norm(n.conv(x.flatten(1)))),
        conv=nn.Linear(48, 4),
        other=nn.Linear(4, 2),
        norm=nn.BatchNorm1d(4, eps=EPS),
    ),
    "linear, positions normalized": lambda: Net(
        lambda n, x: n.other(n.norm(n.conv(x.flatten(2)))),
        conv=nn.Linear(16, 4),
        other=nn.Linear(4, 2),
        norm=nn.BatchNorm1d(3, eps=EPS),
    ),
    "channels side by side": lambda: Net(
        lambda n, x: join(n, x, -3, lambda y: F.avg_pool2d(y, 2).relu()),
        norm=nn.BatchNorm2d(11, eps=EPS),
        last=make_conv(11),
    ),
    "channels with biases side by side": lambda: Net(
        lambda n, x: join(n, x, 1, lambda y: F.max_pool2d(y, 2)),
        conv=make_conv(bias=True),
        norm=nn.BatchNorm2d(11, eps=EPS),
        last=make_conv(11),
    ),
    "one norm of channels side by side": lambda: Net(
        lambda n, x: join(n, x, 1, nn.Identity()),
        norm=nn.GroupNorm(1, 11, eps=EPS),
        last=make_conv(11),
    ),
    "samples side by side": lambda: Net(
        lambda n, x: n.head(n.norm(torch.cat([n.conv(x), n.other(x)])))
    ),
    "parts": lambda: Net(
        lambda n, x: n.head(torch.cat([n.norm(z) for z in n.conv(x).chunk(2, 1)], 1)),
        norm=nn.BatchNorm2d(2, eps=EPS),
    ),
    "a part is normalized": lambda: Net(
        lambda n, x: n.head(torch.cat([n.norm(n.conv(x)[:, :2]), n.conv(x)[:, 2:]], 1)),
        norm=nn.BatchNorm2d(2, eps=EPS),
    ),
    "an activation in place after a norm that returns a view": lambda: Net(
        lambda n, x: n.head(n.norm(n.conv(x)).relu_()), norm=nn.InstanceNorm2d(4, eps=EPS)
    ),
    "a norm in the shape of its input": lambda: Net(
        lambda n, x: n.head(shape_like_input(n, n.conv(x)))
    ),
    "checkpointed": lambda: Net(
        lambda n, x: n.head(checkpoint(lambda z: n.norm(n.conv(z)), x, use_reentrant=False))
    ),
    "parametrized": lambda: parametrize_conv(Net(lambda n, x: n.head(n.norm(n.conv(x))))),
}  # fmt: skip


def parametrize_conv(net: Net) -> Net:
    parametrize.register_parametrization(net.conv, "weight", Tanh())
    return net


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("case", CASES)
def test_what_happens_to_outputs(case: str) -> None:
    """The table has the weights whose length has no effect, all of them and no other."""
    torch.manual_seed(0)
    model = CASES[case]().double()
    x = make_input()
    assert list_normalized(model, x) == list_without_effect(model, x)


#: networks in which the length has no effect, which is not found
UNKNOWN: dict[str, Callable[[], nn.Module]] = {
    "a norm by hand": lambda: Net(
        lambda n, x: n.head(n.conv(x) / n.conv(x).std((0, 2, 3), keepdim=True))
    ),
    "a sum with itself": lambda: Net(lambda n, x: n.head(n.norm(n.conv(x) + n.conv(x.flip(2))))),
    "a custom function": lambda: Net(lambda n, x: n.head(n.norm(PlusOne.apply(n.conv(x))))),
    "weight norm": lambda: Net(
        lambda n, x: n.head(n.norm(n.conv(x))), conv=parametrizations.weight_norm(make_conv())
    ),
    "written into zeros": lambda: Net(lambda n, x: n.head(n.norm(write_into(n.conv(x))))),
    "changed in place": lambda: Net(lambda n, x: n.head(n.norm(change_in_place(n.conv(x))))),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_lengths_that_are_taken_to_have_an_effect(case: str) -> None:
    """Where functions are not understood, steps are the usual ones."""
    model = UNKNOWN[case]().double()
    assert not list_normalized(model, make_input())


def make_norms(eps: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return normalizations by modules, and by torch's functions with arguments by position."""
    return {
        "batch": nn.BatchNorm2d(4, eps=eps),
        "instance": nn.InstanceNorm2d(4, eps=eps),
        "group": nn.GroupNorm(2, 4, eps=eps),
        "layer": nn.LayerNorm([4, 4, 4], eps=eps),
        "rms": nn.RMSNorm([4, 4, 4], eps=eps),
        "normalize": lambda y: F.normalize(y, 2.0, 1, eps),
        "torch.batch_norm": lambda y: torch.batch_norm(
            y, None, None, None, None, True, 0.1, eps, False
        ),
        "torch.instance_norm": lambda y: torch.instance_norm(
            y, None, None, None, None, True, 0.1, eps, False
        ),
        "torch.group_norm": lambda y: torch.group_norm(y, 2, None, None, eps),
        "torch.layer_norm": lambda y: torch.layer_norm(y, [4, 4, 4], None, None, eps),
        "torch.rms_norm": lambda y: torch.rms_norm(y, [4, 4, 4], None, eps),
    }


@pytest.mark.parametrize("name", make_norms(EPS))
def test_lengths_count_beside_a_large_eps(name: str) -> None:
    """A usual eps takes next to nothing of the length's effect; with a large one it has a large."""
    x = make_input()
    for eps, expected in {1e-5: {"conv.weight"}, 1e-3: {"conv.weight"}, 5.0: set()}.items():
        torch.manual_seed(0)
        norm = make_norms(eps)[name]
        model = Net(lambda net, x, norm=norm: net.head(norm(net.conv(x)))).double()
        if isinstance(norm, nn.Module):
            norm.double()
        assert list_normalized(model, x) == expected
        before = compute_outputs(model, x)
        with torch.no_grad():
            model.get_parameter("conv.weight").mul_(2)
        change = float((compute_outputs(model, x) - before).norm() / before.norm())
        assert change < 0.02 if expected else change > 0.2


def test_what_the_table_does_not_depend_on() -> None:
    """Half precision, frozen weights and the device do not change it."""
    model = nn.Sequential(
        make_conv(), nn.BatchNorm2d(4), nn.ReLU(), make_conv(4, 4, True), nn.GroupNorm(2, 4),
        nn.Flatten(), nn.Linear(64, 2),
    )  # fmt: skip
    x = make_input().float()
    assert list_normalized(model, x) == {"0.weight"}
    with torch.autocast("cpu", torch.bfloat16):
        assert list_normalized(model, x) == {"0.weight"}
    model[0].requires_grad_(False)
    assert list_normalized(model, x) == {"0.weight"}
    assert list_normalized(model.to("meta"), x.to("meta")) == {"0.weight"}
