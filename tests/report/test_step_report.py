"""The report of a step of several blocks: one file, offline, with the plan of each block inside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.report_samples import HOSTILE, Reader, hostile_names
from helpers.step_samples import step_plan
from lowtide.analysis.planner_comparison import compare_step
from lowtide.errors import InvalidOptionError
from lowtide.plan.core.account import MemoryAccount
from lowtide.report.step_data import shown_blocks, step_report_data
from lowtide.report.write import step_page, text_report
from lowtide.step.plan import StepPlan


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return step_plan()


def test_the_data_is_the_course_of_the_step(plan: StepPlan) -> None:
    data = step_report_data(plan)
    assert max(data["planned"]) == plan.peak_bytes
    assert max(data["plain"]) == plan.baseline_peak_bytes
    assert len(data["moments"]) == len(data["planned"]) == len(data["plain"]) == 4 * 4 + 2
    assert data["moments"][data["boundary"]].startswith("the code before the backward")
    assert sum(part["bytes"] for part in data["parts"]) == plan.peak_bytes
    assert {row["id"] for row in data["rows"]} == {block.id for block in shown_blocks(plan)}


def test_the_page_is_one_file_that_fetches_nothing(plan: StepPlan) -> None:
    comparison = compare_step(plan, budgets=["80%", "60%"])
    page = step_page(plan, comparison)
    for tag, attributes in Reader(page).tags:
        assert tag not in ("link", "iframe", "object", "img"), tag
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert page.count("<template ") == len(shown_blocks(plan))
    assert plan.peak_place in page
    assert "Planners and budgets" in page


def test_a_comparison_of_something_else_is_refused(plan: StepPlan) -> None:
    comparison = replace(compare_step(plan, budgets=["80%"]), fingerprint="other")
    with pytest.raises(InvalidOptionError, match="another step"):
        step_page(plan, comparison)


def test_hostile_names_stay_text() -> None:
    made = step_plan(graphs=(hostile_names(), hostile_names()))
    block = replace(made.problem.blocks[1], name=HOSTILE[1])
    page = step_page(replace(made, problem=replace(made.problem, blocks=(made.problem.blocks[0], block))))
    tags = [tag for tag, _ in Reader(page).tags]
    assert "img" not in tags
    assert tags.count("script") == 4
    assert "<img src=x" not in page
    assert HOSTILE[1] not in page


def test_memory_of_training_is_shown_where_it_is_known(plan: StepPlan) -> None:
    assert "All the memory of training" not in step_page(plan).split("<template")[0]
    account = MemoryAccount(2**20, 0, 2**10, 2**21, 2**20, step_bytes=plan.peak_bytes)
    assert "All the memory of training" in step_page(replace(plan, account=account)).split("<template")[0]


@pytest.mark.parametrize("suffix", ["html", "txt", "svg", "png"])
def test_reports_are_written(plan: StepPlan, suffix: str, tmp_path: Path) -> None:
    plan.report(tmp_path / f"step.{suffix}")
    assert (tmp_path / f"step.{suffix}").stat().st_size > 500


def test_the_text_has_table_chart_and_explanation(plan: StepPlan) -> None:
    text = text_report(plan)
    assert "decoder.layers" in text
    assert "memory above the start of the step" in text
    assert "is reached in" in text
    assert json.dumps(plan.peak_place)[1:-1] in text
