"""Captured training graphs with their costs, kept in a folder so that planning needs no further capture."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from common import Row, emit, run_child
from lowtide.graph.io import costs_from_dict, costs_to_dict, graph_from_dict, graph_to_dict
from lowtide.plan.core.problem import Problem

FOLDER = Path(__file__).parents[1] / "out" / "problems"


def problem_of(
    name: str, *, folder: Path = FOLDER, fresh: bool = False, costs: str = "measured"
) -> tuple[Problem, str] | Row:
    """Return the problem of the model `name` and a digest of it, or a row that says why there is none.

    The budget is the unplanned peak. A model that has no file in `folder` is captured in a child process, with `costs`
    "measured" or "analytic".
    """
    path = folder / f"{name}.json"
    if fresh or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for row in run_child(__file__, [name, str(path), costs]):
            if "skipped" in row or "error" in row:
                return {"model": name, **row}
    data = path.read_bytes()
    return read(data), hashlib.sha256(data).hexdigest()[:16]


def read(data: bytes) -> Problem:
    """Return the problem that `write` has written as `data`; its budget is the unplanned peak."""
    fields = json.loads(data)
    graph = graph_from_dict(fields["graph"])
    costs = costs_from_dict(fields["costs"], graph)
    return Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes)


def write(problem: Problem, path: Path) -> None:
    """Write `problem` to `path`, all at once."""
    fields = {"graph": graph_to_dict(problem.graph), "costs": costs_to_dict(problem.costs)}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(fields))
    unfinished.replace(path)


def _capture(name: str, path: Path, costs: str) -> None:
    """Capture the model `name`; runs in a child process."""
    import lowtide  # only this process needs PyTorch
    import zoo

    entry = zoo.ALL[name]
    try:
        work = entry.build()
    except ImportError as error:
        emit({"skipped": f"{entry.package} is not installed ({error})"})
        return
    model = lowtide.wrap(work.model, budget="100%", planner="keep_all", costs=costs)
    work.loss(model(*work.args, **work.kwargs)).backward()
    write(max(lowtide.plans(model), key=lambda plan: plan.peak_bytes).problem, path)


if __name__ == "__main__":
    _capture(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
