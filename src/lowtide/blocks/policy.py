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


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """When the layers of a model are blocks of its step without being named.

    Attributes:
        equal: A list of fewer layers of one class is not taken for the repeated layers of a model. The stages of a
            ResNet have three and more.
        parts: A layer with fewer modules inside, itself included, has too little to choose from, and is captured
            quickly.
        repeats: From so many layers on that are like an earlier one, layers are blocks. The plan of the whole graph is
            the better one, and the only one that fits where gradients of parameters take most of the memory, because
            it may compute them late. But tracing and planning it takes half a second for each layer of a transformer:
            `benchmarks/blocks.py --first` has 14 s for 24 layers and 26 s for 48, and as blocks 2.5 and 3.0 s.
        join: Where blocks do not fit, so many times as many layers become one. A budget right below what single layers
            need is also little more than what pairs need, and near the least that fits recomputation is dear: ResNet-50
            at 65 % of its peak takes 13.1 % more time with pairs, 9.8 % with fours, and 9.9 % with whole stages.
    """

    equal: int = 3
    parts: int = 4
    repeats: int = 30
    join: int = 4


@dataclass(frozen=True, slots=True)
class OpaquePolicy:
    """How closely modules are watched that run in eager mode as blocks of a step.

    Attributes:
        watched_runs: So many runs are measured, each of which takes some microseconds for every op and allocation. A
            module in which sizes depend on data shows it in its second run on other data; all its runs are measured.
    """

    watched_runs: int = 4


@dataclass(frozen=True)
class SessionPolicy:
    """How the runs of a step of several blocks are chosen and watched.

    Attributes:
        choose_seconds: The choice is anytime, and what this leaves unproved is told. Choosing again in the middle of a
            training run must not be felt: most choices take milliseconds.
        most_recordings: A recorded step is slower by the profiler's few microseconds an op. A model whose calls always
            differ (layers dropped at random) shows every pair of blocks in far fewer calls than this.
        remembered_calls: Calls whose backward may still come. Gradient accumulation over more calls than this loses
            nothing but what their backward would show.
        remembered_choices: Choices that are kept for sequences that come again.
    """

    choose_seconds: float = 1.0
    most_recordings: int = 48
    remembered_calls: int = 64
    remembered_choices: int = 512


PYTHON_STATE = PythonStateLimits()
EARLY_STOP = EarlyStopPolicy()
PLANNING = ChainPlanning()
LAYERS = LayerPolicy()
OPAQUE = OpaquePolicy()
SESSION = SessionPolicy()
