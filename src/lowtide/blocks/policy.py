"""The tuned numbers of running block by block, with what each trades; those of timing are in `costs.clock`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PythonStateLimits:
    """How far Python state of blocks is followed.

    Attributes:
        entries: Containers with more entries are compared by their number only: comparing all in every run would take
            longer than a small block.
        array_bytes: Larger arrays are compared only while blocks are profiled, for the same reason.
        things: So many things at most are followed from one block, so that a block that reaches the whole program
            (through a global registry) is not walked for seconds.
        files: From code in one file, functions and classes of so many files further are followed. State of a model
            usually lies in its own file or in one that it imports.
        cached_types: How many types and functions are remembered by what was found out about each. Models have tens.
    """

    entries: int = 10_000
    array_bytes: int = 1 << 20
    things: int = 20_000
    files: int = 1
    cached_types: int = 4096


@dataclass(frozen=True, slots=True)
class EarlyStopPolicy:
    """When it pays to end a repeated run as soon as it has made what backward reads.

    The first run then defers what autograd saves, which takes time. The seconds are those of a slow processor.

    Attributes:
        run_seconds: What deferring takes for a run.
        save_seconds: What it takes for every tensor that is deferred.
        run_share: What it takes as a share of the run: a first run that records a graph takes up to a tenth longer than
            one without gradients; the rest is a margin for noise.
        unseen_bytes: So much may autograd hold that cannot be deferred: numbers in formulas, which it keeps as tensors
            that no hook sees.
    """

    run_seconds: float = 2e-5
    save_seconds: float = 5e-6
    run_share: float = 0.15
    unseen_bytes: int = 256


@dataclass(frozen=True, slots=True)
class ChainPlanning:
    """How much planning a chain gets.

    Attributes:
        attempts: Planners that put something between the two ops of a backward are asked again for less memory. Each
            attempt subtracts the excess of the one before, so a few are enough.
        auto_effort: The share of its usual effort that `auto` makes. It asks `rotor`, which is nearly optimal on
            chains, so a long search finds little.
        stretches: A sequence is divided into at most so many stretches of time, which is as many blocks as the planner
            for chains distinguishes.
        least_layers: A list of fewer layers is not taken for the repeated layers of a model: with one layer there is
            nothing to plan.
    """

    attempts: int = 4
    auto_effort: float = 1 / 3
    stretches: int = 150
    least_layers: int = 2


PYTHON_STATE = PythonStateLimits()
EARLY_STOP = EarlyStopPolicy()
PLANNING = ChainPlanning()
