"""Every planner on real models at seven budgets: is `auto` the best everywhere, and how close to optimal is it?

Each model is captured once, with measured costs, and kept in out/problems. Every planner then plans it at 80, 65, 50,
40, 30, 25 and 20 % of the unplanned peak, in a process of its own with a time limit. Overheads and peaks are the
simulator's; the bound is proved for the graph, its costs and its order of first computations, and the gap is what the
overhead exceeds it by. Where `auto` has a schedule in an order of its own that is faster than any in the given order
can be, the bound is what is proved about that other order; what is proved about the given one is `given_bound`. A
planner other than `auto` that runs out of time at one budget of a model is not tried at the others of that model; these
count as out of time as well. Budgets are planned from the least on, and `auto` is given its schedule for the budget
before.

    python benchmarks/plan.py --only gpt unet --planners auto greedy --budgets 65 40 --keep
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import zoo
from checks import BEST, checks, failed
from common import RESULTS, Row, kept_rows, refuse_unknown, write_results
from limits import SCHEDULE, Job, planned, run_jobs
from lowtide.plan import registry
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule
from plan_page import page
from plan_picture import draw
from problems import FOLDER, problem_of

BUDGETS = (80, 65, 50, 40, 30, 25, 20)
LEFT_OUT = {"brute_force", "auto_thorough"}
LIMIT_SECONDS = 120.0


@dataclass
class Table:
    """The rows so far, and what to run."""

    planners: Sequence[str]
    budgets: Sequence[int]
    limit_seconds: float
    rows: list[Row]
    known: dict[str, Schedule] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Add a row that has ended, and remember the schedule if it fits."""
        schedule = row.pop(SCHEDULE, None)
        if schedule is not None and row["fits"]:
            self.known[row["model"]] = schedule
        self.rows.append(row)

    def jobs(self, name: str, problem: Problem, digest: str) -> Iterator[Job]:
        """Yield the jobs of one model; planners that have run out of time are not tried again."""
        peak = problem.budget_bytes
        for planner in self.planners:
            # Least budget first: what fits a budget fits a larger one, and auto is told of it.
            for percent in sorted(self.budgets):
                key = self.key(name, planner, percent, problem, digest)
                if planner != BEST and self._was_out_of_time(name, planner):
                    self.rows.append({**key, "out_of_time": self.limit_seconds, "tried": False})
                    continue
                asked = Problem(problem.graph, problem.costs, peak * percent // 100)
                known = (self.known[name],) if name in self.known else ()
                starts = known if planner == BEST else None
                yield Job(key, partial(planned, asked, planner, starts), self.limit_seconds)

    def key(self, name: str, planner: str, percent: int, problem: Problem, digest: str) -> Row:
        """Return what identifies a row, and what it is about."""
        return {
            "model": name,
            "planner": planner,
            "percent": percent,
            "ops": len(problem.graph.ops),
            "unplanned_bytes": problem.budget_bytes,
            "problem": digest,
        }

    def _was_out_of_time(self, name: str, planner: str) -> bool:
        mine = [row for row in self.rows if row["model"] == name and row.get("planner") == planner]
        return any("out_of_time" in row for row in mine)


def run(options: argparse.Namespace, kept: Sequence[Row]) -> list[Row]:
    """Return the rows of all models, with those of `kept` that are about the same problems and are not run again."""
    done = Table(options.planners, options.budgets, options.limit, [])
    others = list(kept)
    for name in options.only:
        # Rows of models that are not reached yet stay: what is written on the way must not lose them.
        others = [row for row in others if row["model"] != name]
        found = problem_of(name, folder=options.problems, fresh=options.fresh)
        if isinstance(found, dict):
            done.rows.append(found)
            print(f"{name:<22} {found.get('skipped') or found['error']}", flush=True)
            continue
        for row in run_jobs(done.jobs(name, *found), parallel=options.jobs):
            done.add(row)
            print(describe(row), flush=True)
        done.rows += [row for row in kept if row["model"] == name and row.get("problem") == found[1]]
        save(unique([*done.rows, *others]), options.out)
    return unique([*done.rows, *others])


def save(rows: Sequence[Row], out: Path) -> list[Path]:
    """Write table, data and picture, and return their paths; done after every model, for the whole takes hours."""
    about = (__doc__ or "").split("\n\n")[1]
    written = write_results("plan", rows=rows, markdown=page(rows, about), directory=out)
    return [*written, draw(rows, out / "plan.png")]


def unique(rows: Sequence[Row]) -> list[Row]:
    """Return the first row of each model, planner and budget, in a lasting order."""
    found: dict[tuple[str, str, int], Row] = {}
    for row in rows:
        found.setdefault((row["model"], row.get("planner", ""), row.get("percent", 0)), row)
    models, planners = list(zoo.ALL), ["", *registry.names()]
    place = lambda key: (models.index(key[0]), -key[2], planners.index(key[1]))  # noqa: E731
    return [found[key] for key in sorted(found, key=place)]


def note(row: Row) -> str:
    """Return why a row has no figures, or what is special about them."""
    if "out_of_time" in row:
        return f"out of time after {row['out_of_time']:.0f} s" + (
            "" if row.get("tried", True) else ", at another budget"
        )
    if "fits" in row:
        return "-" if row["fits"] else "does not fit"
    return str(row.get("refused") or row.get("skipped") or row.get("error", "-")).replace("|", "/")


def describe(row: Row) -> str:
    """Return the progress line of a row."""
    head = f"{row['model']:<22} {row['percent']:>3} % {row['planner']:<15}"
    if "fits" not in row:
        return f"{head} {note(row)[:80]}"
    gap = "" if row["gap"] is None else f"  gap {row['gap']:.2%}"
    return (
        f"{head} {row['overhead']:>8.2%}{gap}  {row['planning_seconds']:.1f} s{'' if row['fits'] else '  does not fit'}"
    )


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line, checked."""
    every = [name for name in registry.names() if name not in LEFT_OUT]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(zoo.ALL), help="models; all by default")
    parser.add_argument("--planners", nargs="+", metavar="NAME", default=every, help="planners; all by default")
    parser.add_argument("--budgets", nargs="+", type=int, metavar="PERCENT", default=list(BUDGETS))
    parser.add_argument("--jobs", type=int, default=1, help="planners to run at the same time; 1 for fair seconds")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds that one call may take")
    parser.add_argument("--problems", type=Path, default=FOLDER, help="folder of captured models")
    parser.add_argument("--fresh", action="store_true", help="capture and measure again")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the last run that are not run again")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for plan.md, plan.jsonl and plan.png")
    options = parser.parse_args(argv)
    for what, given, known in (("model", options.only, zoo.ALL), ("planner", options.planners, registry.names())):
        refuse_unknown(parser, what, given, known)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a check fails."""
    options = options_of(argv)
    kept = kept_rows("plan", directory=options.out) if options.keep else []
    rows = run(options, kept)
    found = checks(rows)
    print("\n".join(str(check) for check in found))
    for path in save(rows, options.out):
        print(f"Wrote {path}")
    return 1 if failed(found) or any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
