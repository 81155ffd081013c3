"""Dynamo: options for tracing, its errors, calls compiled again, answers at branches, ends of graphs, queues."""

from __future__ import annotations

import dis
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import OptimizedModule
from torch._dynamo.convert_frame import ConvertFrameAssert, input_codes
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported, UserError, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]
from torch._dynamo.utils import counters, get_optimize_ddp_mode
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.ctx_manager import GradModeVariable, InferenceModeVariable
from torch._dynamo.variables.lists import DequeVariable

from lowtide.pytorch.compiler.input_guards import guard_values

_TRY_AGAIN = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
_JUMPS = [name for name in dis.opmap if name.startswith("POP_JUMP") and name.endswith(("IF_FALSE", "IF_TRUE"))]
# The instructions that read the truth of what is on top of the stack.
_READERS_OF_TRUTH = (*_JUMPS, "UNARY_NOT")


def tracing_options(
    *, ignored_functions: set[Callable[..., Any]], recompile_limit: int, recurrent: bool
) -> AbstractContextManager[Any]:
    """Return the options with which models are traced for lowtide.

    Args:
        ignored_functions: Functions that are left out of the graph, and do not end it.
        recompile_limit: How often one function may be compiled; all parts of it together, eight times as often.
        recurrent: Whether code may refer to recurrent modules, which are not traced themselves.
    """
    options: AbstractContextManager[Any] = torch._dynamo.config.patch(
        ignore_logging_functions=ignored_functions,
        # Hooks added later must run, as in eager.
        skip_nnmodule_hook_guards=False,
        # Traced, NumPy becomes PyTorch: other last bits, and random numbers of another generator.
        trace_numpy=False,
        # Tensors rebuilt from the cache have other storage sizes than the ops give.
        fake_tensor_cache_enabled=False,
        recompile_limit=recompile_limit,
        accumulated_recompile_limit=8 * recompile_limit,
        allow_rnn=recurrent,
        # Else the graph of a model in DistributedDataParallel is cut wherever a bucket of gradients ends.
        optimize_ddp=False,
        # Else layers that fully_shard manages share what was compiled for the first of them, whatever their attributes.
        skip_fsdp_guards=False,
    )
    return options


def cuts_at_buckets() -> bool:
    """Return True if graphs of a model in DistributedDataParallel are cut wherever a bucket of gradients ends."""
    return get_optimize_ddp_mode() == "ddp_optimizer"


def refusing_breaks(*, refuse: bool) -> AbstractContextManager[Any]:
    """Return a context in which, if `refuse`, tracing ends with an error where it would cut the graph in two."""
    context: AbstractContextManager[Any] = torch._dynamo.error_on_graph_break(True) if refuse else nullcontext()
    return context


def is_untraceable(error: BaseException) -> bool:
    """Return True if `error` says that the user's code cannot be traced."""
    return isinstance(error, Unsupported | UserError)


def is_of_compiler(error: BaseException) -> bool:
    """Return True if the compiler raised `error` itself."""
    return isinstance(error, TorchDynamoException)


def error_of_backend(error: BaseException) -> Exception | None:
    """Return what a backend raised, if `error` is what the compiler made of that."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else None


def compile_again() -> None:
    """Let the compiler look again at the code that it leaves alone since a call ended with an error."""
    for reference in list(input_codes.seen):
        code = reference()
        if code is not None:
            set_code_exec_strategy(code, _TRY_AGAIN)


def num_graph_breaks() -> int:
    """Return how often the compiler has given up tracing so far: in a function, or all of one in this thread."""
    return sum(counters["graph_break"].values()) + _left_alone.here


class _LeftAlone(threading.local):
    """How many functions the compiler has left alone as a whole, in this thread."""

    here = 0


_left_alone = _LeftAlone()


def count_functions_left_alone() -> None:
    """Count from now on where a function cannot be traced at all, which the compiler's own counts do not tell."""
    convert = ConvertFrameAssert.__call__

    def counted(converter: Any, *args: Any, skip: int = 0, **kwargs: Any) -> Any:
        try:
            return convert(converter, *args, skip=skip + 1, **kwargs)
        except Exception:
            _left_alone.here += 1
            raise

    ConvertFrameAssert.__call__ = counted  # type: ignore[assignment, method-assign]


def num_graphs() -> int:
    """Return how many graphs the compiler has traced in this process so far."""
    return int(counters["stats"]["unique_graphs"])


def is_compiled(model: Any) -> bool:
    """Return True if `model` is what `torch.compile` returned."""
    return isinstance(model, OptimizedModule)


@dataclass(frozen=True)
class Condition:
    """A tensor whose truth decides a branch, while the branch is traced."""

    variable: Any
    translator: Any

    @property
    def node(self) -> fx.Node:
        """The node of the traced graph that computes it."""
        node: fx.Node = self.variable.as_proxy().node
        return node

    @property
    def signature(self) -> Hashable:
        """What all traces of one function for inputs of the same shapes have in common."""
        output = self.translator.output
        examples = map(real_input, output.graph.find_nodes(op="placeholder"))
        return output.root_tx.f_code, tuple(tuple(each.shape) for each in examples if each is not None)

    @property
    def trace(self) -> Hashable:
        """The trace that is under way."""
        trace: Hashable = self.translator.output.compile_id
        return trace

    def guard(self, check: Callable[..., bool], inputs: Sequence[fx.Node], installed: Callable[[], Any]) -> None:
        """Trace the function again at calls in which `check` is False for the values of `inputs`.

        It is called before anything of the traced code runs. `installed` is called once the trace is complete.
        """
        sources = [node.meta["grapharg"].source for node in inputs]
        guard_values(check, sources, "a branch on the contents of inputs", installed)


def real_input(node: fx.Node) -> torch.Tensor | None:
    """Return the tensor that an input of the traced graph stands for, or None if it is a number or anything else."""
    argument = node.meta.get("grapharg")
    if argument is None or argument.pass_arg_as_tensor:
        return None
    return argument.example if isinstance(argument.example, torch.Tensor) else None


Decide = Callable[[Condition], bool | None]
_Jump = Callable[[Any, Any], None]


def decide_branches(decide: Decide, *, active: Callable[[], bool]) -> None:
    """Ask `decide` at every branch on a tensor while `active()`; where it returns None the tracer goes on as usual.

    The tracer has no hook for branches, so the handlers of conditional jumps and of `not` are wrapped, and what makes a
    `bool` of a tensor: `bool(tensor)`, and `item()` of a tensor of booleans.
    """
    _decide_truths(decide, active)
    pending: list[type] = [InstructionTranslatorBase]
    while pending:
        translator = pending.pop()
        pending += translator.__subclasses__()
        for name in _READERS_OF_TRUTH:
            code = dis.opmap[name]
            table = translator.dispatch_table  # type: ignore[attr-defined]
            table[code] = _deciding(table[code], decide, active)


def _deciding(jump: _Jump, decide: Decide, active: Callable[[], bool]) -> _Jump:
    def inner(translator: Any, instruction: Any) -> None:
        condition = _condition(translator) if active() else None
        answer = None if condition is None else decide(condition)
        if answer is not None:
            translator.pop()
            translator.push(ConstantVariable.create(answer))
        jump(translator, instruction)

    return inner


def _decide_truths(decide: Decide, active: Callable[[], bool]) -> None:
    """Ask `decide` where a tensor becomes a `bool`."""
    # It was `bool_impl` before PyTorch 2.15.
    name = next(name for name in ("nb_bool_impl", "bool_impl") if hasattr(TensorVariable, name))
    truth, call_method = getattr(TensorVariable, name), TensorVariable.call_method

    def answer(variable: Any, translator: Any) -> Any:
        found = decide(Condition(variable, translator)) if active() else None
        return None if found is None else ConstantVariable.create(found)

    def decided_truth(variable: Any, translator: Any) -> Any:
        found = answer(variable, translator)
        return truth(variable, translator) if found is None else found

    def decided_call(variable: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = answer(variable, translator) if name == "item" and variable.dtype == torch.bool else None
        return call_method(variable, translator, name, args, kwargs) if found is None else found

    setattr(TensorVariable, name, decided_truth)
    TensorVariable.call_method = decided_call  # type: ignore[assignment, method-assign]


def _condition(translator: Any) -> Condition | None:
    """Return the condition of the jump that comes next, if it is a tensor."""
    value = translator.stack[-1]
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    return Condition(value, translator) if isinstance(value, TensorVariable) else None


def end_graphs_at_methods(
    names: Collection[str], reason: Callable[[Any], str | None], *, active: Callable[[], bool]
) -> None:
    """End the traced graph before calls of a tensor's method, while `active()`; the call itself is left to eager.

    Args:
        names: The methods.
        reason: Returns why, given the arguments with fake tensors in them, or None if the graph goes on.
        active: Tells whether to ask.
    """
    plain = TensorVariable.call_method

    def call_method(variable: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in names and active():
            why = reason([_example(one) for one in (*args, *kwargs.values())])
            if why is not None:
                unimplemented(gb_type="Left to eager by lowtide", context=name, explanation=why, hints=[])
        return plain(variable, translator, name, args, kwargs)

    TensorVariable.call_method = call_method  # type: ignore[assignment, method-assign]


def limit_queues(*, active: Callable[[], bool]) -> None:
    """Let traced queues forget what is too old, as Python's do, while `active()`.

    The compiler knows queues of limited length, but it takes those that a model brings along for unlimited ones: code
    behind an `append` would see one entry more than there is.
    """
    wrap, call = VariableBuilder.wrap_listlike, DequeVariable.call_method

    def wrap_listlike(builder: Any, value: Any) -> Any:
        found: Any = wrap(builder, value)
        if type(value) is deque and value.maxlen is not None and active():
            # Not its own `maxlen`: the compiler cannot write to a queue of which it knows that.
            found.limit = value.maxlen
            install_guard(AttrSource(builder.source, "maxlen").make_guard(GuardBuilder.CONSTANT_MATCH))
        return found

    def call_method(queue: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        found, limit = call(queue, translator, name, args, kwargs), getattr(queue, "limit", None)
        if limit is not None and len(queue.items) > limit:
            queue.items[:] = queue.items[:limit] if name.endswith("left") else queue.items[-limit:]
        return found

    VariableBuilder.wrap_listlike = wrap_listlike  # type: ignore[assignment, method-assign]
    DequeVariable.call_method = call_method  # type: ignore[assignment, method-assign]


def end_graphs_at_random_floats(*, active: Callable[[], bool]) -> None:
    """End the traced graph where Python draws a random float, while `active()`; the call itself is left to eager.

    Traced, the float is a tensor of 64 bits: what it is multiplied with would get that type, and other last bits.
    """
    wrap = VariableBuilder.wrap_unspecialized_primitive

    def wrap_unspecialized_primitive(builder: Any, value: Any) -> Any:
        if isinstance(value, float) and isinstance(builder.source, RandomValueSource) and active():
            why = "Python draws a random float, which is no tensor in eager."
            unimplemented(gb_type="Left to eager by lowtide", context=str(value), explanation=why, hints=[])
        return wrap(builder, value)

    VariableBuilder.wrap_unspecialized_primitive = wrap_unspecialized_primitive  # type: ignore[assignment, method-assign]


def trace_inference_mode_as_no_grad(*, active: Callable[[], bool]) -> None:
    """Trace `torch.inference_mode()` as `torch.no_grad()`, which gives the same numbers, while `active()`.

    The compiler would make inference tensors, with which a training graph fails, and stay in that mode after the error.
    """
    create = InferenceModeVariable.create

    def create_without_gradients(translator: Any, value: Any, **kwargs: Any) -> Any:
        if value is True and active():
            return GradModeVariable.create(translator, target_value=False)
        return create(translator, value, **kwargs)

    InferenceModeVariable.create = staticmethod(create_without_gradients)  # type: ignore[assignment, method-assign]


def _example(variable: Any) -> Any:
    """Return what a traced argument stands for, with fake tensors in the place of tensors."""
    return fx.node.map_aggregate(
        variable.as_proxy(), lambda each: each.node.meta.get("example_value") if isinstance(each, fx.Proxy) else each
    )
