"""Chaining the layers of a model in place, and cells over sequences."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from helpers.exactness import DropEverything, assert_same, train
from lowtide import errors

DIM, BATCH = 12, 6
DROP = DropEverything()


class Layer(nn.Module):
    def __init__(self, number: int, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.layer_idx, self.as_tuple, self.rate = number, as_tuple, 0.2
        self.norm, self.linear, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, *, scale: Any = 1.0) -> Any:
        inner = F.dropout(torch.relu(self.linear(self.norm(hidden_states))), self.rate, self.training)
        after = hidden_states + self.out(inner) * (scale if mask is None else mask * scale)
        return (after, None) if self.as_tuple else after


class Model(nn.Module):
    """A model as others write it, with Python between its layers that cannot be traced."""

    style = "loop"

    def __init__(self, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(Layer(number, as_tuple=as_tuple) for number in range(5))
        self.last = nn.Linear(DIM, 3)
        self.seen: list[int] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers[: len(self.layers)] if self.style == "slice" else self.layers):
            self.seen.append(layer.layer_idx)
            layer = self.layers[number] if self.style == "index" else layer
            if self.style == "keyword":
                x = layer(hidden_states=x, mask=mask, scale=0.5 + number)
            else:
                x = layer(x, mask, scale=0.5 + number)
            if layer.as_tuple:
                x = x[0]
        return self.last(x).mean()


def batches(steps: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [
        ((torch.randn(BATCH, DIM, generator=generator), torch.rand(BATCH, DIM, generator=generator)), {})
        for _ in range(steps)
    ]


def check(model: nn.Module, *names: str, planner: Any = DROP, budget: str = "1TiB") -> nn.Module:
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    assert lowtide.chain_layers(model, *names, budget=budget, planner=planner) is model
    assert list(model.state_dict()) == keys
    assert_same(train(plain, plain, batches()), train(model, model, batches()))
    assert all(plan.num_recomputed for plan in lowtide.plans(model))
    return model


@pytest.mark.parametrize("style", ["loop", "slice", "index", "keyword"])
@pytest.mark.parametrize("as_tuple", [False, True])
def test_the_models_own_loop_runs_the_chain(style: str, as_tuple: bool) -> None:
    torch.manual_seed(1)
    model = Model(as_tuple=as_tuple)
    model.style = style
    check(model)
    assert isinstance(model.layers[0], Layer)
    assert [layer.layer_idx for layer in model.layers] == [0, 1, 2, 3, 4]


def test_named_layers() -> None:
    check(Model(), "layers", planner="chen_sqrt")


def test_unwrap_undoes_it() -> None:
    model = Model()
    layers = model.layers
    lowtide.chain_layers(model, budget="1TiB", planner=DROP)
    assert model.layers is not layers
    assert lowtide.unwrap(model) is model
    assert model.layers is layers
    model(*batches()[0][0]).backward()


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("container", [nn.ModuleList, nn.Sequential])
def test_layers_in_eval_mode_stay_in_it(container: Any) -> None:
    model = Model()
    model.layers = container(*([model.layers] if container is nn.ModuleList else model.layers))
    model.layers[1].eval()
    model.layers[2].norm.eval()
    expected = modes(model)
    lowtide.chain_layers(model, budget="1TiB", planner=DROP)
    assert modes(model) == expected
    lowtide.unwrap(model)
    assert modes(model) == expected


def test_a_list_of_layers_keeps_its_own_mode() -> None:
    model = Model()
    model.layers.training = False
    lowtide.chain_layers(model, budget="1TiB", planner=DROP)
    assert not model.layers.training
    model.layers.training = True
    model.layers[0].eval()
    lowtide.unwrap(model)
    assert model.layers.training
    assert not model.layers[0].training


def test_eval_and_generation_are_untouched() -> None:
    model = lowtide.chain_layers(Model(), budget="1TiB", planner=DROP).eval()
    plain = copy.deepcopy(lowtide.unwrap(copy.deepcopy(model)))
    args = batches()[0][0]
    with torch.no_grad():
        assert torch.equal(model(*args), plain(*args))
    assert not lowtide.plans(model)


def test_sequential_layers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Layer(number) for number in range(4)))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.blocks(x) * mask).sum()

    check(Net())


def test_a_model_that_looks_between_its_layers_gets_an_error() -> None:
    class Collecting(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            total = torch.zeros(())
            for layer in self.layers:
                x = layer(x, mask)
                total = total + x.mean()
            return total

    model = lowtide.chain_layers(Collecting(), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="looks at the output of layer 0"):
        model(*batches()[0][0])


def test_skipped_layers_and_other_inputs_get_an_error() -> None:
    class Skipping(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in list(self.layers)[::2]:
                x = layer(x, mask)
            return x

    class Parallel(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Any:
            return [layer(x, mask) for layer in self.layers]

    model = lowtide.chain_layers(Skipping(), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="Layer 2 was called after layer 0"):
        model(*batches()[0][0])
    model = lowtide.chain_layers(Parallel(), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="not called with the output of layer 0"):
        model(*batches()[0][0])


def test_random_numbers_between_layers_get_an_error_if_layers_draw_too() -> None:
    class Dropping(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                if torch.rand(()) >= 0:
                    x = layer(x, mask)
            return x.mean()

    model = lowtide.chain_layers(Dropping(), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="random numbers between its layers"):
        model(*batches()[0][0])
    lowtide.unwrap(model)
    for layer in model.layers:
        layer.rate = 0.0
    check(model)


def test_a_cache_given_by_position_gets_an_error() -> None:
    class Cache:
        def get_seq_length(self) -> int:
            return 0

    class Caching(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            cache = Cache()
            for layer in self.layers:
                x = layer(x, cache)
            return x

    model = lowtide.chain_layers(Caching(), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidInputError, match=r"a Cache of past keys and values.*use_cache=False"):
        model(*batches()[0][0])


def test_models_without_layers_to_chain() -> None:
    with pytest.raises(errors.InvalidModelError, match="has no list of at least 2 layers"):
        lowtide.chain_layers(nn.Sequential(nn.Linear(2, 2)), budget="50%")
    with pytest.raises(errors.InvalidModelError, match=r"no part called 'h'.*layers"):
        lowtide.chain_layers(Model(), "h", budget="50%")
    with pytest.raises(errors.InvalidModelError, match="is a Linear"):
        lowtide.chain_layers(Model(), "first", budget="50%")
    with pytest.raises(errors.InvalidModelError, match=r"not an nn\.Module"):
        lowtide.chain_layers(print, budget="50%")  # type: ignore[type-var]
    model = lowtide.chain_layers(Model(), budget="50%")
    with pytest.raises(errors.InvalidModelError, match="chained already"):
        lowtide.chain_layers(model, budget="50%")


def test_wrap_names_the_call_for_models_it_cannot_trace() -> None:
    class Untraceable(Model):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x, mask)

    @torch._dynamo.disable
    def untraced(x: Tensor) -> Tensor:
        return model(x, torch.ones_like(x))

    model = Model()
    wrapped = lowtide.wrap(untraced, budget="50%", costs="analytic")
    with pytest.raises(errors.CaptureError, match=r"lowtide\.chain_layers"):
        wrapped(batches()[0][0][0])
    del Untraceable


class PlainStack(nn.Module):
    def __init__(self, cells: list[nn.Module]) -> None:
        super().__init__()
        self.step = nn.ModuleList(cells)

    def forward(self, sequence: Tensor) -> Any:
        zero = sequence.new_zeros(sequence.shape[1], DIM)
        states: list[Any] = [(zero, zero) if isinstance(cell, nn.LSTMCell) else zero for cell in self.step]
        tops = []
        for x in sequence.unbind(0):
            for index, cell in enumerate(self.step):
                states[index] = cell(x, states[index])
                x = states[index][0] if isinstance(cell, nn.LSTMCell) else states[index]
            tops.append(x)
        return torch.stack(tops), states


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("kinds", [[nn.LSTMCell], [nn.LSTMCell, nn.GRUCell, nn.LSTMCell], [nn.GRUCell, nn.RNNCell]])
def test_cells_over_a_sequence(kinds: list[Any], chunk: int | None) -> None:
    torch.manual_seed(0)
    cells = [kind(DIM, DIM) for kind in kinds]
    plain = PlainStack(copy.deepcopy(cells))
    model = lowtide.unroll(cells, budget="1TiB", planner=DROP, chunk=chunk)
    inputs = [((torch.randn(7, BATCH, DIM, requires_grad=True),), {}) for _ in range(3)]
    found = train(model, model, inputs)
    for record in found:
        record.results = {key: value for key, value in record.results.items() if "_time" not in key}
    expected = train(plain, plain, inputs)
    assert_same(expected, found)
    assert model.plans[0].num_recomputed


def test_a_single_cell_and_a_step_function() -> None:
    cell = nn.LSTMCell(DIM, DIM)
    sequence = torch.randn(BATCH, 6, DIM)
    outputs, (hidden, kept) = lowtide.unroll(cell, budget="1TiB", planner=DROP, batch_first=True)(sequence)
    assert outputs.shape == (BATCH, 6, DIM)
    assert torch.equal(outputs[:, -1], hidden)
    assert kept.shape == (BATCH, DIM)
    weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
    model = lowtide.unroll(lambda x, h: torch.tanh(h @ weight + x), budget="1TiB", planner=DROP, output=None)
    nothing, state = model(sequence.transpose(0, 1), torch.zeros(BATCH, DIM))
    assert nothing is None
    expected = torch.zeros(BATCH, DIM)
    for x in sequence.unbind(1):
        expected = torch.tanh(expected @ weight + x)
    assert torch.equal(state, expected)
    (one,), (other,) = (torch.autograd.grad(each.sum(), weight) for each in (state, expected))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("message", "error", "act"),
    [
        ("chunk=0", errors.InvalidOptionError, lambda: lowtide.unroll(nn.GRUCell(2, 2), budget="50%", chunk=0)),
        ("output='all'", errors.InvalidOptionError, lambda: lowtide.unroll(print, budget="50%", output="all")),
        ("cannot be unrolled", errors.InvalidModelError, lambda: lowtide.unroll(3, budget="50%")),
        ("stack of cells", errors.InvalidModelError, lambda: lowtide.unroll([nn.Linear(2, 2)], budget="50%")),
        (
            "needs a state to begin with",
            errors.InvalidInputError,
            lambda: lowtide.unroll(lambda x, h: h, budget="50%")(torch.ones(3, 2, 2)),
        ),
        (
            "time and a batch",
            errors.InvalidInputError,
            lambda: lowtide.unroll(nn.GRUCell(2, 2), budget="50%")(torch.ones(3)),
        ),
    ],
)
def test_bad_sequences(message: str, error: type[Exception], act: Any) -> None:
    with pytest.raises(error, match=message):
        act()
