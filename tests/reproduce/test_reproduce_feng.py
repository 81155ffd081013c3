"""The page about Feng and Huang 2021, on small graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.graph import samples
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.brute_force import BruteForce
from lowtide.plan.planners.chen_sqrt import ChenSqrt
from lowtide.plan.planners.greedy import Greedy
from lowtide.reproduce import feng
from lowtide.reproduce.networks import FENG, Captured

QUICK = {"greedy": Greedy(effort=0.02)}
OTHERS = {"chen_sqrt": ChenSqrt()} | QUICK
PAPER = feng.Published("a chain", 4100, 1500, 40, 30)


def test_published_lines_are_consistent_and_those_of_the_networks():
    assert len(feng.PUBLISHED) == 18
    assert set(feng.PUBLISHED) == set(FENG)
    for name, line in feng.PUBLISHED.items():
        assert abs(100 - 100 * line.planned_mib / line.plain_mib - line.cut) < 1
        assert line.network.endswith(f"batch {FENG[name].batch}")


def test_gradients_count_only_while_they_are_made():
    builder = GraphBuilder()
    x = builder.add_input("x", 1)
    (y,) = builder.add_op("f", [x], [("y", 10)])
    builder.begin_backward()
    (first,) = builder.add_op("b1", [y], [("first", 30)], kind="gradient")
    (second,) = builder.add_op("b2", [y], [("second", 20)], kind="gradient")
    graph = builder.build(outputs=[first, second])
    assert Problem(graph, Costs.unit(graph), 1).baseline.peak_bytes == 60
    assert Problem(feng.intermediate(graph), Costs.unit(graph), 1).baseline.peak_bytes == 40


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_goes_below_what_one_op_needs(seed):
    graph, costs = samples.random_dag(seed, n=6)
    problem = Problem(graph, costs, 1)
    least, op = feng.least_bytes(problem)
    assert op in graph.ops
    assert problem.price(BruteForce().propose(problem).schedule).peak_bytes >= least


def test_measured_plans_are_what_they_are_said_to_be():
    graph, costs = samples.training_chain(40)
    found = feng.measure(PAPER, graph, costs, OTHERS)
    plain = found.problem.baseline.peak_bytes
    assert found.family.peak_bytes <= found.answer.peak_bytes < plain
    assert list(found.others) == ["chen_sqrt", "greedy"]
    assert found.others["greedy"].peak_bytes <= found.family.peak_bytes
    assert found.cut(found.at_published_cut) >= PAPER.cut
    assert found.strongest == "greedy"


def test_rows_say_what_is_published_and_what_is_ours():
    graph, costs = samples.training_chain(40)
    found = feng.measure(PAPER, graph, costs, QUICK)
    rows = {row.quantity: row for row in feng.rows_of(PAPER, found)}
    assert len(rows) == 10
    assert (rows["peak, plain"].published, rows["peak, feng"].published) == (4100, 1500)
    assert rows["peak, plain"].ours * 2**20 == found.problem.baseline.peak_bytes
    assert rows["cut, feng"].ours == pytest.approx(found.cut(found.answer))
    assert rows["overhead, feng"].ours == pytest.approx(100 * found.answer.overhead)
    assert rows["cut, greedy at the published cut"].ours >= 40
    assert all(row.note and row.network == "a chain" for row in rows.values())


def test_a_cut_that_cannot_be_had_is_explained():
    graph, costs = samples.training_chain(6)
    found = feng.measure(replace(PAPER, cut=99), graph, costs, QUICK)
    least, _ = feng.least_bytes(found.problem)
    rows = feng.rows_of(replace(PAPER, cut=99), found)
    assert found.at_published_cut.peak_bytes >= least
    assert "no schedule can cut more than" in next(row.note for row in rows if row.quantity == "cut, feng")


def test_page_has_the_networks_asked_for(monkeypatch):
    asked = []

    def pretend(name, *, batch=None, paper=None):
        asked.append((name, batch, paper))
        return Captured(name, *samples.training_chain(12), parameter_bytes=0, input_bytes=0, batch=1)

    monkeypatch.setattr(feng, "captured", pretend)
    heard: list[str] = []
    page = feng.page(only=("resnet18", "vgg11"), progress=heard.append, others=OTHERS)
    assert asked == [("vgg11", None, "feng"), ("resnet18", None, "feng")]
    assert {row.network for row in page.rows} == {"VGG-11, batch 64", "ResNet-18, batch 256"}
    assert len(page.rows) == 24
    assert page.remarks
    assert heard[0] == "capturing vgg11"


def test_vgg11_at_its_published_size():
    page = feng.page(only=("vgg11",), others=QUICK)
    rows = {row.quantity: row for row in page.rows}
    for quantity, row in rows.items():
        if quantity.startswith("cut"):
            assert row.ours >= row.published
        elif quantity.startswith("overhead"):
            assert row.ours <= 50
        else:
            assert 0.8 <= row.ratio <= 1.02
