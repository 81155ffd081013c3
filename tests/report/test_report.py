"""Reports as data, page, picture and text; what a browser makes of the page is in test_report_browser.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from helpers.report_samples import HOSTILE, Reader, comparison_of, hostile_names, plain_names, plan_of
from lowtide.analysis.planner_comparison import ComparisonRow
from lowtide.errors import InvalidOptionError, ReportError
from lowtide.graph.samples import chain, random_dag
from lowtide.plan.core.account import MemoryAccount
from lowtide.report.data import KINDS, report_data
from lowtide.report.write import html_page, memory_chart, text_report
from lowtide.units import format_bytes


@pytest.fixture(scope="module")
def plan() -> lowtide.Plan:
    return plan_of(plain_names())


@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.7, 0.9, 1.0]))
@settings(max_examples=40, deadline=None)
def test_kinds_of_memory_add_up_to_the_trace(seed: int, share: float) -> None:
    graph, costs = random_dag(seed, n=20)
    peak = lowtide.Problem(graph, costs, 1).baseline.peak_bytes
    problem = lowtide.Problem(graph, costs, max(1, int(share * peak)))
    found = lowtide.solve(problem, "greedy", throw=False)
    data = report_data(found)
    kinds = data["planned"]["kinds"]
    assert set(kinds) == set(KINDS)
    assert [sum(levels) for levels in zip(*kinds.values(), strict=True)] == data["planned"]["bytes"]
    assert all(level >= 0 for levels in kinds.values() for level in levels)
    # What the inside of an op takes is known from the costs, so the other kinds are right as well.
    for step, op in enumerate(found.schedule.steps):
        again = op in found.schedule.steps[:step]
        assert kinds["inside"][step] == costs.workspace_bytes[op] + (graph.ops[op].replay_bytes if again else 0)


def test_kept_bytes_by_op_and_by_module_are_what_the_trace_saves(plan: lowtide.Plan) -> None:
    data = report_data(plan)
    assert sum(data["ops"]["kept"]) == sum(data["modules"]["kept"]) == plan.saved_bytes
    assert sum(data["modules"]["plain"]) == plan.problem.baseline.saved_bytes
    assert sum(runs - 1 for runs in data["ops"]["runs"]) == sum(data["modules"]["recomputed"]) == plan.num_recomputed
    assert sum(row[1] for row in data["peak"]["modules"]) + data["peak"]["inside_bytes"] == plan.peak_bytes
    assert plan.num_recomputed, "a plan that recomputes nothing shows nothing"


def test_many_modules_are_summed_in_one_last_bar() -> None:
    graph = plain_names()
    graph = replace(graph, ops=tuple(replace(op, module=f"layer.{index}") for index, op in enumerate(graph.ops)))
    found = plan_of(graph)
    data = report_data(found)
    assert len(data["modules"]["name"]) == 21
    assert data["modules"]["name"][-1] == f"({len(graph.ops) - 20} more)"
    assert sum(data["modules"]["kept"]) == found.saved_bytes


def test_tradeoff_shows_planners_and_those_that_met_no_budget(plan: lowtide.Plan) -> None:
    tradeoff = report_data(plan, comparison_of(plan))["tradeoff"]
    assert "greedy" in [curve["planner"] for curve in tradeoff["curves"]]
    assert "keep_all" in tradeoff["missed"]
    assert "greedy" not in tradeoff["missed"]


def test_a_comparison_of_another_graph_is_refused(plan: lowtide.Plan) -> None:
    other = replace(comparison_of(plan), fingerprint="other")
    with pytest.raises(InvalidOptionError, match="about a graph of"):
        report_data(plan, other)


def test_page_is_one_file_that_fetches_nothing(plan: lowtide.Plan) -> None:
    page = html_page(plan, comparison_of(plan))
    tags = Reader(page).tags
    for tag, attributes in tags:
        assert tag not in ("link", "iframe", "object", "img"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert {"Content-Security-Policy"} == {each["http-equiv"] for tag, each in tags if "http-equiv" in each}
    assert json.loads("".join(Reader(page).data))["summary"]["peak_bytes"] == plan.peak_bytes


def test_all_memory_of_training_is_shown_where_it_is_known(plan: lowtide.Plan) -> None:
    assert "All the memory of training" not in html_page(plan)
    account = MemoryAccount(2**20, 0, 2**10, 2**21, 2**20, step_bytes=plan.peak_bytes)
    page = html_page(replace(plan, account=account))
    assert "All the memory of training" in page
    assert f">{format_bytes(account.peak_bytes)}<" in page


def test_the_proved_area_is_mentioned_where_something_is_proved(plan: lowtide.Plan) -> None:
    comparison = comparison_of(plan)
    assert "that is proved" not in html_page(plan, replace(comparison, rows=_bounded(comparison, 0.0)))
    assert "that is proved" in html_page(plan, replace(comparison, rows=_bounded(comparison, 0.01)))


def _bounded(comparison: lowtide.Comparison, bound: float) -> tuple[ComparisonRow, ...]:
    return tuple(replace(row, bound=bound) for row in comparison.rows)


def test_hostile_names_stay_text() -> None:
    page = html_page(plan_of(hostile_names()))
    reader = Reader(page)
    assert [tag for tag, _ in reader.tags].count("script") == 3
    assert not [tag for tag, _ in reader.tags if tag == "img"]
    data = json.loads("".join(reader.data))
    assert set(HOSTILE) == set(data["ops"]["module"])
    assert "{{ 7 * 7 }}" in page
    assert "<img src=x" not in page


def test_an_unescaped_name_would_be_noticed() -> None:
    page = html_page(plan_of(hostile_names()))
    broken = page.replace("\\u003cimg src=x", "</script><img src=x", 1)
    assert [tag for tag, _ in Reader(broken).tags if tag == "img"]


def test_text_draws_both_courses_and_the_budget(plan: lowtide.Plan) -> None:
    chart = memory_chart(plan, width=60, height=10)
    lines = chart.splitlines()
    assert len({len(line.rstrip(" budget")) for line in lines[1:11]}) <= 2
    assert "█" in chart
    assert "░" in chart
    assert sum(line.endswith("| budget") for line in lines) == 1
    assert all(len(line) <= 60 + 21 for line in lines)
    # The planned course never reaches above the budget's row; the plain one does.
    budget_row = next(number for number, line in enumerate(lines) if line.endswith("| budget"))
    assert not any("█" in line for line in lines[1:budget_row])
    assert any("░" in line for line in lines[1:budget_row])
    assert str(plan) in text_report(plan)


def test_a_graph_without_phases_is_reported(tmp_path: Path) -> None:
    graph, costs = chain(5)
    found = lowtide.solve(lowtide.Problem(graph, costs, 10_000), "keep_all")
    for name in ("plan.html", "plan.txt", "plan.svg"):
        found.report(tmp_path / name)
        assert (tmp_path / name).stat().st_size


@pytest.mark.parametrize(("name", "start"), [("a.html", b"<!doctype"), ("a.txt", b"Plan by"), ("a.HTM", b"<!doctype")])
def test_report_writes_by_suffix(plan: lowtide.Plan, tmp_path: Path, name: str, start: bytes) -> None:
    (tmp_path / name).write_text("old")
    plan.report(tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_report_draws_pictures(plan: lowtide.Plan, tmp_path: Path, name: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    plan.report(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["plan", "plan.pdf", "plan.html.exe"])
def test_other_suffixes_are_refused(plan: lowtide.Plan, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"\.html"):
        plan.report(tmp_path / name)


@pytest.mark.parametrize("name", ["plan.html", "plan.txt", "plan.png"])
def test_a_folder_that_is_not_there_is_our_error(plan: lowtide.Plan, tmp_path: Path, name: str) -> None:
    with pytest.raises(ReportError, match="Cannot write"):
        plan.report(tmp_path / "missing" / name)


def test_pictures_say_that_they_need_matplotlib(
    plan: lowtide.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.report.write.can_draw", lambda: False)
    with pytest.raises(ReportError, match="matplotlib"):
        plan.report(tmp_path / "plan.png")
