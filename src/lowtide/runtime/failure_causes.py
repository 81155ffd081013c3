"""Why a training call could not be planned or run: the user's own error, or the true cause with the user's line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import forward_ad

from lowtide.blocks.step.find_layers import Refusal
from lowtide.capture.source_lines import is_inside, user_line
from lowtide.errors import CaptureError, LowtideError, UnsupportedBackwardError, warn
from lowtide.pytorch.autograd_graph import saved_tensors_hook_module
from lowtide.pytorch.compiler.joint_graph import read_joint
from lowtide.pytorch.compiler.tracing import error_of_backend, is_of_compiler, is_untraceable
from lowtide.pytorch.dispatch_modes import in_dispatch_mode, in_forward_ad, in_func_transform, mode_names
from lowtide.pytorch.nested import tensor_leaves
from lowtide.pytorch.process_groups import is_distributed_tensor
from lowtide.runtime.compiled_entry import Entry
from lowtide.runtime.input_checks import check_devices, refuse_types
from lowtide.runtime.log_noise import without_compiler_warnings
from lowtide.runtime.model_plans import LayersUndecidedError

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


def refusal_behind(error: Exception) -> LowtideError | None:
    """Return the refusal of a budget, a plan, or a way to cut a call into blocks, that `error` comes from, by itself.

    Its traceback and the errors behind it hold what was computed.
    """
    refused = lowtide_cause(error)
    if not isinstance(refused, Refusal | LayersUndecidedError):
        return None
    refused.__context__ = refused.__cause__ = None
    return refused.with_traceback(None)


def cannot_begin_again(lost: str) -> CaptureError:
    """Return the error for a call that must be begun again, in which `lost` was changed in place."""
    return CaptureError(
        f"The model changes {lost} in place while it is called. The first calls of a model that is captured in parts "
        "are made again where their beginning does not fit the budget, and would then change it twice. Make it a "
        "buffer, or change a copy of it; or raise the budget, or wrap the parts of the model before and behind it."
    )


def in_unusual_context() -> bool:
    """Return True inside a transform, a dispatch mode, forward-mode AD or hooks; takes a microsecond."""
    return in_dispatch_mode() or in_func_transform() or in_forward_ad() or saved_tensors_hook_module() is not None


def refuse_context(model: nn.Module | None, args: Any, kwargs: Any) -> None:
    """Raise an error of ours if the call is made in a way that planned calls do not support."""
    tensors = tensor_leaves((args, kwargs))
    tensors += [] if model is None else [*model.parameters(), *model.buffers()]
    refuse_types({kind for kind in map(type, tensors) if not is_distributed_tensor(kind)} - _PLAIN_TENSORS)
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
    reason = first_break(plain, args, kwargs) or (
        "its Python values change with every call, so that the most variants that are kept have been compiled "
        "(TORCH_LOGS=recompiles shows which)"
    )
    return CaptureError(
        f"Nothing of this call could be captured, so it would train without a budget: {reason}. {_ADVICE}"
    )


def first_break(plain: Callable[..., Any], args: Any, kwargs: Any, *, backward: bool = False) -> str | None:
    """Return why and where tracing the call as one graph of known sizes fails, or None if it does not.

    Nothing of the call runs.

    Args:
        plain: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        backward: Trace its backward too: that of an op may read values though the op itself does not.
    """
    sized: list[str | None] = []

    def stop(module: fx.GraphModule, inputs: Any) -> Any:
        sized.append(_sized_by_data(module) or (_backward_failure(module, inputs) if backward else None))
        raise _TracedError

    entry = Entry(plain, stop, whole=True, expect_branches=True)
    try:
        with without_compiler_warnings():
            entry(*args, **kwargs)
    except _TracedError:
        return sized[0]
    except Exception as error:
        if is_untraceable(error):
            return in_words(error)
        inner = getattr(error, "inner_exception", None) or error.__cause__
        return sized[0] if isinstance(inner, _TracedError) else f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        entry.revive()
    return None


def _sized_by_data(module: fx.GraphModule) -> str | None:
    """Return where a traced graph has numbers that depend on data, which the compiler follows if it must; else None."""
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers):
            place = user_line(str(node.meta.get("stack_trace")))
            return f"the result of {node.target} depends on data{f', at {place}' if place else ''}"
    return None


def _backward_failure(module: fx.GraphModule, inputs: Any) -> str | None:
    """Return why forward and backward of a traced graph cannot be made one graph, or None if they can."""
    try:
        read_joint(module, inputs, lambda joint: joint)
    except Exception as error:  # of many kinds, all of which end the graph
        return f"its backward cannot be traced: {type(error).__name__}: {error}".splitlines()[0]
    return None


def failed_here(error: Exception, *, compared: bool = True) -> LowtideError:
    """Return the error for a call that fails where plain training does not, or may not if it was not `compared`."""
    if is_of_compiler(error):
        found = CaptureError(f"The model could not be captured: {in_words(error)}. {_ADVICE}")
    else:
        place = user_line("", traceback.extract_tb(error.__traceback__))
        plain = "plain training does not" if compared else "whether plain training does was not tried on one rank alone"
        found = CaptureError(
            f"The planned step failed with {type(error).__name__}: {error}{f', at {place}' if place else ''}; {plain}. "
            "Please report the model; lowtide.unwrap(model) trains it plainly meanwhile."
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
