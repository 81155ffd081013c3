"""What several commands share: options, checked once; files that are not overwritten; words and JSON on stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lowtide.cli.models import load_case
from lowtide.errors import InvalidBudgetError, InvalidOptionError, LowtideError, UnknownPlannerError
from lowtide.plan import registry
from lowtide.plan.core.account import optimizer_memory, parse_memory
from lowtide.plan.core.parallel import STRATEGIES, Parallel
from lowtide.plan.core.result import Plan
from lowtide.step.load import load
from lowtide.step.plan import StepPlan
from lowtide.units import parse_budget

# The options that `add_parallel` adds.
PARALLEL = ("world_size", "strategy", "copies")


def add_model(parser: argparse.ArgumentParser, *, or_plan: bool = False) -> None:
    """Add the argument that names the model."""
    words = "package.module:factory or path/to/file.py:factory; the factory returns (model, args[, kwargs])"
    parser.add_argument("model", help=f"{words}; or a saved plan (.json)" if or_plan else words)
    parser.add_argument("--meta", action="store_true", help="build the model without data (on the meta device)")


def add_planning(parser: argparse.ArgumentParser, *, planner: bool = True) -> None:
    """Add the options of planning."""
    if planner:
        parser.add_argument(
            "--planner", type=planner_name, default="auto", metavar="NAME", help=f"one of {', '.join(registry.names())}"
        )
    parser.add_argument(
        "--costs",
        default=None,
        metavar="SOURCE",
        help="measured (default), analytic, or the name of a device such as a100-80gb",
    )


def add_blocks(parser: argparse.ArgumentParser) -> None:
    """Add the option that says which modules are blocks of the step."""
    parser.add_argument(
        "--blocks",
        nargs="+",
        metavar="NAME",
        help="modules that are blocks of the step, such as model.layers; auto (default) or whole",
    )


def blocks_of(options: argparse.Namespace) -> str | list[str]:
    """Return the option `blocks` as `lowtide.plan` takes it."""
    names: list[str] = options.blocks or ["auto"]
    return names[0] if len(names) == 1 and names[0] in ("auto", "whole") else names


def add_parallel(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which processes train together."""
    parser.add_argument(
        "--world-size", type=whole_number, metavar="N", help="plan for one of so many processes that train together"
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="their engine: ddp, or fsdp2, which shards the repeated layers or what --blocks names",
    )
    parser.add_argument("--copies", type=whole_number, metavar="N", help="of fsdp2: copies of the sharded model (HSDP)")


def parallel_of(options: argparse.Namespace) -> Parallel | None:
    """Return the processes that the options name, or None if they name none."""
    if (options.world_size is None) != (options.strategy is None):
        raise InvalidOptionError("Give --world-size and --strategy together, such as --world-size 8 --strategy fsdp2.")
    if options.world_size is None:
        if options.copies is not None:
            raise InvalidOptionError("--copies goes with --world-size and --strategy fsdp2.")
        return None
    return Parallel(options.strategy, options.world_size, copies=options.copies or 1)


def add_memory(parser: argparse._ActionsContainer) -> None:
    """Add the options that say what memory there is."""
    parser.add_argument("--memory", type=memory_size, metavar="SIZE", help='all there is for training, such as "24GiB"')
    parser.add_argument("--device", metavar="NAME", help="memory and speed of a device such as a100-80gb")


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the optimizer."""
    parser.add_argument(
        "--optimizer",
        type=optimizer_name,
        default="adam",
        metavar="NAME",
        help="adam (default), adamw, sgd, sgd-momentum, or the bytes of its state",
    )


def add_output(parser: argparse.ArgumentParser, *, out: str = "") -> None:
    """Add the options about what is written; `out` says what a file given by --out holds."""
    if out:
        parser.add_argument("--out", type=Path, metavar="FILE", help=out)
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def budget(text: str) -> str:
    """Return `text` if it is a budget; the type of an option."""
    try:
        parse_budget(text)
    except InvalidBudgetError as error:
        raise _refusal(error) from None
    return text


def memory_size(text: str) -> str:
    """Return `text` if it is a size in bytes; the type of an option."""
    try:
        parse_memory(text)
    except InvalidBudgetError as error:
        raise _refusal(error) from None
    return text


def planner_name(text: str) -> str:
    """Return `text` if it names a planner; the type of an option."""
    try:
        registry.get(text)
    except UnknownPlannerError as error:
        raise _refusal(error) from None
    return text


def optimizer_name(text: str) -> str:
    """Return `text` if it names an optimizer or a size; the type of an option."""
    try:
        optimizer_memory(text, [], together=False)
    except InvalidOptionError as error:
        raise _refusal(error) from None
    return text


def whole_number(text: str) -> int:
    """Return `text` as a whole number of at least one; the type of an option."""
    number = int(text) if text.strip().lstrip("+").isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def is_plan_file(name: str) -> bool:
    """Return True if the model argument names a saved plan."""
    return name.lower().endswith(".json")


def problem_of(options: argparse.Namespace) -> Plan | StepPlan:
    """Return the plan of plain training of the model that `options` name, or the saved plan that they name."""
    if is_plan_file(options.model):
        refuse_with_plan(options, "costs", "meta", "blocks")
        return load(options.model)
    from lowtide.api import plan

    case = load_case(options.model, meta=options.meta)
    return plan(*case, budget="100%", planner="keep_all", costs=options.costs, blocks=blocks_of(options))


def refuse_with_plan(options: argparse.Namespace, *names: str) -> None:
    """Raise `InvalidOptionError` if one of the options `names` is given beside a saved plan, which brings its own."""
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
    if given:
        raise InvalidOptionError(f"{', '.join(given)} cannot be used with the saved plan {options.model}.")


def check_files(files: Iterable[Path | None], *, force: bool) -> None:
    """Raise `InvalidOptionError`, before any work is done, if a file would be overwritten or has nowhere to go."""
    wanted = [file for file in files if file is not None]
    if len({file.resolve() for file in wanted}) < len(wanted):
        raise InvalidOptionError(f"{wanted[0]} is named for two things; name different files.")
    for file in wanted:
        if file.is_dir():
            raise InvalidOptionError(f"{file} is a folder; name a file.")
        if file.exists() and not force:
            raise InvalidOptionError(f"{file} exists; use --force to overwrite it.")
        if not file.parent.is_dir():
            raise InvalidOptionError(f"There is no folder {file.parent} to write {file.name} to.")


def show(options: argparse.Namespace, text: object, data: dict[str, Any]) -> None:
    """Print `data` as JSON if that was asked for, else `text`."""
    print(json.dumps(data, indent=1, allow_nan=False) if options.json else text)


def wrote(options: argparse.Namespace, files: Sequence[Path | None]) -> None:
    """Say what was written, last; beside JSON this goes to stderr."""
    written = [str(file) for file in files if file is not None]
    if written:
        print(f"Wrote {', '.join(written)}", file=sys.stderr if options.json else sys.stdout)


def _refusal(error: LowtideError) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(str(error))
