"""The compiler backend: capture, costs, plan and lower, called by PyTorch for every graph of a model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.faithful import faithful_tracing
from lowtide.capture.joint import make_program
from lowtide.capture.program import Program
from lowtide.capture.silence import idle_tangents, silence
from lowtide.errors import CaptureError, InvalidInputError, LowtideError, UnsupportedBackwardError, warn
from lowtide.graph.ir import Graph, ValueId
from lowtide.lower.execute import boxed, boxed_backward, boxed_forward, run_around, with_variants
from lowtide.lower.rewrite import lower, lower_backward, repeated_ops, saved_values
from lowtide.lower.unchanged import Unchanged
from lowtide.pytorch.compiler import aot_autograd, functorch_config, inductor_config
from lowtide.run.noise import quiet_warnings
from lowtide.run.places import user_line
from lowtide.run.readers import part_reads
from lowtide.run.session import Session
from lowtide.run.settings import Settings
from lowtide.run.watch import Watch
from lowtide.schedule.expand import expand
from lowtide.schedule.steps import Schedule

Backend = Callable[..., Callable[..., Any]]


class PlannedWithoutRunning(Exception):  # noqa: N818 - a signal, not an error
    """Raised inside the compiler to leave it once the plan is made."""


def lowtide_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **other: Any
) -> Callable[..., Any]:
    """Return the planned program for one graph; the target of `torch.compile(model, backend="lowtide")`.

    Args:
        module: Forward graph, as captured.
        example_inputs: Its inputs.
        options: `budget`, and optionally `planner`, `costs` and `plan`, as for `lowtide.wrap`.
        other: Anything else `torch.compile` passes on is refused.
    """
    if other:
        raise InvalidInputError(f"The lowtide backend does not know {sorted(other)}; pass options={{'budget': ...}}.")
    # Autograd fills missing gradients with zeros unless told otherwise, and here nobody can tell it.
    return make_backend(Session(Settings.from_options(options)), losses_only=False)(module, example_inputs)


def make_backend(session: Session, *, run: bool = True, losses_only: bool = True) -> Backend:
    """Return a backend that plans with `session`.

    Args:
        session: Plans and remembers.
        run: False to plan and then run the graph unplanned.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
    """

    def partition(
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        del joint_inputs
        shape = Shape(num_fwd_outputs, tuple(static_lifetime_input_indices or ()))
        with _own_errors():
            forward, backward = plan_and_lower(joint, shape, session, losses_only=losses_only)
        if not run:
            raise PlannedWithoutRunning
        return forward, backward

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        _check_inputs(example_inputs)
        compile_graph = aot_autograd(
            fw_compiler=partial(boxed_forward, on_run=partial(_prepare_run, session, losses_only)),
            bw_compiler=boxed_backward,
            inference_compiler=boxed,
            partition_fn=partition,
        )
        parted = part_reads(module)
        # Eager runs backward without autocast unless the caller switches it on there.
        as_eager = functorch_config.patch(backward_pass_autocast="off")
        # Random numbers are drawn also where nobody reads them: what is drawn next depends on it.
        drawing = inductor_config.patch(fallback_random=True)
        with faithful_tracing(), as_eager, drawing, quiet_warnings():
            try:
                return parted.call(compile_graph(parted.module, [*example_inputs, *parted.examples]))
            except PlannedWithoutRunning:
                return module.forward
            except Exception as error:
                # The compiler may leave this graph alone and go on with what the model calls.
                session.trouble = _trouble(error, module)
                raise

    return backend


def _trouble(error: Exception, module: fx.GraphModule) -> CaptureError:
    """Return what to tell the user if nothing at all is captured because of `error`."""
    if isinstance(error, DynamicOutputShapeException):
        return _size_from_data(error, module)
    lines = str(error).strip().splitlines()
    nested = [node for node in module.graph.nodes if isinstance(node.target, torch._ops.HigherOrderOperator)]
    places = [f"{node.target} at {user_line(str(node.meta.get('stack_trace')))}" for node in nested]
    hint = f" The graph has {', '.join(places)}, whose backward may be what fails." if nested else ""
    found = CaptureError(
        f"PyTorch could not make the training graph of this call: {type(error).__name__}: {lines[0] if lines else ''}."
        f"{hint} Leave that part of the model unwrapped."
    )
    found.__cause__ = error
    return found


def _size_from_data(error: DynamicOutputShapeException, module: fx.GraphModule) -> CaptureError:
    """Return the error for an op whose result has a size that depends on data."""
    writes = [node for node in module.graph.nodes if node.target in (operator.setitem, operator.getitem)]
    masked = [node for node in writes if _is_mask(node.args[1])]
    place = user_line(str(masked[0].meta.get("stack_trace"))) if masked else None
    return CaptureError(
        f"The size of a result of {error.func} depends on data, and a byte budget needs sizes that are numbers"
        f"{f': a mask selects elements at {place}' if place else ''}. Use torch.where(mask, value, x), or x * mask, in "
        "the place of x[mask] = value and x[mask]; or wrap the parts of the model before and behind it."
    )


def _is_mask(index: Any) -> bool:
    items = index if isinstance(index, tuple | list) else (index,)
    fakes = [item.meta.get("example_value") for item in items if isinstance(item, fx.Node)]
    return any(isinstance(fake, torch.Tensor) and fake.dtype in (torch.bool, torch.uint8) for fake in fakes)


@dataclass(frozen=True)
class Shape:
    """How the outputs and inputs of a joint graph divide: outputs of forward, inputs that are parameters."""

    num_forward_outputs: int
    parameters: tuple[int, ...]


def plan_and_lower(
    joint: fx.GraphModule, shape: Shape, session: Session, *, losses_only: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward graphs that run the joint graph as `session` plans it."""
    if any(node.meta.get("recompute") is not None for node in joint.graph.nodes):
        warn(
            "The model checkpoints parts of itself (torch.utils.checkpoint). The budget decides instead: lowtide plans "
            "the whole graph as if it did not."
        )
    full = _program(joint, shape)
    idle = idle_tangents(joint) if losses_only else frozenset()
    program = _program(silence(joint, idle), shape, full) if idle else full
    # The compiler traces in fake mode; costs are measured on real tensors.
    with _disable_current_modes():
        plan = session.plan(program)
    schedule, available = plan.schedule, _kept_in_any_case(program, plan.schedule)
    spare = full, expand(full.graph, available)
    if idle and _costs_more(full.graph, saved_values(*spare), saved_values(program, schedule)):
        session.retract(plan)
        return plan_and_lower(joint, shape, session, losses_only=False)
    lowered = lower(program, schedule, spare)
    watch = Watch(plan, program, session.corrections)
    run_around(lowered.forward, watch.forward)
    run_around(lowered.backward, watch.backward)
    if session.verifies:
        unchanged = Unchanged(program, schedule, lowered.frame)
        run_around(lowered.forward, unchanged.forward)
        run_around(lowered.backward, unchanged.backward)

    def build(missing: frozenset[int]) -> fx.GraphModule:
        variant = _program(silence(joint, missing), shape, full) if missing else full
        return lower_backward(variant, expand(variant.graph, available), lowered.frame)

    return lowered.forward, with_variants(lowered.backward, idle, build)


def _program(joint: fx.GraphModule, shape: Shape, like: Program | None = None) -> Program:
    """Return the program of a joint graph; its forward is that of `like`."""
    return make_program(joint, num_forward_outputs=shape.num_forward_outputs, parameters=shape.parameters, like=like)


def _kept_in_any_case(program: Program, schedule: Schedule) -> set[ValueId]:
    """Return what a backward other than the planned one may count on: what is saved, and what cannot be replayed."""
    graph = program.graph
    replayed = repeated_ops(schedule)
    drawn = [op for op in graph.forward if graph.ops[op].random and op not in replayed]
    return {*saved_values(program, schedule), *(value for op in drawn for value in graph.ops[op].outputs)}


def _costs_more(graph: Graph, spare: Collection[ValueId], planned: Collection[ValueId]) -> bool:
    """Whether being ready for gradients that are not expected would keep bytes alive that the plan does not count."""
    extra = set(spare).difference(planned, graph.outputs)
    return any(graph.values[value].bytes and graph.values[value].producer is not None for value in extra)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Turn every failure into an error of ours: the compiler takes some others as leave to run without a plan."""
    try:
        yield
    except LowtideError:
        raise
    except Exception as error:
        raise CaptureError(f"Planning failed with {type(error).__name__}: {error}") from error


def _prepare_run(session: Session, losses_only: bool, node: Any) -> None:
    """Note that a planned graph runs, and make its autograd node behave as the plan expects."""
    session.ran = True
    if node is None:
        return
    if losses_only:
        node.set_materialize_grads(False)
    node.register_prehook(_refuse_second_derivative)


def _refuse_second_derivative(gradients: Any) -> None:
    del gradients
    if torch.is_grad_enabled():
        raise UnsupportedBackwardError(
            "create_graph=True asks for a second derivative, which a planned graph does not have. Use "
            "lowtide.unwrap(model) for losses with gradient penalties, or leave that part of the model unwrapped."
        )


def _check_inputs(inputs: Sequence[Any]) -> None:
    """Refuse inputs on several devices and symbolic sizes, before any work is done."""
    if any(isinstance(item, torch.SymInt) for item in inputs):
        raise CaptureError(
            "The graph has symbolic shapes, and a byte budget needs sizes that are numbers. Use "
            'torch.compile(model, backend="lowtide", dynamic=False, ...): each input shape then gets its own plan.'
        )
    tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
    # The compiler loses the type of what such rules return, so that they no longer apply to later ops: other values.
    refuse_types({type(item) for item in tensors if _has_rules(type(item))})
    check_devices(tensors)


def _has_rules(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this type may change what ops do with them; parameters have that switched off."""
    return kind is not torch.Tensor and kind.__torch_function__ is not nn.Parameter.__torch_function__


def refuse_types(kinds: Collection[type[torch.Tensor]]) -> None:
    """Raise `InvalidInputError` if there are any: subclasses of tensors that are not served."""
    if kinds:
        raise InvalidInputError(
            f"The call has tensors of the subclasses {', '.join(sorted(kind.__name__ for kind in kinds))}, whose own "
            "rules a planned graph does not follow. Pass plain tensors (x.as_subclass(torch.Tensor), or what the "
            "subclass wraps), or leave the model unwrapped."
        )


def check_devices(tensors: Sequence[torch.Tensor], *, data: bool = True) -> None:
    """Raise `InvalidInputError` unless all tensors that are not host scalars are on one device that is served.

    Args:
        tensors: Parameters and inputs.
        data: Whether they must have data; the meta device has none.
    """
    found = sorted({str(tensor.device) for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"})
    if len(found) > 1:
        raise InvalidInputError(
            f"The model and its inputs are on {' and '.join(found)}; lowtide plans one real device, or lowtide.plan a "
            "model that is on the meta device as a whole. Move the inputs to the model's device."
        )
    if data and "meta" in found:
        raise InvalidInputError(
            "The model and its inputs are on the meta device, which has no data to train on. lowtide.plan plans such a "
            "model if it is an nn.Module or in the closure of a function. To run it, move it to a real device "
            "(model.to_empty) and give it weights."
        )
