"""What a block must not do between its first run and a repeated one, said to its author."""

from __future__ import annotations

from lowtide.blocks.python_state.snapshot import Path, Snapshot, named
from lowtide.errors import InvalidModelError


def of_run(label: str, before: Snapshot, after: Snapshot, *, recorded: bool, known: bool) -> InvalidModelError | None:
    """Return why a run that led from `before` to `after` could not be repeated; None if it could.

    Tensors that a run without gradients stores look as if they needed none; they are let pass if it is `known` from a
    run that was `recorded` that they do not.
    """
    if (path := before.rebuilt()) is not None:
        return rebuilt(label, path)
    if (path := before.overwritten()) is not None:
        return overwritten(label, path)
    for path, tensor in after.new_tensors(before) if after is not before else ():
        if tensor.requires_grad and not tensor.is_leaf:
            return stored(label, path)
        if not (recorded or known) and tensor.is_floating_point():
            return stored_late(label, path)
    return None


def rebuilt(label: str, path: Path) -> InvalidModelError:
    """Return the error about a block that makes parameters or modules."""
    return InvalidModelError(
        f"{label} adds, replaces or removes parameters or submodules of {_module(path)} while it runs. A block that is "
        "run again would make others. Make them in __init__, or run the block once before it is chained."
    )


def overwritten(label: str, path: Path) -> InvalidModelError:
    """Return the error about a block that writes over a tensor that is not a buffer."""
    return InvalidModelError(
        f"{label} changes the tensor {named(path)!r} in place, so that a repeated run would begin with other contents. "
        "Make it a buffer (register_buffer), or assign a new tensor instead."
    )


def stored(label: str, path: Path) -> InvalidModelError:
    """Return the error about a block that stores a tensor with a gradient."""
    return InvalidModelError(
        f"{label} stores a tensor that needs a gradient in {named(path)!r}. Whoever reads it there would get no "
        "gradient, or a wrong one: the block's own graph is not part of the chain's. Store tensor.detach(), or return "
        "the tensor (lowtide.chain(..., emits=1) hands it to the caller)."
    )


def stored_late(label: str, path: Path) -> InvalidModelError:
    """Return the error about a block that has begun to store tensors."""
    return InvalidModelError(
        f"{label} stores a tensor in {named(path)!r}, but did not when it was looked at, so it is not known whether "
        "the tensor needs a gradient. Store one in every call or in none, or return it (lowtide.chain(..., emits=1))."
    )


def opaque(label: str, path: Path) -> InvalidModelError:
    """Return the error about a block with an iterator."""
    return InvalidModelError(
        f"{label} has an iterator in {named(path)!r}, which cannot be set back for a repeated run. Keep a list and the "
        "number of the next entry instead, or take the iterator out of the block."
    )


def large(label: str, path: Path) -> InvalidModelError:
    """Return the error about a block that changes something large."""
    return InvalidModelError(
        f"{label} changes {named(path)!r} while it runs, which is too large to be set back for every repeated run. "
        "Keep what changes in something smaller (up to 10,000 entries, or 1 MiB), or in a buffer."
    )


def parameter(label: str, name: str) -> InvalidModelError:
    """Return the error about a block that changes its parameters."""
    return InvalidModelError(
        f"{label} changes its parameter {name!r} while it runs, so that a repeated run would begin with other weights. "
        "Change it after optimizer.step() or in a block of its own before the chain."
    )


def state(label: str) -> InvalidModelError:
    """Return the error about a block that has begun to write over its input."""
    return InvalidModelError(
        f"{label} changes its input in place, but did not when it was looked at. Its input is kept for repeated runs; "
        "let it work on a copy, or change its input in every call."
    )


def drawn() -> InvalidModelError:
    """Return the error about random numbers that nobody expected."""
    return InvalidModelError(
        "A block of the chain drew from Python's or numpy's global random numbers, but none did when they were looked "
        "at, so a repeated run would get other numbers. Draw in every call, or use PyTorch's random numbers."
    )


def argument(label: str) -> InvalidModelError:
    """Return the error about a block that changes its arguments."""
    return InvalidModelError(
        f"{label} changes a list or a dictionary that it was given as an argument, which is a copy here: the caller "
        "would not see it. Keep what changes in the block itself, or return it."
    )


def _module(path: Path) -> str:
    return f"{named(path)!r}" if path else "itself"
