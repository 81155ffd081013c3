"""Collectives: they are never run to be measured, because the other processes would have to take part.

One process measures while the others may be reading its results from the cache: a collective that it started would wait
for them for ever, or be answered by one of the model's own. So their time is worked out: every byte goes once over a
link, and every call waits for the slowest process once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lowtide.capture.fused_op import Call, one_by_one
from lowtide.pytorch.nested import tree_leaves
from lowtide.pytorch.ops import is_collective


@dataclass(frozen=True, slots=True)
class Link:
    """What connects processes. Collectives are never recomputed, so plans hardly depend on these.

    Attributes:
        bandwidth: Bytes per second between two processes: PCIe 4.0 with 16 lanes, or a network of 200 Gbit/s.
        start_seconds: Until every process has begun.
    """

    bandwidth: float = 25e9
    start_seconds: float = 2e-5


LINK = Link()


def communicates(call: Call) -> bool:
    """Return True if the call, one of its sequence, or a graph that it is given has a collective."""
    return any(is_collective(each[0]) or _in_graphs(each) for each in one_by_one(call))


def _in_graphs(call: Call) -> bool:
    graphs = [leaf for leaf in tree_leaves(call[1:]) if isinstance(leaf, torch.fx.GraphModule)]
    parts = [part for graph in graphs for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
    return any(is_collective(node.target) for part in parts for node in part.graph.nodes)


def seconds_on_link(moved_bytes: int, target: Any) -> float:
    """Return the time of a collective that moves so many bytes; waiting for one that was started takes nothing."""
    if "wait" in str(target):
        return 0.0
    return LINK.start_seconds + moved_bytes / LINK.bandwidth
