"""Plans on disk: JSON that people can read and compare, one op, value or cost per line.

Loading trusts nothing: sizes are bounded, every field is checked, the graph must have the fingerprint that the file
states and the schedule must be legal on it. Nothing in a file is ever executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError, PlanFileError
from lowtide.files import replace_text
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
from lowtide.plan.core.account import MemoryAccount, account_of
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

FORMAT = "lowtide-plan"
VERSION = 1
MAX_FILE_BYTES = 512 * 2**20
_FIELDS = {
    "format",
    "version",
    "fingerprint",
    "planner",
    "outcome",
    "bound",
    "budget_bytes",
    "min_peak_bytes",
    "peak_bytes",
    "seconds",
    "schedule",
    "graph",
    "costs",
}


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


def write_record(record: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write `record` to `path`; a reader sees the old file or the whole new one, never a part."""
    target = Path(path)
    text = _render(_to_dict(record))
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
    where = str(path)
    try:
        return _from_dict(_read_json(Path(path)), outcomes)
    except PlanFileError as error:
        raise PlanFileError(f"Cannot load the plan file {where!r}: {error}") from None
    except (LowtideError, RecursionError) as error:
        raise PlanFileError(f"Cannot load the plan file {where!r}: it is damaged. {error}") from None


def _read_json(path: Path) -> object:
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


def _to_dict(record: PlanRecord) -> dict[str, Any]:
    problem, schedule = record.problem, record.schedule
    account = {} if record.account is None else {"account": record.account.to_dict()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": problem.graph.fingerprint,
        "planner": record.planner,
        "outcome": record.outcome,
        "bound": record.bound,
        **({} if record.given_bound is None else {"given_bound": record.given_bound}),
        "budget_bytes": problem.budget_bytes,
        "peak_bytes": problem.price(schedule).peak_bytes,
        "min_peak_bytes": record.min_peak_bytes,
        "seconds": record.seconds,
        **account,
        "schedule": {"forward": list(schedule.forward), "backward": list(schedule.backward)},
        "graph": graph_to_dict(problem.graph),
        "costs": costs_to_dict(problem.costs),
    }


def _from_dict(data: object, outcomes: Sequence[str]) -> PlanRecord:
    _check_header(data)
    fields = read_fields(data, "The plan", _FIELDS, {"account", "given_bound"})
    graph = graph_from_dict(fields["graph"])
    if fields["fingerprint"] != graph.fingerprint:
        raise PlanFileError(
            f"its fingerprint {fields['fingerprint']!r:.40} is not that of its graph, {graph.fingerprint!r}; "
            "it was edited or damaged."
        )
    problem = Problem(graph, costs_from_dict(fields["costs"], graph), read_int(fields["budget_bytes"], "budget_bytes"))
    passes = read_fields(fields["schedule"], "The schedule", {"forward", "backward"})
    schedule = Schedule(read_ids(passes["forward"], "forward"), read_ids(passes["backward"], "backward"))
    verify(graph, schedule)
    peak = problem.price(schedule).peak_bytes
    if read_int(fields["peak_bytes"], "peak_bytes") != peak:
        raise PlanFileError(f"it states a peak of {fields['peak_bytes']} bytes, but its schedule has {peak}.")
    outcome = read_str(fields["outcome"], "outcome")
    if outcome not in outcomes:
        raise PlanFileError(f"its outcome {outcome!r:.40} is not one of {', '.join(outcomes)}.")
    bound, given = fields["bound"], fields.get("given_bound")
    return PlanRecord(
        problem=problem,
        schedule=schedule,
        planner=read_str(fields["planner"], "planner"),
        outcome=outcome,
        bound=None if bound is None else read_float(bound, "bound"),
        min_peak_bytes=read_int(fields["min_peak_bytes"], "min_peak_bytes"),
        seconds=read_float(fields["seconds"], "seconds"),
        account=account_of(fields.get("account")),
        given_bound=None if given is None else read_float(given, "given_bound"),
    )


def _check_header(data: object) -> None:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PlanFileError(f'it is not a plan: its field "format" is not {FORMAT!r}.')
    if data.get("version") != VERSION:
        raise PlanFileError(
            f"it has version {data.get('version')!r:.40}; this lowtide reads version {VERSION}. Make the plan again."
        )


def _render(data: dict[str, Any]) -> str:
    """Return `data` as JSON in which long lists have one entry per line, so that files can be compared."""
    lines = []
    for key, item in data.items():
        body = _render_nested(item) if isinstance(item, dict) else json.dumps(item, allow_nan=False)
        lines.append(f"{json.dumps(key)}: {body}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _render_nested(data: dict[str, Any]) -> str:
    lines = []
    for key, item in data.items():
        if isinstance(item, list) and item:
            entries = ",\n".join(f"  {json.dumps(entry, allow_nan=False)}" for entry in item)
            lines.append(f" {json.dumps(key)}: [\n{entries}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(item, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"
