"""Starting is quick: neither `import lowtide` nor the command line's help imports PyTorch, let alone its compiler."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch._functorch.partitioners")
HEAVY = ("torch", "ortools", "matplotlib")


def modules_after(code: str) -> set[str]:
    """Return the modules that a new process has imported after `code`."""
    report = "\nimport sys, json; print('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HELP = """
from lowtide.cli import main
assert main({arguments}) == 0
"""


@pytest.mark.parametrize(
    "code",
    [
        "import lowtide",
        HELP.format(arguments=["--help"]),
        HELP.format(arguments=["--version"]),
        HELP.format(arguments=["plan", "--help"]),
        HELP.format(arguments=["max-batch", "--help"]),
    ],
    ids=["import", "help", "version", "plan help", "max-batch help"],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    found = modules_after(code)
    assert "lowtide" in found
    assert not found.intersection(COMPILER)
    assert not found.intersection(HEAVY)


def test_the_check_can_fail() -> None:
    assert "torch._dynamo" in modules_after("import lowtide.runtime.wrap")


def test_measuring_a_peak_does_not_import_the_compiler() -> None:
    found = modules_after("import lowtide; lowtide.measure_peak")
    assert "torch" in found
    assert not found.intersection(COMPILER)


def test_plan_files_are_served_without_torch(tmp_path) -> None:
    path = tmp_path / "plan.json"
    code = f"""
from lowtide.graph import samples
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve
graph, costs = samples.training_chain(6)
solve(Problem(graph, costs, 10_000), "keep_all").save({str(path)!r})
from lowtide.cli import main
assert main(["explain", {str(path)!r}, "--planner", "greedy"]) == 0
assert main(["compare", {str(path)!r}, "--planners", "greedy", "chen_sqrt"]) == 0
assert main(["plan", {str(path)!r}]) == 0
"""
    assert "torch" not in modules_after(code)


def test_a_ready_schedule_is_priced_without_any_planner() -> None:
    code = """
import lowtide
from lowtide.graph import samples
graph, costs = samples.training_chain(6)
lowtide.solve(lowtide.Problem(graph, costs, 10_000), lowtide.Schedule.keep_all(graph))
"""
    planners = ("lowtide.plan.planners.", "lowtide.plan.auto.", "lowtide.plan.bounds.", "lowtide.plan.search.")
    assert not [name for name in modules_after(code) if name.startswith(planners)]
    named = code.replace("lowtide.Schedule.keep_all(graph)", "'keep_all'")
    assert [name for name in modules_after(named) if name.startswith(planners)]
