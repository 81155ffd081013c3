"""The largest batch with which a model trains in the memory there is, found by planning, without running anything.

Parameters, buffers, batch, optimizer state, gradients, activations and temporaries all count. The batch is made by a
function of a size: --batch names it, or the model's factory returns it in place of args: (model, make_batch).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from lowtide.analysis.batch_search import MOST
from lowtide.cli.common import (
    add_blocks,
    add_memory,
    add_model,
    add_optimizer,
    add_output,
    add_parallel,
    add_planning,
    blocks_of,
    check_files,
    parallel_of,
    show,
    whole_number,
    wrote,
)
from lowtide.cli.models import call, find, load_case
from lowtide.errors import InvalidModelError

EXAMPLES = """
lowtide max-batch my_model.py:make --batch my_model.py:make_batch --memory 24GiB
lowtide max-batch package.large:make --meta --device h100-80gb --optimizer sgd --out plan.json
"""


def prepare_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lowtide max-batch`."""
    add_model(parser)
    parser.add_argument("--batch", metavar="NAME", help="module:function that returns the arguments for a batch size")
    add_memory(parser.add_mutually_exclusive_group(required=True))
    add_optimizer(parser)
    parser.add_argument("--most", type=whole_number, default=MOST, help="the largest batch to try")
    add_planning(parser)
    add_blocks(parser)
    add_parallel(parser)
    add_output(parser, out="save the plan for this batch here, as JSON")


def run(options: argparse.Namespace) -> int:
    """Search, print and write; return the exit code."""
    from lowtide import api

    check_files([options.out], force=options.force)
    model, make_batch = _case(options)
    fit = api.max_batch(
        model,
        make_batch,
        memory=options.memory,
        device=options.device,
        optimizer=options.optimizer,
        planner=options.planner,
        costs=options.costs,
        most=options.most,
        blocks=blocks_of(options),
        parallel=parallel_of(options),
    )
    if options.out is not None:
        fit.plan.save(options.out)
    show(options, fit, fit.to_dict())
    wrote(options, [options.out])
    return 0


def _case(options: argparse.Namespace) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    if options.batch is not None:
        return load_case(options.model, meta=options.meta)[0], find(options.batch)
    made = call(options.model, meta=options.meta)
    if isinstance(made, tuple | list) and len(made) == 2 and callable(made[0]) and callable(made[1]):
        return made[0], made[1]
    raise InvalidModelError(
        f"{options.model} does not return (model, make_batch), so --batch must name the function that returns the "
        "arguments of the call for a batch size."
    )
