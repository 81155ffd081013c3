"""Element-wise ops, and those that need a row at a time, that write their result over what they read.

A gradient that a product makes and the backward of an activation reads is read by nothing else: the result may take its
place. Such an op is joined to the one that made its input, as that op's *tail*: both run as one op, which makes one
value instead of two. The joined op runs where the first of the two did, so all else that the tail reads must be there
by then, and nothing in between may write into anything. Plans lose little by that: to keep the value between the two
would take as many bytes as to keep the result. What the tail alone reads must be there while the first op runs, though,
which matters if it is recomputed: if that could need more than both ops by themselves, they are not joined.

The kernels that write into a given tensor are those that make a new one, so the bits are the same. The joint graph is
not changed: a program says which of its ops have tails, and the graphs that are lowered from it call the other kernel.
"""

from __future__ import annotations

import torch
from torch import fx

from lowtide import device as devices
from lowtide.capture import memory_rewrites
from lowtide.capture.fused_op import BY_ROWS, KERNELS
from lowtide.capture.program import Program, Tail, may_write
from lowtide.graph.ir import OpId, ValueId
from lowtide.pytorch.storages import storage_bytes

# Ops that need more than their results while they run.
_WORKSPACES = {torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default}


def find_tails(program: Program, like: Program | None = None) -> dict[fx.Node, tuple[Tail, ...]]:
    """Return, for the calls of `program` that get tails, these in order.

    Args:
        program: A program without tails.
        like: A program of the same forward graph, whose forward tails this one shall have: they differ in backward.
    """
    return _Finder(program, like).find() if memory_rewrites.are_allowed() else {}


class _Finder:
    """Walks the ops once, in their order; used by `find_tails` alone."""

    def __init__(self, program: Program, like: Program | None) -> None:
        self.program, self.graph = program, program.graph
        self.ends = {*self.graph.outputs, *self.graph.handovers}
        # For ops that are tails, the op at whose place they run.
        self.head: dict[OpId, OpId] = {}
        # The last op that may have written into what it read.
        self.barrier = -1
        self.tails: dict[OpId, list[Tail]] = {}
        self.wanted = None if like is None else {tail.node.name for tails in like.tails.values() for tail in tails}

    def find(self) -> dict[fx.Node, tuple[Tail, ...]]:
        for op, node in enumerate(self.program.calls):
            if node is None:
                continue
            if may_write(node):
                self.barrier = op
            over = self._over(op, node) if node.target in KERNELS else None
            if over is not None:
                self._join(op, node, over)
        return {self._call(head): tuple(tails) for head, tails in self.tails.items()}

    def _join(self, op: OpId, node: fx.Node, over: fx.Node) -> None:
        value = self.program.values[over]
        head = self.head[op] = self._made_by(value)
        self.tails.setdefault(head, []).append(Tail(node, over))

    def _over(self, op: OpId, node: fx.Node) -> fx.Node | None:
        """Return the argument of `node` that it can write over, or None."""
        if self.graph.ops[op].pinned or (node.target in BY_ROWS and not devices.sums_rows_first(self.program.device)):
            return None
        if self.wanted is not None and self.graph.is_forward(op) and node.name not in self.wanted:
            return None
        arguments = [n for n in node.all_input_nodes if self._made_by(self.program.values[n]) >= 0]
        if not arguments:
            return None
        over = max(arguments, key=lambda n: self._made_by(self.program.values[n]))
        value = self.program.values[over]
        head = self._made_by(value)
        others = {self.program.values[n] for n in arguments if n is not over}
        if value in others or any(self._made_by(other) >= head for other in others):
            return None
        if head <= self.barrier or self.graph.is_forward(head) != self.graph.is_forward(op):
            return None
        if not self._is_free(value) or not _is_alike(over, node, self.program.owners[value]):
            return None
        if not self.graph.is_forward(op) and self._may_cost(head, value, others):
            return None
        return over if KERNELS[node.target][1] or over is node.args[0] else None

    def _is_free(self, value: ValueId) -> bool:
        """Return True if `value` may be written over by the one op that reads it."""
        producer = self.graph.values[value].producer
        assert producer is not None
        maker = self.graph.ops[producer]
        once = bool(maker.pinned) or value in maker.first_run_only
        return len(self.graph.readers[value]) == 1 and value not in self.ends and not once

    def _may_cost(self, head: OpId, value: ValueId, others: set[ValueId]) -> bool:
        """Return True if a plan might need more memory: what forward made must be there while `head` runs as well.

        That is no more than the tail would need by itself if `head` reads no more than it makes.
        """
        values, read = self.graph.values, self.graph.ops[head].inputs
        there = self.graph.always_there.union(read)
        late = [v for v in others if self._made_by(v) in self.graph.forward and v not in there]
        if not late:
            return False
        needed = sum(values[v].bytes for v in read if values[v].producer is not None)
        return self._call(head).target in _WORKSPACES or needed > values[value].bytes

    def _made_by(self, value: ValueId) -> OpId:
        """Return the op at whose place `value` is made, or -1 for an input."""
        producer = self.graph.values[value].producer
        return -1 if producer is None else self.head.get(producer, producer)

    def _call(self, op: OpId) -> fx.Node:
        node = self.program.calls[op]
        assert node is not None
        return node


def _is_alike(over: fx.Node, node: fx.Node, owner: fx.Node) -> bool:
    """Return True if the result of `node` fits where `over` is, which is all of the storage that `owner` made."""
    old, new, whole = over.meta["val"], node.meta["val"], owner.meta["val"]
    return (
        old.layout is new.layout is torch.strided
        and old.shape == new.shape
        and old.stride() == new.stride()
        and old.dtype == new.dtype == whole.dtype
        # Kernels of complex numbers round differently if they write over what they read.
        and not old.is_complex()
        and not old.is_neg()
        and old.device == new.device
        and old.storage_offset() == 0
        and storage_bytes(old) == storage_bytes(new) == storage_bytes(whole)
    )
