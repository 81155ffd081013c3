"""Costs, plans and menus that the ranks have in common: made by one of them, checked and priced by each.

What ranks must have equal to share an answer is the question. Costs depend on the tensors that ops take and on the
machine; what differs between ranks of one model, such as the number of a process group or the offset of a rank's part
of a vocabulary, does not count.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lowtide import device as devices
from lowtide.capture.fused_op import Call, one_by_one
from lowtide.costs.op_signature import Calls, signature
from lowtide.distributed.agreement import agreed
from lowtide.errors import LowtideError, RanksError
from lowtide.graph.costs import Costs
from lowtide.graph.io import costs_from_dict, costs_to_dict, read_fields, read_float, read_int, read_list
from lowtide.plan.core.answer import answer_from_dict, answer_to_dict
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.menu import Entry
from lowtide.progress import Progress, silent
from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.process_groups import num_ranks
from lowtide.units import MOST_BUDGET_BYTES

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def shared_costs(program: Calls, make: Callable[[], Costs], progress: Progress = silent) -> Costs:
    """Return the measured costs of `program`; on one of the ranks that ask for the same they are made by `make()`."""
    if num_ranks() == 1:
        return make()
    question = "\n".join(["costs", devices.describe(program.device), program.graph.fingerprint, *_calls(program)])
    text = agreed(question, "measures ops", lambda: json.dumps(costs_to_dict(make())), progress)
    return costs_from_dict(json.loads(text), program.graph)


def _calls(program: Calls) -> Iterator[str]:
    """Yield what is called for every op, with the tensors that it takes."""
    for op in range(len(program.graph.ops)):
        call = program.call(op)
        yield "" if call is None else " then ".join(map(_tensors, one_by_one(call)))


def _tensors(call: Call) -> str:
    return signature((call[0], tuple(tensors_in(call[1:])), {}))


def shared_plan(
    problem: Problem, planner: AbstractPlanner, make: Callable[[], Plan], progress: Progress = silent
) -> Plan:
    """Return the plan for `problem`; on one of the ranks that ask for the same it is made by `make()`."""
    if num_ranks() == 1:
        return make()
    question = "\n".join(["plan", *_problem(problem), _planner(planner)])
    text = agreed(question, "plans", lambda: json.dumps(answer_to_dict(make())), progress)
    return _plan(json.loads(text), problem)


def shared_menu(
    problem: Problem, planner: AbstractPlanner, make: Callable[[], Sequence[Entry]], progress: Progress = silent
) -> tuple[Entry, ...]:
    """Return the menu for a block; on one of the ranks that ask for the same it is made by `make()`.

    Args:
        problem: Graph and costs of the block, with a budget that does not matter.
        planner: Makes the plans.
        make: Makes the menu.
        progress: Is told whom this rank waits for.
    """
    if num_ranks() == 1:
        return tuple(make())
    unlimited = Problem(problem.graph, problem.costs, MOST_BUDGET_BYTES)
    question = "\n".join(["menu", *_problem(unlimited), _planner(planner)])
    text = agreed(question, "plans a block", lambda: json.dumps(list(map(_entry_to_dict, make()))), progress)
    return tuple(_entry_from_dict(data, unlimited) for data in read_list(json.loads(text), "menu"))


def _problem(problem: Problem) -> list[str]:
    costs = json.dumps(costs_to_dict(problem.costs))
    return [problem.graph.fingerprint, hashlib.sha256(costs.encode()).hexdigest(), str(problem.budget_bytes)]


def _planner(planner: AbstractPlanner) -> str:
    """Return the planner with its options; the address of one that does not print them differs from rank to rank."""
    return f"{type(planner).__module__} {_ADDRESS.sub('', repr(planner))}"


def _plan(data: object, problem: Problem) -> Plan:
    try:
        plan = answer_from_dict(data, problem)
    except LowtideError as error:
        raise _unfit(str(error)) from error
    if plan is None:
        raise _unfit("it does not fit the budget here")
    return plan


def _unfit(why: str) -> RanksError:
    return RanksError(
        f"The plan of another rank does not serve this one: {why}. Ranks must run the same versions of lowtide and "
        "PyTorch."
    )


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    return {
        "plan": answer_to_dict(entry.plan),
        "budget_bytes": entry.plan.budget_bytes,
        "kept_at_most": entry.kept_at_most,
        "bound": entry.bound,
    }


def _entry_from_dict(data: object, problem: Problem) -> Entry:
    fields = read_fields(data, "The entry", {"plan", "budget_bytes", "kept_at_most", "bound"})
    own = Problem(problem.graph, problem.costs, read_int(fields["budget_bytes"], "budget_bytes"))
    kept = fields["kept_at_most"]
    return Entry(
        plan=_plan(fields["plan"], own),
        kept_at_most=None if kept is None else read_int(kept, "kept_at_most"),
        bound=read_float(fields["bound"], "bound"),
    )
