"""Whether a run of a unit for its backward only is worth ending early, and what such a run costs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lowtide.blocks.block.autograd_piece import Kept
from lowtide.blocks.block.position import Arguments, Position
from lowtide.blocks.block.tensor_spec import State
from lowtide.blocks.profile.clock import least, now, seconds_of
from lowtide.errors import InvalidModelError
from lowtide.measure import run_phases

# What leaving blanks and filling them takes on a slow processor: for a run, for every blank, and as a share of a run,
# for a first run that leaves blanks takes longer than one without gradients by up to a tenth.
_RUN_SECONDS, _BLANK_SECONDS, _SHARE = 2e-5, 5e-6, 0.15
# Numbers in formulas, which autograd keeps as tensors that no hook sees.
_LITTLE_BYTES = 256


@dataclass(frozen=True)
class Stop:
    """What a run that ends early is like.

    Attributes:
        seconds_saved: How much less time it takes than a whole run.
        held_bytes: What it leaves behind for backward.
        most_bytes: The most bytes during it.
    """

    seconds_saved: float
    held_bytes: int
    most_bytes: int


def measure_stop(
    position: Position, state: State, arguments: Arguments, *, result_bytes: int, seconds: float
) -> Stop | None:
    """Return what a run takes that ends when it has made what backward reads; None if there is nothing to gain.

    That is so if autograd holds more than can be left blank, as functions do that keep tensors in their own way; if the
    unit saves other tensors in its second run; or if what is not computed takes no longer than leaving blanks.
    `result_bytes` and `seconds` are those of a whole run.
    """
    trial = _Trial(position, state, arguments)
    try:
        first, _, second = run_phases([trial.first, trial.forget, trial.second], state[0].device)
    except InvalidModelError:
        return None
    if first[1] > result_bytes + _LITTLE_BYTES:
        return None
    saved = trial.seconds_saved()
    if saved < _RUN_SECONDS + trial.blanks * _BLANK_SECONDS + _SHARE * seconds:
        return None
    return Stop(saved, second[1], second[0])


@dataclass
class _Trial:
    """A run that leaves blanks, and one that fills them."""

    position: Position
    state: State
    arguments: Arguments
    results: State = ()
    kept: Kept = field(init=False)

    def first(self) -> None:
        """Run it and leave blanks."""
        self.results, self.kept = self.position.run_blank(self.state, self.arguments)

    def forget(self) -> None:
        """Forget the results."""
        self.results = ()

    def second(self) -> None:
        """Fill the blanks."""
        with self.position.again(self.position.stash()):
            self.position.fill(self.kept, self.state, self.arguments)

    @property
    def blanks(self) -> int:
        """How many blanks are to be filled."""
        return self.kept.blanks.number if self.kept.blanks is not None else 0

    def seconds_saved(self) -> float:
        """Return the least time from where a run would end to where it ends by itself."""
        device = self.state[0].device
        if not self.blanks:
            return least(lambda: seconds_of(lambda: self.position.run_kept(self.state, self.arguments), device))
        return least(lambda: self._rest(device))

    def _rest(self, device: torch.device) -> float:
        filled: list[float] = []
        with self.position.again(self.position.stash()):
            self.position.fill(self.kept, self.state, self.arguments, done=lambda: filled.append(now(device)))
        return now(device) - filled[0]
