"""Plans kept on disk: the same question is answered from there, any other is not, and damage costs only time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from helpers.kept_plan import COSTS, GRAPH, PLAN, PLANNER, PROBLEM
from helpers.paths import TESTS
from lowtide.graph import samples
from lowtide.graph.costs import Costs
from lowtide.plan import plan_cache as plans_on_disk
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.plan_cache import PlanStore, key_of
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.solve import solve
from lowtide.progress import Progress, silent


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


def test_what_is_put_comes_back(store: PlanStore) -> None:
    assert store.get(PROBLEM, PLANNER) is None
    store.put(PLAN, PLANNER)
    assert store.get(PROBLEM, PLANNER) == PLAN
    assert len(store.files()) == 1
    assert store.clear() == 1
    assert store.get(PROBLEM, PLANNER) is None


def other_mark() -> Problem:
    first = replace(GRAPH.ops[0], pinned="now it must not run twice")
    return Problem(replace(GRAPH, ops=(first, *GRAPH.ops[1:])), COSTS, 600)


@pytest.mark.parametrize(
    ("problem", "planner"),
    [
        (Problem(GRAPH, COSTS, 601), PLANNER),
        (Problem(GRAPH, Costs(tuple(2 * s for s in COSTS.seconds), COSTS.workspace_bytes), 600), PLANNER),
        (Problem(GRAPH, replace(COSTS, workspace_bytes=(1, *COSTS.workspace_bytes[1:])), 600), PLANNER),
        (Problem(*samples.training_chain(9), 600), PLANNER),
        (other_mark(), PLANNER),
        (PROBLEM, Greedy(effort=0.03)),
    ],
    ids=["budget", "seconds", "workspace", "graph", "mark", "options"],
)
def test_any_other_question_has_another_key(problem: Problem, planner: AbstractPlanner) -> None:
    assert key_of(problem, planner) != key_of(PROBLEM, PLANNER)


def test_changed_code_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(PROBLEM, PLANNER)
    monkeypatch.setattr(plans_on_disk, "_code_digest", lambda: "another lowtide")
    assert key_of(PROBLEM, PLANNER) != before


@dataclass(frozen=True)
class Foreign(AbstractPlanner):
    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        return Proposal(lowtide.Schedule.keep_all(problem.graph))


def test_planners_of_others_are_always_asked(store: PlanStore) -> None:
    assert key_of(PROBLEM, Foreign()) is None
    store.put(PLAN, Foreign())
    assert store.files() == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[:50],
        lambda text: "[" * 100_000,
        lambda text: "{}",
        lambda text: json.dumps(json.loads(text) | {"key": "0" * 32}),
        lambda text: json.dumps(json.loads(text) | {"version": 2}),
        lambda text: json.dumps(json.loads(text) | {"forward": [0]}),
        lambda text: json.dumps(json.loads(text) | {"forward": [10**9]}),
        lambda text: json.dumps(json.loads(text) | {"outcome": "GREAT"}),
        lambda text: json.dumps(json.loads(text) | {"bound": "none"}),
        # Legal, but over the budget.
        lambda text: json.dumps(json.loads(text) | {"forward": list(GRAPH.forward), "backward": list(GRAPH.backward)}),
    ],
)
def test_damaged_files_are_ignored(store: PlanStore, spoil) -> None:
    store.put(PLAN, PLANNER)
    (path,) = store.files()
    path.write_text(spoil(path.read_text()))
    assert store.get(PROBLEM, PLANNER) is None
    store.put(PLAN, PLANNER)
    assert store.get(PROBLEM, PLANNER) == PLAN


def test_the_least_recently_used_go_first(store: PlanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_on_disk, "MOST_FILES", 3)
    for budget in range(600, 606):
        problem = Problem(GRAPH, COSTS, budget)
        store.put(replace(PLAN, problem=problem), PLANNER)
    assert len(store.files()) == 3
    assert store.get(Problem(GRAPH, COSTS, 605), PLANNER) is not None


WRITER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from helpers.kept_plan import PLAN, PLANNER, PROBLEM
from lowtide.plan.plan_cache import PlanStore
store = PlanStore(Path({folder!r}))
for _ in range(100):
    store.put(PLAN, PLANNER)
    found = store.get(PROBLEM, PLANNER)
    assert found is not None, "a reader saw a part of a file"
    assert found.schedule == PLAN.schedule
"""


def test_several_processes_may_write_at_once(tmp_path: Path) -> None:
    code = WRITER.format(tests=str(TESTS), folder=str(tmp_path / "plans"))
    writers = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    assert [(writer.communicate()[1], writer.returncode)[1] for writer in writers] == [0, 0, 0]
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_wrap_and_plan_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plans_on_disk, "_WORTH_SECONDS", 0.0)
    asked = []
    monkeypatch.setattr(
        plans_on_disk, "solve", lambda problem, planner, **_: asked.append(planner) or solve(problem, planner)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())])
    args = (torch.ones(64, 16),)
    options = {"budget": "70%", "planner": Greedy(effort=0.02), "costs": "analytic"}
    first, again = (lowtide.plan(model, args, **options) for _ in range(2))
    assert first == again
    assert len(asked) == 1
    lowtide.wrap(model, **options)
    model(*args).sum().backward()
    assert lowtide.plans(model)[0].schedule == first.schedule
    assert len(asked) == 1
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "0")
    lowtide.plan(lowtide.unwrap(model), args, **options)
    assert len(asked) == 2


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(plans_on_disk, "_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(plans_on_disk, "_warned", False)
    with pytest.warns(lowtide.errors.LowtideWarning, match="cannot be written"):
        found = plans_on_disk.solve_once(PROBLEM, PLANNER, silent)
    assert found.schedule == PLAN.schedule
