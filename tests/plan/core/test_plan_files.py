"""Plans on disk: what is saved comes back; what is damaged or hostile is refused with a reason."""

import contextlib
import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.strategies import examples, problems
from lowtide.errors import PlanFileError
from lowtide.graph import samples
from lowtide.plan.core import plan_file as record
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.solve import solve


def make_plan():
    graph, costs = samples.training_chain(6)
    return solve(Problem(graph, costs, 500), Greedy(effort=0.02))


PLAN = make_plan()


@pytest.fixture
def path(tmp_path):
    where = tmp_path / "plan.json"
    PLAN.save(where)
    return where


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_round_trip(path):
    plan = Plan.load(path)
    assert plan == PLAN
    plan.save(path)
    assert Plan.load(str(path)) == plan


def test_what_is_proved_comes_back(path):
    proved = replace(PLAN, bound=0.125, given_bound=0.5)
    proved.save(path)
    assert Plan.load(path) == proved
    edit(path, lambda data: data.update(given_bound="much"))
    with pytest.raises(PlanFileError, match="given_bound"):
        Plan.load(path)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_round_trip_of_any_plan(problem, tmp_path_factory):
    plan = solve(problem, Greedy(effort=0), throw=False)
    where = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(where)
    assert Plan.load(where) == plan


def test_file_has_one_op_per_line(path):
    lines = path.read_text().splitlines()
    assert sum('"target"' in line for line in lines) == 13
    assert all(line.count('"target"') <= 1 for line in lines)


def test_saving_replaces_and_leaves_nothing_behind(path):
    path.write_text("old")
    PLAN.save(path)
    assert os.listdir(path.parent) == ["plan.json"]
    assert Plan.load(path) == PLAN


def test_a_failed_save_keeps_the_old_file(path, monkeypatch):
    before = path.read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.Path, "replace", fail)
    with pytest.raises(PlanFileError, match="No space left"):
        PLAN.save(path)
    assert path.read_text() == before
    assert os.listdir(path.parent) == ["plan.json"]


def test_saving_where_nothing_can_be_written(tmp_path):
    with pytest.raises(PlanFileError, match="Cannot write"):
        PLAN.save(tmp_path / "missing" / "plan.json")
    with pytest.raises(PlanFileError, match="Cannot write"):
        PLAN.save(tmp_path)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(PlanFileError, match="no such file"):
        Plan.load(tmp_path / "nothing.json")
    with pytest.raises(PlanFileError, match="not a regular file"):
        Plan.load(tmp_path)


def test_huge_files_are_not_read(path, monkeypatch):
    monkeypatch.setattr(record, "MAX_FILE_BYTES", 100)
    with pytest.raises(PlanFileError, match="at most 100"):
        Plan.load(path)


@pytest.mark.parametrize("keep", [0, 1, 10, 100, 500, 900])
def test_truncated_files(path, keep):
    path.write_text(path.read_text()[:keep])
    with pytest.raises(PlanFileError, match="truncated"):
        Plan.load(path)


@pytest.mark.parametrize(
    "text", ["[]", "null", "3", '"plan"', "{}", "[" * 100_000, '{"format": "lowtide-plan", "version": 1}', "\x00\x01"]
)
def test_other_text(path, text):
    path.write_text(text)
    with pytest.raises(PlanFileError):
        Plan.load(path)


def test_bytes_that_are_no_text(path):
    path.write_bytes(b"\xff\xfe\x80pickle")
    with pytest.raises(PlanFileError, match="UTF-8"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(version=2), "version 2"),
        (lambda data: data.update(version=True, format="other"), "not a plan"),
        (lambda data: data.update(fingerprint="0" * 32), "fingerprint"),
        (lambda data: data["graph"]["values"][1].update(bytes=7), "fingerprint"),
        (lambda data: data["graph"]["ops"][0].update(inputs=[99]), "names value 99"),
        (lambda data: data["schedule"].update(forward=[0]), "damaged"),
        (lambda data: data["schedule"].update(forward=[0, 1, 2, 3, 4, 10**9]), "damaged"),
        (lambda data: data["schedule"].update(forward="012345"), "must be a list"),
        (lambda data: data["schedule"]["backward"].pop(0), "damaged"),
        (lambda data: data.update(peak_bytes=1), "states a peak"),
        (lambda data: data.update(budget_bytes=0), "not above zero"),
        (lambda data: data.update(budget_bytes=-1), "budget_bytes"),
        (lambda data: data.update(budget_bytes="1"), "budget_bytes"),
        (lambda data: data.update(outcome="GREAT"), "outcome"),
        (lambda data: data.update(bound="none"), "bound"),
        (lambda data: data.update(planner=["greedy"]), "planner"),
        (lambda data: data.update(extra=1), "unknown fields extra"),
        (lambda data: data.pop("costs"), "lacks costs"),
        (lambda data: data["costs"]["seconds"].pop(), "Costs cover"),
        (lambda data: data["costs"].update(seconds=[float("nan")] * 13), "NaN"),
        (lambda data: data["costs"].update(seconds=[1e999] * 13), "Infinity"),
    ],
)
def test_edited_files(path, change, message):
    edit(path, change)
    with pytest.raises(PlanFileError, match=message):
        Plan.load(path)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_refused_or_harmless(data, tmp_path_factory):
    where = tmp_path_factory.mktemp("plans") / "plan.json"
    PLAN.save(where)
    text = where.read_text()
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start, min(len(text), start + 30)))
    where.write_text(text[:start] + data.draw(st.text(max_size=5)) + text[stop:], encoding="utf-8", errors="replace")
    with contextlib.suppress(PlanFileError):
        assert Plan.load(where).schedule == PLAN.schedule
