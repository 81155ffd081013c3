"""Plans on disk: JSON that people can read and compare, one op, value or cost per line.

Loading trusts nothing: sizes are bounded, every field is checked, the graph must have the fingerprint that the file
states and the schedule must be legal on it. Nothing in a file is ever executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError, PlanFileError
from lowtide.files import replace_text
from lowtide.graph.costs import Costs
from lowtide.graph.io import (
    costs_from_dict,
    costs_to_dict,
    graph_from_dict,
    graph_to_dict,
    read_fields,
    read_float,
    read_ids,
    read_int,
    read_str,
)
from lowtide.graph.ir import Graph
from lowtide.plan.core.account import MemoryAccount, account_of
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

FORMAT = "lowtide-plan"
VERSION = 1
MAX_FILE_BYTES = 512 * 2**20
STEP_FORMAT = "lowtide-step-plan"
# What a plan is, beside the graph and the costs of its ops, which several plans may share.
_FIELDS = {"planner", "outcome", "bound", "budget_bytes", "min_peak_bytes", "peak_bytes", "seconds", "schedule"}
_OPTIONAL = {"account", "given_bound", "cut"}


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """What a plan file holds; see `Plan` for the meanings."""

    problem: Problem
    schedule: Schedule
    planner: str
    outcome: str
    bound: float | None
    min_peak_bytes: int
    seconds: float
    account: MemoryAccount | None = None
    given_bound: float | None = None
    cut: str | None = None


def write_record(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write `record` to `path`; a reader sees the old file or the whole new one, never a part."""
    graph = record.problem.graph
    header = {"format": FORMAT, "version": VERSION, "fingerprint": graph.fingerprint}
    write_json_file(header | record_to_dict(record) | graph_and_costs(record.problem), path)


def write_json_file(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write `data` to `path`; a reader sees the old file or the whole new one, never a part."""
    target = Path(path)
    text = f"{_render(data, 0)}\n"
    try:
        replace_text(target, text)
    except OSError as error:
        raise PlanFileError(f"Cannot write {str(target)!r}: {error.strerror}.") from None


def read_record(path: str | os.PathLike[str], *, outcomes: Sequence[str]) -> PlanRecord:
    """Return what the plan file at `path` holds; raise `PlanFileError` if anything in it is not as it must be.

    Args:
        path: The file.
        outcomes: Names that its field `outcome` may have.
    """
    with loading(path):
        return _from_dict(read_json(path), outcomes)


@contextmanager
def loading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever is wrong with the file at `path` into a `PlanFileError` that names it."""
    where = str(path)
    try:
        yield
    except PlanFileError as error:
        raise PlanFileError(f"Cannot load the plan file {where!r}: {error}") from None
    except (LowtideError, RecursionError) as error:
        raise PlanFileError(f"Cannot load the plan file {where!r}: it is damaged. {error}") from None


def read_json(path: str | os.PathLike[str]) -> object:
    """Return what the JSON file at `path` holds; raise `PlanFileError` if it is none that may be read."""
    path = Path(path)
    try:
        if not path.exists():
            raise PlanFileError("there is no such file.")
        if not path.is_file():
            raise PlanFileError("it is not a regular file.")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise PlanFileError(f"it has {size} bytes; at most {MAX_FILE_BYTES} are read.")
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except OSError as error:
        raise PlanFileError(f"{error.strerror}.") from None
    except UnicodeDecodeError:
        raise PlanFileError("it is not text in UTF-8.") from None
    except ValueError as error:
        if isinstance(error, PlanFileError):
            raise
        raise PlanFileError(f"it is not complete JSON ({error}); it may be truncated.") from None


def _refuse_constant(name: str) -> float:
    raise PlanFileError(f"it contains {name}, which is not a number.")


def graph_and_costs(problem: Problem) -> dict[str, Any]:
    """Return the part of a plan file that plans for the same graph share."""
    return {"graph": graph_to_dict(problem.graph), "costs": costs_to_dict(problem.costs)}


def read_graph_and_costs(graph_data: object, costs_data: object, fingerprint: object) -> tuple[Graph, Costs]:
    """Return graph and costs of a plan file, which says that the graph has this fingerprint."""
    graph = graph_from_dict(graph_data)
    if fingerprint != graph.fingerprint:
        raise PlanFileError(
            f"its fingerprint {fingerprint!r:.40} is not that of its graph, {graph.fingerprint!r}; "
            "it was edited or damaged."
        )
    return graph, costs_from_dict(costs_data, graph)


def record_to_dict(record: PlanRecord) -> dict[str, Any]:
    """Return a plan without its graph and costs."""
    problem, schedule = record.problem, record.schedule
    account = {} if record.account is None else {"account": record.account.to_dict()}
    return {
        "planner": record.planner,
        "outcome": record.outcome,
        "bound": record.bound,
        **({} if record.given_bound is None else {"given_bound": record.given_bound}),
        "budget_bytes": problem.budget_bytes,
        "peak_bytes": problem.price(schedule).peak_bytes,
        "min_peak_bytes": record.min_peak_bytes,
        "seconds": record.seconds,
        **account,
        **cut_to_dict(record.cut),
        "schedule": {"forward": list(schedule.forward), "backward": list(schedule.backward)},
    }


def record_from_dict(data: object, graph: Graph, costs: Costs, outcomes: Sequence[str]) -> PlanRecord:
    """Return the plan for `graph` that `data` describes; its schedule is legal and has the peak that is stated."""
    fields = read_fields(data, "The plan", _FIELDS, _OPTIONAL)
    problem = Problem(graph, costs, read_int(fields["budget_bytes"], "budget_bytes"))
    passes = read_fields(fields["schedule"], "The schedule", {"forward", "backward"})
    schedule = Schedule(read_ids(passes["forward"], "forward"), read_ids(passes["backward"], "backward"))
    verify(graph, schedule)
    peak = problem.price(schedule).peak_bytes
    if read_int(fields["peak_bytes"], "peak_bytes") != peak:
        raise PlanFileError(f"it states a peak of {fields['peak_bytes']} bytes, but its schedule has {peak}.")
    given = fields.get("given_bound")
    return PlanRecord(
        problem=problem,
        schedule=schedule,
        planner=read_str(fields["planner"], "planner"),
        outcome=read_outcome(fields["outcome"], outcomes),
        bound=read_bound(fields["bound"]),
        min_peak_bytes=read_int(fields["min_peak_bytes"], "min_peak_bytes"),
        seconds=read_float(fields["seconds"], "seconds"),
        account=account_of(fields.get("account")),
        given_bound=None if given is None else read_float(given, "given_bound"),
        cut=read_cut(fields.get("cut")),
    )


def read_outcome(data: object, outcomes: Sequence[str]) -> str:
    """Return the name of an outcome."""
    outcome = read_str(data, "outcome")
    if outcome not in outcomes:
        raise PlanFileError(f"its outcome {outcome!r:.40} is not one of {', '.join(outcomes)}.")
    return outcome


def cut_to_dict(cut: str | None) -> dict[str, str]:
    """Return the field that says why a model is cut as it is; none where that is not known, as in older files."""
    return {} if cut is None else {"cut": cut}


def read_cut(data: object) -> str | None:
    """Return why a model is cut as it is, or None if a file does not say so."""
    return None if data is None else read_str(data, "cut")


def read_bound(data: object) -> float | None:
    """Return a bound, or None if nothing is proved."""
    return None if data is None else read_float(data, "bound")


def _from_dict(data: object, outcomes: Sequence[str]) -> PlanRecord:
    check_header(data, FORMAT, VERSION)
    shared = {"format", "version", "fingerprint", "graph", "costs"}
    fields = read_fields(data, "The plan", shared | _FIELDS, _OPTIONAL)
    graph, costs = read_graph_and_costs(fields["graph"], fields["costs"], fields["fingerprint"])
    own = {key: item for key, item in fields.items() if key not in shared}
    return record_from_dict(own, graph, costs, outcomes)


def check_header(data: object, form: str, version: int) -> None:
    """Raise `PlanFileError` unless `data` is of this form and version."""
    found = data.get("format") if isinstance(data, dict) else None
    if found != form and found in (FORMAT, STEP_FORMAT):
        kinds = {FORMAT: "one graph", STEP_FORMAT: "a step of several blocks"}
        raise PlanFileError(f"it is the plan of {kinds[found]}, not of {kinds[form]}; lowtide.load loads both.")
    if not isinstance(data, dict) or found != form:
        raise PlanFileError(f'it is not a plan: its field "format" is not {form!r}.')
    if data.get("version") != version:
        raise PlanFileError(
            f"it has version {data.get('version')!r:.40}; this lowtide reads version {version}. Make the plan again."
        )


def _render(data: Any, depth: int) -> str:
    """Return `data` as JSON in which long lists have one entry per line, so that files can be compared."""
    if not data or not isinstance(data, dict | list):
        return json.dumps(data, allow_nan=False)
    if isinstance(data, dict):
        lines = [f"{json.dumps(key)}: {_render(item, depth + 1)}" for key, item in data.items()]
    else:
        lines = [_render(item, depth + 1) if _is_deep(item) else json.dumps(item, allow_nan=False) for item in data]
    body = ",\n".join(f"{' ' * depth}{line}" for line in lines)
    first, last = "{}" if isinstance(data, dict) else "[]"
    return f"{first}\n{body}\n{' ' * max(depth - 1, 0)}{last}"


def _is_deep(item: object) -> bool:
    return isinstance(item, dict) and any(isinstance(each, dict) for each in item.values())
