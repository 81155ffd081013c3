"""The proof beside the search: a `MomentSelector` on another core, in a process of its own for larger graphs.

In a thread, proof and search wait for each other wherever both run Python. A process of its own takes a while to start,
which it does while the planners are asked, and has the same answers. Where it cannot be had, a thread does; where it is
lost, a thread starts over, and what was proved before still counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.integer_program import UNLIMITED, Limits
from lowtide.plan.bounds.moment_selection import MomentSelector, Proof
from lowtide.plan.bounds.prover_process import LostError, ProverProcess
from lowtide.plan.bounds.relaxed_solution import schedule_of
from lowtide.plan.core.problem import Problem
from lowtide.schedule.steps import Schedule

# By so much an answer may be late before it is given up.
_LATE_SECONDS = 0.5


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
