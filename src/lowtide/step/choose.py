"""One variant per instance, so that the step fits the budget and takes least time.

Model: a multiple-choice knapsack with a row per moment of the step; every row is a prefix of what forwards leave, a
suffix of what backwards leave, and one peak. Optimal: a walk over partial choices (`frontier`) is exact where all
variants of a block leave the same, which is usual, and CP-SAT (`integer_program`) proves the rest within the time
given; seconds count in parts of 2^-40 of the slowest step. The lower bound is of the same model with cells instead of
variants: a cell costs the `bound_seconds` of its variant, leaves its `floor_bytes`, and peaks no higher than any
variant, so no plans of the blocks do better. Cost: milliseconds to `seconds`, whatever the number of instances.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from lowtide.step.frontier import walk
from lowtide.step.integer_program import least_cost, least_excess
from lowtide.step.policy import POLICY
from lowtide.step.problem import Block, Choice, StepProblem, Variant
from lowtide.step.rows import Rows, rows_of
from lowtide.step.simulate import Moment, StepTrace, simulate_step

# What a bound gives up for the last bit of a product of floats.
_ROUNDING = 1 - 2**-50


@dataclass(frozen=True, slots=True)
class StepChoice:
    """A choice and what is proved of it.

    Attributes:
        choice: The variant of each instance.
        peak_bytes: The peak of the step, exact.
        seconds: Time of recomputation.
        bound_seconds: No plans of the blocks that fit take less, be they in the menus or not.
        proved: Whether no other choice from the menus is better.
    """

    choice: Choice
    peak_bytes: int
    seconds: float
    bound_seconds: float
    proved: bool


class NothingFits(Exception):  # noqa: N818
    """No choice fits the budget.

    Attributes:
        least_peak_bytes: The least peak found.
        choice: The choice that has it.
        moment: Where it is.
        proved: Whether no choice has a lower peak; if not, the time ended first.
    """

    def __init__(self, problem: StepProblem, least: StepChoice) -> None:
        super().__init__(
            f"No choice of variants fits {problem.budget_bytes} bytes; the least peak is {least.peak_bytes}."
        )
        self.least_peak_bytes = least.peak_bytes
        self.choice = least.choice
        self.moment: Moment = simulate_step(problem, least.choice).peak_moment
        self.proved = least.proved


def choose_variants(problem: StepProblem, *, seconds: float = 2.0) -> StepChoice:
    """Return the choice of least time that fits, or the best that `seconds` suffice to find.

    Raises `NothingFits`, with the least peak, if there is none.
    """
    end = time.perf_counter() + seconds
    choice, proved = _fastest(problem), True
    if not _fits(problem, choice):
        choice, proved = _search(problem, end - POLICY.bound_share * seconds)
    trace = simulate_step(problem, choice)
    bound = min(trace.seconds, _bound(problem, trace, end))
    return StepChoice(choice, trace.peak_bytes, trace.seconds, bound, proved or trace.seconds <= bound)


def least_peak(problem: StepProblem, *, seconds: float = 2.0) -> StepChoice:
    """Return the choice of least peak; the budget is not looked at, and nothing is proved of its time."""
    unlimited = replace(problem, budget_bytes=0)
    rows = rows_of(unlimited, bytewise=True)
    most = simulate_step(problem, _fastest(problem)).peak_bytes
    least = _least(lambda excess: _lightest(rows, excess) is not None, most)
    choice = _lightest(rows, least) or _fastest(problem)
    trace = simulate_step(problem, choice)
    if trace.peak_bytes == least:
        return StepChoice(choice, least, trace.seconds, 0.0, True)
    return _least_by_program(unlimited, trace, choice, seconds)


def _fastest(problem: StepProblem) -> Choice:
    return tuple(_fastest_of(problem, instance) for instance in range(len(problem.instances)))


def _fastest_of(problem: StepProblem, instance: int) -> int:
    menu = problem.menu(instance)
    return min(problem.allowed(instance), key=lambda variant: (menu[variant].seconds, menu[variant].forward_after))


def _fits(problem: StepProblem, choice: Choice | None) -> bool:
    return choice is not None and simulate_step(problem, choice).peak_bytes <= problem.budget_bytes


def _search(problem: StepProblem, end: float) -> tuple[Choice, bool]:
    """Return the best choice found until `end`, and whether it is proved to be best."""
    rows = rows_of(problem)
    left = end - time.perf_counter()
    walked = walk(rows, end - (1 - POLICY.walk_share) * left)
    if walked.choice is None or not _fits(problem, walked.choice):
        return _by_program(problem, rows, _any(problem, left / 2), end)
    if rows.exact and rows.cost(walked.choice) <= walked.bound:
        return walked.choice, True
    return _by_program(problem, rows, walked.choice, end)


def _any(problem: StepProblem, seconds: float) -> Choice:
    """Return a choice that fits, if there is one."""
    least = least_peak(problem, seconds=seconds)
    if least.peak_bytes > problem.budget_bytes:
        raise NothingFits(problem, least)
    return least.choice


def _by_program(problem: StepProblem, rows: Rows, known: Choice, end: float) -> tuple[Choice, bool]:
    """Return the best choice that CP-SAT finds, starting from one that fits."""
    solved = least_cost(rows, known, end - time.perf_counter())
    if solved.choice is None or not _fits(problem, solved.choice):
        return known, False
    better = rows.cost(solved.choice) <= rows.cost(known)
    return solved.choice if better else known, solved.optimal and rows.exact


def _bound(problem: StepProblem, trace: StepTrace, end: float) -> float:
    """Return a time that no plans of the blocks beat."""
    relaxed = relax(problem)
    fastest = simulate_step(relaxed, _fastest(relaxed))
    if fastest.seconds >= trace.seconds or fastest.peak_bytes <= problem.budget_bytes:
        return fastest.seconds
    rows = rows_of(relaxed, optimistic=True)
    walked = walk(rows, end - (1 - POLICY.walk_share) * (end - time.perf_counter()))
    bound = walked.bound
    if walked.choice is not None and (rows.cost(walked.choice) > bound or not _fits(relaxed, walked.choice)):
        bound = max(bound, least_cost(rows, walked.choice, end - time.perf_counter()).bound)
    return bound * rows.unit_seconds * _ROUNDING


def relax(problem: StepProblem) -> StepProblem:
    """Return the problem with cells instead of variants; what is fixed stays as it is."""
    cells = [Block(block.name, tuple(_cell(block, variant) for variant in block.variants)) for block in problem.blocks]
    pairs = list(zip(problem.instances, problem.fixed or (None,) * len(problem.instances), strict=True))
    chosen = [pair for pair in dict.fromkeys(pairs) if pair[1] is not None]
    place = {pair: len(cells) + k for k, pair in enumerate(chosen)}
    cells += [_only(problem.blocks[block], variant) for block, variant in chosen if variant is not None]
    return replace(problem, blocks=tuple(cells), instances=tuple(place.get(pair, pair[0]) for pair in pairs), fixed=())


def _cell(block: Block, variant: Variant) -> Variant:
    floor = variant.floor_bytes
    after = variant.net - floor
    return Variant(
        # A plan peaks at what it leaves at least.
        forward_peak=max(floor, min(v.forward_peak for v in block.variants)),
        forward_after=floor,
        backward_peak=max(after, min(v.backward_peak for v in block.variants)),
        backward_after=after,
        seconds=variant.bound_seconds,
        bound_seconds=variant.bound_seconds,
        floor_bytes=floor,
    )


def _only(block: Block, variant: int) -> Block:
    return Block(block.name, (block.variants[variant],))


def _lightest(rows: Rows, excess: int) -> Choice | None:
    """Return the choice that leaves least after every forward, with `excess` more room; None if there is none.

    Less is never worse later on, where suffixes are taken as their least.
    """
    nets, after, choice = rows.least_nets(), 0, []
    if min(rows.level[0], rows.turn[0] - nets[0]) + excess < 0:
        return None
    for k, options in enumerate(rows.options):
        forward, backward = rows.forward[k] + excess - after, rows.backward[k] + excess - after - nets[k + 1]
        level = min(rows.level[k + 1], rows.turn[k + 1] - nets[k + 1]) + excess - after
        fit = [o for o in options if o.forward_peak <= forward and o.after + o.backward_peak <= backward]
        best = min(fit, key=lambda o: o.after, default=None)
        if best is None or best.after > level:
            return None
        after += best.after
        choice.append(best.variant)
    return tuple(choice)


def _least(works: Callable[[int], bool], high: int) -> int:
    """Return the least number from 0 on that works, by bisection; `high` does."""
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low


def _least_by_program(unlimited: StepProblem, trace: StepTrace, known: Choice, seconds: float) -> StepChoice:
    """Return the choice of least peak that CP-SAT finds, starting from a known one."""
    rows = rows_of(unlimited, bytewise=True)
    coarse = rows_of(unlimited)
    if not coarse.exact:
        rows = coarse
    # Rounding adds less than a unit for each half of an instance, and one for the row.
    most = trace.peak_bytes // rows.unit_bytes + 2 * len(known) + 2
    solved = least_excess(rows, known, most, seconds)
    found = simulate_step(unlimited, solved.choice or known)
    if found.peak_bytes > trace.peak_bytes:
        return StepChoice(known, trace.peak_bytes, trace.seconds, 0.0, False)
    proved = solved.optimal and rows.exact
    return StepChoice(solved.choice or known, found.peak_bytes, found.seconds, 0.0, proved)


Key = tuple[tuple[int, ...], tuple[int, ...], Hashable]


class Choices:
    """The choices that were made, by what they were made from: most calls come again.

    Args:
        seconds: How long one search may take.
        remembered: So many choices are kept.

    Attributes:
        seconds: How long the last search took.
    """

    def __init__(self, *, seconds: float, remembered: int) -> None:
        self.seconds = 0.0
        self._limit, self._remembered = seconds, remembered
        self._made: dict[Key, StepChoice] = {}

    def clear(self) -> None:
        """Forget all choices."""
        self._made.clear()

    def choose(
        self, instances: tuple[int, ...], fixed: tuple[int, ...], known: Hashable, problem: Callable[[], StepProblem]
    ) -> StepChoice:
        """Return the choice for a sequence of blocks; raise `NothingFits` if none fits.

        Args:
            instances: The blocks.
            fixed: The variants of the first of them, which have run.
            known: All else that the problem depends on.
            problem: Returns it, with all variants free.
        """
        key = (instances, fixed, known)
        if key not in self._made:
            self._made[key] = self._implied(key) or self._search(fixed, problem())
        return self._made[key]

    def _implied(self, key: Key) -> StepChoice | None:
        """Return an earlier choice that has fixed the same variants already: it needs no second search."""
        instances, fixed, known = key
        for other, found in reversed(self._made.items()):
            if (other[0], other[2]) == (instances, known) and found.choice[: len(fixed)] == fixed:
                return found
        return None

    def _search(self, fixed: tuple[int, ...], problem: StepProblem) -> StepChoice:
        free = (None,) * (len(problem.instances) - len(fixed))
        self._made = dict(list(self._made.items())[-self._remembered :])
        begin = time.perf_counter()
        found = choose_variants(replace(problem, fixed=(*fixed, *free)), seconds=self._limit)
        self.seconds = time.perf_counter() - begin
        return found
