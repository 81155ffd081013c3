"""Blocks of a chain that remember things in Python: one call leaves what one plain run of the blocks leaves."""

from __future__ import annotations

import array
import copy
import random
import threading
import weakref
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.chain_cases import BATCH, DIM, Loop
from helpers.exactness import DropEverything
from lowtide import errors
from lowtide.blocks.python_state.reachable import Reachable
from lowtide.blocks.python_state.snapshot import Snapshot

DROP = DropEverything(again=True)
STEPS = 3


class Stateful(nn.Module):
    """A block whose result depends on what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(DIM, DIM), nn.Tanh()
        self.prepare()

    def prepare(self) -> None:
        """Make what is remembered."""

    def factor(self, x: Tensor) -> Any:
        """Return a number or a tensor that is not the same in every run."""
        raise NotImplementedError

    def remembered(self) -> Any:
        """Return what is remembered, to compare."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x)) * (1 + self.factor(x))


class Calls(Stateful):
    def prepare(self) -> None:
        self.calls = 0

    def factor(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls / 7

    def remembered(self) -> Any:
        return self.calls


class Listed(Stateful):
    def prepare(self) -> None:
        self.seen: list[float] = []

    def factor(self, x: Tensor) -> Any:
        self.seen.append(float(x.detach().sum()))
        return len(self.seen) / 5

    def remembered(self) -> Any:
        return self.seen


class Nested(Stateful):
    def prepare(self) -> None:
        self.table: dict[str, Any] = {"rows": [[1.0]], "count": Counter(), "more": defaultdict(list)}

    def factor(self, x: Tensor) -> Any:
        self.table["rows"][0].append(2.0)
        self.table["rows"].append([float(len(self.table["rows"]))])
        self.table["count"]["n"] += 1
        self.table["more"][self.table["count"]["n"]].append(1)
        return sum(map(sum, self.table["rows"])) / 50

    def remembered(self) -> Any:
        return self.table


class OnSubmodule(Stateful):
    def factor(self, x: Tensor) -> Any:
        self.inner.steps = getattr(self.inner, "steps", 0) + 1
        return self.inner.steps / 3

    def remembered(self) -> Any:
        return getattr(self.inner, "steps", None)


class Deque(Stateful):
    def prepare(self) -> None:
        self.last: deque[float] = deque([0.1, 0.2], maxlen=3)
        self.kinds: set[int] = set()

    def factor(self, x: Tensor) -> Any:
        self.last.append(self.last[-1] + 0.3)
        self.kinds.add(len(self.kinds))
        return sum(self.last) + len(self.kinds)

    def remembered(self) -> Any:
        return list(self.last), self.kinds


@dataclass
class Meter:
    total: float = 0.0
    kept: Any = None


class InAnObject(Stateful):
    def prepare(self) -> None:
        self.meter, self.space = Meter(), SimpleNamespace(n=0)

    def factor(self, x: Tensor) -> Any:
        self.meter.total += 0.25
        self.space.n += 1
        return self.meter.total + self.space.n / 9

    def remembered(self) -> Any:
        return self.meter.total, self.space.n


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class InSlots(Stateful):
    def prepare(self) -> None:
        self.slotted = Slotted()

    def factor(self, x: Tensor) -> Any:
        self.slotted.number += 1
        return self.slotted.number / 9

    def remembered(self) -> Any:
        return self.slotted.number


class CachedTensor(Stateful):
    """Keeps a tensor of the last run, without its gradient."""

    def prepare(self) -> None:
        self.cache: Tensor | None = None

    def factor(self, x: Tensor) -> Any:
        before, self.cache = self.cache, x.detach() * 2
        return 0.0 if before is None else before.mean()

    def remembered(self) -> Any:
        return None if self.cache is None else self.cache.tolist()


class LazyBuffer(Stateful):
    """Makes a buffer in its first run."""

    def factor(self, x: Tensor) -> Any:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(DIM))
        return self.scale

    def remembered(self) -> Any:
        return list(self._buffers)


class PythonRandom(Stateful):
    def factor(self, x: Tensor) -> Any:
        return random.random() + random.gauss(0, 1)


class NumpyRandom(Stateful):
    def factor(self, x: Tensor) -> Any:
        return float(np.random.randn())  # an odd number of them: one is left over for the next call


class OwnGenerators(Stateful):
    def prepare(self) -> None:
        self.torch = [torch.Generator().manual_seed(3)]
        self.python, self.numpy = random.Random(3), np.random.default_rng(3)
        self.legacy = np.random.RandomState(4)

    def factor(self, x: Tensor) -> Any:
        drawn = self.python.random() + self.numpy.random() + float(self.legacy.randn())
        return torch.rand(DIM, generator=self.torch[0]) + drawn

    def remembered(self) -> Any:
        state = self.legacy.get_state(legacy=False)["state"]
        return self.torch[0].get_state().tolist(), self.python.getstate(), self.numpy.bit_generator.state, state["pos"]


class Arrays(Stateful):
    def prepare(self) -> None:
        self.array, self.raw = np.zeros(3), bytearray(2)

    def factor(self, x: Tensor) -> Any:
        self.array += 0.5
        self.raw[0] += 1
        return float(self.array.sum()) + self.raw[0]

    def remembered(self) -> Any:
        return self.array.tolist(), bytes(self.raw)


class Mode(Stateful):
    """Puts a part of itself into another mode, which the next run sees."""

    def prepare(self) -> None:
        self.drop = nn.Dropout(0.5)

    def factor(self, x: Tensor) -> Any:
        found = self.drop(torch.ones(DIM)) + self.drop.training
        self.drop.train(not self.drop.training)
        return found

    def remembered(self) -> Any:
        return self.drop.training


class HookInForward(Stateful):
    """Registers a hook on a part of itself in every run."""

    def factor(self, x: Tensor) -> Any:
        self.inner.register_forward_hook(lambda module, args, result: result * 0.9)
        return 0.1

    def remembered(self) -> Any:
        return len(self.inner._forward_hooks)


class EveryThird(Stateful):
    """Remembers nothing when it is looked at."""

    def prepare(self) -> None:
        self.log: list[int] = []

    def factor(self, x: Tensor) -> Any:
        if x.mean() > 0.5:
            self.log.append(1)
        return len(self.log) / 4

    def remembered(self) -> Any:
        return self.log


class OfTheClass(Stateful):
    total = 0
    names: ClassVar[OrderedDict[str, int]] = OrderedDict()

    def factor(self, x: Tensor) -> Any:
        type(self).total += 1
        self.names[str(self.total)] = self.total
        return self.total / 9

    def remembered(self) -> Any:
        return self.total, list(self.names)


COUNT = 0
SEEN: list[int] = []


class Globals(Stateful):
    def factor(self, x: Tensor) -> Any:
        global COUNT
        COUNT += 1
        SEEN.append(COUNT)
        return COUNT / 9 + len(SEEN)

    def remembered(self) -> Any:
        return COUNT, list(SEEN)


class Holders(Stateful):
    """Remembers in things that only hold other things."""

    def prepare(self) -> None:
        self.mapping, self.sequence, self.waiting = UserDict(n=0), UserList(), Queue()
        self.numbers, self.own = array.array("d", [0.0]), threading.local()
        self.own.n = 0
        self.meter = Meter()
        self.reference = weakref.ref(self.meter)

    def factor(self, x: Tensor) -> Any:
        self.mapping["n"] += 1
        self.sequence.append(1)
        self.waiting.put(1)
        self.numbers[0] += 1
        self.own.n += 1
        self.reference().total += 1
        return self.mapping["n"] + len(self.sequence) + self.waiting.qsize() + self.numbers[0] + self.own.n

    def remembered(self) -> Any:
        found = self.mapping["n"], len(self.sequence), self.waiting.qsize(), self.numbers[0], self.own.n
        return *found, self.meter.total


class ByReference(Stateful):
    """Remembers in something that it refers to without holding it."""

    def prepare(self) -> None:
        meter = Meter()
        ALIVE.append(meter)
        self.reference = weakref.ref(meter)

    def factor(self, x: Tensor) -> Any:
        self.reference().total += 1
        return self.reference().total / 9

    def remembered(self) -> Any:
        return self.reference().total


ALIVE: list[Meter] = []
KINDS = [
    *(Calls, Listed, Nested, OnSubmodule, Deque, InAnObject, InSlots, CachedTensor, LazyBuffer, PythonRandom),
    *(NumpyRandom, OwnGenerators, Arrays, Mode, HookInForward, EveryThird, OfTheClass, Globals, Holders),
    ByReference,
]


def reset() -> None:
    global COUNT
    COUNT = 0
    SEEN.clear()
    OfTheClass.total = 0
    OfTheClass.names.clear()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def outcome(model: nn.Module, blocks: list[Any], inputs: list[Tensor]) -> list[Any]:
    """Return everything that training leaves, step by step."""
    reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: list[Any] = []
    for given in inputs:
        x = given.clone().requires_grad_()
        loss = model(x).square().mean()
        row: list[Any] = [block.remembered() for block in blocks if isinstance(block, Stateful)]
        loss.backward()
        row += [block.remembered() for block in blocks if isinstance(block, Stateful)]
        row += [loss.item(), x.grad.tolist()]
        row += [parameter.grad.tolist() for parameter in model.parameters()]
        row += [(name, buffer.tolist()) for name, buffer in model.named_buffers()]
        row += [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
        row += [np.random.get_state()[2:]]
        found.append(copy.deepcopy(row))
        optimizer.step()
        optimizer.zero_grad()
    return found


def batches(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(BATCH, DIM, generator=generator) + (step == 1) for step in range(steps)]


def assert_like_plain(make: Callable[[], list[Any]], *, planner: Any = DROP, budget: str = "1TiB") -> nn.Module:
    """Train a loop over new blocks and a chain of new blocks, which must leave the same."""
    results, model = [], nn.Module()
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = make()
        model = lowtide.chain(blocks, budget=budget, planner=planner) if chained else Loop(blocks)
        results.append(outcome(model, blocks, batches()))
    for step, (plain, found) in enumerate(zip(*results, strict=True)):
        for place, (one, other) in enumerate(zip(plain, found, strict=True)):
            assert repr(one) == repr(other), f"step {step}, entry {place}"
    assert model.plans[0].num_recomputed
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_remember(kind: type[Stateful]) -> None:
    assert_like_plain(lambda: [kind() for _ in range(6)])


@pytest.mark.parametrize("kind", [Calls, Listed, CachedTensor, PythonRandom, NumpyRandom])
def test_what_blocks_remember_under_a_real_plan(kind: type[Stateful]) -> None:
    assert_like_plain(lambda: [kind() for _ in range(6)], planner="rotor", budget="85%")


@pytest.mark.parametrize("kind", [Calls, Nested, CachedTensor, OwnGenerators, NumpyRandom])
def test_one_block_many_times(kind: type[Stateful]) -> None:
    assert_like_plain(lambda: [kind()] * 5)


def test_the_test_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.blocks.python_state.snapshot.Snapshot.restore", lambda self: None)
    with pytest.raises(AssertionError):
        assert_like_plain(lambda: [Calls() for _ in range(4)])


def test_state_in_closures_defaults_and_function_attributes() -> None:
    def make() -> list[Any]:
        calls = 0
        seen: list[int] = []
        linear = nn.Linear(DIM, DIM)

        def block(x: Tensor, kept: list[int] = []) -> Tensor:  # noqa: B006
            nonlocal calls
            calls += 1
            seen.append(calls)
            kept.append(1)
            block.runs = getattr(block, "runs", 0) + 1
            return torch.tanh(linear(x)) * (calls + len(seen) + block.runs + len(kept)) / 9

        return [linear, block, block, nn.Linear(DIM, DIM)]

    assert_like_plain(make)


def test_state_of_a_bound_method_and_a_partial() -> None:
    import functools

    class Owner:
        def __init__(self) -> None:
            self.calls, self.linear = 0, nn.Linear(DIM, DIM)

        def run(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.linear(x)) * self.calls

    def scaled(table: dict[str, int], x: Tensor) -> Tensor:
        table["n"] = table.get("n", 0) + 1
        return x.sin() * table["n"]

    def make() -> list[Any]:
        return [nn.Linear(DIM, DIM), Owner().run, functools.partial(scaled, {}), nn.Linear(DIM, DIM)]

    assert_like_plain(make)


def test_hooks_that_collect() -> None:
    def make() -> list[Any]:
        blocks = [Calls() for _ in range(4)]
        for block in blocks:
            block.linear.register_forward_hook(lambda module, args, result, own=block: setattr(own, "calls", 5))
        return blocks

    assert_like_plain(make)


def test_settings_changed_between_forward_and_backward() -> None:
    """A plain backward does not see modes, attributes and hooks of that time; a repeated run must not either."""
    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5), Calls()) for _ in range(4)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        for x in batches():
            loss = model(x).sum()
            model.eval()
            for block in blocks:
                block[2].calls += 100
                block[0].register_forward_hook(lambda module, args, result: result * 3)
                block[0].weight, old = nn.Parameter(block[0].weight.detach() * 2), block[0].weight
            loss.backward()
            results.append([block[2].calls for block in blocks] + [old.grad.sum().item(), loss.item()])
            model.train()
    assert results[:STEPS] == results[STEPS:]


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aux = y.square().mean()
        return y.tanh()


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(DIM, DIM), []
        self.loose = torch.zeros(())
        self.on = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.on == "store":
            self.kept.append(x * 2)
        elif self.on == "overwrite":
            self.loose += 1
        elif self.on == "random":
            random.random()
        elif self.on == "parameter":
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        elif self.on == "module":
            self.more = nn.Linear(DIM, DIM)
        elif self.on == "input":
            x.mul_(2)
        return self.linear(x).tanh() + self.loose


class Overwrites(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, DIM), how
        self.loose, self.stream = torch.zeros(()), iter(range(10**6))
        if how != "iterator":
            del self.stream
        self.many, self.large = [0] * 20_000, np.zeros(300_000)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "loose":
            self.loose.add_(1)
        elif self.how == "parameter":
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        elif self.how == "data":
            self.linear.weight.data.clamp_(-0.01, 0.01)
        elif self.how == "module":
            self.extra = nn.Linear(DIM, DIM)
            return self.extra(x)
        elif self.how == "many":
            self.many[5] += 1
        elif self.how == "large":
            self.large[5] += 1
        elif self.how == "iterator":
            return self.linear(x) * next(self.stream)
        return self.linear(x) + self.loose


REFUSED = {
    "loose": r"Block 1 \(Overwrites\) changes the tensor 'loose' in place.*register_buffer",
    "parameter": r"Block 1 \(Overwrites\) changes its parameter 'weight'",
    "data": r"Block 1 \(Overwrites\) changes its parameter 'weight'",
    "module": r"Block 1 \(Overwrites\) adds, replaces or removes parameters or submodules",
    "many": r"Block 1 \(Overwrites\) changes 'many' while it runs, which is too large",
    "large": r"Block 1 \(Overwrites\) changes 'large' while it runs, which is too large",
    "iterator": r"Block 1 \(Overwrites\) has an iterator in 'stream'",
}


@pytest.mark.parametrize("how", REFUSED)
def test_what_cannot_be_put_back_is_refused(how: str) -> None:
    block = Overwrites(how)
    chained = lowtide.chain([nn.Linear(DIM, DIM), block, nn.Linear(DIM, DIM)], budget="1TiB", planner=DROP)
    state, loose, random_state = copy.deepcopy(block.state_dict()), block.loose.clone(), torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(errors.InvalidModelError, match=REFUSED[how]):
            chained(torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    assert torch.equal(block.loose, loose)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not hasattr(block, "extra")
    assert block.many[5] == block.large[5] == 0


def test_a_stored_tensor_with_a_gradient_is_refused() -> None:
    chained = lowtide.chain([Auxiliary() for _ in range(3)], budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 0 \(Auxiliary\) stores a tensor .* in 'aux'.*emits"):
        chained(torch.randn(BATCH, DIM))
    assert not hasattr(chained[0], "aux")


def test_a_hook_that_collects_features_is_refused() -> None:
    features: list[Tensor] = []
    blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3)]
    blocks[1][0].register_forward_hook(lambda module, args, result: features.append(result))
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match=r"Block 1 .*stores a tensor that needs a gradient.*features"):
        chained(torch.randn(BATCH, DIM))
    assert features == []


LATE = {
    "store": "stores a tensor",
    "overwrite": "changes the tensor 'loose' in place",
    "random": "drew from Python's or numpy's",
    "parameter": "Parameter 'weight' of a Linear in Block 2 .* was changed in place by a block",
    "module": "adds, replaces or removes",
    "input": "changes its input in place",
}


@pytest.mark.parametrize("how", LATE)
def test_what_begins_after_the_look(how: str) -> None:
    blocks = [Late() for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    x = torch.randn(BATCH, DIM)
    chained(x).sum().backward()
    blocks[2].on = how
    with pytest.raises(errors.InvalidModelError, match=LATE[how]):
        chained(x).sum().backward()


def test_a_change_while_it_is_run_again_is_undone() -> None:
    """Python state that a run with gradients alone changes."""

    class Recorded(nn.Linear):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                self.runs += 1
            return super().forward(x) * (1 + self.runs)

    blocks = [Recorded(DIM, DIM) for _ in range(4)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    chained(torch.randn(BATCH, DIM)).sum().backward()
    assert all(block.runs <= 1 for block in blocks)


def test_arguments_that_blocks_change() -> None:
    class Noting(nn.Linear):
        def forward(self, x: Tensor, notes: list[float] | None = None, *, stats: dict[str, Any]) -> Tensor:
            stats["n"] = stats.get("n", 0) + 1
            if notes is not None:
                notes.append(stats["n"])
            return torch.tanh(super().forward(x)) * stats["n"]

    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        blocks = [Noting(DIM, DIM) for _ in range(5)]
        model = lowtide.chain(blocks, budget="1TiB", planner=DROP) if chained else Loop(blocks)
        stats: dict[str, Any] = {}
        notes: list[float] = []
        for x in batches():
            loss = model(x, extras=[(notes,)] * 5, stats=stats).sum()
            loss.backward()
            results.append((loss.item(), dict(stats), list(notes), [p.grad.sum().item() for p in model.parameters()]))
    assert results[:STEPS] == results[STEPS:]


def test_stored_tensors_are_part_of_the_peak() -> None:
    """What blocks keep of their inputs stays beyond the step, in the prediction too."""
    blocks = [CachedTensor() for _ in range(8)]
    chained = lowtide.chain(blocks, budget="1TiB", planner=DROP)
    x = torch.randn(4096, DIM)
    gradient = torch.ones(4096, DIM)
    for _ in range(3):
        measured = lowtide.measure_peak(lambda: chained(x).backward(gradient))
        chained.zero_grad()
        assert measured <= chained.plans[0].budget_bytes
    measured = lowtide.measure_peak(lambda: chained(x).backward(gradient))
    assert measured <= chained.plans[0].peak_bytes


def test_chained_layers_with_counters() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Calls() for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    results = []
    for chained in (False, True):
        torch.manual_seed(0)
        model = Model()
        if chained:
            lowtide.chain_layers(model, budget="1TiB", planner=DROP)
        for x in batches():
            loss = model(x).sum()
            loss.backward()
            results.append((loss.item(), [layer.calls for layer in model.layers]))
            results[-1][1].append([parameter.grad.sum().item() for parameter in model.parameters()])
    assert results[:STEPS] == results[STEPS:]


def test_chained_layers_that_change_their_arguments_are_refused() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor, notes: list[int]) -> Tensor:
            notes.append(1)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(DIM, DIM) for _ in range(3))

        def forward(self, x: Tensor, notes: list[int]) -> Tensor:
            for layer in self.layers:
                x = layer(x, notes)
            return x

    model = lowtide.chain_layers(Model(), budget="1TiB", planner=DROP)
    with pytest.raises(errors.InvalidModelError, match="changes a list or a dictionary"):
        model(torch.randn(BATCH, DIM), [])


def test_unrolled_steps_with_counters() -> None:
    results = []
    for chunk in (1, 3):
        torch.manual_seed(0)
        cell = nn.GRUCell(DIM, DIM)
        calls = []

        def step(x: Tensor, hidden: Tensor, cell: nn.Module = cell, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return cell(x, hidden) * (1 + len(calls) / 9)

        sequence = torch.randn(9, BATCH, DIM, generator=torch.Generator().manual_seed(1))
        if chunk == 1:
            hidden = torch.zeros(BATCH, DIM)
            for x in sequence:
                hidden = step(x, hidden)
        else:
            model = lowtide.unroll(step, budget="1TiB", planner=DROP, chunk=3, output=None)
            _, hidden = model(sequence, torch.zeros(BATCH, DIM))
        hidden.sum().backward()
        results.append((hidden.sum().item(), len(calls), cell.weight_hh.grad.sum().item()))
    assert results[0] == results[1]


def _must_not_run(*_: Any, **__: Any) -> Any:
    raise AssertionError("looking at a container runs its own methods")


class Registry(dict[str, Any]):
    """Like registries that import what is looked at."""

    keys = values = items = __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = _must_not_run  # type: ignore[assignment]
    copy = clear = update = __setitem__ = _must_not_run  # type: ignore[assignment]


class OrderedRegistry(OrderedDict[str, Any]):
    keys = values = items = __iter__ = __len__ = __getitem__ = __eq__ = _must_not_run  # type: ignore[assignment]


class Names(list[Any]):
    __iter__ = __len__ = __getitem__ = extend = clear = copy = _must_not_run  # type: ignore[assignment]


class Flags(set[str]):
    __iter__ = __len__ = __contains__ = update = __eq__ = _must_not_run  # type: ignore[assignment]


@pytest.mark.parametrize("entries", [1, 3, 5000])
def test_methods_of_containers_do_not_run(entries: int) -> None:
    words = [str(number) for number in range(entries)]
    things = [Registry(), OrderedRegistry(zip(words, words, strict=True)), Names(words), Flags(words)]
    dict.update(things[0], dict.fromkeys(words, 1))
    bases: list[Any] = [dict, OrderedDict, list, set]
    holder = SimpleNamespace(things=things)
    known = Snapshot(Reachable((holder,)))
    assert known.holds()
    for thing, base in zip(things, bases, strict=True):
        base.clear(thing)
    assert not known.holds()
    known.restore()
    assert known.holds()
    assert [base.__len__(thing) for thing, base in zip(things, bases, strict=True)] == [entries] * 4
    assert list(dict.items(things[0])) == [(word, 1) for word in words]
    assert list(OrderedDict.items(things[1])) == [(word, word) for word in words]
    assert list(list.__iter__(things[2])) == words
