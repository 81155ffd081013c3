"""The collectives of a graph, which ranks must run in one order: compared before any of them runs.

Every rank says which collectives its graph has between which ranks, and waits until the others have said the same.
Only those that take part in a collective are asked, so groups of ranks may well run different graphs. Where two ranks
wait for each other to say different things, neither will: both then know what they would have run.

    collectives/<ranks>/<digest>/<rank>     said by a rank
    collectives/<ranks>/<digest>/text       what it stands for
    waiting/<rank>                          what a rank waits for the others to say
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lowtide.capture.fused_op import Call, one_by_one
from lowtide.costs.op_signature import Calls, signature
from lowtide.distributed import policy
from lowtide.errors import RanksError
from lowtide.pytorch.nested import tensors_in, tree_leaves
from lowtide.pytorch.ops import is_collective, op_name
from lowtide.pytorch.process_groups import SharedStore, members, rank, shared_store

_WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """The collectives that one graph has between the same ranks, in order."""

    ranks: tuple[int, ...]
    calls: tuple[str, ...]

    @property
    def key(self) -> str:
        """What says the same of ranks that run the same."""
        ranks = "-".join(map(str, self.ranks))
        return f"collectives/{ranks}/{hashlib.sha256(json.dumps(self.calls).encode()).hexdigest()[:32]}"


def compare_collectives(program: Calls) -> bool:
    """Return whether `program` has collectives, once all ranks that take part have the same ones in the same order.

    Raises `RanksError` if they have others, or do not come.
    """
    own = collectives_of(program)
    store = shared_store() if own else None
    if store is None:
        return bool(own)
    for each in own:
        store.put(f"{each.key}/text", json.dumps(each.calls))
        store.put(f"{each.key}/{rank()}", "")
    store.put(f"{_WAITING}/{rank()}", json.dumps([each.key for each in own]))
    for each in own:
        _meet(store, each, [one.key for one in own])
    store.put(f"{_WAITING}/{rank()}", "[]")
    return True


def collectives_of(program: Calls) -> list[CollectiveRun]:
    """Return the collectives of `program`, those between the same ranks together."""
    found: dict[tuple[int, ...], list[str]] = {}
    for op in range(len(program.graph.ops)):
        call = program.call(op)
        for one in () if call is None else one_by_one(call):
            for ranks in _ranks(one):
                found.setdefault(ranks, []).append(_text(one))
    return [CollectiveRun(ranks, tuple(calls)) for ranks, calls in sorted(found.items())]


def _ranks(call: Call) -> Iterator[tuple[int, ...]]:
    """Yield the ranks between which `call` communicates, if it does; waiting for a collective is none."""
    if is_collective(call[0]):
        groups = (members(leaf) for leaf in tree_leaves(call[1:]) if isinstance(leaf, str))
        yield from (ranks for ranks in groups if len(ranks) > 1)


def _text(call: Call) -> str:
    """Return what ranks must agree on: the op, how it reduces, and its tensors; the names of groups may differ.

    In an exchange of parts of different sizes, the tensors may, too.
    """
    tensors = [] if op_name(call[0]).startswith("all_to_all") else tensors_in(call[1:])
    words = [leaf for leaf in tree_leaves(call[1:]) if isinstance(leaf, str) and not members(leaf)]
    return signature((call[0], (*tensors, *words), {}))


def _meet(store: SharedStore, own: CollectiveRun, waiting_for: Sequence[str]) -> None:
    """Return once all ranks of `own` have said that they run it."""
    begin, pause = time.monotonic(), policy.POLICY.shortest_pause
    missing = [each for each in own.ranks if each != rank()]
    while missing := [each for each in missing if store.get(f"{own.key}/{each}") is None]:
        for other in missing:
            different = _waits_for_another(store, own, other, waiting_for)
            if different is not None:
                raise _would_differ(own, other, different)
        if time.monotonic() - begin > policy.POLICY.meeting_seconds:
            raise RanksError(
                f"Rank {rank()} is about to run {len(own.calls)} collectives with "
                f"{_ranks_in_words(missing)}, which {'has' if len(missing) == 1 else 'have'} not come to the same "
                f"graph within {policy.POLICY.meeting_seconds:g} seconds. All ranks that communicate must train the "
                "same model on inputs of the same shapes, in the same order; the output of a rank that has ended says "
                "why."
            )
        time.sleep(pause)
        pause = min(2 * pause, policy.POLICY.longest_pause)


def _waits_for_another(
    store: SharedStore, own: CollectiveRun, other: int, waiting_for: Sequence[str]
) -> tuple[str, ...] | None:
    """Return what rank `other` would run in the place of `own`, if it waits in vain for this rank to say the same."""
    ranks = own.key.rpartition("/")[0]
    for key in json.loads(store.get(f"{_WAITING}/{other}") or b"[]"):
        if key.rpartition("/")[0] == ranks and key not in waiting_for and store.get(f"{key}/{rank()}") is None:
            return tuple(json.loads(store.get(f"{key}/text") or b"[]"))
    return None


def _would_differ(own: CollectiveRun, other: int, theirs: tuple[str, ...]) -> RanksError:
    pairs = list(zip_longest(own.calls, theirs, fillvalue="nothing"))
    place = next((number for number, (mine, one) in enumerate(pairs) if mine != one), 0)
    mine, one = pairs[place] if pairs else ("nothing", "nothing")
    return RanksError(
        f"Ranks {rank()} and {other} would run different collectives, which never ends or gives wrong numbers: rank "
        f"{rank()} has {len(own.calls)}, rank {other} has {len(theirs)}, and number {place + 1} is {mine} on rank "
        f"{rank()} and {one} on rank {other}. Ranks that communicate must train the same model on inputs of the same "
        "shapes: pad them to one shape, and let nothing in the model depend on the rank."
    )


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
