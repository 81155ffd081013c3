"""Collectives are priced and never run: the other processes would have to take part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.cost_cases import aten, call, fake, program
from lowtide.costs import measured
from lowtide.costs.collectives import LINK, communicates

functional = torch.ops._c10d_functional
REDUCE = call(functional.all_reduce.default, fake(30, 40), "sum", "0")
GATHER = call(functional.all_gather_into_tensor.default, fake(30, 40), 2, "0")
WAIT = call(functional.wait_tensor.default, fake(30, 40))
PLAIN = call(aten.add.Tensor, fake(30, 40), fake(30, 40))

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without distributed training")


def test_what_communicates() -> None:
    assert all(map(communicates, (REDUCE, GATHER, WAIT)))
    assert not communicates(PLAIN)


def test_graphs_inside_of_ops_are_looked_into() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(functional.wait_tensor.default, (graph.placeholder("x"),)))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert communicates(call(torch.ops.higher_order.cond, fake(), module, module, (fake(3),)))


def test_no_collective_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[object] = []
    measure = measured._measure
    monkeypatch.setattr(measured, "_measure", lambda one, *rest: (ran.append(one[0]), measure(one, *rest))[1])
    costs = measured.measure_costs(program(REDUCE, GATHER, WAIT, PLAIN), cache=False)
    assert set(ran) == {aten.add.Tensor}
    size = 30 * 40 * 4
    assert costs.seconds[0] == pytest.approx(LINK.start_seconds + 2 * size / LINK.bandwidth)
    assert costs.seconds[2] == 0
    assert costs.workspace_bytes[:3] == (0, 0, 0)
