"""Results in git: one row a line, with a page of summary that people can read."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import common
import plan_page

MOST_LINES_OF_A_PAGE = 60
PAGES = sorted(common.RESULTS.glob("*.md"))


def row(planner, percent, overhead, *, fits=True, model="gpt"):
    key = {"model": model, "planner": planner, "percent": percent}
    return {**key, "fits": fits, "overhead": overhead, "gap": 0.0, "planning_seconds": 1.0}


ROWS = [
    row("auto", 80, 0.01),
    row("auto", 50, 0.05),
    row("greedy", 80, 0.01),
    row("greedy", 50, 0.06),
    row("auto", 80, 0.5, model="unet", fits=False),
    {"model": "gpt", "planner": "rotor", "percent": 50, "refused": "no chain"},
    {"model": "lstm", "skipped": "not installed"},
]


def test_rows_are_written_one_a_line_and_read_again(tmp_path):
    path = tmp_path / "plan.jsonl"
    assert common.read_rows(path) == []
    common.write_rows(path, ROWS, {"machine": "some"})
    assert len(path.read_text().splitlines()) == 1 + len(ROWS)
    common.append_row(path, {"model": "moe"})
    assert common.read_rows(path) == [*ROWS, {"model": "moe"}]
    assert common.kept_rows("plan", {"gpt", "unet", "moe"}, tmp_path) == [{"model": "lstm", "skipped": "not installed"}]


def test_a_row_added_to_no_file_is_not_taken_for_the_machine(tmp_path):
    common.append_row(tmp_path / "new.jsonl", {"model": "moe"})
    assert common.read_rows(tmp_path / "new.jsonl") == [{"model": "moe"}]


def test_the_page_has_a_line_for_each_model_and_says_what_failed():
    page = plan_page.page(ROWS, "About.")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| model", "| gpt", "| unet"]
    assert "2 of 2 | 1.00% | 5.00% | -" in lines[1]
    assert "0 of 1 | - | - | -" in lines[2]
    assert "lstm: not installed" in page


def test_there_are_results():
    assert len(PAGES) > 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_results_in_git_are_rows_and_a_summary(page):
    assert len(page.read_text().splitlines()) <= MOST_LINES_OF_A_PAGE
    assert common.read_rows(page.with_suffix(".jsonl"))


def test_nothing_else_is_among_the_results():
    assert {path.suffix for path in common.RESULTS.iterdir()} <= {".jsonl", ".md", ".png"}
