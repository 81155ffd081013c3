"""Plan a model inside a budget, without running it; write the plan and a report of it.

A plan is a JSON file that lowtide.wrap(model, plan="plan.json") uses without planning again. A report is one page
(.html), a picture (.png, .svg) or plain text (.txt).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lowtide.cli.common import (
    add_blocks,
    add_memory,
    add_model,
    add_optimizer,
    add_output,
    add_parallel,
    add_planning,
    blocks_of,
    budget,
    check_files,
    is_plan_file,
    parallel_of,
    refuse_with_plan,
    show,
    wrote,
)
from lowtide.cli.models import load_case
from lowtide.errors import InvalidOptionError
from lowtide.plan import registry
from lowtide.plan.core.module_table import module_rows
from lowtide.plan.core.result import Plan
from lowtide.report.write import check_report_path
from lowtide.step.load import load
from lowtide.step.plan import StepPlan

EXAMPLES = """
lowtide plan my_model.py:make --budget 50% --report plan.html
lowtide plan my_model.py:make --budget 6GiB --out plan.json
lowtide plan package.large:make --meta --device a100-80gb --optimizer adamw
lowtide plan package.large:make --budget 50% --blocks model.layers
lowtide plan package.large:make --meta --device a100-80gb --world-size 8 --strategy fsdp2
lowtide plan plan.json --report plan.html
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide plan`."""
    add_model(parser, or_plan=True)
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--budget", type=budget, help='what a step may allocate: "6GiB", or "50%%" of plain training')
    add_memory(memory)
    add_optimizer(parser)
    add_planning(parser)
    add_blocks(parser)
    add_parallel(parser)
    add_output(parser, out="save the plan here, as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what the planner did and why, on stderr")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a report: .html, .png, .svg or .txt")


def run(options: argparse.Namespace) -> int:
    """Plan, print and write; return the exit code."""
    files = [options.out, options.report]
    check_files(files, force=options.force)
    if options.report is not None:
        check_report_path(options.report)
    plan = _plan(options)
    if options.verbose:
        _say_choice(plan)
    if options.out is not None:
        plan.save(options.out)
    if options.report is not None:
        plan.report(options.report)
    show(options, plan, summary(plan) | {"written": [str(file) for file in files if file is not None]})
    wrote(options, files)
    return 0


def _plan(options: argparse.Namespace) -> Plan | StepPlan:
    if is_plan_file(options.model):
        refuse_with_plan(
            options, "budget", "memory", "device", "costs", "meta", "blocks", "world_size", "strategy", "copies"
        )
        return load(options.model)
    if options.budget is None and options.memory is None and options.device is None:
        raise InvalidOptionError("Say what memory there is: --budget 50%, --memory 24GiB or --device a100-80gb.")
    from lowtide import api

    case = load_case(options.model, meta=options.meta)
    return api.plan(
        *case,
        budget=options.budget,
        memory=options.memory,
        device=options.device,
        planner=options.planner,
        costs=options.costs,
        optimizer=options.optimizer,
        blocks=blocks_of(options),
        parallel=parallel_of(options),
    )


def _say_choice(plan: Plan | StepPlan) -> None:
    """Say on stderr what the planner does for the graph, or for every block of a step."""
    if plan.planner not in registry.names():
        return
    planner = registry.get(plan.planner)
    if isinstance(plan, Plan):
        graphs = {"": plan.problem}
    else:
        pairs = zip(plan.problem.blocks, plan.menus, strict=True)
        graphs = {f" for {block.name}": menu[0].problem for block, menu in pairs if menu}
    for name, problem in graphs.items():
        print(f"{plan.planner}{name}:", planner.choose(problem), sep="\n", file=sys.stderr)


def summary(plan: Plan | StepPlan) -> dict[str, Any]:
    """Return the figures of `plan` for JSON."""
    parts = _modules(plan) if isinstance(plan, Plan) else _blocks(plan)
    return {
        "format": "lowtide-plan-summary",
        "version": 1,
        "planner": plan.planner,
        "outcome": plan.outcome.name,
        "fingerprint": plan.fingerprint,
        "num_ops": plan.num_ops,
        "num_recomputed": plan.num_recomputed,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "min_peak_bytes": plan.min_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "overhead": plan.overhead,
        "bound": plan.bound,
        "gap": plan.gap,
        "baseline_seconds": plan.baseline_seconds,
        "planning_seconds": plan.seconds,
        "costs": plan.costs_source,
        "account": None if plan.account is None else plan.account.to_dict(),
        **parts,
    }


def _modules(plan: Plan) -> dict[str, Any]:
    problem = plan.problem
    return {"modules": [asdict(row) for row in module_rows(problem.graph, problem.costs, plan.schedule)]}


def _blocks(plan: StepPlan) -> dict[str, Any]:
    return {"peak_place": plan.peak_place, "blocks": [asdict(row) for row in plan.rows]}
