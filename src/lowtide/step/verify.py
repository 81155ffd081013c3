"""Legality and peak of a choice, by summing for each moment all that came before it; knows nothing of the simulator."""

from __future__ import annotations

from lowtide.errors import InvalidScheduleError
from lowtide.step.problem import Choice, StepProblem, Variant


def verify_step(problem: StepProblem, choice: Choice, peak_bytes: int) -> None:
    """Raise `InvalidScheduleError` unless `choice` may be made, peaks at `peak_bytes`, and fits the budget.

    Takes time quadratic in the number of instances.
    """
    check_choice(problem, choice)
    found = step_peak(problem, choice)
    if found != peak_bytes:
        raise InvalidScheduleError(f"The step peaks at {found} bytes, not at {peak_bytes}.")
    if found > problem.budget_bytes:
        raise InvalidScheduleError(f"The step peaks at {found} bytes; the budget is {problem.budget_bytes}.")


def check_choice(problem: StepProblem, choice: Choice) -> None:
    """Raise `InvalidScheduleError` unless `choice` may be made."""
    if len(choice) != len(problem.instances):
        raise InvalidScheduleError(f"{len(choice)} variants are chosen for {len(problem.instances)} instances.")
    for instance, variant in enumerate(choice):
        if isinstance(variant, bool) or not isinstance(variant, int) or not 0 <= variant < len(problem.menu(instance)):
            raise InvalidScheduleError(
                f"Instance {instance} has variant {variant!r}; variants are 0 to {len(problem.menu(instance)) - 1}."
            )
        if problem.fixed and problem.fixed[instance] not in (None, variant):
            raise InvalidScheduleError(
                f"Instance {instance} has variant {variant}, but {problem.fixed[instance]} is fixed."
            )


def step_peak(problem: StepProblem, choice: Choice) -> int:
    """Return the peak of the step with `choice`."""
    chosen = [problem.menu(k)[variant] for k, variant in enumerate(choice)]
    count = len(chosen)
    forward = [_forward_peak(problem, chosen, k) for k in range(count + 1)]
    return max(forward + [_backward_peak(problem, chosen, k) for k in range(count + 1)])


def _forward_peak(problem: StepProblem, chosen: list[Variant], done: int) -> int:
    """Return the highest level from when `done` forwards have run until the next has."""
    gap = problem.forward_gaps[done]
    begin = sum(g.after for g in problem.forward_gaps[:done]) + sum(v.forward_after for v in chosen[:done])
    inside = [gap.after + v.forward_peak for v in chosen[done : done + 1]]
    return begin + max([gap.peak, *inside])


def _backward_peak(problem: StepProblem, chosen: list[Variant], left: int) -> int:
    """Return the highest level from when `left` backwards are left to run until the next has."""
    done = len(chosen) - left
    gap = problem.backward_gaps[done]
    gaps = sum(g.after for g in (*problem.forward_gaps, *problem.backward_gaps[:done]))
    begin = gaps + sum(v.forward_after for v in chosen[:left]) + sum(v.net for v in chosen[left:])
    inside = [gap.after + chosen[left - 1].backward_peak] if left else []
    return begin + max([gap.peak, *inside])
