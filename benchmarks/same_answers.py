"""The same problems planned by two source trees side by side: a change of the code must not make an answer worse.

The problems are models captured with analytic costs, so that nothing is measured, and published graphs. Each is planned
by one tree right after the other, in a process of its own, and the trees take turns in going first. `auto` counts its
work in steps, so that overhead, peak and bound are equal unless the change is meant to change them. CPU seconds count
the prover's process; on a busy machine they say more than the clock.

    python benchmarks/same_answers.py --other ../before/src --graphs ../shared/graphs --only gpt vgg16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import problems
from common import RESULTS, Row, describe_machine, number, refuse_unknown, run_child, table, text, write_results
from lowtide.plan.core.problem import Problem
from lowtide.reproduce.chainer_graphs import read_chainer_graph
from published import POINTS, load

CHILD = Path(__file__).with_name("plan_stored.py")
HERE = Path(__file__).parents[1] / "src"
FOLDER = Path(__file__).parents[1] / "out" / "same_answers"
GRAPHS = Path(__file__).parents[2] / "shared" / "graphs"
# Models and budgets in percent of the unplanned peak. Models whose package is not installed are skipped.
MODELS: dict[str, tuple[int, ...]] = {
    "gpt": (90, 60, 35),
    "resnet50": (90, 50, 30),
    "densenet121": (90, 60, 30),
    "unet": (90, 60, 40),
    "inception": (70, 40),
    "encoder_decoder": (70, 40),
    "lstm": (90, 50),
    "moe": (80, 50),
    "hf_gpt2": (80, 50),
    "hf_t5": (70, 40),
    "timm_vit_tiny": (80, 50),
    "timm_efficientnet_b0": (90, 50),
    "tv_resnet18": (90, 60),
    "tv_mobilenet_v3_small": (80, 40),
}
# A published graph on which the least overhead is a fraction of the usual gap.
CHAINER: dict[str, tuple[int, ...]] = {"kusumoto_resnet50": (90, 60)}
# Differences that are rounding alone.
ROUNDING = 1e-9
# How many times the other tree's CPU seconds all problems with equal answers may take together. Better answers may take
# longer.
MOST_SECONDS = 1.1


@dataclass(frozen=True)
class Case:
    """A stored problem and a budget in percent of its unplanned peak."""

    name: str
    path: Path
    percent: int


def cases(only: Sequence[str], folder: Path, graphs: Path) -> Iterator[Case | Row]:
    """Yield the cases; those that have no file in `folder` yet are captured or converted first."""
    for name, percents in MODELS.items():
        if only and name not in only:
            continue
        found = problems.problem_of(name, folder=folder, costs="analytic")
        if isinstance(found, dict):
            yield {"problem": name, "violations": [], **found}
        else:
            yield from (Case(name, folder / f"{name}.json", percent) for percent in percents)
    if graphs.is_dir():
        yield from _published(only, folder, graphs)
    else:
        yield {"problem": "published graphs", "violations": [], "skipped": f"{graphs} is not a folder"}


def _published(only: Sequence[str], folder: Path, graphs: Path) -> Iterator[Case]:
    """Yield the published points."""
    folder.mkdir(parents=True, exist_ok=True)
    for point in POINTS:
        if not only or point.name in only:
            path = folder / f"{point.name}.json"
            problems.write(Problem(*load(graphs / point.file), 1), path)
            yield Case(point.name, path, point.percent)
    for name, percents in CHAINER.items():
        if not only or name in only:
            path = folder / f"{name}.json"
            problems.write(Problem(*read_chainer_graph(graphs / f"{name}.txt").training(), 1), path)
            yield from (Case(name, path, percent) for percent in percents)


def compared(case: Case, planner: str, trees: dict[str, Path], *, other_first: bool) -> Row:
    """Return the answers of both trees."""
    row: Row = {"problem": case.name, "percent": case.percent}
    for tree in sorted(trees, reverse=other_first):
        arguments = [str(trees[tree]), str(case.path), str(case.percent), planner]
        for answer in run_child(str(CHILD), arguments, env={"PYTHONPATH": str(trees[tree])}):
            row |= {f"{key}_{tree}": value for key, value in answer.items()}
    row["violations"] = violations(row)
    return row


def violations(row: Row) -> list[str]:
    """Return in what this tree is worse than the other."""
    errors = [f"{tree}: {row[key]}" for tree in ("here", "other") if (key := f"error_{tree}") in row]
    if errors:
        return errors
    if row["fits_here"] != row["fits_other"]:
        return [] if row["fits_here"] else ["it does not fit any more"]
    if not row["fits_here"]:
        return ["the least peak is higher"] if row["peak_bytes_here"] > row["peak_bytes_other"] else []
    found = []
    if row["overhead_here"] > row["overhead_other"] + ROUNDING:
        found.append("the overhead is higher")
    if (row["bound_here"] or 0.0) < (row["bound_other"] or 0.0) - ROUNDING:
        found.append("the bound is lower")
    return found


def is_equal(row: Row) -> bool:
    """Return whether both trees have the same answer to the last digit."""
    keys = ("overhead", "peak_bytes", "bound", "outcome", "recomputed")
    return all(row.get(f"{key}_here") == row.get(f"{key}_other") for key in keys)


def percents(key: str) -> Callable[[Row], str]:
    """Return a column with the share `key` of the other tree and of this one, once if they are equal."""

    def show(row: Row) -> str:
        other, here = row.get(f"{key}_other"), row.get(f"{key}_here")
        shown = ["-" if share is None else f"{100 * share:.3f}" for share in (other, here)]
        return shown[0] if other == here else " → ".join(shown)

    return show


def ratio(rows: Sequence[Row], key: str) -> float:
    """Return how many times the other tree's `key` this one needs for all rows together."""
    both = [row for row in rows if f"{key}_here" in row and f"{key}_other" in row]
    return sum(row[f"{key}_here"] for row in both) / max(1e-9, sum(row[f"{key}_other"] for row in both))


COLUMNS: dict[str, Callable[[Row], str]] = {
    "problem": text("problem"),
    "ops": text("ops_here"),
    "budget": lambda row: f"{row['percent']} %" if "percent" in row else "-",
    "overhead, %": percents("overhead"),
    "bound, %": percents("bound"),
    "equal": lambda row: "-" if "skipped" in row else "yes" if is_equal(row) else "no",
    "seconds, other": number("seconds_other", ".1f"),
    "here": number("seconds_here", ".1f"),
    "CPU, other": number("cpu_seconds_other", ".1f"),
    "CPU, here": number("cpu_seconds_here", ".1f"),
    "note": lambda row: "; ".join(row["violations"]) or row.get("skipped") or "-",
}


def summary(rows: Sequence[Row]) -> str:
    """Return what the rows say together."""
    planned = [row for row in rows if "percent" in row]
    equal = [row for row in planned if is_equal(row)]
    worse = sum(bool(row["violations"]) for row in planned)
    return (
        f"{len(planned)} problems, {len(equal)} with equal answers, {worse} worse. "
        f"All: {ratio(planned, 'seconds'):.2f} times the seconds, {ratio(planned, 'cpu_seconds'):.2f} times the CPU "
        f"seconds. Equal answers: {ratio(equal, 'seconds'):.2f} and {ratio(equal, 'cpu_seconds'):.2f} times."
    )


def page(rows: Sequence[Row]) -> str:
    """Return the result page."""
    lines = ["# Same answers", "", "Written by `make bench-same`; " + describe_machine(), "", summary(rows), ""]
    return "\n".join([*lines, table(rows, COLUMNS)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if an answer is worse or planning takes longer than it may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="source folder of the tree to compare with")
    parser.add_argument("--here", type=Path, default=HERE, help="source folder of this tree")
    parser.add_argument("--graphs", type=Path, default=GRAPHS, help="folder of the published graphs")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="problems, such as gpt; all by default")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where captured problems are kept")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for same_answers.md and same_answers.json")
    options = parser.parse_args(argv)
    refuse_unknown(parser, "problem", options.only, {*MODELS, *CHAINER, *(point.name for point in POINTS)})
    trees = {"here": options.here.resolve(), "other": options.other.resolve()}
    rows: list[Row] = []
    for place, case in enumerate(cases(options.only, options.folder, options.graphs)):
        row = compared(case, options.planner, trees, other_first=place % 2 == 0) if isinstance(case, Case) else case
        rows.append(row)
        print("  ".join(f"{name} {show(row)}" for name, show in COLUMNS.items()), flush=True)
    print(summary(rows))
    for path in write_results("same_answers", rows=rows, markdown=page(rows), directory=options.out):
        print(f"Wrote {path}")
    slow = ratio([row for row in rows if "percent" in row and is_equal(row)], "cpu_seconds") > MOST_SECONDS
    return 1 if slow or any(row["violations"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
