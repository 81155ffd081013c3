"""All the memory that training takes, added up: what is always there, and the two moments that may be the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lowtide.errors import InvalidBudgetError, InvalidOptionError
from lowtide.graph.io import read_fields, read_int
from lowtide.text_table import text_table
from lowtide.units import format_bytes, parse_budget

# Tensors the size of a parameter that stay for each parameter, and how many such the update makes meanwhile.
_STATE = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}
_TEMPORARY = {"sgd": 0, "sgd-momentum": 0, "adam": 2, "adamw": 2}
# Adam counts the steps of every parameter in a float of its own.
_STEP_BYTES = {"sgd": 0, "sgd-momentum": 0, "adam": 4, "adamw": 4}

# Figures of training in several processes.
_OF_PROCESSES = frozenset({"bucket_bytes", "sharding_bytes", "ranks"})


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """What training takes, in bytes; gradients are taken to be freed after every update (`zero_grad`'s default).

    Attributes:
        parameter_bytes: Parameters.
        buffer_bytes: Buffers.
        batch_bytes: The arguments of the call.
        optimizer_bytes: What the optimizer keeps.
        gradient_bytes: Gradients of all parameters that are trained.
        step_bytes: Peak of forward and backward on top of all else but the gradients, which it includes.
        update_bytes: What the optimizer's update allocates and frees again.
        bucket_bytes: The buckets in which gradients are reduced over several processes, which always stay.
        sharding_bytes: Of the step, the most that is there because parameters are sharded: unsharded parameters, the
            buffers of gathering and reducing, and reduced gradients. Of a model that trains already, batch and
            optimizer are then not known.
        ranks: How many processes train, if there are several; the account is that of one of them.
    """

    parameter_bytes: int
    buffer_bytes: int
    batch_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    step_bytes: int = 0
    update_bytes: int = 0
    bucket_bytes: int = 0
    sharding_bytes: int = 0
    ranks: int = 0

    @property
    def resident_bytes(self) -> int:
        """What is there during the whole step."""
        model_bytes = self.parameter_bytes + self.buffer_bytes
        return model_bytes + self.batch_bytes + self.optimizer_bytes + self.bucket_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that is there at one moment: in forward and backward, or in the update."""
        return self.resident_bytes + max(self.step_bytes, self.gradient_bytes + self.update_bytes)

    def to_dict(self) -> dict[str, int]:
        """Return the figures by name, for JSON; those of several processes only where there are any."""
        return {name: size for name, size in asdict(self).items() if size or name not in _OF_PROCESSES}

    @staticmethod
    def from_dict(data: object) -> MemoryAccount:
        """Return the account that `data` describes; raise `InvalidGraphError` if it describes none."""
        names = {field.name for field in fields(MemoryAccount)}
        found = read_fields(data, "The account", names - _OF_PROCESSES, set(_OF_PROCESSES))
        return MemoryAccount(**{name: read_int(found[name], name) for name in sorted(found)})

    def lines(self) -> list[str]:
        """Return the account as a table."""
        in_update = self.gradient_bytes + self.update_bytes > self.step_bytes
        moment = (
            ("gradients and the optimizer's update", self.gradient_bytes + self.update_bytes)
            if in_update
            else ("forward and backward, gradients included", self.step_bytes)
        )
        is_all = not self.sharding_bytes or self.batch_bytes or self.optimizer_bytes
        rows = [
            ("parameters", self.parameter_bytes),
            ("buffers", self.buffer_bytes),
            *([("batch", self.batch_bytes), ("optimizer state", self.optimizer_bytes)] if is_all else []),
            *([("gradient buckets", self.bucket_bytes)] if self.bucket_bytes else []),
            moment,
            *self._sharding_rows(),
            ("peak of training" if is_all else "peak without batch and optimizer", self.peak_bytes),
        ]
        title = f"memory of each of {self.ranks} processes" if self.ranks else "memory"
        return text_table((title, "bytes", ""), [(name, str(size), format_bytes(size)) for name, size in rows])

    def _sharding_rows(self) -> list[tuple[str, int]]:
        words = "of that at most, unsharded parameters and buffers"
        return [(words, self.sharding_bytes)] if self.sharding_bytes else []

    def __str__(self) -> str:
        """Return the account as a table."""
        return "\n".join(self.lines())


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """What an optimizer needs: bytes that stay, and bytes that its update allocates and frees again."""

    state_bytes: int
    update_bytes: int


def optimizer_memory(optimizer: str | int, parameters: Sequence[int], *, together: bool) -> OptimizerMemory:
    """Return what `optimizer` needs to train parameters of these sizes.

    Args:
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw", as in `torch.optim`; or the bytes of its state as a number
            or a size such as "2GiB".
        parameters: Bytes of every parameter that is trained.
        together: Whether all parameters are updated at once, as on CUDA, or one after the other, as on the CPU.
    """
    if isinstance(optimizer, int) and not isinstance(optimizer, bool):
        if optimizer < 0:
            raise InvalidOptionError(f"optimizer={optimizer} is below zero; it must be the bytes of its state.")
        return OptimizerMemory(optimizer, 0)
    if not isinstance(optimizer, str):
        raise InvalidOptionError(f"optimizer={optimizer!r:.80} is not {_allowed()}.")
    name = optimizer.strip().lower().replace("_", "-")
    if name in _STATE:
        total, largest = sum(parameters), max(parameters, default=0)
        # Updated at once, the roots of all second moments exist together; each quotient then takes the root's place.
        update = min(1, _TEMPORARY[name]) * total if together else _TEMPORARY[name] * largest
        return OptimizerMemory(_STATE[name] * total + _STEP_BYTES[name] * len(parameters), update)
    try:
        size = parse_budget(optimizer).bytes
    except InvalidBudgetError:
        size = None
    if size is None:
        raise InvalidOptionError(f"optimizer={optimizer!r} is not {_allowed()}.")
    return OptimizerMemory(size, 0)


def parse_memory(memory: int | str, what: str = "memory") -> int:
    """Return `memory` in bytes; a share or "auto" has nothing to refer to here."""
    size = parse_budget(memory).bytes
    if size is None:
        raise InvalidBudgetError(f'{what}={memory!r} is not a size; give bytes, or a size such as "24GiB".')
    return size


def account_of(data: Any) -> MemoryAccount | None:
    """Return the account in a plan file's field, or None if there is none."""
    return None if data is None else MemoryAccount.from_dict(data)


def _allowed() -> str:
    return f'{", ".join(map(repr, _STATE))}, or the bytes of its state such as 2000000 or "2GiB"'
