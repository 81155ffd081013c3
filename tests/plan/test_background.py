"""Plans made beside the caller's work: the same plans, in processes that end in every way there is."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from lowtide.graph.samples import transformer
from lowtide.plan import registry
from lowtide.plan.background import PlanJob
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve

AUTO = registry.get("auto")
LONG = 60.0


def started(job):
    """Return the process of a job, once those of others have ended."""
    assert wait_until(lambda: not job.is_over and job._work._process is not None)
    return job._work._process


def problem_of(layers=2, share=0.5):
    graph, costs = transformer(layers)
    return Problem(graph, costs, int(share * Problem(graph, costs, 1).baseline.peak_bytes))


@pytest.fixture(autouse=True)
def _without_plan_cache(monkeypatch):
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "0")


def is_alive(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds=LONG):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


def test_the_plan_is_the_one_that_is_made_here():
    problem = problem_of()
    job = PlanJob(problem, AUTO)
    assert job.wait(LONG)
    here = solve(problem, AUTO)
    assert (job.plan.schedule, job.plan.bound, job.plan.outcome) == (here.schedule, here.bound, here.outcome)
    assert job.plan.problem is problem


def family_of(process_id):
    """Return the processes of the group that a process leads."""
    found = subprocess.run(["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True)
    rows = [map(int, line.split()) for line in found.stdout.splitlines()]
    return [one for one, group in rows if group == process_id]


def test_the_process_gives_way_and_ends_with_the_job():
    job = PlanJob(problem_of(12, 0.4), AUTO)
    process = started(job)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == own
    # It starts another one, which proves.
    assert wait_until(lambda: len(family_of(process.pid)) == 2)
    family = family_of(process.pid)
    job.give_way()
    assert [os.getpriority(os.PRIO_PROCESS, each) for each in family] == [min(own + 10, 19)] * 2
    assert not job.is_over
    job.close()
    assert job.is_over
    assert wait_until(lambda: process.returncode is not None)
    assert wait_until(lambda: not family_of(process.pid))
    assert job.plan is None


def test_a_job_that_waits_for_its_turn_gives_way_when_it_starts():
    first, second = PlanJob(problem_of(12, 0.4), AUTO), PlanJob(problem_of(12, 0.5), AUTO)
    started(first)
    second.give_way()
    first.close()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, started(second).pid) == min(own + 10, 19)
    second.close()


def test_a_job_that_nobody_holds_ends_its_process():
    job = PlanJob(problem_of(12, 0.4), AUTO)
    process = started(job)
    del job
    gc.collect()
    assert wait_until(lambda: process.returncode is not None)


def test_one_process_runs_at_a_time_and_the_next_follows():
    first, second = PlanJob(problem_of(12, 0.4), AUTO), PlanJob(problem_of(), AUTO)
    started(first)
    assert second._work._process is None
    assert not second.wait(0.2)
    first.close()
    assert second.wait(LONG)
    assert second.plan is not None


def test_a_process_that_is_killed_leaves_no_plan_and_lets_others_run():
    job = PlanJob(problem_of(12, 0.4), AUTO)
    os.kill(started(job).pid, signal.SIGKILL)
    assert job.wait(LONG)
    assert job.plan is None
    again = PlanJob(problem_of(), AUTO)
    assert again.wait(LONG)
    assert again.plan is not None


def test_a_planner_that_cannot_be_sent_leaves_no_plan():
    class Local(AbstractPlanner):
        def __init__(self):
            self.lock = threading.Lock()

        def propose(self, problem, progress):
            raise NotImplementedError

    job = PlanJob(problem_of(), Local())
    assert job.is_over
    assert job.plan is None


def test_without_an_interpreter_there_is_no_plan(monkeypatch):
    monkeypatch.setattr(sys, "executable", "")
    job = PlanJob(problem_of(), AUTO)
    assert job.is_over
    assert job.plan is None


SCRIPT = """
import os, sys, time
from lowtide.graph.samples import transformer
from lowtide.plan import registry
from lowtide.plan.background import PlanJob
from lowtide.plan.core.problem import Problem
graph, costs = transformer(12)
job = PlanJob(Problem(graph, costs, int(0.4 * Problem(graph, costs, 1).baseline.peak_bytes)), registry.get("auto"))
print(job._work._process.pid, flush=True)
{then}
"""


@pytest.mark.parametrize(
    "then",
    ["pass", "os._exit(3)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"],
    ids=["returns", "exits", "is killed", "is interrupted"],
)
def test_the_process_ends_with_its_caller(then):
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(then=then)], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert wait_until(lambda: not is_alive(int(found.stdout)))
    assert "Exception ignored" not in found.stderr


def test_a_forked_process_leaves_the_job_to_its_parent():
    then = """
    child = os.fork()
    if child == 0:
        job.close()
        del job
        other = PlanJob(Problem(graph, costs, 1 << 60), registry.get("auto"))
        os._exit(0 if other._work._process is not None and other.wait(60) else 4)
    _, status = os.waitpid(child, 0)
    sys.exit(0 if status == 0 and job._work._process.poll() is None else 5)
    """
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(then=textwrap.dedent(then))],
        capture_output=True,
        timeout=LONG,
        check=False,
    )
    assert found.returncode == 0, found.stderr
