"""One training call of several blocks, from its first block to the end of its backward: what it shows about itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.blocks.step.eager_code import EagerNodes
from lowtide.blocks.step.eager_watch import EagerWatch
from lowtide.blocks.step.ledger import Ledger
from lowtide.blocks.step.module_places import Spot
from lowtide.blocks.step.pending_gradients import PendingGradients
from lowtide.blocks.step.recorder import Recorder, Stretch
from lowtide.step.problem import Gap, Variant
from lowtide.step.surroundings import Gaps, ModuleRun


@dataclass(frozen=True)
class Shown:
    """What a call has shown when it is over.

    Attributes:
        gaps: Its gaps.
        recorded: Whether they were recorded, and not only watched.
        excess: For every run of a block, what its forward and backward took beyond the prediction.
    """

    gaps: Gaps
    recorded: bool
    excess: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class BehindRun:
    """What happens between the backward of a run and that of the run before it, as far as forward shows it.

    Attributes:
        freed: What dies: what the run and the code right before it hold, and nothing before them, and gradients of one
            tensor that are added up. An input of the call, what an earlier run takes as well, and what the call returns
            live longer.
        gradients: The gradients of what the run takes, of every tensor one.
    """

    freed: int
    gradients: int


@dataclass
class Call:
    """A call under way, or waiting for its backward.

    Attributes:
        outside: Returns the tensors that were there before.
        blocks: The blocks that have run, in order.
        spots: Where the modules of each of them stand in a list of modules.
        variants: How each of them ran.
        runs: How what surrounds them sees them.
        state: The state of what surrounds them when the call began.
        figures: The predictions for each of them.
        tangent_bytes: For each of them, what its backward is handed.
        forward_gaps: What tensors have shown of the code before each block, and behind the last one.
        eager_peaks: For each of these gaps, the gradients that will be alive in its backward.
        leaf_bytes: For each of these gaps, the gradients that its backward leaves to the parameters of its code.
        forward_ended: Whether the forward pass has ended.
        is_whole: Whether the recording began with the call, and not with the first block.
        forward: Records the forward pass.
        pending: Gradients that wait between blocks.
    """

    outside: Callable[[], Iterable[torch.Tensor]]
    blocks: list[int] = field(default_factory=list)
    spots: list[Spot | None] = field(default_factory=list)
    variants: list[int] = field(default_factory=list)
    runs: list[ModuleRun] = field(default_factory=list)
    state: Hashable = None
    figures: list[Variant] = field(default_factory=list)
    tangent_bytes: list[int] = field(default_factory=list)
    forward_gaps: list[Gap] = field(default_factory=list)
    eager_peaks: list[int] = field(default_factory=list)
    leaf_bytes: list[int] = field(default_factory=list)
    forward_ended: bool = False
    is_whole: bool = False
    forward: Recorder = field(default_factory=Recorder)
    _backward: Recorder = field(default_factory=Recorder)
    _backward_peaks: dict[int, int] = field(default_factory=dict)
    pending: PendingGradients = field(default_factory=PendingGradients)
    _freed: dict[int, int] | None = None
    _gradients: list[tuple[int, int]] = field(default_factory=list)
    _summed: int = 0
    _backward_gaps: list[Gap] = field(default_factory=list)
    _backward_order: list[int] = field(default_factory=list)
    _dead_before_backward: int = 0
    _nodes: EagerNodes = field(default_factory=EagerNodes)
    _eager: EagerWatch | None = None
    _measured_peaks: list[int | None] = field(default_factory=list)
    _ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """The tensors that passed a border."""
        if self._ledger is None:
            self._ledger = Ledger(self.outside())
            # It holds on to the arguments of the call.
            self.outside = tuple
        return self._ledger

    def enter(self, args: Sequence[Any]) -> None:
        """Note that a block is about to run with these arguments."""
        self._watch_gap(args)
        self._gradients.append(self.ledger.gradients_of(args, len(self._gradients)))
        self.pending.note_reads(len(self.blocks), args)

    def leave(self, outputs: Sequence[Any]) -> None:
        """Note what a block has returned."""
        self.pending.note_outputs(len(self.blocks) - 1, outputs)
        self.ledger.add(outputs)
        self.forward.border()

    def end_forward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note that the forward pass has ended with these outputs."""
        self._watch_gap(outputs, border=False)
        # A caller who lets go of them now may hold them another time: they count until the end of the step.
        self.ledger.hand_over(outputs)
        self._freed = self.ledger.bytes_by_holder()
        self.forward.stop()
        self.forward_ended = True

    def begin_backward(self) -> None:
        """Note that the backward pass begins."""
        self._dead_before_backward = self.ledger.remove_dead()
        if self._eager is not None:
            self._eager.begin_gap(-self._dead_before_backward)

    def enter_backward(self, place: int) -> None:
        """Note that the backward of a run of a block is about to run."""
        freed = self._end_eager() + self._summed + self.pending.leave(place)
        self._summed = 0
        if not self._backward_gaps:
            freed += self._dead_before_backward
        self._backward_gaps.append(Gap(0, -freed))
        self._backward_order.append(place)
        if self.is_recorded:
            # The engine gives every node a profiler of its own: only what is inside of a node can be recorded.
            self._backward.start()

    def leave_backward(self, of_inputs: Sequence[Any], of_parameters: Iterable[Any]) -> None:
        """Note what a backward has returned."""
        if self._backward.is_running:
            self._backward.stop()
            self._backward_peaks[self._backward_order[-1]] = self._backward.stretches[0].peak
        self._summed = self.pending.arrive(self._backward_order[-1], of_inputs)
        self.ledger.add(of_parameters)
        if self._eager is not None:
            self._eager.begin_gap(returned=of_inputs)

    def end_backward(self, *, is_known: bool = False) -> Shown | None:
        """Note that the backward pass has ended; return what was shown, or None if it was not all of the step.

        Args:
            is_known: Whether such a call has run before: estimates then say nothing new.
        """
        self._backward_gaps.append(Gap(0, -self._end_eager() - self._summed - self.pending.leave(-1)))
        self.stop_watching()
        if self._backward_order != list(reversed(range(len(self.blocks)))):
            return None
        estimates = [0] * len(self.eager_peaks) if is_known else self.eager_peaks
        peaks = zip(self._measured_peaks, reversed(estimates), strict=True)
        eager = [estimate if measured is None else measured for measured, estimate in peaks]
        leaves = reversed(self.leaf_bytes)
        backward = tuple(map(_with_eager, self._backward_gaps, eager, leaves))
        if not self.is_recorded:
            return Shown(Gaps(tuple(self.forward_gaps), backward), recorded=False)
        stretches = self.forward.stretches
        forward, excess = _read(stretches, self.figures, self._missed_before(stretches[0]))
        # The end of a sharded model frees a buffer that its parts have taken, which recordings leave out.
        ends = max(forward[-1].after, self.forward_gaps[-1].after)
        forward[-1] = Gap(max(forward[-1].peak, ends), ends)
        over = [self._backward_excess(place) for place in range(len(self.blocks))]
        return Shown(Gaps(tuple(forward), backward), self.is_whole, tuple(zip(excess, over, strict=True)))

    def _missed_before(self, first: Stretch) -> int:
        """Return what the tensors that enter the first block show beyond the recording of what came before it.

        A recording that began with the call is short of it by what was there before and was let go of in the call,
        such as what an attempt that ended with an error had left in attributes. Another call finds nothing to free.
        """
        missed = self.forward_gaps[0].after - first.end
        return max(missed, 0) if self.is_whole else missed

    @property
    def is_recorded(self) -> bool:
        """Whether the forward pass was recorded, all of it or from the first block on."""
        return self.forward_ended and len(self.forward.stretches) == 2 * len(self.blocks) + 1

    @property
    def behind(self) -> list[BehindRun]:
        """What happens in backward behind each run of a block, and before that of the last one; the first run first."""
        found = self.ledger.bytes_by_holder() if self._freed is None else self._freed
        gradients = [*self._gradients, (0, 0)]
        return [
            BehindRun(found.get(place, 0) + gradients[place][1], gradients[place][0])
            for place in range(len(self.forward_gaps))
        ]

    def discard(self) -> None:
        """Stop recordings that were not ended by the step itself."""
        self.forward.discard()
        self._backward.discard()
        self.stop_watching()

    def stop_watching(self) -> None:
        """Take the hooks of eager nodes away: a graph that is kept may run backward once more."""
        if self._eager is not None:
            self._eager.stop()

    def _end_eager(self) -> int:
        """Return what has died in the gap of backward that ends, and note what its code was measured to take."""
        if self._eager is None:
            self._measured_peaks.append(None)
            return self.ledger.remove_dead()
        peak, died = self._eager.end_gap()
        self._measured_peaks.append(peak)
        return died

    def _watch_gap(self, tensors: Sequence[Any], *, border: bool = True) -> None:
        """Note what the code behind the last block has freed, made and saved until now."""
        after = -self.ledger.remove_dead()
        if self.forward.is_running and self._eager is None:
            self._eager = EagerWatch(self.ledger.remove_dead)
        part = self._nodes.behind(tensors, None if self._eager is None else self._eager.follow)
        holder = len(self.forward_gaps)
        after += self.ledger.add(part.saved, holder) + self.ledger.add(tensors, holder)
        self.forward_gaps.append(Gap(max(after, 0), after))
        self.eager_peaks.append(part.backward_peak_bytes)
        self.leaf_bytes.append(part.leaf_bytes)
        if border:
            self.forward.border()

    def _backward_excess(self, place: int) -> int:
        """Return what the backward of a block took beyond its prediction, as far as that was recorded."""
        if place not in self._backward_peaks or not self.is_whole:
            # What was allocated before a recording began does not lower its level when it is freed.
            return 0
        predicted = self.figures[place].backward_peak - self.tangent_bytes[place]
        return max(0, self._backward_peaks[place] - predicted)


def _with_eager(gap: Gap, peak: int, leaf_bytes: int) -> Gap:
    """Return a gap of backward with the peak of its eager code, and the gradients that this leaves to parameters."""
    after = gap.after + leaf_bytes
    return Gap(max(peak, after, 0), after)


def _read(stretches: Sequence[Stretch], figures: Sequence[Variant], before: int) -> tuple[list[Gap], list[int]]:
    """Return the gaps of a recorded forward pass, and what blocks took beyond their predicted peaks.

    The predicted level is set to the recorded one at the beginning of every block, so that whatever a prediction
    misses is part of the gap behind the block.

    Args:
        stretches: Gap, block, gap, ..., gap.
        figures: Predictions for every block.
        before: The level when the recording began.
    """
    gaps: list[Gap] = []
    excess: list[int] = []
    level = 0
    for number, figure in enumerate(figures):
        gap, inside = stretches[2 * number], stretches[2 * number + 1]
        begin = before + gap.end
        gaps.append(Gap(max(before + gap.peak - level, begin - level, 0), begin - level))
        excess.append(max(0, before + inside.peak - (begin + figure.forward_peak)))
        level = begin + figure.forward_after
    last = stretches[-1]
    gaps.append(Gap(max(before + last.peak - level, before + last.end - level, 0), before + last.end - level))
    return gaps, excess
