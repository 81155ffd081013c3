"""A page of results: published figures beside ours."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        network: The network, with its size where a paper varies it.
        quantity: What is compared, such as "peak, kusumoto, memory-centric".
        published: The paper's figure, or None where it gives none.
        ours: Our figure, in the same unit.
        unit: The unit, such as "GB" (1e9 bytes), "GiB", "%" or "s".
        note: Why the two differ, where they do.
    """

    network: str
    quantity: str
    published: float | None
    ours: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours divided by the published figure; None where there is none or it is zero."""
        return self.ours / self.published if self.published else None


@dataclass(frozen=True)
class Page:
    """All figures of one paper.

    Attributes:
        title: The paper.
        rows: The figures, rows of one network beside each other.
        remarks: What holds for the whole page: memory model, units, known differences.
    """

    title: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]


COLUMNS = ("network", "quantity", "published", "ours", "unit", "ours / published", "note")
_NUMBERS = frozenset(("published", "ours", "ours / published"))


def to_terminal(page: Page) -> RenderableType:
    """Return the page for a rich console; all notes are numbered, so that rows stay short."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        is_number = column in _NUMBERS
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    notes = _notes(page, uses=1)
    before = ""
    for row in page.rows:
        if before not in ("", row.network):
            table.add_section()
        network, *cells = _cells(row, notes)
        table.add_row(*(Text(cell) for cell in ("" if row.network == before else network, *cells)))
        before = row.network
    return Group(Text(page.title, style="bold"), table, *(Text(line) for line in (*_numbered(notes), *page.remarks)))


def to_markdown(page: Page) -> str:
    """Return the page as a Markdown document."""
    notes = _notes(page, uses=2)
    lines = [f"# {page.title}", "", _markdown_row(COLUMNS)]
    lines.append(_markdown_row(["---:" if column in _NUMBERS else "---" for column in COLUMNS]))
    lines += [_markdown_row(_cells(row, notes)) for row in page.rows]
    if notes:
        lines += ["", "## Notes", "", *_numbered(notes)]
    if page.remarks:
        lines += ["", "## Remarks", "", *(f"- {remark}" for remark in page.remarks)]
    return "\n".join([*lines, ""])


def to_json(page: Page) -> str:
    """Return the page as JSON, figures in full precision, one row a line."""
    rows = ",\n  ".join(_dump(_fields(row)) for row in page.rows)
    return f'{{\n "title": {_dump(page.title)},\n "rows": [\n  {rows}\n ],\n "remarks": {_dump(page.remarks)}\n}}\n'


def _fields(row: Row) -> dict[str, Any]:
    return {
        "network": row.network,
        "quantity": row.quantity,
        "published": row.published,
        "ours": row.ours,
        "unit": row.unit,
        "ratio": row.ratio,
        "note": row.note,
    }


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def format_figure(figure: float | None) -> str:
    """Return a figure for people: about four significant digits, whole numbers in full; "-" if there is none."""
    if figure is None:
        return "-"
    if figure == int(figure) or abs(figure) >= 1000:
        return f"{figure:,.0f}"
    return f"{figure:.4g}" if abs(figure) >= 1 else f"{figure:.3g}"


def _cells(row: Row, notes: dict[str, int]) -> tuple[str, ...]:
    ratio = "" if row.ratio is None else f"{row.ratio:,.3f}" if abs(row.ratio) < 100 else f"{row.ratio:,.0f}"
    note = f"note {notes[row.note]}" if row.note in notes else row.note
    return (row.network, row.quantity, format_figure(row.published), format_figure(row.ours), row.unit, ratio, note)


def _notes(page: Page, *, uses: int) -> dict[str, int]:
    """Return the numbers of the notes that at least so many rows share, in the order in which rows refer to them."""
    counts = Counter(row.note for row in page.rows if row.note)
    shared = [note for note, count in counts.items() if count >= uses]
    return {note: number for number, note in enumerate(shared, start=1)}


def _numbered(notes: dict[str, int]) -> list[str]:
    return [f"{number}. {note}" for note, number in notes.items()]


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
