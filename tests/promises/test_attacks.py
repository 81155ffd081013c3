"""Ways in which hostile models once got other bits than eager training, and their relatives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from helpers.exactness import STEPS, Batch, DropEverything, assert_exact

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic"}

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")


def floats(*shape: int) -> list[Batch]:
    return [((torch.randn(*shape, generator=torch.Generator().manual_seed(s)),), {}) for s in range(STEPS)]


class Calls(nn.Module):
    """Two layers with any function between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.between(torch.tanh(self.first(x)))
        return torch.tanh(self.last(h)).square().mean()


# Random numbers that nobody reads


def drop_in_vain(h: torch.Tensor) -> torch.Tensor:
    F.dropout(h, 0.3)
    return F.dropout(h, 0.2)


def draw_in_vain(h: torch.Tensor) -> torch.Tensor:
    torch.rand(3), torch.randn_like(h), torch.randperm(5)
    return F.dropout(h, 0.2)


def bernoulli_in_vain(h: torch.Tensor) -> torch.Tensor:
    torch.bernoulli(torch.sigmoid(h.detach()))
    return h * torch.rand_like(h)


def attention_in_vain(h: torch.Tensor) -> torch.Tensor:
    rows = h[None, None]
    F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)
    return F.dropout(h, 0.2)


def noise_of_zero_width(h: torch.Tensor) -> torch.Tensor:
    torch.normal(torch.zeros(4), 0.0), torch.empty(7).uniform_(0, 1)
    return F.dropout1d(h, 0.2)


@pytest.mark.parametrize(
    "between", [drop_in_vain, draw_in_vain, bernoulli_in_vain, attention_in_vain, noise_of_zero_width]
)
@pytest.mark.parametrize("options", [LOOSE, None], ids=["kept", "dropped"])
def test_random_numbers_that_nobody_reads_are_drawn(between, options):
    assert_exact(Calls(between), floats(64, 8), wrap=options)


# NumPy inside forward


def numpy_noise(h: torch.Tensor) -> torch.Tensor:
    return h * torch.from_numpy(np.random.rand(8)).float()


def numpy_choice(h: torch.Tensor) -> torch.Tensor:
    return h[:, torch.from_numpy(np.random.permutation(8))]


def numpy_generator(h: torch.Tensor) -> torch.Tensor:
    return h + torch.as_tensor(np.random.default_rng(3).normal(size=8), dtype=h.dtype)


def numpy_function(h: torch.Tensor) -> torch.Tensor:
    return h + torch.from_numpy(np.tanh(h.detach().numpy()))


def numpy_constant(h: torch.Tensor) -> torch.Tensor:
    return h * torch.from_numpy(np.exp(np.linspace(0, 1, 8, dtype=np.float32)))


def numpy_scalar(h: torch.Tensor) -> torch.Tensor:
    return h * float(np.float32(1) / np.float32(3)) + float(np.sin(0.7))


def python_noise(h: torch.Tensor) -> torch.Tensor:
    return h * random.random() + random.choice([0.25, 0.5])


@pytest.mark.parametrize(
    "between",
    [numpy_noise, numpy_choice, numpy_generator, numpy_function, numpy_constant, numpy_scalar, python_noise],
    ids=lambda function: function.__name__,
)
def test_numpy_in_forward_is_numpy(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    states = []

    def seeded(model: nn.Module) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            np.random.seed(5), random.seed(6)
            result = model(*args)
            states.append((np.random.get_state()[1:3], random.getstate()))
            return result

        return call

    model = Calls(between)
    plain = Calls(between)
    plain.load_state_dict(model.state_dict())
    from helpers.exactness import assert_same, train

    expected = train(plain, seeded(plain), floats(4, 8))
    lowtide.wrap(model, planner=DropEverything(again=True), **LOOSE)
    found = train(model, seeded(model), floats(4, 8))
    assert_same(expected, found)
    assert lowtide.plans(model)
    for (eager_numpy, eager_python), (numpy, python) in zip(states[:STEPS], states[STEPS:], strict=True):
        assert python == eager_python
        assert numpy[1] == eager_numpy[1]
        assert np.array_equal(numpy[0], eager_numpy[0])


# Hooks where gradients are accumulated


def accumulator_of(parameter: torch.Tensor) -> Any:
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


def double(gradients: Any) -> Any:
    return (gradients[0] * 2,)


def hook_before(parameter: torch.Tensor, seen: list[Any]) -> Any:
    node = accumulator_of(parameter)
    return node, node.register_prehook(double)


def hook_after(parameter: torch.Tensor, seen: list[Any]) -> Any:
    node = accumulator_of(parameter)
    return node, node.register_hook(lambda _, outputs: seen.append(outputs[0].clone()))


def hook_both(parameter: torch.Tensor, seen: list[Any]) -> Any:
    return hook_before(parameter, seen), hook_after(parameter, seen)


def hook_tensor(parameter: torch.Tensor, seen: list[Any]) -> Any:
    return parameter.register_hook(lambda gradient: gradient * 3)


def hook_when_accumulated(parameter: torch.Tensor, seen: list[Any]) -> Any:
    return parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))


def hook_many(parameter: torch.Tensor, seen: list[Any]) -> Any:
    return torch.autograd.graph.register_multi_grad_hook([parameter], lambda g: seen.append(g[0].clone()))


def hook_removed(parameter: torch.Tensor, seen: list[Any]) -> Any:
    node = accumulator_of(parameter)
    node.register_prehook(double).remove()
    return node


@pytest.mark.parametrize(
    "hook",
    [hook_before, hook_after, hook_both, hook_tensor, hook_when_accumulated, hook_many, hook_removed],
    ids=lambda function: function.__name__,
)
def test_hooks_where_gradients_are_accumulated(hook: Callable[..., Any]) -> None:
    def run(*, wrapped: bool) -> tuple[list[torch.Tensor], list[Any]]:
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), []
        if wrapped:
            lowtide.wrap(model, planner=DropEverything(again=True), **LOOSE)
        handles = hook(model[0].weight, seen)
        for (x,), _ in floats(4, 8):
            model(x).sum().backward()
        del handles
        return [p.grad for p in model.parameters()], seen

    (expected, expected_seen), (found, found_seen) = run(wrapped=False), run(wrapped=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(expected_seen) == len(found_seen)
    assert all(torch.equal(a, b) for a, b in zip(expected_seen, found_seen, strict=True))


def test_a_hook_added_between_forward_and_backward() -> None:
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        if wrapped:
            lowtide.wrap(model, **LOOSE)
        x = torch.ones(4, 8)
        model(x).sum().backward()
        loss = model(x).sum()
        node = accumulator_of(model[0].weight)
        node.register_prehook(double)
        loss.backward()
        grads.append(model[0].weight.grad)
    assert torch.equal(*grads)


# Dropout of everything


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(1.0),
        nn.Dropout1d(1.0),
        nn.AlphaDropout(1.0),
        nn.FeatureAlphaDropout(1.0),
        nn.Dropout(0.0),
        nn.Dropout(0.999),
        nn.RReLU(0.1, 0.1),
    ],
    ids=str,
)
def test_dropout_of_everything(layer: nn.Module) -> None:
    assert_exact(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 4), nn.Dropout(0.5)), floats(4, 8))


@pytest.mark.parametrize("p", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout(p: float, causal: bool) -> None:
    def attend(h: torch.Tensor) -> torch.Tensor:
        q = h.view(1, 2, 4, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=p, is_causal=causal).view(8, 8)

    assert_exact(Calls(attend), floats(8, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dropout_of_everything_with_infinities(dtype: torch.dtype) -> None:
    def drop(h: torch.Tensor) -> torch.Tensor:
        wild = torch.cat([h[:2].to(dtype), torch.full_like(h[2:], float("inf")).to(dtype)])
        return torch.nan_to_num(F.dropout(wild, 1.0)).to(h.dtype)

    assert_exact(Calls(drop), floats(4, 8))


# Outputs beside the loss that are views of what it is computed from


class Contrastive(nn.Module):
    def __init__(self, extra: str) -> None:
        super().__init__()
        self.one, self.other, self.scale = nn.Linear(64, 32), nn.Linear(64, 32), nn.Parameter(torch.tensor(2.66))
        self.extra = extra

    def forward(self, x: torch.Tensor) -> Any:
        one, other = F.normalize(self.one(x)), F.normalize(self.other(x.flip(0)))
        logits = one @ other.t() * self.scale.exp()
        target = torch.arange(len(logits))
        loss = (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
        extras = {"both": (logits, logits.t()), "turned": (logits.t(),), "plain": (logits,), "hidden": (one.t(), other)}
        return loss, *extras[self.extra]


@pytest.mark.parametrize("extra", ["both", "turned", "plain", "hidden"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 7))])
def test_outputs_that_are_views_beside_the_loss(extra: str, seed: int) -> None:
    torch.manual_seed(seed)
    batches = [((torch.randn(4, 64),), {}) for _ in range(2)]
    assert_exact(Contrastive(extra), batches, loss=lambda result: result[0])


# Changes that autograd does not notice


def clamp_weight(model: nn.Module, x: torch.Tensor) -> None:
    model[0].weight.data.clamp_(-0.01, 0.01)


def write_by_numpy(model: nn.Module, x: torch.Tensor) -> None:
    model[0].bias.detach().numpy()[0] = 7


def change_input(model: nn.Module, x: torch.Tensor) -> None:
    x.data.mul_(2)


def swap_elements(model: nn.Module, x: torch.Tensor) -> None:
    model[0].weight.data.copy_(model[0].weight.data.flip(0))


def change_nothing(model: nn.Module, x: torch.Tensor) -> None:
    model[0].weight.data.mul_(1)


@pytest.mark.parametrize("change", [clamp_weight, write_by_numpy, change_input, swap_elements, change_nothing])
def test_changes_behind_autograds_back_are_found_under_verify(change: Callable[..., None]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    lowtide.wrap(model, planner=DropEverything(), verify=True, **LOOSE)
    for step in range(2):
        x = torch.randn(4, 8)
        loss = model(x).sum()
        if step:
            change(model, x)
        if step and change is not change_nothing:
            with pytest.raises(lowtide.errors.VerificationError, match=r"\.data"):
                loss.backward()
        else:
            loss.backward()


def test_what_is_not_read_again_may_change_under_verify() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    lowtide.wrap(model, planner="keep_all", verify=True, **LOOSE)
    loss = model(torch.randn(4, 8)).sum()
    model[0].weight.data.clamp_(-0.01, 0.01)
    loss.backward()


# Results written over tensors that are laid out otherwise than they were traced


class ChannelNorm(nn.Module):
    """A layer norm over channels between convolutions, with branches whose gradients are summed."""

    def __init__(self, size: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, size, stride=size)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(depth)])
        self.layers = nn.ModuleList([nn.Conv2d(32, 32, 3, padding=1, groups=32) for _ in range(depth)])
        self.scale = nn.Parameter(torch.ones(32, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            normed = norm(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            h = h * self.scale + layer(normed) * normed
        return h.square().mean()


@pytest.mark.parametrize("size", [8, 16, 4], ids=["2 x 2", "1 x 1", "4 x 4"])
@pytest.mark.parametrize("planner", ["keep_all", DropEverything(again=True)], ids=["kept", "dropped"])
def test_norms_over_channels(size: int, planner: Any) -> None:
    assert_exact(ChannelNorm(size, 3), floats(2, 3, 16, 16), wrap={"planner": planner})
