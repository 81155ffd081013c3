"""Layers of a model as blocks of its step: the bits of eager training, one capture for equal layers, no trace left."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import assert_exact, assert_same, first_loss, train
from lowtide.blocks.policy import LAYERS, LayerPolicy
from lowtide.blocks.step.find_layers import find_layers, repeated_layers
from lowtide.errors import InfeasibleBudgetError, InvalidOptionError
from lowtide.plan.core.result import Plan
from lowtide.pytorch.compiler.tracing import num_graphs
from lowtide.runtime.layer_blocks import LayerOverride
from lowtide.step.plan import StepPlan

DIM, ROWS = 16, 32
OPTIONS: dict[str, Any] = {"budget": "70%", "planner": "greedy", "costs": "analytic"}


class Layer(nn.Module):
    """A residual layer with dropout and batch norm."""

    def __init__(self, dim: int = DIM, number: int = 0) -> None:
        super().__init__()
        self.wide, self.narrow, self.number = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim), number
        self.norm, self.dropout = nn.BatchNorm1d(3 * dim), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(torch.tanh(self.norm(self.wide(x)))))


class Stack(nn.Module):
    """Layers between two projections, and a loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def stack(count: int = 4, make: Callable[[], nn.Module] = Layer) -> Stack:
    torch.manual_seed(0)
    return Stack(*(make() for _ in range(count))).train()


def rows(*, steps: int = 3, needs: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [((torch.randn(ROWS, DIM, generator=generator).requires_grad_(needs),), {}) for _ in range(steps)]


def overrides(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module.__dict__.get("forward"), LayerOverride)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step_of(model: nn.Module) -> StepPlan:
    found = lowtide.plans(model)[0]
    assert isinstance(found, StepPlan)
    return found


# The bits of eager training, and how often layers are captured


@pytest.mark.parametrize("needs", [False, True])
def test_named_class_is_exact_and_captured_once(needs: bool) -> None:
    before = num_graphs()
    model = assert_exact(stack(6), rows(needs=needs), wrap=OPTIONS | {"blocks": [Layer]})
    assert num_graphs() - before == 1
    assert len(step_of(model).blocks) == 6
    assert sum(plan.num_recomputed for plan in step_of(model).plans) > 0


def left_behind() -> None:
    """Leave four MiB to the garbage collector, of which the profiler has seen the allocation."""
    held: list[Any] = []
    lowtide.measure_peak(lambda: held.append(torch.empty(1 << 20)))
    held.append(held)


@pytest.mark.parametrize("when", ["before", "compiling", "second call"])
def test_garbage_from_before_does_not_count_as_the_steps(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime import model_plans

    def baseline(leave: Callable[[str], None]) -> int:
        torch._dynamo.reset()
        original = model_plans.make_menu
        monkeypatch.setattr(model_plans, "make_menu", lambda *args: (leave("compiling"), original(*args))[1])
        model = lowtide.wrap(stack(6), **OPTIONS | {"blocks": [Layer]})
        for time, ((x,), _) in zip(("before", "second call"), rows(steps=2), strict=True):
            leave(time)
            model(x).backward()
        monkeypatch.undo()
        return step_of(model).baseline_peak_bytes

    expected = baseline(lambda now: None)
    gc.collect()
    gc.disable()
    try:
        assert baseline(lambda now: left_behind() if now == when else None) == expected
    finally:
        gc.enable()


class Reading(Layer):
    """A layer that reads a number of its own, so that every instance has code of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 0 * self.number)


def test_many_layers_that_differ_in_a_number_are_all_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime import compiled_entry

    monkeypatch.setattr(compiled_entry, "MOST_RECOMPILATIONS", 2)
    torch.manual_seed(0)
    model = Stack(*(Reading(number=number) for number in range(6))).train()
    assert_exact(model, rows(steps=2), wrap=OPTIONS | {"blocks": [Reading]})
    assert len(step_of(model).blocks) == 6


def test_layers_that_differ_in_a_number_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime import model_plans

    made: list[Any] = []
    original = model_plans.make_menu
    monkeypatch.setattr(model_plans, "make_menu", lambda *args: made.append(args) or original(*args))
    torch.manual_seed(0)
    model = Stack(*(Reading(number=number) for number in range(4))).train()
    before = num_graphs()
    assert_exact(model, rows(), wrap=OPTIONS | {"blocks": [Reading]})
    assert num_graphs() - before == 4
    assert len(made) == 1


class Tupled(Layer):
    """Takes keywords, a tuple and None; returns a tuple with None and a number in it."""

    def forward(self, x: Tensor, *, scale: tuple[Tensor, None], flag: bool = True) -> tuple[Tensor, None, int]:
        return super().forward(x) * scale[0] if flag else x, None, 3


class TupledStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x), torch.sigmoid(self.first.bias)
        for number, layer in enumerate(self.layers):
            x, nothing, three = layer(x, scale=(scale, None), flag=number != 1)
            assert nothing is None
            assert three == 3
        return self.last(x).square().mean()


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor


class Dataclassed(Layer):
    def forward(self, x: Tensor) -> Output:
        hidden = super().forward(x)
        return Output(hidden, hidden.mean())


class DataclassStack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        output = Output(self.first(x), x.mean())
        total = torch.zeros(())
        for layer in self.layers:
            output = layer(output.hidden)
            total = total + output.extra
        return self.last(output.hidden).square().mean() + total


class Repeating(Stack):
    """Calls its layers twice, the last one in between, and one layer without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (*self.layers, *self.layers, self.layers[-1]):
            x = layer(x)
        with torch.no_grad():
            x = x + self.layers[0](x)
        return self.last(x).square().mean()


class Straight(Stack):
    """Has no loop, so the compiler captures what is between the layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.layers[0](x)
        x = torch.sin(x * 2)
        x = self.layers[1](x)
        return torch.tanh(self.last(x)).square().mean()


@pytest.mark.parametrize(
    ("stack_class", "layer"),
    [(TupledStack, Tupled), (DataclassStack, Dataclassed), (Repeating, Layer), (Straight, Layer)],
)
def test_ways_of_calling_layers_are_exact(stack_class: type[Stack], layer: type[Layer]) -> None:
    torch.manual_seed(0)
    model = stack_class(layer(), layer(), layer()).train()
    assert_exact(model, rows(needs=True), wrap=OPTIONS | {"budget": "90%", "blocks": [layer]})


def test_code_between_layers_is_captured_where_there_is_no_loop() -> None:
    torch.manual_seed(0)
    model = Straight(Layer(), Layer()).train()
    assert_exact(model, rows(), wrap=OPTIONS | {"budget": "95%", "blocks": [Layer]})
    assert len(step_of(model).blocks) == 5


def test_shared_layer_and_layer_in_eval_mode_are_exact() -> None:
    torch.manual_seed(0)
    shared, frozen = Layer(), Layer()
    model = Stack(shared, frozen, shared, Layer()).train()
    frozen.eval().requires_grad_(requires_grad=False)
    assert_exact(model, rows(needs=True), wrap=OPTIONS | {"budget": "80%", "blocks": [Layer]})
    assert len(step_of(model).blocks) == 4


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](x))


def test_outer_block_wins() -> None:
    model = assert_exact(stack(3, Outer), rows(), wrap=OPTIONS | {"blocks": [Layer, Outer]})
    assert {type(module) for module in overrides(model)} == {Outer}
    assert len(step_of(model).blocks) == 3


def test_names_and_lists_of_names() -> None:
    model = stack(3)
    assert list(find_layers(model, ("layers.2", "layers.0", "layers.2")).modules) == ["layers.2", "layers.0"]
    assert list(find_layers(model, ("layers",)).modules) == ["layers.0", "layers.1", "layers.2"]
    assert_exact(model, rows(), wrap=OPTIONS | {"budget": "90%", "blocks": ["layers.0", "layers.2"]})


def test_layers_inside_sequential_are_exact() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(Layer(), Layer(), Layer()), nn.Linear(DIM, 1)).train()
    assert_exact(model, rows(), wrap=OPTIONS | {"budget": "80%", "blocks": [Layer]})


def test_budget_is_kept_when_activations_are_in_layers() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer(64) for _ in range(6))).train(), torch.randn(512, 64)

    def step() -> None:
        model(x).mean().backward()

    step()
    budget = int(0.6 * lowtide.measure_peak(step))
    lowtide.wrap(model, budget=budget, blocks=[Layer])
    step()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        assert lowtide.measure_peak(step) <= budget
    assert step_of(model).peak_bytes <= budget


class Growing(Stack):
    """Runs layers of another class at some calls."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.others = nn.ModuleList([Reading(), Reading()])

    def forward(self, x: Tensor, *, grows: bool = False) -> Tensor:
        x = self.first(x)
        for layer in (*self.layers, *(self.others if grows else ())):
            x = layer(x)
        return self.last(x).square().mean()


def test_call_that_is_tried_again_draws_the_same_random_numbers() -> None:
    torch.manual_seed(0)
    model = Growing(Layer(), Layer(), Layer()).train()
    calls = [(args, {"grows": step > 1}) for step, (args, _) in enumerate(rows(steps=4))]
    assert_exact(model, calls, wrap=OPTIONS | {"budget": "100%", "blocks": [Layer, Reading]})
    assert len(step_of(model).blocks) == 5


def test_layers_of_one_class_that_differ_are_not_expected_twice() -> None:
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    layers[0].wide, layers[0].norm, layers[0].narrow = nn.Linear(DIM, 90), nn.BatchNorm1d(90), nn.Linear(90, DIM)
    model = assert_exact(Stack(*layers).train(), rows(steps=4), wrap=OPTIONS | {"budget": 10**8, "blocks": [Layer]})
    assert sum(plan.num_recomputed for plan in step_of(model).plans) == 0


# Hooks


def test_hooks_of_layers_run_outside_of_their_blocks() -> None:
    model, seen = stack(3), []

    def install(model: Stack) -> None:
        for number, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(lambda _m, args, n=number: seen.append(("before", n)) or (args[0] * 2,))
            layer.register_forward_hook(lambda _m, _a, out, n=number: seen.append(("after", n)) or out + 1)
            layer.register_full_backward_hook(lambda _m, _i, _o, n=number: seen.append(("backward", n)))

    plain = copy.deepcopy(model)
    install(plain)
    expected = train(plain, plain, rows(needs=True))
    of_plain, seen[:] = list(seen), []
    install(model)
    lowtide.wrap(model, **OPTIONS | {"budget": "90%"}, blocks=[Layer])
    before = num_graphs()
    assert_same(expected, train(model, model, rows(needs=True)))
    assert seen == of_plain
    assert len(step_of(model).blocks) >= 3
    assert num_graphs() > before


# A layer is what it was at all other times


def test_layer_behaves_as_before_outside_of_planned_calls() -> None:
    model = stack(3)
    x = torch.randn(ROWS, DIM)
    lowtide.wrap(model, **OPTIONS, blocks=[Layer])
    before = num_graphs()
    torch.manual_seed(3)
    alone = model.layers[0](x)
    torch.manual_seed(3)
    assert torch.equal(alone, Layer.forward(model.layers[0], x))
    model.eval()
    model(x)
    with torch.no_grad():
        model.train()(x)
    assert num_graphs() == before


def test_unwrap_restores_forward() -> None:
    model = stack(3)
    lowtide.wrap(model, **OPTIONS, blocks=[Layer])
    assert len(overrides(model)) == 3
    lowtide.wrap(model, **OPTIONS, blocks=["layers.0"])
    assert overrides(model) == [model.layers[0]]
    lowtide.unwrap(model)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_forward_of_somebody_else_stays() -> None:
    model = stack(3)
    original = model.layers[1].forward
    model.layers[1].forward = lambda x: original(x) * 0.5
    mine = model.layers[1].forward
    plain = stack(3)
    plain.layers[1].forward = lambda x, layer=plain.layers[1]: Layer.forward(layer, x) * 0.5
    expected = train(plain, plain, rows())
    lowtide.wrap(model, **OPTIONS | {"budget": "90%"}, blocks=[Layer])
    assert_same(expected, train(model, model, rows()))
    lowtide.unwrap(model)
    assert model.layers[1].forward is mine


def test_copies_and_pickles_are_plain() -> None:
    model = stack(3)
    keys = list(model.state_dict())
    lowtide.wrap(model, **OPTIONS, blocks=[Layer])
    train(model, model, rows(steps=1))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert not overrides(other)
        assert list(other.state_dict()) == keys
        torch.manual_seed(0)
        loss = other(rows()[0][0][0])
        loss.backward()
        assert other.layers[0].wide.weight.grad is not None
        assert model.layers[0].forward.module is model.layers[0]


def test_error_in_a_layer_arrives_and_the_next_call_is_planned() -> None:
    model = stack(3)
    lowtide.wrap(model, **OPTIONS | {"budget": "1GiB"}, blocks=[Layer])
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(ROWS, DIM + 1))
    with pytest.raises(RuntimeError):
        model(torch.randn(ROWS, DIM).double())
    model(torch.randn(ROWS, DIM)).backward()
    assert len(step_of(model).blocks) == 3


def test_two_threads_train_two_models() -> None:
    models = [stack(3), stack(3)]
    for module in (module for model in models for module in model.modules() if isinstance(module, nn.Dropout)):
        # Threads draw from one generator.
        module.p = 0.0
    expected = [train(plain, plain, rows(steps=1)) for plain in map(copy.deepcopy, models)]
    found: dict[int, Any] = {}
    compiled = threading.Barrier(len(models))

    def loss(result: Any) -> Tensor:
        # PyTorch's optimizers do other arithmetic while any thread compiles, so no step is made before both have.
        compiled.wait(60)
        return first_loss(result)

    def run(number: int) -> None:
        found[number] = train(models[number], models[number], rows(steps=1), loss=loss)

    for model in models:
        lowtide.wrap(model, **OPTIONS | {"budget": "1GiB"}, blocks=[Layer])
    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(models)):
        assert_same(expected[number], found[number])


# What is chosen automatically


def test_deep_models_are_cut_at_their_layers() -> None:
    deep, shallow = stack(LAYERS.repeats + 1), stack(LAYERS.repeats)
    distinct = Stack(*(Layer(dim) for dim in range(1, LAYERS.repeats + 2)))
    assert len(find_layers(deep, "auto").modules) == LAYERS.repeats + 1
    assert f"{LAYERS.repeats} captures" in find_layers(deep, "auto").reason
    assert not find_layers(shallow, "auto").modules
    assert not find_layers(distinct, "auto").modules
    assert not find_layers(deep, "whole").modules


def test_deep_model_is_exact_by_default() -> None:
    before = num_graphs()
    model = assert_exact(stack(LAYERS.repeats + 1), rows(), wrap=OPTIONS)
    assert num_graphs() - before == 1
    assert len(step_of(model).blocks) == LAYERS.repeats + 1


def test_repeated_layers_have_one_class_and_parameters() -> None:
    mixed = nn.Sequential(*(nn.Linear(2, 2) if number % 2 else nn.ReLU() for number in range(12)))
    empty = nn.Sequential(*(nn.ReLU() for _ in range(12)))
    small = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    nested = nn.ModuleList(nn.Sequential(*(nn.Linear(2, 2) for _ in range(8))) for _ in range(8))
    assert not repeated_layers(mixed)
    assert not repeated_layers(empty)
    assert not repeated_layers(small)
    assert list(repeated_layers(nn.ModuleDict({"body": nested}))) == [f"body.{number}" for number in range(8)]


# Errors, before any work


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (["layers.7"], r"'layers.7'.*no module.*layers.0"),
        (["first", "nothing"], r"'nothing'.*no module.*Its modules: first"),
        ([nn.Conv2d], r"Conv2d.*no module of it.*Linear, ModuleList, Layer"),
        ([""], "the model itself"),
        ([Stack], "the model itself"),
        ([int], "no nn.Module"),
        ("layers", '"auto", "whole" or a list'),
        ([torch.tanh], '"auto", "whole" or a list'),
        ([], '"auto", "whole" or a list'),
    ],
)
def test_blocks_that_are_not_there(blocks: Any, words: str) -> None:
    model = stack(2)
    with pytest.raises(InvalidOptionError, match=words):
        lowtide.wrap(model, **OPTIONS, blocks=blocks)
    assert not overrides(model)
    assert lowtide.unwrap(model) is model


def test_plan_of_one_graph_has_no_blocks() -> None:
    plan = lowtide.plan(stack(2), rows()[0][0], budget="1GiB", costs="analytic")
    with pytest.raises(InvalidOptionError, match="one graph"):
        lowtide.wrap(stack(2), plan=plan, blocks=[Layer])


def test_functions_have_no_blocks() -> None:
    with pytest.raises(InvalidOptionError, match="function"):
        lowtide.wrap(lambda x: x.sum(), budget="1GiB", blocks=[Layer])


# Budgets below what layers as blocks need


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut models of few layers at their layers by default."""
    monkeypatch.setattr(
        "lowtide.blocks.step.find_layers.find_layers", partial(find_layers, policy=LayerPolicy(repeats=3))
    )


def deep() -> Stack:
    """Return a model that is cut at its layers by default, and whose plan as a whole needs less than its blocks."""
    return stack(6)


def many_rows() -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [((torch.randn(8 * ROWS, DIM, generator=generator),), {}) for _ in range(2)]


def least_of(blocks: Any, *, run: bool) -> int:
    """Return the least budget that the error names, of planning alone or of training."""
    options = OPTIONS | {"budget": 1000, "blocks": blocks}
    args = many_rows()[0][0]
    call = partial(lowtide.wrap(deep(), **options), *args) if run else partial(lowtide.plan, deep(), args, **options)
    with pytest.raises(InfeasibleBudgetError) as caught:
        call()
    return caught.value.least_bytes


@pytest.mark.usefixtures("few_are_many")
def test_whole_graph_is_planned_where_layers_as_blocks_do_not_fit() -> None:
    as_blocks, whole = least_of([Layer], run=False), least_of("whole", run=False)
    assert whole < 0.9 * as_blocks
    budget = (whole + as_blocks) // 2
    plan = lowtide.plan(deep(), many_rows()[0][0], **OPTIONS | {"budget": budget})
    assert isinstance(plan, Plan)
    assert plan.peak_bytes <= budget
    model = assert_exact(deep(), many_rows(), wrap=OPTIONS | {"budget": budget})
    assert [type(each) for each in lowtide.plans(model)] == [Plan]
    assert not overrides(model)


@pytest.mark.usefixtures("few_are_many")
def test_least_budget_is_that_of_the_better_cut_and_works() -> None:
    planned, trained = least_of("auto", run=False), least_of("auto", run=True)
    assert planned == trained == least_of("whole", run=True)
    assert_exact(deep(), many_rows()[:1], wrap=OPTIONS | {"budget": trained})


@pytest.mark.usefixtures("few_are_many")
def test_model_that_fits_nowhere_is_cut_at_its_layers_again() -> None:
    model = deep()
    budget = least_of([Layer], run=True)
    lowtide.wrap(model, **OPTIONS | {"budget": budget})
    with pytest.raises(InfeasibleBudgetError):
        model(torch.randn(64 * ROWS, DIM))
    assert len(overrides(model)) == 6
    model(*many_rows()[0][0]).backward()
    assert len(step_of(model).blocks) == 6
