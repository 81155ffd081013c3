"""Why a training call could not be planned or run: the user's own error, or the true cause with the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported, UserError
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.errors import CaptureError, LowtideError, UnsupportedBackwardError, warn
from lowtide.run.backend import check_devices, refuse_types
from lowtide.run.entry import Entry
from lowtide.run.noise import quiet_warnings
from lowtide.run.places import is_inside, user_line
from lowtide.run.verify import ModelState, fresh

_PLAIN_TENSORS = {torch.Tensor, nn.Parameter, nn.Buffer}
_ADVICE = (
    "lowtide.chain and lowtide.chain_layers(model, budget=...) plan such a model layer by layer, without tracing it."
)


def is_unusual() -> bool:
    """Whether the call is made inside a transform, a dispatch mode, forward-mode AD or hooks; takes a microsecond."""
    inside_mode = torch._C._len_torch_dispatch_stack() or peek_interpreter_stack() is not None
    return bool(inside_mode) or forward_ad._current_level >= 0 or _top_saved_tensors_default_hooks(True) is not None


def refuse_context(model: nn.Module | None, args: Any, kwargs: Any) -> None:
    """Raise an error of ours if the call is made in a way that planned calls do not support."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors += [] if model is None else [*model.parameters(), *model.buffers()]
    refuse_types({type(tensor) for tensor in tensors} - _PLAIN_TENSORS)
    if peek_interpreter_stack() is not None:
        raise UnsupportedBackwardError(
            "A wrapped model was called inside a transform of torch.func (grad, vmap, jvp, ...), which needs the "
            "derivatives of every op; a planned graph has its gradient alone. Call the model outside of it and "
            "loss.backward(), or lowtide.unwrap(model) for this part."
        )
    if forward_ad._current_level >= 0 and any(_is_dual(tensor) for tensor in tensors):
        raise UnsupportedBackwardError(
            "A wrapped model was called with dual tensors (forward-mode AD), and a planned graph has no forward "
            "derivative. lowtide.unwrap(model) for this part, or use backward."
        )
    _look_at_saved_tensors_hooks()
    modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    if modes:
        raise CaptureError(
            f"The call was made inside {', '.join(modes)}, which wants to see every op by itself; the compiler traces "
            "nothing there, so the model would train without a budget. Leave its `with` block, or call a copy of the "
            "model that is not wrapped inside it."
        )
    check_devices(tensors)


def _look_at_saved_tensors_hooks() -> None:
    """Raise where `torch.utils.checkpoint` wants to run the call again; warn of hooks that may change values."""
    hooks = _top_saved_tensors_default_hooks(True)
    where = "" if hooks is None else str(getattr(hooks[0], "__module__", "?"))
    if where == "torch.utils.checkpoint":
        raise UnsupportedBackwardError(
            "A wrapped model was called inside torch.utils.checkpoint, which runs it again in backward and ends that "
            "run half way; a planned graph recomputes by itself and runs as a whole. Call it without checkpoint: the "
            "budget decides what is recomputed."
        )
    if where and where != "torch.autograd.graph" and not where.startswith("lowtide."):
        warn(
            "A wrapped model was called inside torch.autograd.graph.saved_tensors_hooks. The hooks see what the plan "
            "keeps, which is not what plain training keeps: if they change values, gradients differ from it."
        )


def _is_dual(tensor: torch.Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def eager_error(plain: Callable[..., Any], model: nn.Module | None, args: Any, kwargs: Any) -> Exception | None:
    """Return the error that the call raises without any plan, or None.

    What it would save for backward is dropped, so that it needs little memory, and it leaves no trace.
    """
    state = ModelState(model)
    args, kwargs = pytree.tree_map_only(torch.Tensor, fresh, (args, kwargs))
    try:
        # Not without gradients: a model may look whether its tensors need them.
        with torch.autograd.graph.saved_tensors_hooks(_drop, _ask_for):
            plain(*args, **kwargs)
    except _DroppedError:
        return None
    except Exception as error:
        return error
    finally:
        state.restore(model)
    return None


class _DroppedError(Exception):
    """Raised where the call reads what was dropped: it is differentiated inside."""


def _drop(tensor: torch.Tensor) -> None:
    """Keep nothing for backward."""


def _ask_for(nothing: None) -> torch.Tensor:
    """Say that nothing was kept."""
    raise _DroppedError


def is_users_own(error: BaseException) -> bool:
    """Whether `error` was raised by the user's code itself and not below PyTorch's compiler or a planned graph."""
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
        with quiet_warnings():
            entry(*args, **kwargs)
    except _TracedError:
        return None
    except (Unsupported, UserError) as error:
        return in_words(error)
    except Exception as error:
        inner = getattr(error, "inner_exception", None) or error.__cause__
        return None if isinstance(inner, _TracedError) else f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        entry.revive()
    return None


def failed_here(error: Exception) -> LowtideError:
    """Return the error for a call that fails where plain training does not."""
    if isinstance(error, TorchDynamoException):
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
    if isinstance(error, BackendCompilerFailed):
        inner, place = error.inner_exception, user_line(str(error), getattr(error, "real_stack", None))
        return f"{type(inner).__name__}: {inner}".splitlines()[0] + (f", at {place}" if place else "")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = lines[0] if lines else type(error).__name__
    why = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    place = user_line(str(error), getattr(error, "real_stack", None))
    return f"{what}{f' ({why.rstrip(chr(46))})' if why else ''}{f', at {place}' if place else ''}"
