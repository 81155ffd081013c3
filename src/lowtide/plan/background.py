"""A plan that is made beside the caller's work: in a process, which ends when nobody waits any more.

While the caller waits, the process has the caller's priority; as soon as the caller goes on, it gives way.

The process is asked one question, uses the same plan cache as the caller, and sends its answer back, which is verified
and priced on this side. Only one such process runs at a time; further jobs wait for their turn. A process that is lost,
or that takes too long, leaves its job without a plan: whoever asked goes on with the plan that there is.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

from lowtide.errors import LowtideError
from lowtide.plan import registry
from lowtide.plan.core import child_process
from lowtide.plan.core.answer import answer_from_dict, answer_to_dict
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.plan.plan_cache import solve_or_nearest
from lowtide.progress import silent

_ITSELF = "lowtide.plan.background"


@dataclass(frozen=True)
class BackgroundPolicy:
    """How work in the background gives way to the caller's.

    Attributes:
        nice: Added to the priority number: a training thread that wants the same core gets ten times as much of it.
        threads: Of libraries for arithmetic.
        most_seconds: After so long, on any graph, training goes on with the plan that there is. The graphs of
            `make bench-scaling` take up to two minutes on a core of their own.
        poll_seconds: How often the process looks whether its caller is still there.
    """

    nice: int = 10
    threads: int = 1
    most_seconds: float = 900.0
    poll_seconds: float = 2.0


POLICY = BackgroundPolicy()
# What comes of a process that ends before it has answered.
_LOST = (OSError, EOFError, ValueError, pickle.UnpicklingError, LowtideError)
_LOWEST = 19
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class _Turns:
    """Which job of this process runs."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Forget all jobs, as a process does that was forked: they are its parent's."""
        self.lock = threading.Lock()
        self.is_taken = False

    def take(self) -> bool:
        """Return True if the caller may run now."""
        with self.lock:
            free, self.is_taken = not self.is_taken, True
            return free

    def leave(self) -> None:
        """Let the next one run."""
        with self.lock:
            self.is_taken = False


_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.renew)


class PlanJob:
    """The plan that a planner will have made for a problem.

    Example:
        ```python
        job = PlanJob(problem, planner)
        job.wait(2.0)
        job.plan  # None while it is not there
        ```

    Args:
        problem: The question.
        planner: Who is asked.
    """

    def __init__(self, problem: Problem, planner: AbstractPlanner) -> None:
        self._work = _Work(problem, planner)
        # Nobody waits when this is gone; the thread that reads the answer must not keep it.
        self._finalizer = weakref.finalize(self, self._work.cancel)
        self._work.start_if_free()

    @property
    def plan(self) -> Plan | None:
        """The plan, if it is there."""
        return self._work.plan

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more; starts the process if it is this job's turn."""
        self._work.start_if_free()
        return self._work.over.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until the job is over, but no longer than so many seconds; return whether it is."""
        until = time.monotonic() + seconds
        while not self.is_over and (left := until - time.monotonic()) > 0:
            # Another job may end meanwhile.
            self._work.over.wait(min(left, 0.1))
        return self.is_over

    def give_way(self) -> None:
        """Have a low priority from now on."""
        self._work.give_way()

    def close(self) -> None:
        """End the process, if it still runs."""
        self._finalizer()


class _Work:
    """The process of one job, and the thread that waits for it."""

    def __init__(self, problem: Problem, planner: AbstractPlanner) -> None:
        self.problem, self.planner = problem, planner
        self.plan: Plan | None = None
        self.over = threading.Event()
        self._owner = os.getpid()
        self._has_turn = False
        self._gives_way = False
        self._process: subprocess.Popen[bytes] | None = None

    def start_if_free(self) -> None:
        """Start the process unless it was started, another one runs, or there can be none."""
        if self._has_turn or self.over.is_set() or os.getpid() != self._owner or not _turns.take():
            return
        self._has_turn = True
        try:
            question = pickle.dumps((self.problem, self.planner))
            threads = dict.fromkeys(_THREAD_VARIABLES, str(POLICY.threads))
            started = child_process.start(_ITSELF, "serve", threads, own_group=True)
        except Exception:  # Planners of others may be anything; what cannot be sent is not planned beside.
            started = None
        if started is None:
            self._end()
            return
        self._process, greeting = started
        if self._gives_way:
            self.give_way()
        threading.Thread(target=self._attend, args=(question, greeting), name="lowtide-plan", daemon=True).start()

    def give_way(self) -> None:
        """Give a low priority to the process, and to those that it has started or will start."""
        self._gives_way = True
        if self._process is None or self.over.is_set() or not hasattr(os, "setpriority"):
            return
        # It may have just ended.
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PGRP, self._process.pid, min(own + POLICY.nice, _LOWEST))

    def cancel(self) -> None:
        """End the process; in a forked process, leave it to its parent."""
        if os.getpid() != self._owner:
            return
        self.over.set()
        if self._process is not None:
            self._process.kill()

    def _attend(self, question: bytes, greeting: str) -> None:
        """Send the question, read the answer, and see the process off."""
        process = self._process
        assert process is not None
        # Without an answer there is no plan, which `over` tells who asked.
        try:
            with contextlib.suppress(*_LOST):
                self.plan = self._answer(process, question, greeting.encode())
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self._end()

    def _answer(self, process: subprocess.Popen[bytes], question: bytes, greeting: bytes) -> Plan | None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question)
        process.stdin.flush()
        while not (line := process.stdout.readline()).rstrip(b"\r\n").endswith(greeting):
            if not line:
                return None
        return answer_from_dict(pickle.load(process.stdout), self.problem)

    def _end(self) -> None:
        self.over.set()
        _turns.leave()


def serve(greeting: str) -> None:
    """Answer one question; runs in the process."""
    caller = os.getppid()
    answers = child_process.begin_answers(greeting)
    problem, planner = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    pickle.dump(_found(problem, planner), answers)
    answers.flush()


def _found(problem: Problem, planner: AbstractPlanner) -> dict[str, Any] | None:
    try:
        return answer_to_dict(solve_or_nearest(problem, registry.registered(planner), silent))
    except LowtideError:
        return None


def _end_with(caller: int) -> None:
    """End this process when its caller is gone, or when nobody would wait so long."""
    until = time.monotonic() + POLICY.most_seconds
    closed = threading.Thread(target=sys.stdin.buffer.read, daemon=True)
    closed.start()
    while closed.is_alive() and os.getppid() == caller and time.monotonic() < until:
        closed.join(POLICY.poll_seconds)
    os._exit(0)
