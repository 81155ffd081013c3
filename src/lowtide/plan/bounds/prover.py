"""The proof beside the search: a `MomentSelector` on another core, in a process of its own for larger graphs.

In a thread, proof and search wait for each other wherever both run Python. A process of its own takes a while to start,
which it does while the planners are asked, and has the same answers. Where it cannot be had, a thread does; where it is
lost, a thread starts over, and what was proved before still counts.

The process ends when the caller does, and at any failure; whoever asked then asks elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lowtide.environment import PROVER_PROCESS
from lowtide.graph.ir import OpId
from lowtide.plan.bounds.integer_program import UNLIMITED, Limits
from lowtide.plan.bounds.moment_selection import MomentSelector, Proof
from lowtide.plan.bounds.relaxed_solution import schedule_of
from lowtide.plan.core import child_process
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule

# By so much an answer may be late before it is given up.
_LATE_SECONDS = 0.5
# Seconds in which a process must have said that it is ready: far more than a loaded machine takes to start one.
_READY_SECONDS = 60.0


class Prover:
    """Ever stronger proofs for one problem after the other; to be used as a context.

    Attributes:
        problem: What it is about, or None.
        proof: The best proof so far for that.
        done: Whether another stage would bring nothing.
    """

    def __init__(self, *, own_process: bool) -> None:
        self.problem: Problem | None = None
        self.proof = Proof(0.0, ())
        self.done = False
        self._selector: MomentSelector | None = None
        self._closed = False
        self._process = ProverProcess.start() if own_process else None
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        finally:
            self._thread.shutdown(cancel_futures=True)

    def _leave(self) -> None:
        """End the process: nobody waits for what may be under way."""
        self._closed = True
        process = self._process
        if process is not None:
            process.close()

    @property
    def rerun_ops(self) -> frozenset[OpId]:
        """The ops that run again in the solution of the latest program that has one."""
        return frozenset() if self.proof.solution is None else frozenset().union(*self.proof.solution.rerun)

    @property
    def suggested_schedule(self) -> Schedule | None:
        """What that solution does, as a schedule, if there is one; it may not fit."""
        if self.proof.solution is None or self.problem is None:
            return None
        return schedule_of(self.problem.graph, self.proof.solution)

    def set_problem(self, problem: Problem | None) -> None:
        """Be about `problem`, whose budget is below the peak of plain training, or about nothing from now on."""
        self.problem, self._selector = problem, None
        self.proof, self.done = Proof(0.0, ()), False

    def quick_bound(self, *, seconds: float) -> Callable[[], Proof]:
        """Begin a relaxation with a few moments; return what waits for its end and returns the best proof."""
        return self._begin("quick_bound", seconds, {"seconds": seconds})

    def advance(self, limits: Limits, known: Schedule | None) -> Callable[[], Proof]:
        """Begin `MomentSelector.advance`; return what waits for its end and returns the best proof."""
        return self._begin("advance", limits.seconds, {"limits": limits, "known": known})

    def _begin(self, method: str, seconds: float, arguments: dict[str, Any]) -> Callable[[], Proof]:
        under_way: Future[tuple[Proof, bool]] = self._thread.submit(self._run, method, arguments)
        # A process that starts late keeps no time; a thread cannot be ended.
        timeout = None if self._process is None or seconds == UNLIMITED else seconds + _LATE_SECONDS

        def wait() -> Proof:
            try:
                proof, self.done = under_way.result(timeout)
            except (TimeoutError, LostError):
                # It is late, or was already: what is proved so far is the answer.
                self._leave()
                self.done = True
                return self.proof
            # It can be lower where a thread had to start over.
            self.proof = proof if proof.bound >= self.proof.bound else self.proof
            return self.proof

        return wait

    def _run(self, method: str, arguments: dict[str, Any]) -> tuple[Proof, bool]:
        assert self.problem is not None, "there is nothing to prove yet"
        process = self._process
        if process is not None:
            try:
                return process.ask(self.problem, method, **arguments)
            except LostError:
                if self._closed:
                    raise
                self._process = None
                process.close()
        if self._selector is None:
            self._selector = MomentSelector(self.problem)
        return getattr(self._selector, method)(**arguments), self._selector.done


class LostError(Exception):
    """The process is not there any more, or cannot be asked: no answer will come."""


class ProverProcess:
    """The caller's end."""

    def __init__(self, process: subprocess.Popen[bytes], greeting: str) -> None:
        self._child = process
        self._greeting: bytes | None = greeting.encode()
        self._problem: Problem | None = None

    @staticmethod
    def start() -> ProverProcess | None:
        """Start a process, which goes on by itself while it gets ready, or return None if there can be none."""
        if PROVER_PROCESS in os.environ:
            return None
        started = child_process.start(__name__, "serve", {PROVER_PROCESS: "1"})
        return None if started is None else ProverProcess(*started)

    def ask(self, problem: Problem, method: str, **arguments: Any) -> tuple[Proof, bool]:
        """Return what the method of the selector of `problem` returns, and whether that is done.

        Raises:
            LostError: The process has ended before it has answered, or `problem` cannot be sent.
        """
        try:
            # All of it or nothing.
            question = pickle.dumps((None if problem is self._problem else problem, method, arguments))
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(question)
            self._child.stdin.flush()
            self._problem = problem
            self._await_greeting()
            proof, done = pickle.load(self._child.stdout)
        except Exception as error:  # whatever it is, there is another way
            raise LostError(str(error)) from error
        return proof, done

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            # What was to be sent cannot be any more.
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _await_greeting(self) -> None:
        if self._greeting is None:
            return
        assert self._child.stdout is not None
        too_late = threading.Timer(_READY_SECONDS, self._child.kill)
        too_late.daemon = True
        too_late.start()
        try:
            while True:
                line = self._child.stdout.readline()
                if line.rstrip(b"\r\n").endswith(self._greeting):
                    self._greeting = None
                    return
                if not line:
                    raise EOFError("it has ended before it was ready")
        finally:
            too_late.cancel()


def serve(greeting: str) -> None:
    """Answer questions until there are no more; runs in the process."""
    questions: queue.SimpleQueue[tuple[Problem | None, str, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    answers = child_process.begin_answers(greeting)
    selector: MomentSelector | None = None
    while True:
        problem, method, arguments = questions.get()
        selector = selector if problem is None else MomentSelector(problem)
        assert selector is not None, "the first question has a problem"
        pickle.dump((getattr(selector, method)(**arguments), selector.done), answers)
        answers.flush()


def _read(questions: queue.SimpleQueue[tuple[Problem | None, str, dict[str, Any]]]) -> None:
    """Pass questions on; when there are no more, nobody waits for the answer to the last one, either."""
    try:
        while True:
            questions.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)
