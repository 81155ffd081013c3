"""The compiler backends: PyTorch calls one for every graph of a model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx

from lowtide.capture.captured_graph import CapturedGraph, capture
from lowtide.capture.normalise import keeping_kernels
from lowtide.capture.separate_reads import separate_reads
from lowtide.capture.source_lines import user_line
from lowtide.distributed.doors import Doors
from lowtide.distributed.replicas import running
from lowtide.errors import CaptureError, InvalidInputError, InvalidOptionError, LowtideError
from lowtide.lower.execute import run_quickly
from lowtide.pytorch.compiler.joint_graph import JointGraph, RunnableStep, compile_step, read_joint
from lowtide.pytorch.compiler.tracing import cuts_at_buckets
from lowtide.pytorch.fake_tensors import DynamicOutputShapeException
from lowtide.pytorch.ops import takes_graphs
from lowtide.runtime.inductor_backend import compile_for
from lowtide.runtime.input_checks import check_inputs
from lowtide.runtime.log_noise import without_compiler_warnings
from lowtide.runtime.model_plans import Session
from lowtide.runtime.pipeline import lower_joint
from lowtide.settings import Settings
from lowtide.step.plan import StepPlan

# What reads or writes the places that its second argument says.
_BY_PLACES = (operator.setitem, operator.getitem, torch.index_put)

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def lowtide_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **other: Any
) -> Callable[..., Any]:
    """Return the planned program for one graph; the target of `torch.compile(model, backend="lowtide")`.

    Args:
        module: Forward graph, as captured.
        example_inputs: Its inputs.
        options: `budget`, and optionally `planner`, `costs` and `plan`, as for `lowtide.wrap`.
        other: Anything else that `torch.compile` passes on; it is refused.
    """
    if other:
        raise InvalidInputError(f"The lowtide backend does not know {sorted(other)}; pass options={{'budget': ...}}.")
    settings = Settings.from_options(options)
    if running() is not None and cuts_at_buckets():
        raise InvalidOptionError(
            "torch.compile cuts the graph of a model in DistributedDataParallel wherever a bucket of gradients ends, "
            "and a budget is for the graph as a whole. Use lowtide.wrap(model, budget=...), or set "
            "torch._dynamo.config.optimize_ddp = False before the first step."
        )
    if isinstance(settings.plan, StepPlan):
        raise InvalidOptionError(
            "The plan is of a step of several blocks, and the compiler does not say which graphs make up a step. Use "
            "lowtide.wrap(model, plan=...)."
        )
    # Each graph has a session of its own: the compiler does not say which graphs make up a call.
    # What others compile is run by autograd as usual, which fills missing gradients with zeros.
    return training_backend(Session(settings), losses_only=False)(module, example_inputs)


def training_backend(session: Session, *, losses_only: bool = True) -> Backend:
    """Return the backend that plans graphs with `session` and runs them as planned.

    Args:
        session: Plans and remembers.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
    """

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if session.settings.engine == "inductor":
            compiled = compile_for(session, module, inputs, losses_only=losses_only)
            return _without_traces(compiled, (module,))
        with session.step.adding(), _capturing(module, inputs, session):
            separated = separate_reads(module)
            examples = [*inputs, *separated.examples]
            doors = Doors(session.replica, separated.module, examples)

            def lower(joint: JointGraph) -> RunnableStep:
                with _own_errors():
                    deliveries = doors.deliveries(joint, whole=not session.is_in_parts())
                    return doors.gated(lower_joint(joint, session, losses_only=losses_only, deliveries=deliveries))

            compiled = compile_step(separated.module, examples, lower=lower, untrained=run_quickly)
        return _without_traces(separated.call(doors.call(compiled)), (module, separated.module))

    return backend


def _without_traces(compiled: Callable[..., Any], modules: Sequence[fx.GraphModule]) -> Callable[..., Any]:
    """Return `compiled`, which at its first call lets go of what its traced `modules` have noted at their nodes.

    These are fake tensors with an autograd graph, and that holds real ones: each number that an op takes is wrapped
    into a tensor and saved for backward. The compiler keeps the modules as long as `compiled`, so the notes would be
    there in the step that it is made in, beyond the budget. It reads them until it is done with the call's code.
    """
    traced = list(modules)

    def run(*args: Any) -> Any:
        while traced:
            for node in traced.pop().graph.nodes:
                node.meta.pop("example_value", None)
        return compiled(*args)

    return run


class GraphTaker(Protocol):
    """Takes the graphs of a call that is not to run as planned, and runs them."""

    def add(self, captured: CapturedGraph) -> int:
        """Return the number of a graph."""

    def run(self, number: int, forward: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Return what a graph returns."""


def capturing_backend(session: Session, taker: GraphTaker) -> Backend:
    """Return the backend that hands captured graphs to `taker`, and lets it run them so that the call goes on."""

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with _capturing(module, inputs, session):
            separated = separate_reads(module)
            examples = [*inputs, *separated.examples]
            doors = Doors(session.replica, separated.module, examples)

            def take(joint: JointGraph) -> int:
                with _own_errors():
                    deliveries = doors.deliveries(joint, whole=not session.is_in_parts())
                    return taker.add(capture(joint, losses_only=True, deliveries=deliveries))

            number = read_joint(separated.module, examples, take)
        if number is None:
            return module.forward
        return separated.call(lambda *args: taker.run(number, separated.module.forward, args))

    return backend


@contextmanager
def _capturing(module: fx.GraphModule, inputs: Sequence[Any], session: Session) -> Iterator[None]:
    """Trace calls of the kernels that eager runs; note why a graph fails: the compiler may skip it and go on."""
    check_inputs(inputs)
    with keeping_kernels(), without_compiler_warnings():
        try:
            yield
        except Exception as error:
            session.failure = _capture_failure(error, module)
            raise


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turn every failure into an error of ours: after some others the compiler would run the graph without a plan."""
    try:
        yield
    except LowtideError:
        raise
    except Exception as error:
        raise CaptureError(f"Planning failed with {type(error).__name__}: {error}") from error


def _capture_failure(error: Exception, module: fx.GraphModule) -> CaptureError:
    """Return what to tell the user if nothing at all is captured because of `error`.

    It is kept while the call goes on, so it does not refer to `error`: the frames of its traceback are those of the
    user's modules, with all that their variables hold.
    """
    if isinstance(error, DynamicOutputShapeException):
        return _size_from_data(error, module)
    lines = str(error).strip().splitlines()
    nested = [node for node in module.graph.nodes if takes_graphs(node.target)]
    places = [f"{node.target} at {user_line(str(node.meta.get('stack_trace')))}" for node in nested]
    hint = f" The graph has {', '.join(places)}, whose backward may be what fails." if nested else ""
    return CaptureError(
        f"PyTorch could not make the training graph of this call: {type(error).__name__}: {lines[0] if lines else ''}."
        f"{hint} Leave that part of the model unwrapped."
    )


def _size_from_data(error: DynamicOutputShapeException, module: fx.GraphModule) -> CaptureError:
    """Return the error for an op whose result has a size that depends on data."""
    writes = [node for node in module.graph.nodes if node.target in _BY_PLACES]
    masked = [node for node in writes if _is_mask(node.args[1])]
    place = user_line(str(masked[0].meta.get("stack_trace"))) if masked else None
    return CaptureError(
        f"The size of a result of {error.func} depends on data, and a byte budget needs sizes that are numbers"
        f"{f': a mask selects elements at {place}' if place else ''}. Use torch.where(mask, value, x), or x * mask, in "
        "the place of writing by a mask; or wrap the parts of the model before and behind it."
    )


def _is_mask(index: Any) -> bool:
    items = index if isinstance(index, tuple | list) else (index,)
    fakes = [item.meta.get("example_value") for item in items if isinstance(item, fx.Node)]
    return any(isinstance(fake, torch.Tensor) and fake.dtype in (torch.bool, torch.uint8) for fake in fakes)
