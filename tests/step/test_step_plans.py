"""Plans of steps: figures, words, files, verification, and what less memory costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from helpers.step_samples import step_plan
from lowtide.errors import InvalidScheduleError, PlanFileError
from lowtide.plan.core.result import Outcome
from lowtide.plan.diagnose.infeasible import AskedBudget
from lowtide.step.peak import infeasible_step, plan_at_peak, step_parts
from lowtide.step.plan import StepPlan
from lowtide.step.problem import Gap
from lowtide.step.replan import with_budget
from lowtide.step.simulate import Moment, simulate_step
from lowtide.step.verify import verify_step
from lowtide.step.words import moment_in_words


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return step_plan()


@pytest.fixture
def saved(plan: StepPlan, tmp_path: Path) -> Path:
    plan.save(tmp_path / "step.json")
    return tmp_path / "step.json"


def test_it_has_the_figures_of_a_plan(plan: StepPlan) -> None:
    assert plan.fits
    assert plan.outcome in (Outcome.FITS, Outcome.OPTIMAL)
    assert plan.min_peak_bytes <= plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert plan.overhead > 0
    assert plan.bound is not None
    assert plan.gap == pytest.approx(plan.overhead - plan.bound)
    assert plan.num_recomputed == sum(each.num_recomputed for each in plan.plans if each is not None) > 0
    kept = sum(variant.forward_after for variant in plan.variants)
    assert plan.saved_bytes == kept + sum(gap.after for gap in plan.problem.forward_gaps)


def test_the_baseline_is_the_step_in_which_every_op_runs_once(plan: StepPlan) -> None:
    assert plan.plain.seconds == 0
    assert plan.baseline_seconds == pytest.approx(
        sum(each.problem.baseline.seconds for each in plan.plans if each is not None)
    )


def test_equal_runs_are_one_row(plan: StepPlan) -> None:
    assert sum(row.runs for row in plan.rows) == 4
    text = str(step_plan(1.0))
    assert "decoder.layers x 3" in text
    assert "4 block runs, 2 of them distinct" in text
    assert "nothing is recomputed" in text


def test_the_summary_says_what_the_proof_covers_and_where_the_peak_is(plan: StepPlan) -> None:
    proved = replace(plan, bound=plan.overhead / 2)
    assert "as long as ops stay in their block" in str(proved)
    assert f"in {plan.peak_place}" in str(plan)


@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (Moment("forward", 1), "the forward of b (block run 2 of 2)"),
        (Moment("gap", 0), "the code before the forward of a (block run 1 of 2)"),
        (Moment("gap", 2), "the code after the forward of b (block run 2 of 2)"),
        (Moment("gap", 3), "the code before the backward of b (block run 2 of 2)"),
        (Moment("gap", 4), "the code before the backward of a (block run 1 of 2)"),
        (Moment("gap", 5), "the code after the backward of a (block run 1 of 2)"),
    ],
)
def test_moments_in_words(moment: Moment, words: str) -> None:
    assert moment_in_words(["a", "b"], moment) == words


def test_a_saved_plan_is_the_same_plan(plan: StepPlan, saved: Path) -> None:
    found = lowtide.load(saved)
    assert isinstance(found, StepPlan)
    assert found == plan == StepPlan.load(saved)
    assert str(found) == str(plan)
    found.verify()
    verify_step(found.problem, found.choice, found.peak_bytes)
    assert simulate_step(found.problem, found.choice) == plan.trace


def test_why_a_step_is_cut_as_it_is_shows_everywhere(plan: StepPlan, tmp_path: Path) -> None:
    assert "from menus by greedy: " in str(plan)
    assert "blocks  " not in str(plan)
    why = "up to 4 layers in a row as one block"
    told = replace(plan, cut=why)
    told.save(tmp_path / "step.json")
    assert StepPlan.load(tmp_path / "step.json") == told != plan
    assert f"  blocks    {why}" in str(told)
    found = lowtide.explain(told, less=False)
    assert why in str(found)
    assert isinstance(found, lowtide.StepExplanation)
    assert found.to_dict()["cut"] == why
    told.report(tmp_path / "step.html")
    assert f"Blocks: {why}." in (tmp_path / "step.html").read_text(encoding="utf-8")
    assert with_budget(told, told.budget_bytes).cut == why
    graph = replace(plan.block_plans[0], cut="one graph: as asked")
    graph.save(tmp_path / "plan.json")
    assert lowtide.load(tmp_path / "plan.json") == graph
    assert "  blocks    one graph: as asked" in str(graph)


@settings(max_examples=12, deadline=None)
@given(share=st.floats(0.2, 1.0), runs=st.lists(st.integers(0, 1), min_size=1, max_size=5))
def test_any_plan_survives_the_disk(share: float, runs: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    made = step_plan(share, runs=tuple(runs))
    made.verify()
    path = tmp_path_factory.mktemp("plans") / "step.json"
    made.save(path)
    assert lowtide.load(path) == made
    assert sum(part.bytes for part in step_parts(made)) == made.peak_bytes


def test_every_graph_stands_once_in_the_file(plan: StepPlan, saved: Path) -> None:
    data = json.loads(saved.read_text())
    assert [block["name"] for block in data["blocks"].values()] == ["embedding", "decoder.layers.0"]
    assert saved.read_text().count('"graph"') == 2
    assert max(len(line) for line in saved.read_text().splitlines()) < 2000


def edit(path: Path, *keys: Any, value: Any) -> Path:
    data = json.loads(path.read_text())
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(data))
    return path


LAYER = ("blocks", "block 1")


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("version",), 99, "version 99"),
        (("format",), "other", "not a plan"),
        (("peak_bytes",), 1, "states a peak of 1 bytes"),
        (("budget_bytes",), 5, "its outcome is"),
        (("outcome",), "OVER_BUDGET", "its outcome is"),
        (("outcome",), "GOOD", "is not one of"),
        (("step", "choice"), [0, 0, 0], "3 variants are chosen for 4"),
        (("step", "choice"), [0, 0, 0, 99], "has variant 99"),
        (("step", "instances"), [0, 1, 1, 7], "runs block 7"),
        (("step", "forward_gaps"), [[0, 0]], "1 forward gaps"),
        (("step", "forward_gaps"), [[0]], "must be two numbers"),
        ((*LAYER, "variants", 0, 0), 2**40, "does not take what its plan takes"),
        ((*LAYER, "variants", 0, 4), 5.0, "does not take what its plan takes"),
        ((*LAYER, "variants", 0), [1, 2], "2 numbers"),
        ((*LAYER, "fingerprint"), "0", "is not that of its graph"),
        ((*LAYER, "plans"), {}, "one for each variant"),
        ((*LAYER, "plans", "plan 0", "schedule", "forward"), [0], "damaged"),
        ((*LAYER, "costs", "seconds"), [0.0], "damaged"),
        (("blocks",), {"a": {}}, "its blocks are not"),
        (("unknown",), 1, "unknown fields"),
    ],
)
def test_tampered_files_are_refused(saved: Path, keys: tuple[Any, ...], value: Any, words: str) -> None:
    with pytest.raises(PlanFileError, match=words) as failed:
        lowtide.load(edit(saved, *keys, value=value))
    assert str(saved) in str(failed.value)


def test_a_plan_in_memory_that_was_tampered_with_is_refused(plan: StepPlan) -> None:
    block = plan.problem.blocks[1]
    lighter = replace(block.variants[0], forward_peak=block.variants[0].forward_peak + 1)
    blocks = (plan.problem.blocks[0], replace(block, variants=(lighter, *block.variants[1:])))
    with pytest.raises(PlanFileError, match="does not take what its plan takes"):
        replace(plan, problem=replace(plan.problem, blocks=blocks)).verify()
    with pytest.raises(InvalidScheduleError):
        replace(plan, choice=(0,)).verify()
    with pytest.raises(InvalidScheduleError, match="the budget is"):
        replace(plan, problem=replace(plan.problem, budget_bytes=plan.peak_bytes - 1)).verify()


def test_each_loader_says_what_the_other_kind_is(plan: StepPlan, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"plan of a step of several blocks.*lowtide\.load"):
        lowtide.Plan.load(saved)
    own = next(each for each in plan.plans if each is not None)
    own.save(tmp_path / "one.json")
    assert lowtide.load(tmp_path / "one.json") == own
    with pytest.raises(PlanFileError, match=r"plan of one graph.*lowtide\.load"):
        StepPlan.load(tmp_path / "one.json")
    with pytest.raises(PlanFileError, match="no such file"):
        lowtide.load(tmp_path / "none.json")


def test_less_memory_takes_at_least_as_long(plan: StepPlan) -> None:
    overheads = [with_budget(plan, share * plan.baseline_peak_bytes // 10).overhead for share in (9, 7, 5)]
    assert overheads == sorted(overheads)


def test_the_error_names_budget_peak_block_and_help() -> None:
    least = step_plan(0.05)
    assert not least.fits
    assert least.bound is None
    error = infeasible_step(least, AskedBudget("5%", least.budget_bytes, whole_bytes=least.baseline_peak_bytes))
    text = " ".join(str(error).split())
    assert "within the budget of 5% (" in text
    assert f"is {least.peak_bytes} bytes" in text
    assert "4 block runs" in text
    assert least.peak_place in text
    assert 'budget="' in text
    assert error.least_bytes == least.peak_bytes == least.min_peak_bytes
    assert error.plan is least


def test_a_peak_between_blocks_is_told(plan: StepPlan) -> None:
    gaps = (*plan.problem.forward_gaps[:-1], Gap(2**40, 0))
    large = replace(plan, problem=replace(plan.problem, forward_gaps=gaps, budget_bytes=2**41))
    assert large.peak_place == "the code after the forward of decoder.layers.0 (block run 4 of 4)"
    assert plan_at_peak(large) is None
    assert step_parts(large)[0].cause.value == "code between blocks"
    explanation = lowtide.explain(large, less=False)
    assert "code after the forward" in str(explanation)


def test_explain_and_compare(plan: StepPlan, tmp_path: Path) -> None:
    found = lowtide.explain(plan)
    assert isinstance(found, lowtide.StepExplanation)
    assert sum(part.bytes for part in found.parts) == plan.peak_bytes
    assert found.less
    assert found.block is not None
    found.save(tmp_path / "why.json")
    assert json.loads((tmp_path / "why.json").read_text())["place"] == plan.peak_place
    assert "What less memory costs" in str(found)
