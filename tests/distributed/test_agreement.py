"""One rank answers, all others read its answer; a rank that is gone is told of, and never waited for without end."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from helpers.ranks import outcomes_of_ranks, run_on_ranks
from lowtide.distributed import policy, shared_plans
from lowtide.distributed.agreement import agreed
from lowtide.distributed.policy import WaitingPolicy
from lowtide.plan.planners.greedy import Greedy

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="PyTorch was built without distributed training")

BRIEF = WaitingPolicy(beat_seconds=0.2, silent_seconds=3.0)


def answer(rank: int, question: str, seconds: float) -> str:
    def make() -> str:
        time.sleep(seconds)
        return f"{question} answered by {rank}"

    return agreed(question, "works", make)


def test_alone_a_rank_asks_nobody() -> None:
    assert agreed("what", "works", lambda: "this") == "this"


def ask_the_same(rank: int) -> str:
    policy.POLICY = BRIEF
    # Longer than a rank may be silent: it is at work.
    first = answer(rank, "first", BRIEF.silent_seconds + 1)
    return f"{first}, {answer(rank, 'second', 0)}, {answer(rank, 'first', 0) == first}"


def test_all_ranks_get_one_answer() -> None:
    found = outcomes_of_ranks(ask_the_same, ranks=4)
    assert len(set(found)) == 1
    assert found[0].startswith("first answered by ")
    assert found[0].endswith("True")


def ask_another(rank: int) -> str:
    return answer(rank, f"question {rank}", 0.1)


def test_ranks_with_questions_of_their_own_wait_for_nobody() -> None:
    assert outcomes_of_ranks(ask_another) == ["question 0 answered by 0", "question 1 answered by 1"]


def fail(rank: int) -> str:
    def make() -> str:
        time.sleep(0.5)
        raise ValueError(f"rank {rank} has no answer")

    try:
        return agreed("what", "works", make)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0] + ", then " + answer(0, "what", 0)


def test_a_failure_is_told_to_all_and_the_next_attempt_begins_anew() -> None:
    found = outcomes_of_ranks(fail)
    own = next(rank for rank, each in enumerate(found) if each.startswith("ValueError"))
    told = f"RanksError: Rank {own}, which works for all ranks, has failed with ValueError: rank {own} has no answer"
    assert found[1 - own] == f"{told}, then what answered by 0"
    assert found[own] == f"ValueError: rank {own} has no answer, then what answered by 0"


def leave(rank: int, leaving: int) -> str:
    policy.POLICY = BRIEF

    def make() -> str:
        time.sleep(0.5)
        os._exit(1)

    if rank != leaving:
        time.sleep(1)
    begin = time.monotonic()
    try:
        return agreed("what", "works", make)
    except lowtide.errors.RanksError as error:
        soon = time.monotonic() - begin < BRIEF.silent_seconds + 2
        return f"{soon}: {error}"


def test_a_rank_that_is_gone_is_told_of() -> None:
    found = outcomes_of_ranks(leave, 1, ranks=3)
    assert found.pop(1) == "ended"
    assert all(each.startswith("True: Rank 1, which works for all ranks, has given no sign of life") for each in found)


def test_the_end_of_the_rank_that_keeps_the_store_is_told_of() -> None:
    found = outcomes_of_ranks(leave, 0, ranks=3)
    assert found.pop(0) == "ended"
    assert all(each.startswith("True: The store of the process group does not answer") for each in found)


def train_with(rank: int, budgets: tuple[str, ...], rows: tuple[int, ...]) -> str:
    model = lowtide.wrap(Net(), budget=budgets[rank], planner=Greedy(effort=0.02), costs="analytic")
    replica = DistributedDataParallel(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", lowtide.errors.LowtideWarning)
        for _ in range(3):
            replica(torch.randn(rows[rank], 32)).backward()
    return " | ".join(str(each.message) for each in caught if "Give all ranks the same" in str(each.message))


def test_ranks_with_other_budgets_are_told() -> None:
    first, second = outcomes_of_ranks(train_with, ("90%", "80%"), (96, 96))
    assert first.startswith("Rank 1 trains with a budget of 80%, this rank 0 one of 90%")
    assert second.startswith("Rank 0 trains with a budget of 90%, this rank 1 one of 80%")
    assert "|" not in first + second


def test_ranks_with_other_graphs_are_told_and_train() -> None:
    first, second = outcomes_of_ranks(train_with, ("90%", "90%"), (96, 128))
    assert first.startswith("Rank 1 trains with another graph")
    assert second.startswith("Rank 0 trains with another graph")


def test_ranks_that_are_alike_are_told_nothing() -> None:
    assert outcomes_of_ranks(train_with, ("90%", "90%"), (96, 96)) == ["", ""]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x), 0.1)
        return x.square().mean()


def plan_and_step(rank: int, blocks: bool, cache: str) -> None:
    # Nothing was measured before, and ranks have no disk in common.
    os.environ["LOWTIDE_CACHE_DIR"] = f"{cache}/{rank}"
    answered: list[str] = []
    agreed = shared_plans.agreed

    def noted(question: str, work: str, make: Callable[[], str], *more: Any) -> str:
        return agreed(question, work, lambda: (answered.append(question), make())[1], *more)

    shared_plans.agreed = noted
    torch.manual_seed(0)
    model = lowtide.wrap(
        Net(),
        budget="80%",
        planner=Greedy(effort=0.02),
        blocks=["layers.0", "layers.1", "layers.2"] if blocks else "auto",
    )
    replica = DistributedDataParallel(model)
    for _ in range(2):
        replica(torch.randn(64, 32)).backward()
    first, *_ = lowtide.plans(model)
    menus = first.menus if blocks else [[first]]
    mine = [(each.schedule, each.problem.costs, each.bound, each.peak_bytes) for menu in menus for each in menu]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, answered))
    assert all(theirs == mine for theirs, _ in everyone)
    of_all = [question for _, questions in everyone for question in questions]
    # Measuring and planning at least, each of them on one rank; blocks are several graphs.
    assert len(of_all) >= 2
    assert len(set(of_all)) == len(of_all)


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_one_rank_answers_each_question_and_all_have_its_plan(blocks: bool, tmp_path: Path) -> None:
    run_on_ranks(plan_and_step, blocks, str(tmp_path))
