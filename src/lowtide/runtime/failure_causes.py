"""Why a training call could not be planned or run: the user's own error, or the true cause with the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from lowtide.capture.source_lines import is_inside, user_line
from lowtide.errors import CaptureError, LowtideError, UnsupportedBackwardError, warn
from lowtide.pytorch.autograd_graph import saved_tensors_hook_module
from lowtide.pytorch.compiler.tracing import error_of_backend, is_of_compiler, is_untraceable
from lowtide.pytorch.dispatch_modes import in_dispatch_mode, in_forward_ad, in_func_transform, mode_names
from lowtide.pytorch.nested import map_tensors, tensor_leaves
from lowtide.runtime.compiled_entry import Entry
from lowtide.runtime.input_checks import check_devices, refuse_types
from lowtide.runtime.log_noise import without_compiler_warnings
from lowtide.runtime.verify import ModelState, fresh

_PLAIN_TENSORS = {torch.Tensor, nn.Parameter, nn.Buffer}
_ADVICE = (
    "lowtide.chain and lowtide.chain_layers(model, budget=...) plan such a model layer by layer, without tracing it."
)


def lowtide_cause(error: BaseException) -> LowtideError | None:
    """Return the lowtide error that `error` is or was caused by, if there is one."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        if isinstance(current, LowtideError):
            return current
        seen.add(id(current))
        pending += [error_of_backend(current), current.__cause__, current.__context__]
    return None


def in_unusual_context() -> bool:
    """Return True inside a transform, a dispatch mode, forward-mode AD or hooks; takes a microsecond."""
    return in_dispatch_mode() or in_func_transform() or in_forward_ad() or saved_tensors_hook_module() is not None


def refuse_context(model: nn.Module | None, args: Any, kwargs: Any) -> None:
    """Raise an error of ours if the call is made in a way that planned calls do not support."""
    tensors = tensor_leaves((args, kwargs))
    tensors += [] if model is None else [*model.parameters(), *model.buffers()]
    refuse_types({type(tensor) for tensor in tensors} - _PLAIN_TENSORS)
    if in_func_transform():
        raise UnsupportedBackwardError(
            "A wrapped model was called inside a transform of torch.func (grad, vmap, jvp, ...), which needs the "
            "derivatives of every op; a planned graph has its gradient alone. Call the model outside of it and "
            "loss.backward(), or lowtide.unwrap(model) for this part."
        )
    if in_forward_ad() and any(_is_dual(tensor) for tensor in tensors):
        raise UnsupportedBackwardError(
            "A wrapped model was called with dual tensors (forward-mode AD), and a planned graph has no forward "
            "derivative. lowtide.unwrap(model) for this part, or use backward."
        )
    _check_saved_tensors_hooks()
    modes = mode_names()
    if modes:
        raise CaptureError(
            f"The call was made inside {', '.join(modes)}, which wants to see every op by itself; the compiler traces "
            "nothing there, so the model would train without a budget. Leave its `with` block, or call a copy of the "
            "model that is not wrapped inside it."
        )
    check_devices(tensors)


def _check_saved_tensors_hooks() -> None:
    """Raise where `torch.utils.checkpoint` wants to run the call again; warn of hooks that may change values."""
    where = saved_tensors_hook_module()
    if where == "torch.utils.checkpoint":
        raise UnsupportedBackwardError(
            "A wrapped model was called inside torch.utils.checkpoint, which runs it again in backward and ends that "
            "run half way; a planned graph recomputes by itself and runs as a whole. Call it without checkpoint: the "
            "budget decides what is recomputed."
        )
    if where is not None and where != "torch.autograd.graph" and not where.startswith("lowtide."):
        warn(
            "A wrapped model was called inside torch.autograd.graph.saved_tensors_hooks. The hooks see what the plan "
            "keeps, which is not what plain training keeps: if they change values, gradients differ from it."
        )


def _is_dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def eager_error(plain: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Exception | None:
    """Return the error that the call raises without any plan, or None.

    What it would save for backward is dropped, so that it needs little memory, and it leaves no trace.
    """
    state = ModelState(model)
    args, kwargs = map_tensors(fresh, (args, kwargs))
    try:
        # Not without gradients: a model may look whether its tensors need them.
        with torch.autograd.graph.saved_tensors_hooks(_drop, _ask_for):
            plain(*args, **kwargs)
    except _DroppedError:
        return None
    except Exception as error:
        return error
    finally:
        state.restore()
    return None


class _DroppedError(Exception):
    """Raised where the call reads what was dropped: it is differentiated inside."""


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing for backward."""


def _ask_for(nothing: None) -> torch.Tensor:
    """Say that nothing was kept."""
    raise _DroppedError


def is_users_own(error: BaseException) -> bool:
    """Return True if the user's code raised `error`, and not PyTorch's compiler or a planned graph below it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and not is_inside(frames[-1].f_code.co_filename)


def nothing_captured(plain: Callable[..., Any], args: Any, kwargs: Any, noted: LowtideError | None) -> LowtideError:
    """Return the error for a call of which nothing could be captured, with the reason.

    Args:
        plain: What was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        noted: What went wrong behind the tracer, if anything did.
    """
    if noted is not None:
        return noted
    reason = _first_break(plain, args, kwargs) or (
        "its Python values change with every call, so that the most variants that are kept have been compiled "
        "(TORCH_LOGS=recompiles shows which)"
    )
    return CaptureError(
        f"Nothing of this call could be captured, so it would train without a budget: {reason}. {_ADVICE}"
    )


def _first_break(plain: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Return why and where tracing the call as one graph fails, or None if it does not."""

    def stop(*_: Any) -> Any:
        raise _TracedError

    entry = Entry(plain, stop, whole=True)
    try:
        with without_compiler_warnings():
            entry(*args, **kwargs)
    except _TracedError:
        return None
    except Exception as error:
        if is_untraceable(error):
            return in_words(error)
        inner = getattr(error, "inner_exception", None) or error.__cause__
        return None if isinstance(inner, _TracedError) else f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        entry.revive()
    return None


def failed_here(error: Exception) -> LowtideError:
    """Return the error for a call that fails where plain training does not."""
    if is_of_compiler(error):
        found = CaptureError(f"The model could not be captured: {in_words(error)}. {_ADVICE}")
    else:
        place = user_line("", traceback.extract_tb(error.__traceback__))
        found = CaptureError(
            f"The planned step failed with {type(error).__name__}: {error}{f', at {place}' if place else ''}; plain "
            "training does not. Please report the model; lowtide.unwrap(model) trains it plainly meanwhile."
        )
    found.__cause__ = error
    return found


class _TracedError(Exception):
    """Ends a trace that has come to its end."""


def in_words(error: BaseException) -> str:
    """Return what the compiler says it cannot trace, in one line with the place in the user's code."""
    place = user_line(str(error), getattr(error, "real_stack", None))
    inner = error_of_backend(error)
    if inner is not None:
        return f"{type(inner).__name__}: {inner}".splitlines()[0] + (f", at {place}" if place else "")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = lines[0] if lines else type(error).__name__
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{what}{f' ({why.rstrip(chr(46))})' if why else ''}{f', at {place}' if place else ''}"
