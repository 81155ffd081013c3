"""Models with a `torch.autograd.Function` of their own: what its backward computes belongs to backward."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import assert_same, train

# Bytes by which a predicted peak may be too high.
SCALARS = 16


class Cube(torch.autograd.Function):
    """Keeps its input alone; backward begins with ops that do not read the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope = torch.tanh(x.pow(2)).mul(3)
        return gradient * slope


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Cube.apply(layer(x))
        return x.sum()


def test_its_backward_is_planned_as_backward() -> None:
    graph = lowtide.plan(Net(), (torch.ones(256, 64),), budget="100%", costs="analytic").problem.graph
    places = {"tanh": [graph.is_forward(op) for op in range(len(graph.ops)) if "tanh" in graph.ops[op].target]}
    assert places == {"tanh": [False] * 4}


def test_a_function_at_the_end_of_the_model() -> None:
    def step(x: Tensor, weight: Tensor) -> Tensor:
        return Cube.apply((x * weight).sum())

    weight = torch.ones(8, requires_grad=True)
    graph = lowtide.plan(step, (torch.ones(8), weight), budget="100%", costs="analytic").problem.graph
    assert [graph.is_forward(op) for op in range(len(graph.ops)) if "tanh" in graph.ops[op].target] == [False]


def test_exact_and_as_predicted() -> None:
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        nn.init.normal_(layer.weight, std=0.05)
    batches = [((torch.rand(256, 64),), {}) for _ in range(2)]
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="75%")
    assert_same(train(plain, plain, batches), train(model, model, batches))
    (plan,) = lowtide.plans(model)
    model.zero_grad()
    measured = lowtide.measure_peak(lambda: model(*batches[0][0]).backward())
    assert measured <= plan.peak_bytes <= plan.budget_bytes
    # Scalars that the first part of an op of two reads count to the end of the second, if that is where the peak is.
    assert plan.peak_bytes - measured <= SCALARS
