"""Under `verify`, compares what recomputation reads with what forward read, by checksums.

Autograd notices changes in place, but not those made through `.data` or NumPy between forward and backward. A
recomputation would then read other contents than the first run, and differ from eager unnoticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.program import Program
from lowtide.errors import VerificationError
from lowtide.lower.chunks import Part
from lowtide.lower.emit_graphs import Frame
from lowtide.pytorch.compiler.joint_graph import Run
from lowtide.schedule.steps import Schedule


def checksum(tensor: Tensor) -> int:
    """Return a number that other contents would almost surely not give."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


# Sums of so many forward runs are kept whose backward may still come.
_MOST_RUNS = 4096


class InputChecksums:
    """Compares the inputs that recomputations of one plan read with those of their forward run.

    Runs are told apart by where their inputs lie: equal layers share a plan, and run one after the other.
    """

    def __init__(self, program: Program, schedule: Schedule, frame: Frame) -> None:
        again = [op for op in schedule.backward if op in set(schedule.forward)]
        read = {program.values.get(node) for op in again for node in program.reads(op, replay=True)}
        places = {value: place for place, value in enumerate(frame.saved)}
        primals = enumerate(program.values.get(node) for node in program.primals)
        # Position among the arguments of forward, among those of backward, and the name of the input.
        self._inputs = [
            (position, places[value], program.graph.values[value].name)
            for position, value in primals
            if value in read and value in places
        ]
        self._sums: dict[tuple[int, ...], list[int]] = {}

    def forward(self, run: Run, args: list[Any]) -> Any:
        """Return the result of a forward run."""
        tensors = [args[position] for position, _, _ in self._inputs]
        place = _place(tensors)
        self._sums.pop(place, None)
        self._sums[place] = [checksum(tensor) for tensor in tensors]
        if len(self._sums) > _MOST_RUNS:
            del self._sums[next(iter(self._sums))]
        return run(args)

    def begin_backward(self, args: Sequence[Any]) -> None:
        """Raise `VerificationError` if what a backward run will recompute from has changed."""
        tensors = [args[place] for _, place, _ in self._inputs]
        known = self._sums.get(_place(tensors), [None] * len(tensors))
        for (_, _, name), tensor, wanted in zip(self._inputs, tensors, known, strict=True):
            if checksum(tensor) != wanted:
                raise VerificationError(
                    f"An input of the graph ({name}) was changed between forward and backward in a way that autograd "
                    "does not notice (through .data or NumPy), and a recomputation reads it. Change parameters and "
                    "inputs after backward, or in place under torch.no_grad(), which raises where it matters."
                )

    def backward(self, run: Run, args: list[Any], part: Part) -> Any:
        """Return the result of a part of a backward run."""
        del part
        return run(args)


def _place(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
