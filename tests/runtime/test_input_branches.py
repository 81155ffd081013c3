"""Branches on the contents of inputs: taken as eager takes them, at every call, in one graph where they are cheap."""

from __future__ import annotations

import copy
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

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic", "planner": DropEverything(again=True)}
FULL, HOLES, EMPTY = torch.ones(4, dtype=torch.long), torch.tensor([1, 0, 1, 1]), torch.zeros(4, dtype=torch.long)


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


def batches(*masks: torch.Tensor) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [((torch.randn(4, 8, generator=generator), mask.clone()), {}) for mask in masks]


CASES = [all_of, any_of, counted, twice, looped, in_words, of_floats, drawn]
ORDERS = [(FULL, HOLES, FULL, EMPTY), (HOLES, HOLES, FULL, HOLES)]


@pytest.mark.parametrize("branch", CASES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("masks", ORDERS, ids=["full first", "holes first"])
def test_branches_are_eagers_at_every_call(branch: Callable[..., Any], masks: tuple[torch.Tensor, ...]) -> None:
    assert_exact(Branching(branch), batches(*masks))


@pytest.mark.parametrize("branch", [all_of, any_of, counted, twice, looped], ids=lambda function: function.__name__)
def test_cheap_branches_do_not_cut_the_graph(branch: Callable[..., Any]) -> None:
    model = lowtide.wrap(Branching(branch), **LOOSE)
    model(*batches(FULL)[0][0]).backward()
    assert len(lowtide.plans(model)) == 1
    model(*batches(HOLES)[0][0]).backward()
    assert len(lowtide.plans(model)) == 2


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
    from lowtide.runtime import input_branches as module

    model = Branching(all_of)
    monkeypatch.setattr(module, "expect", lambda condition, answer: None)
    torch.fx.node.has_side_effect(module.expect)
    torch._dynamo.allow_in_graph(module.expect)
    with pytest.raises(AssertionError, match="differs"):
        assert_exact(model, batches(FULL, HOLES))


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
