"""The proof beside the search: a refiner on another core, in a process of its own where the graph is worth it.

In a thread, proof and search wait for each other wherever both run Python. A process of its own takes a while to start,
which it does while the planners are asked, and has the same answers. Where it cannot be had, or is lost, a thread does.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lowtide.graph.ir import OpId
from lowtide.plan.bounds.apart import Apart, LostError
from lowtide.plan.bounds.hints import schedule_of
from lowtide.plan.bounds.program import Limits
from lowtide.plan.bounds.refine import Proof, Refiner
from lowtide.plan.problem import Problem
from lowtide.schedule.steps import Schedule


class Prover:
    """Ever stronger proofs for one problem after the other; to be used as a context.

    Attributes:
        problem: What it is about, or None.
        proof: The best proof so far for that.
        done: Whether another stage would bring nothing.
    """

    def __init__(self, *, apart: bool) -> None:
        self.problem: Problem | None = None
        self.proof = Proof(0.0, ())
        self.done = False
        self._refiner: Refiner | None = None
        self._closed = False
        self._apart = Apart.start() if apart else None
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> Prover:
        return self

    def __exit__(self, *_: object) -> None:
        # Nobody waits for what may be under way.
        self._closed = True
        if self._apart is not None:
            self._apart.close()
        self._thread.shutdown(cancel_futures=True)

    @property
    def hint(self) -> frozenset[OpId]:
        """The ops that run again in the solution of the latest program that has one."""
        return frozenset() if self.proof.hint is None else frozenset().union(*self.proof.hint.rerun)

    @property
    def suggestion(self) -> Schedule | None:
        """What that solution does, as a schedule, if there is one; it may not fit."""
        if self.proof.hint is None or self.problem is None:
            return None
        return schedule_of(self.problem.graph, self.proof.hint)

    def turn_to(self, problem: Problem | None) -> None:
        """Be about `problem`, whose budget is below the peak of plain training, or about nothing from now on."""
        self.problem, self._refiner = problem, None
        self.proof, self.done = Proof(0.0, ()), False

    def glance(self, *, seconds: float) -> Callable[[], Proof]:
        """Begin a relaxation with a few moments; return what waits for its end and returns the best proof."""
        return self._begin("glance", seconds=seconds)

    def advance(self, limits: Limits, known: Schedule) -> Callable[[], Proof]:
        """Begin another stage; return what waits for its end and returns the best proof. See `Refiner.advance`."""
        return self._begin("advance", limits=limits, known=known)

    def _begin(self, method: str, **arguments: Any) -> Callable[[], Proof]:
        under_way: Future[tuple[Proof, bool]] = self._thread.submit(self._run, method, arguments)

        def wait() -> Proof:
            proof, self.done = under_way.result()
            # It can be lower where one had to begin anew.
            self.proof = proof if proof.bound >= self.proof.bound else self.proof
            return self.proof

        return wait

    def _run(self, method: str, arguments: dict[str, Any]) -> tuple[Proof, bool]:
        assert self.problem is not None, "there is nothing to prove yet"
        if self._apart is not None:
            try:
                return self._apart.ask(self.problem, method, **arguments)
            except LostError:
                if self._closed:
                    raise
                self._apart.close()
                self._apart = None
        if self._refiner is None:
            self._refiner = Refiner(self.problem)
        return getattr(self._refiner, method)(**arguments), self._refiner.done
