"""The compiler backend of `engine="inductor"`: graphs are planned as for the exact engine and run by generated code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from lowtide.capture.captured_graph import capture
from lowtide.capture.normalise import keeping_kernels
from lowtide.capture.program import Program, output_node
from lowtide.costs.resolve import resolve_costs
from lowtide.distributed.replicas import running
from lowtide.distributed.sharded_model import find_sharded
from lowtide.errors import CaptureError, InvalidModelError, InvalidOptionError, LowtideError, UnsupportedBackwardError
from lowtide.graph.costs import Costs
from lowtide.plan.core.problem import Problem
from lowtide.plan.core.result import Plan
from lowtide.progress import Progress, ProgressLine
from lowtide.pytorch.autograd_graph import graph_is_retained
from lowtide.pytorch.compiler.joint_graph import JointGraph, read_joint
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.runtime.input_checks import check_inputs
from lowtide.runtime.model_plans import Session, plan_or_least

_EXACT = "Use the exact engine, which is the default."


def refuse_model(model: nn.Module, container: nn.Module) -> None:
    """Raise if `engine="inductor"` cannot train a model, before any work is done."""
    if container is not model:
        raise InvalidModelError(
            'engine="inductor" trains in one process, and the model is in DistributedDataParallel. Train it in one '
            "process, or use the exact engine, which is the default and plans such models."
        )
    refuse_sharded_model(model)
    recurrent = [name for name, each in model.named_modules() if isinstance(each, nn.RNNBase)]
    if recurrent:
        kind = type(model.get_submodule(recurrent[0])).__name__
        raise InvalidModelError(
            f'engine="inductor" plans a step that is one graph, and {recurrent[0] or "the model"!r} is an nn.{kind}, '
            f"which PyTorch does not capture. {_EXACT}"
        )


def check_engine(*, verify: bool) -> None:
    """Raise if generated code cannot be made here, or not be used as asked."""
    if verify:
        raise InvalidOptionError(
            'verify=True compares with eager training bit for bit, and the code of engine="inductor" has the bits of '
            f"torch.compile instead. Leave verify out. {_EXACT}"
        )
    from lowtide.pytorch.inductor.compile import check_toolchain

    check_toolchain()


def refuse_sharded_model(model: nn.Module) -> None:
    """Raise if parameters of `model` are sharded."""
    if find_sharded(model) is not None:
        raise InvalidModelError(
            'engine="inductor" trains in one process, and the model is sharded by fully_shard. Use the exact engine, '
            "which is the default and plans sharded models block by block."
        )


def compile_for(
    session: Session, module: fx.GraphModule, inputs: Sequence[Any], *, losses_only: bool
) -> Callable[..., Any]:
    """Return what runs one graph, planned by `session`, by Inductor's code.

    Args:
        session: Plans it.
        module: The graph, as Dynamo has traced it.
        inputs: Its inputs.
        losses_only: Expect gradients for scalar outputs alone, where there are any.
    """
    from lowtide.inductor.engine import StepCompilation
    from lowtide.pytorch.inductor.compile import check_toolchain, compile_planned

    _refuse_surroundings(session)
    check_toolchain()
    check_inputs(inputs)
    with _own_errors(session), ProgressLine() as progress:
        eager = _eager_program(module, inputs, losses_only=losses_only)
        if eager is None:
            return module.forward
        compilation = StepCompilation(_wishes(session, module, eager, progress, losses_only=losses_only))
        compiled = compile_planned(module, inputs, compilation)
        assert compilation.plan is not None
        session.record(compilation.plan)
        return compiled


def _refuse_surroundings(session: Session) -> None:
    if running() is not None or session.replica is not None:
        raise InvalidModelError(
            'engine="inductor" trains in one process, and a model in DistributedDataParallel is running. ' + _EXACT
        )
    if not session.is_one_graph:
        raise CaptureError(
            'engine="inductor" plans a step that is one graph, and Python code that cannot be traced cuts this one '
            "into several (TORCH_LOGS=graph_breaks shows where). Take that code out of the model, or use the exact "
            "engine, which is the default and plans such steps block by block."
        )


@contextmanager
def _own_errors(session: Session) -> Iterator[None]:
    """Turn every failure into an error of ours: after some others the compiler would run the graph without a plan."""
    try:
        yield
    except LowtideError as error:
        session.failure = error
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0] if lines else ''}"
        session.failure = CaptureError(f"Inductor could not make code for this model: {reason}. {_EXACT}")
        raise session.failure from error


def _eager_program(module: fx.GraphModule, inputs: Sequence[Any], *, losses_only: bool) -> Program | None:
    """Return the program of the exact engine, of whose step percentages are; None if nothing needs a gradient."""

    def program_of(joint: JointGraph) -> Program:
        captured = capture(joint, losses_only=losses_only)
        return captured.arriving(captured.expected)

    with keeping_kernels():
        return read_joint(module, inputs, program_of)


def _wishes(session: Session, module: fx.GraphModule, eager: Program, progress: Progress, *, losses_only: bool) -> Any:
    from lowtide.inductor.engine import Wishes

    with without_modes():
        costs = session.costs_of(eager, progress)
    unplanned_bytes = Problem(eager.graph, costs, 1).baseline.peak_bytes
    asked = session.asked(unplanned_bytes, eager.device)
    session.note_unplanned_step(unplanned_bytes)

    def costs_of(program: Program) -> Costs:
        return resolve_costs(program, session.settings.costs, progress)

    def solve(problem: Problem) -> Plan:
        return plan_or_least(problem, session.settings.planner, progress)

    def on_forward(node: Any) -> None:
        session.ran = True
        if node is not None:
            _prepare_backward(node, losses_only=losses_only)

    outputs = output_node(module).args[0]
    num_outputs = len(outputs) if isinstance(outputs, tuple | list) else 1
    return Wishes(asked, unplanned_bytes, costs_of, solve, num_outputs, losses_only, on_forward, progress)


def _prepare_backward(node: Any, *, losses_only: bool) -> None:
    """Make the autograd node of a forward run behave as the plan expects."""
    if losses_only:
        node.set_materialize_grads(False)
    node.register_prehook(_refuse_other_backwards)


def _refuse_other_backwards(gradients: Any) -> None:
    del gradients
    if torch.is_grad_enabled():
        raise UnsupportedBackwardError(
            "create_graph=True asks for a second derivative, which a planned graph does not have. Use "
            "lowtide.unwrap(model) for losses with gradient penalties, or leave that part of the model unwrapped."
        )
    if graph_is_retained():
        raise UnsupportedBackwardError(
            'retain_graph=True asks for a graph that can run backward again, and the code of engine="inductor" writes '
            f"over what forward has saved. {_EXACT}"
        )
