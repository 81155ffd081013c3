"""The oracle of exactness: train twice from the same state, plainly and wrapped, and compare every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import lowtide
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.orders.reordering import ReorderedProblem, delayed
from lowtide.plan.registry import get
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class DropEverything(AbstractPlanner):
    """Keep nothing that may be recomputed; with `again`, recompute it for every reader restart. The hardest test."""

    again: bool = False

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        del progress
        again = range(len(problem.graph.values)) if self.again else ()
        return Proposal(expand(problem.graph, (), again=again))


@dataclass(frozen=True, kw_only=True)
class Tightest(AbstractPlanner):
    """Ask the greedy planner for the least peak it can reach; with `waiting`, in an order in which ops wait."""

    waiting: bool = False

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        graph = problem.graph
        order = delayed(graph, outputs=True) if self.waiting else range(len(graph.ops))
        reordered = ReorderedProblem.of(replace(problem, budget_bytes=1), order)
        return Proposal(reordered.to_given(get("greedy").propose(reordered.problem, progress).schedule))


@dataclass
class Record:
    """Everything one training step leaves behind."""

    results: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def note(self, name: str, tensor: torch.Tensor | None) -> None:
        self.results[name] = None if tensor is None else tensor.detach().clone()


Batch = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any], torch.Tensor]


def first_loss(result: Any) -> torch.Tensor:
    """Return the loss of a call: the sum of all floating point outputs that need a gradient, scaled to order one."""
    leaves = [leaf for leaf in tensors_of(result) if leaf.requires_grad]
    return sum((leaf.float().mean() for leaf in leaves), start=torch.zeros(()))


def train(
    model: nn.Module,
    call: Callable[..., Any],
    batches: list[Batch],
    *,
    loss: Loss = first_loss,
    set_to_none: bool = True,
    zero_every: int = 1,
) -> list[Record]:
    """Return what each step of training leaves: outputs, gradients, buffers, parameters, optimizer state, RNG."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    records = []
    for step, (args, kwargs) in enumerate(batches):
        torch.manual_seed(100 + step)
        args, kwargs = pytree.tree_map_only(torch.Tensor, clone_leaf, (args, kwargs))
        record = Record()
        result = call(*args, **kwargs)
        value = loss(result)
        value.backward()
        record.note("loss", value)
        for index, leaf in enumerate(tensors_of(result)):
            record.note(f"output {index}", leaf)
        for index, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor):
                record.note(f"input {index}", leaf)
                record.note(f"input {index} gradient", leaf.grad if leaf.requires_grad else None)
        for name, parameter in model.named_parameters():
            record.note(f"gradient of {name}", parameter.grad)
        if (step + 1) % zero_every == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        for name, tensor in model.state_dict().items():
            record.note(name, tensor)
        for index, state in enumerate(optimizer.state.values()):
            for key, tensor in state.items():
                record.note(f"optimizer {index} {key}", tensor)
        record.note("random state", torch.get_rng_state())
        records.append(record)
    return records


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors in a structure, dataclasses included."""
    leaves = pytree.tree_leaves(result, is_leaf=is_dataclass)
    nested = [pytree.tree_leaves(vars(leaf)) if is_dataclass(leaf) else [leaf] for leaf in leaves]
    return [leaf for leaves in nested for leaf in leaves if isinstance(leaf, torch.Tensor)]


def clone_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def assert_same(expected: list[Record], found: list[Record]) -> None:
    """Raise unless both runs left the same bits at every step."""
    assert len(expected) == len(found) >= 1
    for step, (plain, planned) in enumerate(zip(expected, found, strict=True)):
        assert plain.results.keys() == planned.results.keys()
        for name, tensor in plain.results.items():
            other = planned.results[name]
            assert (tensor is None) == (other is None), f"step {step}: {name} is None only once"
            if tensor is not None:
                assert torch.equal(tensor, other), f"step {step}: {name} differs by {difference(tensor, other)}"


def difference(a: torch.Tensor, b: torch.Tensor | None) -> str:
    if b is None or a.shape != b.shape:
        return "shape"
    return str((a.double() - b.double()).abs().max().item())


def assert_exact(
    model: nn.Module, batches: list[Batch], *, wrap: dict[str, Any] | None = None, **how: Any
) -> nn.Module:
    """Train a copy plainly and `model` wrapped; raise on any differing bit. Returns the wrapped model."""
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    expected = train(plain, plain, batches, **how)
    options = {"budget": "1TiB", "planner": DropEverything(again=True), "costs": "analytic"} | (wrap or {})
    wrapped = lowtide.wrap(model, **options)
    assert wrapped is model
    found = train(model, model, batches, **how)
    assert list(model.state_dict()) == keys
    assert_same(expected, found)
    assert lowtide.plans(model), "nothing was planned"
    return model


def num_recomputed(model: nn.Module) -> int:
    return sum(plan.num_recomputed for plan in lowtide.plans(model))
