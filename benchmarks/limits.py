"""Jobs in child processes, each with a time limit, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from common import Row, leaving_when_told
from lowtide.errors import LowtideError, PlannerRefusedError
from lowtide.plan import registry
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule

# Under this key a row carries its schedule; it must be taken out before the row is written.
SCHEDULE = "schedule"
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Job:
    """What to run, what to call it, and for how long it may run."""

    key: Row
    work: Callable[[], Row]
    limit_seconds: float


@dataclass(frozen=True)
class _Running:
    job: Job
    process: BaseProcess
    answer: Connection
    started: float


def run_jobs(jobs: Iterable[Job], *, parallel: int = 1) -> Iterator[Row]:
    """Yield the row of each job, its key included, as they end.

    A job that runs out of time yields the key `out_of_time`, one that fails the key `error`. The jobs are asked for
    one by one when there is room for them, so that a generator can look at the rows that were yielded by then.
    """
    waiting, running = iter(jobs), list[_Running]()
    more = True
    with leaving_when_told():
        try:
            while more or running:
                while more and len(running) < parallel:
                    job = next(waiting, None)
                    if job is None:
                        more = False
                    else:
                        running.append(_start(job))
                if not running:
                    return
                _wait(running)
                for each in list(running):
                    row = _result(each)
                    if row is not None:
                        running.remove(each)
                        yield {**each.job.key, **row}
        finally:
            for each in running:
                _stop(each)


def _start(job: Job) -> _Running:
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_child, args=(job.work, theirs))
    process.start()
    theirs.close()
    return _Running(job, process, ours, time.monotonic())


def _child(work: Callable[[], Row], answer: Connection) -> None:
    os.setsid()  # so that it can be stopped together with processes of its own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        row = work()
    except Exception as error:  # whatever it is becomes a row
        row = {"error": f"{type(error).__name__}: {error}"}
    answer.send(row)


def _wait(running: list[_Running]) -> None:
    ends = min(each.started + each.job.limit_seconds for each in running)
    wait([each.answer for each in running], timeout=max(0.0, ends - time.monotonic()))


def _result(each: _Running) -> Row | None:
    if each.answer.poll():
        try:
            row: Row = each.answer.recv()
        except EOFError:
            each.process.join()
            row = {"error": f"the process ended with exit code {each.process.exitcode}"}
        _stop(each)
        return row
    if time.monotonic() - each.started < each.job.limit_seconds:
        return None
    _stop(each)
    return {"out_of_time": each.job.limit_seconds}


def _stop(each: _Running) -> None:
    """End the process and those it has started."""
    if each.process.pid is not None and each.process.is_alive():
        try:
            os.killpg(each.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not made its group yet, or has just ended
            each.process.kill()
    each.process.join()
    each.answer.close()


def planned(problem: Problem, planner: str, starts: tuple[Schedule, ...] | None = None) -> Row:
    """Return what `planner` makes of `problem`; given `starts`, it may use them, and the row has its schedule."""
    started = time.perf_counter()
    asked = registry.get(planner)
    if starts is not None:
        asked = asked.with_starts(starts)
    try:
        plan = solve(problem, asked, throw=False)
    except PlannerRefusedError as error:
        return {"refused": str(error)}
    except LowtideError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        **({SCHEDULE: plan.schedule} if starts is not None else {}),
        "fits": plan.peak_bytes <= problem.budget_bytes,
        "overhead": plan.overhead,
        "peak_bytes": plan.peak_bytes,
        "bound": plan.bound,
        "gap": plan.gap,
        "given_bound": plan.given_bound,
        "outcome": plan.outcome.name,
        "recomputed": plan.num_recomputed,
        "planning_seconds": time.perf_counter() - started,
    }
