"""What K-FAC says by itself: warnings, true reasons, forecasts."""

import multiprocessing
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.maps.layers import REGISTRY, Block, register
from pullback.maps.layers.linear import Linear
from pullback.maps.layers.registry import Use
from pullback.testing import assert_close
from tests.kfac_options import kfac_of

from .common import batch, gram, kfac, net, train, vector


class Auxiliary(nn.Module):
    """A head of its own beside the measured output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 5)
        self.head = nn.Linear(5, 4)
        self.side = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.features = torch.tanh(self.body(x))
        return self.head(self.features)


def test_a_head_beside_the_measured_output_is_named_once() -> None:
    model = Auxiliary().double()
    x, y = batch()
    opt = kfac(model)
    for i in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y) + model.side(model.features).square().mean()
        loss.backward()
        if i:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                opt.step()
        else:
            with pytest.warns(RuntimeWarning, match=r"side\.weight, side\.bias") as records:
                opt.step()
            assert records[0].filename == __file__  # the line of the user's own call
    rows = {row.name: row.block for row in opt.coverage()}
    assert rows["side.weight"] == "gradient"


def test_coverage_says_that_it_is_preliminary() -> None:
    opt = kfac(model := net())
    assert opt.coverage().is_preliminary
    assert {row.block for row in opt.coverage()} == {"unknown"}
    assert "preliminary" in str(opt.coverage())
    train(opt, model)
    assert not opt.coverage().is_preliminary
    assert "preliminary" not in str(opt.coverage())


class Doubling(nn.Module):
    """y = 2(Wx + b), whose gradient is twice what a linear layer's formula says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight, self.bias)


class DoublingByOtherNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.matrix, self.shift)


@pytest.mark.parametrize("make", [Doubling, DoublingByOtherNames])
def test_a_registered_layer_with_a_wrong_formula_gets_the_true_reason(
    make: type[nn.Module],
) -> None:
    class Wrong(Linear):
        def parameters(self, module: Any) -> dict[str, Tensor | None]:
            weight, bias = module.parameters()
            return {"weight": weight, "bias": bias}

        def block(self, names: Mapping[str, str | None], uses: Sequence[Use]) -> Block:
            return super().block(names, uses)

    register(make)(Wrong)
    try:
        model = make().double()
        x, y = batch()
        opt = kfac(model)
        F.cross_entropy(model(x), y).backward()
        opt.step()
        for row in opt.coverage():
            assert row.block == "diagonal"
            assert "formula of its layer, Wrong" in row.reason
            assert "outside" not in row.reason
    finally:
        del REGISTRY[make]


@pytest.mark.parametrize("interval", [1, 2])
def test_the_gram_right_after_an_inversion_has_corrected_eigenvalues(interval: int) -> None:
    """With a batch that stays, the EKFAC Gram is the same before and after new eigenbases."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    x, y = batch()
    options = {"fisher": "exact", "lr": 0.0, "ekfac": True, "statistics_every": 1}
    opt = kfac(model, invert_every=interval, **options)
    for _ in range(5):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    plain = gram(model, x, y)
    p = model(x).detach().softmax(1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    exact = torch.stack([torch.kron(m, v[:, None] * v) for m, v in zip(fisher, x, strict=True)])
    corrected = opt.gram().dense()
    assert (corrected - exact.mean(0)).norm() < 0.99 * (plain - exact.mean(0)).norm()
    torch.testing.assert_close(
        corrected.trace(), exact.mean(0).trace()
    )  # which its squares add up to


class Inside(nn.Module):
    """Computes the loss itself, under autocast, and returns logits that a wrapper casts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.body(x)
            loss = F.cross_entropy(logits, y)
        return {"loss": loss, "logits": logits}


def test_outputs_that_are_cast_after_the_loss_was_computed() -> None:
    torch.manual_seed(0)
    model = Inside()
    x = torch.randn(16, 5)
    y = torch.randint(0, 3, (16,))
    inner = model.forward
    model.forward = lambda *a: {n: t.float() for n, t in inner(*a).items()}  # type: ignore
    options = {"likelihood": pb.likelihoods.Categorical(), "fisher": "exact", "lr": 0.0}
    grams = []
    for call in (model, inner):
        with kfac_of(
            model if call is model else model.body,
            output="logits" if call is model else None,
            **options,
        ) as opt:
            call(x, y)["loss"].backward()
            opt.step()
            assert {row.block.split()[0] for row in opt.coverage()} == {"kronecker"}
            grams.append(opt.gram().dense())
        model.zero_grad()
    assert_close(*grams, 1e-6, "as of the layers themselves")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_empirical_fisher_of_a_scaled_loss_is_noticed(reduction: str) -> None:
    class Scaler:
        def get_scale(self) -> float:
            return 65536.0

    grams = []
    for scale, options in ((1.0, {}), (65536.0, {"grad_scaler": Scaler()}), (65536.0, {})):
        torch.manual_seed(0)
        model = net()
        x, y = batch()
        opt = kfac(model, fisher="empirical", reduction=reduction, lr=0.0, **options)
        loss = scale * F.cross_entropy(model(x), y, reduction=reduction)
        if scale > 1 and not options:
            with pytest.warns(RuntimeWarning, match="grad_scaler"):
                loss.backward()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss.backward()
            opt.step()
        grams.append(opt.gram().dense())
    assert_close(grams[1], grams[0], 1e-12, "with the scaler")


def _train_in_child(queue: Any) -> None:
    torch.set_num_threads(1)  # torch's other threads do not survive a fork
    queue.put(_train())


def _train() -> list[float]:
    torch.manual_seed(0)
    opt = kfac(model := net())
    train(opt, model, 4)
    return vector(model).tolist()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_trains_alike() -> None:
    want = _train()  # whatever a first use starts is there before the fork
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_train_in_child, args=(queue,), daemon=True)
    child.start()
    try:
        assert queue.get(timeout=60) == want
    finally:
        child.kill()
        child.join()


def test_inputs_that_a_hook_overwrites_during_backward() -> None:
    torch.manual_seed(0)
    model = net()
    x, y = batch()
    want = gram(model, x, y)
    leaf = x.clone().requires_grad_()
    z = model(leaf)
    with kfac(model, fisher="exact", lr=0.0) as opt:
        z = model(leaf)
        leaf.register_hook(lambda g: leaf.data.zero_())
        z.register_hook(lambda g: None)
        F.cross_entropy(z, y).backward()
        opt.step()
        assert_close(opt.gram().dense(), want, 1e-12, "inputs as the forward pass saw them")


def test_the_clip_holds_the_kl_divergence_of_a_step() -> None:
    """Median KL of a step on a small MLP stays near the limit, momentum included."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    opt = kfac(model, lr=0.1, kl_clip=1e-2, damping=1e-3, momentum=0.9, statistics_every=1)
    divergences = []
    for i in range(30):
        x, y = batch(64, seed=i)
        opt.zero_grad()
        before = model(x)
        F.cross_entropy(before, y).backward()
        opt.step()
        old = before.detach().log_softmax(1)
        new = model(x).detach().log_softmax(1)
        divergences.append(float(F.kl_div(new, old, log_target=True, reduction="batchmean")))
    assert sorted(divergences)[15] < 5e-2  # ½δ by the quadratic model of averages; it was above 1


class Scaled(nn.Module):
    """A frozen layer and trained factors of its outputs, as in IA³."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.factors = nn.Parameter(torch.ones(outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.factors.flatten()


def test_vectors_of_no_known_layer_follow_adam_for_a_true_reason_and_not_silently() -> None:
    model = nn.Sequential(Scaled(3, 5), nn.Tanh(), Scaled(5, 4)).double()
    x, y = batch()
    opt = pb.KFAC(model)
    for i in range(2):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        assert ["100 % of the trained" in str(w.message) for w in caught] == [True] * (i == 0)
    rows = {r.name: r for r in opt.coverage() if r.rule != "none"}
    assert rows.keys() == {"0.factors", "2.factors"}
    assert all(r.rule == "adam" and "elementwise product" in r.reason for r in rows.values())


def test_what_adam_takes_is_named_by_its_kind() -> None:
    layers = [nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    opt = pb.KFAC(model := nn.Sequential(*layers))
    F.cross_entropy(model(torch.randint(0, 7, (6,))), torch.randint(0, 3, (6,))).backward()
    opt.step()
    why = {r.name: r.reason for r in opt.coverage() if r.rule == "adam"}
    assert why == {
        "0.weight": "its rows are looked up",
        "1.weight": "weight of LayerNorm",
        "1.bias": "bias of LayerNorm",
        "2.bias": "bias of Linear",
        "4.weight": "it gives the output; weight of Linear",
        "4.bias": "bias of Linear",
    }
    groups = [{"params": model[2].parameters(), "rule": "adam"}, {"params": model[4].parameters()}]
    rows = {r.name: r.reason for r in pb.KFAC(model, params=groups).coverage()}
    assert rows["2.weight"] == "its param group asks for it"


def test_a_matrix_that_no_statistics_reached_has_that_for_a_reason() -> None:
    """Also one that a function uses, whose use is known."""

    class Beside(Auxiliary):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 2))

    model = Beside().double()
    x, y = batch()
    opt = pb.KFAC(model, rule="eigenbasis")
    loss = F.cross_entropy(model(x), y)
    beside = model.side(model.features) + model.features @ model.w
    (loss + beside.square().mean()).backward()
    with pytest.warns(RuntimeWarning, match=r"The loss reaches w, side\.weight"):
        opt.step()
    reasons = {row.name: row.reason for row in opt.coverage()}
    assert reasons["w"].startswith("no statistics reached it yet")
    assert reasons["side.weight"] == "no forward pass so far gave it any rows"


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_model_of_which_only_the_head_is_trained_is_said_to_follow_adam(
    is_asked_for: bool,
) -> None:
    layers = [nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 4)]
    model = nn.Sequential(*layers).double()
    model[:2].requires_grad_(False)
    x, y = batch()
    group: dict[str, Any] = {"params": model[2].parameters()}
    if is_asked_for:
        group["rule"] = "adam"
    opt = pb.KFAC(model, params=[group])
    F.cross_entropy(model(x), y).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    messages = [str(w.message) for w in caught if "trained parameters" in str(w.message)]
    if is_asked_for:
        assert messages == []
    else:
        assert messages == [
            "100 % of the trained parameters follow AdamW, 2.weight among them: it gives the "
            "output; weight of Linear. coverage() says what is known of each."
        ]


def test_a_matrix_without_its_eigenbases_is_said_to_follow_adam() -> None:
    torch.manual_seed(0)
    width = 1100  # two sides of it are more than one step begins
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, width), nn.Linear(width, width))
    opt = pb.KFAC(nn.Sequential(model, nn.Linear(width, 2)), lr=1e-4)
    F.cross_entropy(opt.model(torch.randn(4, 3)), torch.tensor([0, 1, 1, 0])).backward()
    opt.step()
    rows = {r.name: r for r in opt.coverage()}
    assert rows["0.0.weight"].rule == "eigenbasis"
    assert rows["0.3.weight"].rule == "adam"
    assert "not there yet" in rows["0.3.weight"].reason


@pytest.mark.parametrize(
    "how", [nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.orthogonal,
            nn.utils.spectral_norm],
)  # fmt: skip
def test_a_weight_that_is_computed_has_the_parametrization_for_a_reason(how: Any) -> None:
    model = nn.Sequential(how(nn.Linear(3, 5)), nn.Tanh(), nn.Linear(5, 4)).double()
    x, y = batch()
    choices: tuple[dict[str, Any], ...] = ({}, {"likelihood": nn.CrossEntropyLoss()})
    for options in choices:
        opt = kfac_of(model, **options)
        F.cross_entropy(model(x), y).backward()
        with pytest.warns(RuntimeWarning, match="is computed from it"):
            opt.step()
        (row,) = (r for r in opt.coverage() if "orig" in r.name)
        assert "is computed from it" in row.reason
        assert row.block == ("diagonal" if options else "none")
        opt.close()


def test_every_output_that_the_metric_does_not_see_is_named_once() -> None:
    """Also one that the loss takes up later."""
    torch.manual_seed(0)
    model = nn.ModuleDict({n: nn.Linear(3, 2) for n in ("main", "one", "two")}).double()
    model.forward = lambda x: model["main"](x)  # type: ignore[method-assign]
    x = torch.randn(8, 3).double()
    opt = kfac_of(model, 1e-3, likelihood=pb.likelihoods.Gaussian(), statistics_every=1)

    def warn_about(*heads: str) -> list[str]:
        opt.zero_grad()
        loss = model(x).square().sum() + sum(model[n](x).square().sum() for n in heads)
        torch.as_tensor(loss).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        return [str(w.message) for w in caught if "The loss reaches" in str(w.message)]

    assert ["one.weight, one.bias" in text for text in warn_about("one")] == [True]
    assert warn_about("one") == []
    assert ["two.weight, two.bias" in text for text in warn_about("one", "two")] == [True]
    assert warn_about("one", "two") == []


def test_steps_skipped_for_gradients_that_are_not_finite_are_warned_of_once() -> None:
    opt = kfac(model := net())
    x, y = batch()
    for i in range(3):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        next(model.parameters()).grad[0, 0] = float("nan")
        if i:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                opt.step()
        else:
            with pytest.warns(RuntimeWarning, match="not finite: the step was skipped"):
                opt.step()
        assert not opt.info.accepted
