"""The rivals' schedules in the comparison with PyTorch's own means are what their graphs do."""

import pytest

import native
import zoo
from lowtide.capture.memory_rewrites import as_traced
from lowtide.graph import samples
from lowtide.plan.core.problem import Problem
from lowtide.schedule.verify import verify
from lowtide.testing.models import SMALL, gpt
from planners import capture
from problems import write


def test_checkpointed_blocks_run_again_once_and_whole():
    graph, costs = samples.transformer(3)
    blocks = native.block_ops(graph, ["layer0", "layer1", "layer2"])
    assert [len(ops) for ops in blocks] == [14, 14, 14]
    schedule = native.checkpointed_schedule(graph, blocks)
    verify(graph, schedule)
    problem = Problem(graph, costs, 1)
    assert problem.price(schedule).peak_bytes < problem.baseline.peak_bytes
    again = [op for op in schedule.backward if graph.is_forward(op)]
    assert len(again) == len(set(again))
    for ops in blocks:
        # The last two ops of a block are not needed by backward: a product and the sum that ends the block.
        assert [op for op in again if op in ops] == ops[:-2]


def test_blocks_are_told_apart_by_whole_names():
    graph, _ = samples.transformer(11)
    assert [len(ops) for ops in native.block_ops(graph, ["layer1"])] == [14]


def test_what_was_measured_is_planned_for_again(tmp_path, monkeypatch):
    graph, costs = samples.transformer(2)
    write(Problem(graph, costs, 1), tmp_path / "gpt.json")
    rows = [{"rival": "budget 0.50", "measured_bytes": 10**9, "simulated_bytes": 10**9, "rival_overhead": 0.1}]
    asked = []
    monkeypatch.setattr(native, "run_child", lambda *args, **kwargs: asked.append(args) or rows)
    monkeypatch.setattr(native, "run_jobs", lambda jobs: ({**job.key, **job.work()} for job in jobs))
    command = ["--only", "gpt", "--planner", "keep_all", "--problems", str(tmp_path), "--out", str(tmp_path / "out")]
    for more, times in (([], 1), (["--measured"], 1), ([], 2)):
        assert native.main([*command, *more]) == 0
        assert len(asked) == times


@pytest.fixture(scope="module")
def small_gpt():
    return zoo.Workload(*gpt(**SMALL["gpt"]))


@pytest.fixture(scope="module")
def captured(small_gpt):
    with as_traced():
        return capture(small_gpt)


@pytest.mark.slow
def test_budget_points_are_exact_and_peak_where_the_schedule_says(captured):
    rows = list(native.budget_rows(captured, [0.05, 0.5]))
    for row in rows:
        assert row["exact"]
        assert row["simulated_bytes"] == pytest.approx(row["measured_bytes"], rel=0.01)
    assert rows[0]["rival_overhead"] >= rows[1]["rival_overhead"] > 0


@pytest.mark.slow
def test_checkpoint_points_peak_near_what_the_schedule_says(small_gpt, captured):
    (row, *_) = native.checkpoint_rows(small_gpt, captured.problem)
    assert row["rival"] == "checkpoint 2 x Block"
    assert row["rival_overhead"] > 0
    assert row["simulated_bytes"] == pytest.approx(row["measured_bytes"], rel=0.25)
