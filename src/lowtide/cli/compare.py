"""Planners and budgets side by side: what each planner makes of each budget, in peak memory and extra time.

The best planner at each budget is marked with a *. With a saved plan in place of a model nothing is captured or
measured: its graph and costs are used. In a step of several blocks a planner makes the menus of the blocks, and the
default is one planner, greedy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lowtide.analysis.planner_comparison import BUDGETS, compare_plan
from lowtide.cli.common import (
    add_blocks,
    add_model,
    add_output,
    add_planning,
    budget,
    check_files,
    planner_name,
    problem_of,
    show,
    wrote,
)
from lowtide.errors import InvalidBudgetError
from lowtide.report.write import check_report_path

EXAMPLES = """
lowtide compare my_model.py:make
lowtide compare my_model.py:make --budgets 65% 50% 6GiB --planners auto chen_sqrt rotor --out comparison.json
lowtide compare plan.json --report comparison.html
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide compare`."""
    add_model(parser, or_plan=True)
    parser.add_argument(
        "--budgets",
        nargs="+",
        type=budget,
        default=list(BUDGETS),
        metavar="BUDGET",
        help=f"default {' '.join(BUDGETS)}".replace("%", "%%"),
    )
    parser.add_argument(
        "--planners",
        nargs="+",
        type=planner_name,
        metavar="NAME",
        help="default: all but brute_force, auto_thorough; for a step of several blocks, greedy",
    )
    add_planning(parser, planner=False)
    add_blocks(parser)
    add_output(parser, out="save the table here, as JSON")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the trade-off as a page (.html)")


def run(options: argparse.Namespace) -> int:
    """Compare, print and write; return the exit code."""
    from lowtide.progress import ProgressLine

    files = [options.out, options.report]
    check_files(files, force=options.force)
    if options.report is not None:
        check_report_path(options.report)
    if any(each.strip().lower() == "auto" for each in options.budgets):
        raise InvalidBudgetError('The budget "auto" cannot be compared with others; name a size or a share.')
    plan = problem_of(options)
    with ProgressLine() as progress:
        comparison = compare_plan(
            plan,
            budgets=options.budgets,
            planners=options.planners,
            progress=progress,
        )
    if options.out is not None:
        comparison.save(options.out)
    if options.report is not None:
        plan.report(options.report, comparison=comparison)
    show(options, comparison, comparison.to_dict())
    wrote(options, files)
    return 0
