"""What the benchmarks share: child processes that report rows, tables, and result files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROW = "row: "
MIB = 2**20
Row = dict[str, Any]


def emit(row: Row) -> None:
    """Hand a row from a child process to its parent."""
    print(ROW + json.dumps(row), flush=True)


@contextmanager
def leaving_when_told() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit`, so that whoever has started child processes can end them; in the main thread."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_child(script: str, arguments: Sequence[str], *, env: dict[str, str] | None = None) -> Iterator[Row]:
    """Yield the rows a child process emits; a child that fails yields a last row with the key `error`."""
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "KINETO_LOG_LEVEL": "5", **(env or {})}
    with leaving_when_told(), tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(ROW):
                        yield json.loads(line.removeprefix(ROW))
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()][-12:]
            yield {"error": f"exit code {process.returncode}: " + " | ".join(last)}


def refuse_unknown(parser: argparse.ArgumentParser, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """End with the parser's error if one of the names `given` is not `known`."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        parser.error(f"unknown {what} {', '.join(unknown)}; there are {', '.join(known)}")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch  # benchmarks of planning alone start without it

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def table(rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> str:
    """Return a Markdown table with one line per row; `columns` maps a heading to what it shows of a row."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(show(row) for show in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def mib(key: str) -> Callable[[Row], str]:
    """Return a column that shows `key` in MiB."""
    return lambda row: "-" if row.get(key) is None else f"{row[key] / MIB:.2f}"


def text(key: str) -> Callable[[Row], str]:
    """Return a column that shows `key` as it is, and yes or no for a boolean."""

    def show(row: Row) -> str:
        value = row.get(key)
        if isinstance(value, bool):
            return "yes" if value else "**no**"
        return "-" if value is None else str(value)

    return show


def number(key: str, form: str) -> Callable[[Row], str]:
    """Return a column that shows `key` in the given format."""
    return lambda row: "-" if row.get(key) is None else format(row[key], form)


def write_rows(path: Path, rows: Iterable[Row], about: Row) -> None:
    """Write a results file: what the rows are `about`, such as the machine, in the first line; then one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in (about, *rows)))


def append_row(path: Path, row: Row) -> None:
    """Add `row` to a results file; a new file begins with the machine."""
    if not path.exists():
        write_rows(path, (), {"machine": machine()})
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a results file, or none if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines[1:]]


def write_results(name: str, *, rows: Iterable[Row], markdown: str, directory: Path = RESULTS) -> list[Path]:
    """Write all rows to `name.jsonl` and their summary to `name.md`, and return the paths."""
    data, page = directory / f"{name}.jsonl", directory / f"{name}.md"
    write_rows(data, rows, {"machine": machine()})
    page.write_text(markdown + "\n")
    return [data, page]


def kept_rows(name: str, models: Collection[str] = (), directory: Path = RESULTS) -> list[Row]:
    """Return the rows that the last run wrote to `name.jsonl`, without those of `models`."""
    return [row for row in read_rows(directory / f"{name}.jsonl") if row.get("model") not in models]


def commit() -> str:
    """Return the short hash of the commit that is checked out, with a "+" if files in it have changed since."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def describe_machine() -> str:
    """Return one line about the machine, for the head of a result page."""
    facts = machine()
    return f"Python {facts['python']}, torch {facts['torch']}, {facts['threads']} threads on {facts['processor']}."
