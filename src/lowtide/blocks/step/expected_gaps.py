"""The gaps of a call as far as they are known: seen of its sequence, of pairs of blocks, or worked out from blocks."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.blocks.step.call import BehindRun, Call
from lowtide.blocks.step.gap_book import EDGE, GapBook, Pair, Runs, pairs
from lowtide.step.problem import Gap
from lowtide.step.step_block import StepBlock
from lowtide.step.surroundings import Gaps


def expected_gaps(book: GapBook, blocks: Sequence[StepBlock], sequence: Runs, call: Call | None) -> Gaps:
    """Return what is known of the code between the blocks: of this sequence, or else of each pair of blocks.

    Args:
        book: What was seen.
        blocks: The blocks, by number.
        sequence: The call.
        call: The call under way, if there is one; it may be the beginning of the sequence.
    """
    known = book.of_sequence(sequence)
    if known is not None:
        return known
    forward = [book.forward(pair) or Gap(0, 0) for pair in pairs(sequence)]
    if call is not None and sequence[: len(call.blocks)] == tuple(call.blocks):
        forward[: len(call.forward_gaps)] = call.forward_gaps
    else:
        call = None
    return Gaps(tuple(forward), expected_backward(book, blocks, sequence, call))


def expected_backward(
    book: GapBook, blocks: Sequence[StepBlock], sequence: Runs, call: Call | None = None
) -> tuple[Gap, ...]:
    """Return the gaps of backward: what was seen of each pair, or else what follows from blocks and eager nodes.

    Args:
        book: What was seen.
        blocks: The blocks, by number.
        sequence: The call.
        call: The call that has begun with it, as far as it has run; None if none has. Runs that it has not shown are
            taken to hold all of their inputs alone.
    """
    shown = 0 if call is None else len(call.forward_gaps)
    eager = [] if call is None else list(zip(call.eager_peaks, call.leaf_bytes, strict=True))
    seen_behind = [] if call is None else call.behind
    inputs = [*(blocks[block].input_bytes for block in sequence), 0]
    behind = [*seen_behind, *(BehindRun(size, size) for size in inputs[shown:])]
    gaps = zip(pairs(sequence), (*eager, *[(0, 0)] * (len(sequence) + 1 - shown)), behind, strict=True)
    return tuple(reversed([_backward(book, blocks, pair, *of_code, run) for pair, of_code, run in gaps]))


def _backward(
    book: GapBook, blocks: Sequence[StepBlock], pair: Pair, eager_peak: int, leaf_bytes: int, behind: BehindRun
) -> Gap:
    """Return what happens between the backward of the second block and that of the first one.

    If that was never seen, it is what other blocks behind the first one have shown, or else what follows from the
    blocks: the gradients that the first one takes are there already, and what the second one holds alone dies, unless
    the first one has made it and reads it itself.
    """
    before, _ = pair
    known = book.backward(pair) or (None if before == EDGE else book.most_behind(before))
    if known is not None:
        return known
    if before == EDGE:
        return _gap(eager_peak, leaf_bytes - behind.freed)
    first = blocks[before]
    # The second one has made gradients of what it takes, and no others; behind the last one nothing is counted yet.
    arrived = min(first.tangent_bytes, behind.gradients)
    return _gap(eager_peak, leaf_bytes - max(behind.freed - first.own_output_bytes, 0) - arrived)


def _gap(peak: int, after: int) -> Gap:
    return Gap(max(peak, after, 0), after)
