"""Plan one stored problem and emit the answer as a row.

The child process of `same_answers.py`. It runs with the source tree of another version, too, so it uses only names that
all versions have.

    python benchmarks/plan_stored.py src out/same_answers/gpt.json 50 auto
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import lowtide
from common import Row, emit
from lowtide.graph.io import costs_from_dict, graph_from_dict
from lowtide.plan import registry


def read(path: Path, percent: int) -> lowtide.Problem:
    """Return the problem in the file at `path` with a budget of `percent` of its unplanned peak."""
    fields = json.loads(path.read_text())
    graph = graph_from_dict(fields["graph"])
    problem = lowtide.Problem(graph, costs_from_dict(fields["costs"], graph), 1)
    return replace(problem, budget_bytes=problem.baseline.peak_bytes * percent // 100)


def plan(problem: lowtide.Problem, planner: str) -> Row:
    """Return the answer of `planner`, and the seconds and CPU seconds that it took."""
    asked = registry.get(planner)  # some versions load planners when the first one is asked for
    started, cpu = time.perf_counter(), cpu_seconds()
    found = lowtide.solve(problem, asked, throw=False)
    return {
        "ops": len(problem.graph.ops),
        "fits": found.peak_bytes <= problem.budget_bytes,
        "overhead": found.overhead,
        "peak_bytes": found.peak_bytes,
        "bound": found.bound,
        "outcome": found.outcome.name,
        "recomputed": found.num_recomputed,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": cpu_seconds() - cpu,
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(tree: str, path: str, percent: str, planner: str) -> None:
    """Plan with the code in `tree`."""
    if not Path(lowtide.__file__).is_relative_to(tree):
        raise SystemExit(f"{lowtide.__file__} is not in {tree}: PYTHONPATH does not name it")
    emit(plan(read(Path(path), int(percent)), planner))


if __name__ == "__main__":
    main(*sys.argv[1:])
