"""Branches on the contents of inputs: taken as eager takes them, at every call, in one graph where they are cheap."""

from __future__ import annotations

import copy
import datetime
import itertools
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from helpers.exactness import Batch, DropEverything, assert_exact, assert_same, train
from lowtide.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic", "planner": DropEverything(again=True)}
FULL, HOLES, EMPTY = torch.ones(4, dtype=torch.long), torch.tensor([1, 0, 1, 1]), torch.zeros(4, dtype=torch.long)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Forget earlier tests: the compiler keeps a bounded number of variants of one method, and all share one here."""
    torch._dynamo.reset()


class Branching(nn.Module):
    def __init__(self, branch: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.calls = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), 0
        self.branch = branch

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.calls = 1
        h = F.dropout(self.norm(self.first(x)), 0.3)
        return self.last(F.dropout(self.branch(h, mask), 0.2)).square().mean()


def all_of(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.all():
        return torch.tanh(h)
    return h * mask[:, None]


def any_of(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.sin(h) if not (mask == 0).any() else h * 2


def counted(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.sum() == mask.numel() and mask.shape[0] > 1:
        h = torch.exp(h)
    return h + 1


def twice(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask[0] > 0:
        h = torch.tanh(h)
    if mask[1] > 0:
        h = torch.sin(h)
    return h


def looped(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    for row in range(3):
        if mask[row]:
            h = torch.tanh(h + row)
    return h


def in_words(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    whole = mask is None or mask.all()
    return torch.tanh(h) if whole else torch.cos(h)


def of_floats(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if h.detach().sum() > 0:
        return torch.tanh(h)
    return torch.cos(h)


def drawn(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if torch.rand([]) < 0.5:
        return torch.tanh(h)
    return torch.cos(h)


@torch.library.custom_op("lowtide_tests::coin", mutates_args=())
def coin(mask: torch.Tensor) -> torch.Tensor:
    """Return 0 or 1, which the mask does not tell."""
    return torch.randint(2, ()) + 0 * mask.sum()


coin.register_fake(lambda mask: mask.new_empty(()))


def tossed(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h) if coin(mask) > 0 else torch.cos(h)


def thinned(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h) if F.dropout(mask.float(), 0.5).sum() > 3 else torch.cos(h)


def shuffled(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h) if torch.randperm(len(mask))[0] > 1 else torch.cos(h)


def picked(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h) if (mask + 1.0).multinomial(1)[0] > 1 else torch.cos(h)


def batches(*masks: torch.Tensor) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [((torch.randn(4, 8, generator=generator), mask.clone()), {}) for mask in masks]


CASES = [all_of, any_of, counted, twice, looped, in_words, of_floats, drawn, tossed, thinned, shuffled, picked]
FULL_FIRST, HOLES_FIRST = (FULL, HOLES, FULL, EMPTY), (HOLES, HOLES, FULL, HOLES)


@pytest.mark.parametrize(
    ("branch", "masks"),
    [
        *itertools.product(CASES, [FULL_FIRST]),
        *itertools.product([all_of, twice], [HOLES_FIRST]),
        *(pytest.param(each, HOLES_FIRST, marks=pytest.mark.slow) for each in CASES if each not in (all_of, twice)),
    ],
    ids=lambda each: each.__name__ if callable(each) else "full first" if each is FULL_FIRST else "holes first",
)
def test_branches_are_eagers_at_every_call(branch: Callable[..., Any], masks: tuple[torch.Tensor, ...]) -> None:
    assert_exact(Branching(branch), batches(*masks))


@pytest.mark.parametrize(
    "branch",
    [all_of, twice, *(pytest.param(each, marks=pytest.mark.slow) for each in (any_of, counted, looped))],
    ids=lambda function: function.__name__,
)
def test_cheap_branches_do_not_cut_the_graph(branch: Callable[..., Any]) -> None:
    model = lowtide.wrap(Branching(branch), **LOOSE)
    model(*batches(FULL)[0][0]).backward()
    assert len(lowtide.plans(model)) == 1
    model(*batches(HOLES)[0][0]).backward()
    assert len(lowtide.plans(model)) == 2


def test_a_look_at_inputs_stays_small() -> None:
    """What a look makes is not part of the plan; where it is much, the graph is cut and the look is a part of it."""

    def compared(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h) if (mask + 1 > 1).all() else torch.cos(h)

    for columns, cut in ((8, False), (1 << 16, True)):
        model = lowtide.wrap(Branching(compared), **LOOSE)
        model(batches(FULL)[0][0][0], torch.ones(4, columns, dtype=torch.long)).backward()
        assert (len(lowtide.plans(model)) > 1) == cut


def test_branches_seen_before_are_not_captured_again() -> None:
    model = lowtide.wrap(Branching(all_of), **LOOSE)
    for mask in (FULL, HOLES):
        model(*batches(mask)[0][0]).backward()
    compiled = model._compiled_call_impl.session.num_compiled
    for mask in (FULL, HOLES, FULL, HOLES, HOLES):
        model(*batches(mask)[0][0]).backward()
    assert model._compiled_call_impl.session.num_compiled == compiled


def test_more_combinations_than_are_kept() -> None:
    def many(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for bit in range(4):
            if (mask.sum() >> bit) % 2:
                h = torch.tanh(h) + bit
        return h

    masks = [torch.tensor([number, 0, 0, 0]) for number in range(12)]
    assert_exact(Branching(many), batches(*masks))


def test_a_changed_branch_leaves_no_trace_of_the_first_try() -> None:
    model = Branching(all_of)
    plain = copy.deepcopy(model)
    lowtide.wrap(model, **LOOSE)
    model(*batches(FULL)[0][0]).backward(), plain(*batches(FULL)[0][0]).backward()
    for module in (model, plain):
        module.zero_grad(), module.load_state_dict(plain.state_dict())
    expected, found = (train(module, module, batches(HOLES)) for module in (plain, model))
    assert_same(expected, found)


@pytest.mark.parametrize("masks", [(FULL, FULL), (FULL, HOLES, FULL)], ids=["same branch", "branch that changes"])
def test_buffers_are_not_copied_against_the_budget(masks: tuple[torch.Tensor, ...]) -> None:
    model = Branching(all_of)
    model.register_buffer("table", torch.zeros(100_000))
    lowtide.wrap(model, **LOOSE)
    for mask in masks:
        model(*batches(mask)[0][0]).backward()
        model.zero_grad()
    args = batches(masks[0])[0][0]
    plan = lowtide.plans(model)[0]
    measured = lowtide.measure_peak(lambda: model(*args).backward())
    assert abs(measured - plan.peak_bytes) < 1024


def test_other_compilers_are_not_touched() -> None:
    graphs = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    lowtide.wrap(Branching(all_of), **LOOSE)(*batches(FULL)[0][0])
    torch.compile(Branching(all_of), backend=backend)(*batches(FULL)[0][0])
    assert len(graphs) > 1


def test_a_check_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle can fail: without the check the wrong branch would be taken."""
    from lowtide.pytorch.compiler.tracing import Condition

    monkeypatch.setattr(Condition, "guard", lambda *_: None)
    with pytest.raises(AssertionError, match="differs"):
        assert_exact(Branching(all_of), batches(FULL, HOLES))


# What has happened before the branch happens once


def in_place(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask *= 2
    return torch.tanh(h) if (mask > 1).all() else torch.cos(h)


def by_method(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask.zero_()
    return torch.tanh(h) if mask.any() else torch.cos(h)


def by_item(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask[0] = 0
    return torch.tanh(h) if mask.all() else torch.cos(h)


def by_view(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    mask[1:].zero_()
    return torch.tanh(h) if mask.all() else torch.cos(h)


def by_out(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    torch.add(mask, 1, out=mask)
    return torch.tanh(h) if (mask > 1).all() else torch.cos(h)


WRITING = [in_place, by_method, by_item, by_view, by_out]


@pytest.mark.parametrize("branch", WRITING, ids=lambda function: function.__name__)
def test_masks_that_are_written_to_before_the_branch(branch: Callable[..., Any]) -> None:
    assert_exact(Branching(branch), batches(FULL, HOLES, FULL))


@pytest.mark.parametrize(
    "branch",
    [in_place, *(pytest.param(each, marks=pytest.mark.slow) for each in WRITING[1:])],
    ids=lambda function: function.__name__,
)
def test_masks_that_come_later_and_are_written_to(branch: Callable[..., Any]) -> None:
    def unless_missing(h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return h if mask is None else branch(h, mask)

    first = ((batches(FULL)[0][0][0], None), {})
    assert_exact(Branching(unless_missing), [first, *batches(FULL, HOLES)])


def test_a_mask_written_to_by_another_name() -> None:
    class Aliased(Branching):
        def forward(self, x: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
            return self.of_two(x, pair, pair.view(-1))

        @torch._dynamo.disable(recursive=False)
        def of_two(self, x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.inner(x, one, other)

        def inner(self, x: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            one.zero_()
            h = self.first(x)
            return (torch.tanh(h) if other.any() else torch.cos(h)).square().mean()

    assert_exact(Aliased(all_of), batches(FULL, HOLES, EMPTY))


@pytest.mark.parametrize("write", ["iadd", "add_"])
def test_a_counter_in_a_buffer(write: str) -> None:
    class Counting(Branching):
        def __init__(self) -> None:
            super().__init__(self.early)
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def early(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if write == "iadd":
                self.steps += 1
            else:
                self.steps.add_(1)
            return torch.tanh(h) if self.steps < 3 else torch.cos(h)

        def __deepcopy__(self, memo: Any) -> Counting:
            twin = Counting()
            twin.load_state_dict(self.state_dict())
            return twin

    assert_exact(Counting(), batches(FULL, FULL, FULL, FULL))


def test_python_before_the_branch_runs_once() -> None:
    told: list[float] = []

    def telling(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        told.append(float(h.detach().sum()))
        torch._dynamo.graph_break()
        return all_of(h, mask)

    assert_exact(Branching(telling), batches(FULL, HOLES, FULL, HOLES))
    assert told[:4] == told[4:]


def test_numbers_of_a_generator_are_drawn_once() -> None:
    generator = torch.Generator()

    def drawing(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return all_of(h + torch.rand(4, 8, generator=generator), mask)

    plain, model = Branching(drawing), Branching(drawing)
    model.load_state_dict(plain.state_dict())
    steps = batches(FULL, HOLES, FULL, HOLES)
    expected = train(plain, plain, steps)
    generator.manual_seed(generator.initial_seed())
    assert_same(expected, train(model, lowtide.wrap(model, **LOOSE), steps))


def test_two_branches_in_one_backward() -> None:
    """Buffers that the first call has saved are not touched by the second one."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branching(self.scaled)
            self.inner.norm = nn.Identity()
            self.inner.register_buffer("scale", torch.arange(8.0) + 1)

        def scaled(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return all_of(h * self.inner.scale, mask)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, FULL) + self.inner(x, HOLES)

    plain, model = Twice(), Twice()
    model.load_state_dict(plain.state_dict())
    lowtide.wrap(model.inner, **LOOSE)
    steps = [((batches(FULL)[0][0][0],), {})] * 2
    assert_same(train(plain, plain, steps), train(model, model, steps))


def test_branches_need_no_copies_of_buffers() -> None:
    class Large(Branching):
        def __init__(self) -> None:
            super().__init__(all_of)
            self.register_buffer("large", torch.ones(1 << 20))

    model, batch = Large(), batches(FULL)[0][0]
    lowtide.wrap(model, budget="100%")
    for _ in range(2):
        model.zero_grad()
        model(*batch).backward()
    model.zero_grad()
    budget = lowtide.plans(model)[0].budget_bytes
    assert lowtide.measure_peak(lambda: model(*batch).backward()) <= budget + 1024


def test_an_assertion_about_inputs_leaves_the_graph_whole() -> None:
    def checked(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert mask.any(), "an empty batch"
        return torch.tanh(h)

    model = lowtide.wrap(Branching(checked), **LOOSE)
    for mask in (FULL, EMPTY, HOLES):
        before = len(lowtide.plans(model))
        if mask is EMPTY:
            with pytest.raises(AssertionError, match="an empty batch"):
                model(*batches(mask)[0][0])
        else:
            model(*batches(mask)[0][0]).backward()
    assert len(lowtide.plans(model)) == before


def broadcasting(rank: int, port: int) -> None:
    """Train in two processes whose branches change at different steps; buffers are sent before every call."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    address, wait = f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=wait)
    torch.manual_seed(0)
    plain = Branching(all_of)
    model = copy.deepcopy(plain)
    orders = [(FULL, HOLES, FULL, HOLES), (FULL, FULL, HOLES, HOLES)]
    expected = train(plain, DistributedDataParallel(plain), batches(*orders[rank]))
    parallel = lowtide.wrap(DistributedDataParallel(model), **LOOSE)
    assert_same(expected, train(model, parallel, batches(*orders[rank])))
    dist.destroy_process_group()


def test_branches_that_change_in_one_process_alone() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(broadcasting, (port,), nprocs=2)


def test_models_that_ask_whether_they_are_traced_are_told_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """As models of transformers do: `transformers.models.x` imports the question by name."""
    library = types.ModuleType("transformers.models.x")
    exec("def is_torchdynamo_compiling():\n    import torch\n    return torch.compiler.is_compiling()", vars(library))
    source = "def branch(h, mask):\n    return h.sin() if is_torchdynamo_compiling() else h.cos()"
    exec(source, vars(library))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    question = library.is_torchdynamo_compiling
    assert_exact(Branching(library.branch), batches(FULL, HOLES))
    assert library.is_torchdynamo_compiling is question


@pytest.mark.parametrize("mask", [FULL, HOLES, EMPTY], ids=["full", "holes", "empty"])
@pytest.mark.parametrize("branch", [all_of, any_of, counted, twice])
def test_a_plan_is_of_the_branch_that_the_call_takes(branch: Callable[..., torch.Tensor], mask: torch.Tensor) -> None:
    model, x = Branching(branch), torch.randn(4, 8)
    state = torch.get_rng_state()
    plan = lowtide.plan(model, (x, mask), **LOOSE)
    assert torch.equal(state, torch.get_rng_state())
    lowtide.wrap(model, plan=plan)(x, mask).backward()
    (used,) = lowtide.plans(model)
    assert used.problem.graph.fingerprint == plan.problem.graph.fingerprint


def test_a_plan_is_of_the_branch_that_a_buffer_decides() -> None:
    class Flagged(Branching):
        def __init__(self) -> None:
            super().__init__(all_of)
            self.register_buffer("flags", HOLES.clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x, self.flags)

    model, x = Flagged(), torch.randn(4, 8)
    plan = lowtide.plan(model, (x,), **LOOSE)
    lowtide.wrap(model, plan=plan)(x).backward()
    assert len(lowtide.plans(model)) == 1


def test_a_plan_without_data_says_where_it_is_read() -> None:
    with torch.device("meta"):
        model, x, mask = Branching(all_of), torch.randn(4, 8), torch.ones(4, dtype=torch.long)
    with pytest.raises(CaptureError, match=r"reads what a tensor contains, at .*test_input_branches"):
        lowtide.plan(model, (x, mask), **LOOSE)
