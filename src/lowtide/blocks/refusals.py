"""What a chain refuses, said to the author of the model: one function for each reason, which returns the error.

A block must do the same in every run from the same input, because it is run again during backward. The first group is
about blocks that do not. The second is about calls and modules that a chain cannot take at all.
"""

from __future__ import annotations

from lowtide.blocks.policy import PYTHON_STATE
from lowtide.errors import InvalidInputError, InvalidModelError, UnsupportedBackwardError


def rebuilt(label: str, module: str) -> InvalidModelError:
    """Return the error about a block that makes parameters or modules in `module`; empty for the block itself."""
    return InvalidModelError(
        f"{label} adds, replaces or removes parameters or submodules of {repr(module) if module else 'itself'} while "
        "it runs. A block that is run again would make others. Make them in __init__, or run the block once before it "
        "is chained."
    )


def overwritten(label: str, path: str) -> InvalidModelError:
    """Return the error about a block that writes over a tensor that is not a buffer."""
    return InvalidModelError(
        f"{label} changes the tensor {path!r} in place, so that a repeated run would begin with other contents. "
        "Make it a buffer (register_buffer), or assign a new tensor instead."
    )


def stored(label: str, path: str) -> InvalidModelError:
    """Return the error about a block that stores a tensor with a gradient."""
    return InvalidModelError(
        f"{label} stores a tensor that needs a gradient in {path!r}. Whoever reads it there would get no "
        "gradient, or a wrong one: the block's own graph is not part of the chain's. Store tensor.detach(), or return "
        "the tensor (lowtide.chain(..., emits=1) hands it to the caller)."
    )


def stored_late(label: str, path: str) -> InvalidModelError:
    """Return the error about a block that has begun to store tensors."""
    return InvalidModelError(
        f"{label} stores a tensor in {path!r}, but did not when it was profiled, so it is not known whether "
        "the tensor needs a gradient. Store one in every call or in none, or return it (lowtide.chain(..., emits=1))."
    )


def opaque(label: str, path: str) -> InvalidModelError:
    """Return the error about a block with an iterator."""
    return InvalidModelError(
        f"{label} has an iterator in {path!r}, which cannot be set back for a repeated run. Keep a list and the "
        "number of the next entry instead, or take the iterator out of the block."
    )


def large(label: str, path: str) -> InvalidModelError:
    """Return the error about a block that changes something large."""
    return InvalidModelError(
        f"{label} changes {path!r} while it runs, which is too large to be set back for every repeated run. "
        f"Keep what changes in something smaller (up to {PYTHON_STATE.entries:,} entries, or "
        f"{PYTHON_STATE.array_bytes >> 20} MiB), or in a buffer."
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
        f"{label} changes its input in place, but did not when it was profiled. Its input is kept for repeated runs; "
        "let it work on a copy, or change its input in every call."
    )


def drawn() -> InvalidModelError:
    """Return the error about random numbers of Python or numpy that no block drew when it was profiled."""
    return InvalidModelError(
        "A block of the chain drew from Python's or numpy's global random numbers, but none did when they were "
        "profiled, so a repeated run would get other numbers. Draw in every call, or use PyTorch's random numbers."
    )


def argument(label: str) -> InvalidModelError:
    """Return the error about a block that changes its arguments."""
    return InvalidModelError(
        f"{label} changes a list or a dictionary that it was given as an argument, which is a copy here: the caller "
        "would not see it. Keep what changes in the block itself, or return it."
    )


def function_transform() -> UnsupportedBackwardError:
    """Return the error about a call inside a transform of torch.func."""
    return UnsupportedBackwardError(
        "A chain was called in training inside a transform of torch.func (grad, vjp, jvp, vmap, ...), which cannot "
        "go through it: it recomputes in a backward of its own. Use loss.backward() or torch.autograd.grad, or "
        "transform a function that calls the blocks one after the other."
    )


def forward_mode() -> UnsupportedBackwardError:
    """Return the error about a call that asks for derivatives in forward mode."""
    return UnsupportedBackwardError(
        "A chain was called in training inside torch.autograd.forward_ad.dual_level(); it has no derivatives in "
        "forward mode. Call the blocks one after the other there, or put the chain in eval mode."
    )


def cached_parametrization() -> InvalidModelError:
    """Return the error about a call inside torch.nn.utils.parametrize.cached()."""
    return InvalidModelError(
        "A chain with parametrised modules was called in training inside torch.nn.utils.parametrize.cached(). "
        "Repeated runs would read weights of the first one, with its graph. Leave cached() out around the chain."
    )


def input_kind(what: str, kind: str) -> InvalidInputError:
    """Return the error about an input that is sparse or of a class of its own."""
    return InvalidInputError(
        f"{what} is {kind}; a chain takes dense tensors of the class torch.Tensor, for only those come out "
        "of it as they would without it. Convert it: tensor.as_subclass(torch.Tensor), or tensor.to_dense()."
    )


def result_kind(label: str, kind: str) -> InvalidModelError:
    """Return the error about a block that returns a sparse tensor or one of a class of its own."""
    return InvalidModelError(
        f"{label} returned {kind}; a block of a chain returns dense tensors of the "
        "class torch.Tensor. Convert it: tensor.as_subclass(torch.Tensor), or tensor.to_dense()."
    )


def script_module(name: str) -> InvalidModelError:
    """Return the error about a module of TorchScript."""
    return InvalidModelError(
        f"The chain has a {name} of TorchScript, which changes its code, and with it the last "
        "bits of its results, in its first few runs. Use the plain module."
    )


def lazy_parameter(name: str) -> InvalidModelError:
    """Return the error about a parameter without a shape."""
    return InvalidModelError(
        f"{name} has no shape yet: a lazy module gets it in its first run. Run the chain once without gradients "
        "(with torch.no_grad(): model(x)) before the optimizer is made and training begins."
    )


def sharded_module(kind: str) -> InvalidModelError:
    """Return the error about a block that fully_shard was applied to, or a part of it."""
    return InvalidModelError(
        f"A block of the chain is or has a {kind}, which fully_shard manages: its parameters come and go in hooks, and "
        "a repeated run would gather them on this rank alone. Use lowtide.wrap(model, budget=...), which makes every "
        "sharded module a block of the step."
    )


def wrapped_parameter(name: str, kind: str) -> InvalidModelError:
    """Return the error about a parameter that is made of other tensors."""
    return InvalidModelError(
        f"{name} is a {kind}, not a plain tensor. Chains of sharded or quantised modules are not "
        "supported; use plain parameters."
    )
