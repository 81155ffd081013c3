"""Results in git: one row a line, with a page of summary that people can read."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import common
import plan_page
import referee_page

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


def test_the_referees_page_says_if_rows_are_of_several_commits():
    same = [{"commit": "abc1234"}] * 2
    assert referee_page.made_with(same) == "All were made with commit abc1234."
    assert referee_page.made_with([*same, {}]) == "They are of several commits: abc1234 (2), not noted (1)."
    assert common.commit()


def refereed(**fields):
    kept = {"budget_bytes": 10, "measured_bytes": 10, "graphs": 1, "warnings": [], "bits": "exact", "amount": None}
    return {"package": "timm", "architecture": "some", **kept, **fields}


def test_a_peak_above_the_budget_has_no_excuse():
    above = refereed(measured_bytes=11, graphs=3, warnings=["some"])
    assert referee_page.outcome(refereed(graphs=3)) == referee_page.EXACT
    assert referee_page.outcome(above) == referee_page.ABOVE
    assert referee_page.bars([above])["no peak above the budget"] == ("1", False)
    assert referee_page.bars([{"package": "timm", "foreign": "some"}])["no peak above the budget"] == ("0", True)


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"as_aot_eager": True, "aot_eager": "other by 1"}, referee_page.LIMIT),
        ({"as_aot_eager": False, "aot_eager": "loss by the layer by 2e-07"}, referee_page.LIMIT),
        ({"as_aot_eager": False, "aot_eager": "loss by the layer by 2e-03"}, referee_page.SILENT),
        ({"as_aot_eager": False, "aot_eager": "other by 2e-07"}, referee_page.SILENT),
        ({"as_aot_eager": False, "aot_eager": "equal"}, referee_page.SILENT),
        ({"aot_eager": "RuntimeError"}, referee_page.SILENT),
        ({"amount": 0.1, "as_aot_eager": True, "aot_eager": "loss by the layer by 2e-07"}, referee_page.SILENT),
    ],
)
def test_last_bits_are_a_limit_where_aot_eager_differs_in_the_same_tensor(fields, outcome):
    assert referee_page.outcome(refereed(**{"bits": "loss by the layer", "amount": 1e-6} | fields)) == outcome
