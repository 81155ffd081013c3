"""Under `verify`, compares what recomputation reads with what forward read, by checksums.

Autograd notices changes in place, but not those made through `.data` or NumPy between forward and backward. A
recomputation would then read other contents than the first run, and differ from eager unnoticed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.program import Program
from lowtide.errors import VerificationError
from lowtide.lower.emit_graphs import Frame
from lowtide.schedule.steps import Schedule


def checksum(tensor: Tensor) -> int:
    """Return a number that other contents would almost surely not give."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


class InputChecksums:
    """Compares the inputs that recomputations of one plan read with those of the forward run before."""

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
        self._sums: list[int] = []

    def forward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Return the result of a forward run."""
        self._sums = [checksum(args[position]) for position, _, _ in self._inputs]
        return run(args)

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Return the result of a backward run; raise `VerificationError` if what it recomputes from has changed."""
        for (_, place, name), wanted in zip(self._inputs, self._sums, strict=False):
            if checksum(args[place]) != wanted:
                raise VerificationError(
                    f"An input of the graph ({name}) was changed between forward and backward in a way that autograd "
                    "does not notice (through .data or NumPy), and a recomputation reads it. Change parameters and "
                    "inputs after backward, or in place under torch.no_grad(), which raises where it matters."
                )
        return run(args)
