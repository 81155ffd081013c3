"""A recurrent cell over a sequence, as a chain of stretches of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowtide.blocks.block.tensor_spec import State, as_state
from lowtide.blocks.chain import PlannedBlocks
from lowtide.blocks.policy import PLANNING
from lowtide.errors import InvalidInputError, InvalidModelError, InvalidOptionError
from lowtide.plan.core.result import Plan
from lowtide.settings import Settings

_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
Output = Callable[..., Tensor] | str | None


class Unrolled(nn.Module):
    """A cell, a stack of cells or a step function, run over the time steps of a sequence within a budget."""

    _time: _Stretch

    def __init__(
        self,
        step: Callable[..., Any] | Sequence[nn.Module],
        settings: Settings,
        *,
        chunk: int | None,
        output: Output,
        batch_first: bool,
        verify: bool = False,
    ) -> None:
        super().__init__()
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
            raise InvalidOptionError(f"chunk={chunk!r} is not a number of time steps of at least 1.")
        if not (output is None or output == "first" or callable(output)):
            raise InvalidOptionError(f'output={output!r} is not "first", None or a function of the state.')
        time = _Stretch(step, output)
        # The cells are a part of this module under one name only.
        self.__dict__["_time"] = time
        self.step = time.step
        self._settings, self._chunk, self._batch_first, self._verify = settings, chunk, batch_first, verify
        self._chains: dict[int, PlannedBlocks] = {}

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far."""
        return [plan for chain in self._chains.values() for plan in chain.plans]

    def forward(self, sequence: Tensor, state: Any = None) -> tuple[Tensor | None, Any]:
        """Return the outputs of all time steps, or None if there are none, and the state after the last.

        Args:
            sequence: The inputs, time first, or batch first if so chosen.
            state: The state before the first step, a tensor or a tuple; zeros by default for cells.
        """
        if not isinstance(sequence, Tensor) or sequence.dim() < 2 or not sequence.numel():
            raise InvalidInputError("The sequence must be a tensor with a time and a batch dimension, and not empty.")
        if self._batch_first:
            sequence = sequence.transpose(0, 1)
        steps = sequence.shape[0]
        chunk = self._chunk or -(-steps // PLANNING.stretches)
        parts = torch.split(sequence, chunk)
        if len(parts) not in self._chains:
            names = [f"steps {k * chunk}-{min((k + 1) * chunk, steps) - 1}" for k in range(len(parts))]
            self._chains[len(parts)] = PlannedBlocks(
                names, [self._time] * len(parts), self._settings, emits=self._time.emits, verify=self._verify
            )
        begun = self._time.initial(sequence) if state is None else self._time.flat(state)
        found = self._chains[len(parts)](begun, parts, {}, training=self.training)
        outputs = None
        if self._time.emits:
            found, rows = found
            outputs = torch.cat([row for (row,) in rows])
            outputs = outputs.transpose(0, 1) if self._batch_first else outputs
        return outputs, self._time.shaped(as_state(found, "The last step"))


class _Stretch(nn.Module):
    """One stretch of time as a block: the state goes in and comes out, and the stretch's inputs come beside it."""

    step: Callable[..., Any]

    def __init__(self, step: Callable[..., Any] | Sequence[nn.Module], output: Output) -> None:
        super().__init__()
        if isinstance(step, list | tuple | nn.ModuleList):
            step = nn.ModuleList(step)
            if not len(step) or not all(isinstance(cell, _CELLS) for cell in step):
                raise InvalidModelError("A stack of cells must be a list of LSTMCell, GRUCell and RNNCell modules.")
        elif not callable(step) or isinstance(step, type):
            raise InvalidModelError(
                f"{step!r:.80} cannot be unrolled; give an LSTMCell, a GRUCell, a list of cells, or a function "
                "step(x, *state) that returns the next state."
            )
        self.step = step
        cells = tuple(step) if isinstance(step, nn.ModuleList) else (step,) if isinstance(step, _CELLS) else ()
        self._cells = cast("tuple[nn.RNNCellBase, ...]", cells)
        self._output = output
        self.emits = 0 if output is None else 1

    def forward(self, *arguments: Any) -> State:
        """Return the state after the time steps of the last argument, then their outputs."""
        state, tops = arguments[:-1], []
        for x in arguments[-1].unbind(0):
            state = self._next(x, state)
            if self._output is not None:
                tops.append(self._top(state))
        return (*state, torch.stack(tops)) if tops else state

    def _next(self, x: Tensor, state: State) -> State:
        if not self._cells:
            return as_state(self.step(x, *state), "The step")
        after: list[Tensor] = []
        place = 0
        for cell in self._cells:
            if isinstance(cell, nn.LSTMCell):
                after += cell(x, (state[place], state[place + 1]))
                x = after[-2]
                place += 2
            else:
                x = cell(x, state[place])
                after.append(x)
                place += 1
        return tuple(after)

    def _top(self, state: State) -> Tensor:
        if callable(self._output):
            return self._output(*state)
        if not self._cells:
            return state[0]
        return state[-2] if isinstance(self._cells[-1], nn.LSTMCell) else state[-1]

    def initial(self, sequence: Tensor) -> State:
        """Return the state of zeros that cells begin with."""
        if not self._cells:
            raise InvalidInputError("A step function needs a state to begin with: pass state=.")
        sizes = [cell.hidden_size for cell in self._cells for _ in range(1 + isinstance(cell, nn.LSTMCell))]
        weight = self._cells[0].weight_hh
        return tuple(weight.new_zeros(sequence.shape[1], size) for size in sizes)

    def flat(self, state: Any) -> State:
        """Return a state as a flat tuple; cells of a stack may have theirs in a tuple of their own."""
        if isinstance(state, Tensor):
            return (state,)
        rows = [entry if isinstance(entry, tuple | list) else (entry,) for entry in state]
        return as_state(tuple(tensor for row in rows for tensor in row), "The state to begin with")

    def shaped(self, state: State) -> Any:
        """Return the state as a single tensor or a tuple, and for a stack of cells as a list with one entry each."""
        if isinstance(self.step, nn.ModuleList):
            rows, place = [], 0
            for cell in self._cells:
                size = 1 + isinstance(cell, nn.LSTMCell)
                rows.append(state[place] if size == 1 else tuple(state[place : place + size]))
                place += size
            return rows
        return state[0] if len(state) == 1 else state
