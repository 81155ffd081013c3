"""What the rows of the referee say: an outcome for each, and a page of counts, bars, and the rows that are not good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from common import Row, describe_machine, mib, number, table, text

LAST_BITS = 1e-3
ARCHITECTURES = 140
TRANSFORMERS = 80
TIMM = 60
EXACT_SHARE = 0.9
# The page is to be one page; all rows are in the file beside it.
LISTED = 24

EXACT = "exact and planned"
LIMIT = "differs in the last bits, as PyTorch's own aot_eager does (Limits)"
EAGER = "eager differs from itself"
SILENT = "silent difference"
ABOVE = "above the budget"
UNPLANNED = "trained without a plan"
OURS = "an error of ours"
LATE = "no end in the time given"
FOREIGN = "a foreign error"
OUTCOMES = (EXACT, EAGER, LIMIT, OURS, LATE, UNPLANNED, ABOVE, SILENT, FOREIGN)


def outcome(row: Row) -> str:
    """Return which of `OUTCOMES` a row is, the worst if there are several."""
    if "foreign" in row:
        return FOREIGN
    if "error" in row or "late" in row:
        return OURS if "error" in row else LATE
    if row["bits"] != "exact" and not row.get("eager_differs") and not _is_limit(row):
        return SILENT
    if _is_above(row):
        return ABOVE
    if not row["graphs"]:
        return UNPLANNED
    if row["bits"] == "exact":
        return EXACT
    return EAGER if row.get("eager_differs") else LIMIT


def _is_above(row: Row) -> bool:
    return "measured_bytes" in row and row["measured_bytes"] > row["budget_bytes"]


def _is_limit(row: Row) -> bool:
    """Return whether a row differs in the last bits only, and PyTorch's own `aot_eager` differs from eager there."""
    if row["amount"] is None or not row["amount"] < LAST_BITS:
        return False
    # The bits of aot_eager may be others than ours in the tensor in which both differ from eager.
    tensor, _, amount = row.get("aot_eager", "").rpartition(" by ")
    return bool(row.get("as_aot_eager")) or (tensor == row["bits"] and float(amount) < LAST_BITS)


def is_good(row: Row) -> bool:
    """Return whether a row is exact, planned and within its budget."""
    return "not_built" not in row and outcome(row) == EXACT


def verdict(row: Row) -> str:
    """Return the progress line of a row."""
    if "not_built" in row:
        return f"not built: {row['not_built'][:120]}"
    return f"{outcome(row)}  {_bits(row)}  {_note(row)[:200]}  {row['seconds']:.0f} s"


def _bits(row: Row) -> str:
    if "bits" not in row:
        return "-"
    if row["bits"] == "exact":
        return "exact"
    stock = "same in aot_eager" if row.get("as_aot_eager") else f"aot_eager: {row.get('aot_eager', 'not run')}"
    return f"{row['bits']} by {row['amount']:.1g}; {stock}"


def _note(row: Row) -> str:
    said = row.get("foreign") or row.get("error") or row.get("late") or "; ".join(row.get("warnings", ())) or "-"
    if row.get("least_tries", 1) > 1:
        said = f"the least budget named was too small {row['least_tries'] - 1} times; {said}"
    return " ".join(said.split()).replace("|", "/")


def _ratio(over: str, under: str) -> Callable[[Row], str]:
    return lambda row: f"{row[over] / row[under]:.4f}" if row.get(over) and row.get(under) else "-"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "package": text("package"),
    "architecture": text("architecture"),
    "model": text("model"),
    "graphs": text("graphs"),
    "bits": _bits,
    "budget MiB": mib("budget_bytes"),
    "measured / budget": _ratio("measured_bytes", "budget_bytes"),
    "predicted / measured": _ratio("predicted_bytes", "measured_bytes"),
    "first step s": number("first_seconds", ".1f"),
    "outcome": outcome,
    "note": lambda row: _note(row)[:200],
}


def bars(rows: Sequence[Row]) -> dict[str, tuple[str, bool]]:
    """Return what must hold, with the figure there is and whether it holds."""
    packages = Counter(row["package"] for row in rows)
    outcomes = Counter(map(outcome, rows))
    over = sum(map(_is_above, rows))
    share = outcomes[EXACT] / max(1, len(rows))
    return {
        f"at least {ARCHITECTURES} architectures": (str(len(rows)), len(rows) >= ARCHITECTURES),
        f"at least {TRANSFORMERS} of transformers": (
            str(packages["transformers"]),
            packages["transformers"] >= TRANSFORMERS,
        ),
        f"at least {TIMM} of timm": (str(packages["timm"]), packages["timm"] >= TIMM),
        "no silent difference": (str(outcomes[SILENT]), not outcomes[SILENT]),
        "no peak above the budget": (str(over), not over),
        "no foreign error": (str(outcomes[FOREIGN]), not outcomes[FOREIGN]),
        f"{EXACT_SHARE:.0%} exact and planned": (f"{share:.1%}", share >= EXACT_SHARE),
    }


def made_with(rows: Sequence[Row]) -> str:
    """Return a sentence about the commits that the rows were made with."""
    counts = Counter(row.get("commit", "not noted") for row in rows).most_common()
    if len(counts) == 1:
        return f"All were made with commit {counts[0][0]}."
    return "They are of several commits: " + ", ".join(f"{each} ({number})" for each, number in counts) + "."


def page(every: Sequence[Row]) -> tuple[str, bool]:
    """Return the page, and whether every bar holds."""
    rows = sorted((row for row in every if "not_built" not in row), key=lambda row: (outcome(row), row["architecture"]))
    judged = bars(rows)
    least = sum("least_bytes" in row for row in rows)
    outcomes = Counter(map(outcome, rows))
    bad = [row for row in rows if not is_good(row)]
    lines = [
        "# Referee: planned against eager, architecture by architecture",
        "",
        "Written by `make bench-referee`; " + describe_machine(),
        "",
        "Small models from configurations, dropout on, three AdamW steps, one thread. The budget is 60 % of the",
        f"measured peak of eager's step, or the least that works ({least} rows). {len(every) - len(rows)} further",
        "architectures are not trained by eager PyTorch as they could be built here, and do not count. All rows are in",
        f"`referee.jsonl`. {made_with(rows)}",
        "",
        "| bar | is | holds |",
        "|---|---|---|",
        *(f"| {bar} | {figure} | {'yes' if holds else '**no**'} |" for bar, (figure, holds) in judged.items()),
        "",
        "| outcome | rows | share |",
        "|---|---|---|",
        *(f"| {each} | {outcomes[each]} | {outcomes[each] / max(1, len(rows)):.1%} |" for each in OUTCOMES),
        "",
        f"Rows that are not exact, planned and within the budget ({len(bad)}, of which {min(len(bad), LISTED)} here):",
        "",
        table(bad[:LISTED], COLUMNS),
    ]
    return "\n".join(lines), all(holds for _, holds in judged.values())
