"""A schedule in words: one row per module, as plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph
from lowtide.schedule.simulate import instances
from lowtide.schedule.steps import Schedule
from lowtide.units import format_bytes, format_seconds

MAX_ROWS = 20


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """What a schedule does to the ops of one module.

    Attributes:
        module: Path of the module.
        kept_bytes: Bytes of its values that are alive between forward and backward.
        recomputed: Number of runs beyond the first of its ops.
        recompute_seconds: Time of those runs.
    """

    module: str
    kept_bytes: int
    recomputed: int
    recompute_seconds: float


def module_rows(graph: Graph, costs: Costs, schedule: Schedule) -> list[ModuleRow]:
    """Return one row per module, in order of kept bytes, largest first."""
    kept: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    boundary = len(schedule.forward)
    for instance in instances(graph, schedule):
        producer = graph.values[instance.value].producer
        if instance.birth < boundary <= instance.death and producer is not None:
            kept[graph.ops[producer].module] += instance.bytes
    seen: set[int] = set()
    for op in schedule.steps:
        module = graph.ops[op].module
        kept[module] += 0
        if op in seen:
            runs[module] += 1
            seconds[module] = seconds.get(module, 0.0) + costs.seconds[op]
        seen.add(op)
    rows = [ModuleRow(module, kept[module], runs[module], seconds.get(module, 0.0)) for module in kept]
    return sorted(rows, key=lambda row: (-row.kept_bytes, -row.recompute_seconds, row.module))


def module_table(rows: Sequence[ModuleRow], *, limit: int = MAX_ROWS) -> list[str]:
    """Return the lines of a table of `rows`; those after the first `limit` are summed in one last row."""
    shown = list(rows) if len(rows) <= limit + 1 else [*rows[:limit], _total(rows[limit:])]
    cells = [("module", "kept", "recomputed", "recompute time")]
    for row in shown:
        cells.append(
            (
                row.module or "(top)",
                format_bytes(row.kept_bytes),
                f"{row.recomputed} ops" if row.recomputed else "-",
                format_seconds(row.recompute_seconds) if row.recomputed else "-",
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    lines = []
    for line in cells:
        right = "  ".join(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        lines.append(f"{line[0].ljust(widths[0])}  {right}")
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _total(rows: Sequence[ModuleRow]) -> ModuleRow:
    return ModuleRow(
        f"({len(rows)} more modules)",
        sum(row.kept_bytes for row in rows),
        sum(row.recomputed for row in rows),
        sum(row.recompute_seconds for row in rows),
    )
