"""What is alive at the peak of a training step, by module and source line, and why it is.

Names the three tensors that stand most in the way of a lower peak, and says what each 10 % less memory would cost.
Plain training is explained unless a budget is given. A saved plan in place of a model is explained as it is.
"""

from __future__ import annotations

import argparse

from lowtide.analysis.explain_step import explain_any
from lowtide.cli.common import (
    add_blocks,
    add_model,
    add_output,
    add_planning,
    blocks_of,
    budget,
    check_files,
    is_plan_file,
    refuse_with_plan,
    show,
    wrote,
)
from lowtide.cli.models import load_case
from lowtide.plan.core.result import Plan
from lowtide.step.load import load
from lowtide.step.plan import StepPlan

EXAMPLES = """
lowtide explain my_model.py:make
lowtide explain my_model.py:make --budget 40% --no-less
lowtide explain plan.json --json
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide explain`."""
    add_model(parser, or_plan=True)
    parser.add_argument("--budget", type=budget, help="explain the plan for this budget (default: plain training)")
    parser.add_argument("--no-less", action="store_true", help="do not work out what less memory would cost")
    add_planning(parser)
    add_blocks(parser)
    add_output(parser, out="save the explanation here, as JSON")


def run(options: argparse.Namespace) -> int:
    """Explain, print and write; return the exit code."""
    from lowtide.progress import ProgressLine

    check_files([options.out], force=options.force)
    plan = _plan(options)
    with ProgressLine() as progress:
        found = explain_any(plan, planner=options.planner, less=not options.no_less, progress=progress)
    if options.out is not None:
        found.save(options.out)
    show(options, found, found.to_dict())
    wrote(options, [options.out])
    return 0


def _plan(options: argparse.Namespace) -> Plan | StepPlan:
    if is_plan_file(options.model):
        refuse_with_plan(options, "budget", "costs", "meta", "blocks")
        return load(options.model)
    from lowtide import api

    planner = "keep_all" if options.budget is None else options.planner
    case = load_case(options.model, meta=options.meta)
    blocks = blocks_of(options)
    return api.plan(*case, budget=options.budget or "100%", planner=planner, costs=options.costs, blocks=blocks)
