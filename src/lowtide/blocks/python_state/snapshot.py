"""Snapshots of what a block remembers in Python: attributes, lists, counters, closures, random generators.

A snapshot is taken before and after a run. If nothing has changed, both are the same object, which costs a few
comparisons of identity for every module. If something has, everything is followed again. Tensors are compared by
identity and version; their contents are not copied.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.blocks import refusals as refused
from lowtide.blocks.python_state.reachable import Path, Reachable, named
from lowtide.errors import InvalidModelError
from lowtide.pytorch.tensor_versions import version_of


class Snapshot:
    """What the things that a block can reach hold at one moment."""

    __slots__ = ("_held", "empty", "large", "opaque", "structure", "tensors", "versions")

    def __init__(self, found: Reachable) -> None:
        self.empty = found.empty
        self.structure = [(path, holder, holder.read()) for path, holder in found.structure]
        self._held = [(holder, holder.read()) for holder in found.holders]
        self._held += [(holder, known) for _, holder, known in self.structure]
        self.tensors: dict[int, tuple[Path, Tensor]] = found.tensors
        self.versions = {key: version_of(tensor) for key, (_, tensor) in found.tensors.items()}
        self.opaque = found.opaque
        self.large = found.large

    def holds(self) -> bool:
        """Return True if everything still holds what it held then."""
        if any(self.empty):
            return False
        return all(holder.same(known) for holder, known in self._held)

    def restore(self) -> None:
        """Make everything hold again what it held then."""
        for each in self.empty:
            if each:
                each.clear()
        for holder, known in self._held:
            if not holder.same(known):
                holder.write(known)

    def renewed(self) -> Snapshot:
        """Return the same with the present versions of tensors."""
        found = copy.copy(self)
        found.versions = {key: version_of(tensor) for key, (_, tensor) in self.tensors.items()}
        return found

    def overwritten(self) -> Path | None:
        """Return where the first tensor is that was changed in place since; None if there is none."""
        for key, (path, tensor) in self.tensors.items():
            if version_of(tensor) != self.versions[key]:
                return path
        return None

    def rebuilt(self) -> Path | None:
        """Return the module that has other parameters or submodules than then; None if there is none."""
        return next((path for path, holder, known in self.structure if not holder.same(known)), None)

    def new_tensors(self, before: Snapshot) -> list[tuple[Path, Tensor]]:
        """Return the tensors that were not there `before`."""
        return [found for key, found in self.tensors.items() if key not in before.tensors]


class PythonState:
    """The Python state of some blocks: read as a snapshot, restored from one."""

    __slots__ = ("_now", "_roots")

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = tuple(roots)
        self._now: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """Return what they remember now; the same object as before if nothing has changed."""
        now = self._now
        if now is None or not now.holds():
            now = Snapshot(Reachable(self._roots))
        elif now.tensors and now.overwritten() is not None:
            now = now.renewed()
        self._now = now
        return now

    def restore(self, snapshot: Snapshot) -> None:
        """Make them remember what they did at `snapshot`."""
        snapshot.restore()
        self._now = snapshot

    def forget(self) -> None:
        """Drop the last snapshot, which keeps what it holds alive."""
        self._now = None

    def forget_results(self) -> None:
        """Drop the last snapshot if it keeps results of a call alive, and with them what autograd has saved."""
        if self._now is not None and any(tensor.grad_fn is not None for _, tensor in self._now.tensors.values()):
            self._now = None


def why_not_repeatable(
    label: str, before: Snapshot, after: Snapshot, *, recorded: bool, known: bool
) -> InvalidModelError | None:
    """Return why a run that led from `before` to `after` could not be repeated; None if it could.

    Tensors that a run without gradients stores look as if they needed none. They are allowed if it is `known` from a
    run that was `recorded` that they do not.
    """
    if (path := before.rebuilt()) is not None:
        return refused.rebuilt(label, named(path))
    if (path := before.overwritten()) is not None:
        return refused.overwritten(label, named(path))
    for path, tensor in after.new_tensors(before) if after is not before else ():
        if tensor.requires_grad and not tensor.is_leaf:
            return refused.stored(label, named(path))
        if not (recorded or known) and tensor.is_floating_point():
            return refused.stored_late(label, named(path))
    return None
