"""How training is spread over processes, as far as it must be known to plan for one of them without the others."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import InvalidOptionError

STRATEGIES = ("ddp", "fsdp2")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Training in several processes with an engine in its usual form.

    Attributes:
        strategy: "ddp" (DistributedDataParallel: every process has the whole model) or "fsdp2" (`fully_shard`:
            parameters, gradients and optimizer state are spread over processes).
        world_size: How many processes there are.
        copies: For "fsdp2", how many copies of the sharded model there are (HSDP); parameters are spread over
            `world_size / copies` processes.
        reshard_after_forward: For "fsdp2", whether layers let go of their unsharded parameters after forward; the model
            around them never does, as in PyTorch.
    """

    strategy: str
    world_size: int
    copies: int = 1
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        """Raise `InvalidOptionError` if this cannot be."""
        if self.strategy not in STRATEGIES:
            raise InvalidOptionError(f"strategy={self.strategy!r} is not known; there are {' and '.join(STRATEGIES)}.")
        _check_count("world_size", self.world_size)
        _check_count("copies", self.copies)
        if self.world_size % self.copies:
            raise InvalidOptionError(
                f"copies={self.copies} does not divide world_size={self.world_size}: every copy of the model is spread "
                "over equally many processes."
            )
        if self.strategy == "ddp" and (self.copies != 1 or not self.reshard_after_forward):
            raise InvalidOptionError(
                "copies and reshard_after_forward are options of fsdp2; with ddp every process has a copy of the model."
            )

    @staticmethod
    def parse(given: object) -> Parallel | None:
        """Return what a user gave: a `Parallel`, "fsdp2:8" for one, or None for training in one process."""
        if given is None or isinstance(given, Parallel):
            return given
        strategy, _, count = given.partition(":") if isinstance(given, str) else ("", "", "")
        if not count.strip().isdigit():
            raise InvalidOptionError(
                f'parallel={given!r:.80} is not a lowtide.Parallel, such as Parallel("fsdp2", 8), or "fsdp2:8".'
            )
        return Parallel(strategy.strip(), int(count))

    @property
    def shards(self) -> int:
        """Over how many processes parameters are spread."""
        return self.world_size // self.copies if self.is_sharded else 1

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are spread over processes."""
        return self.strategy == "fsdp2"

    def __str__(self) -> str:
        """Return the short form, with copies where there are several."""
        return f"{self.strategy}:{self.world_size}" + (f" in {self.copies} copies" if self.copies > 1 else "")


def _check_count(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise InvalidOptionError(f"{name}={number!r} is not a whole number of at least 1.")
