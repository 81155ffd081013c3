"""Branches on what integer and boolean inputs contain, taken as eager takes them, without cutting the graph in two.

`if attention_mask.all():` is a choice between two graphs. The tracer cannot read values, so it would end the graph
there; libraries that know this do something else while they are traced, which gives other bits than eager. Here the
condition is worked out on the real inputs of the call that is captured, the branch is traced, and the condition becomes
one of the compiler's guards: it is worked out at every call, before anything of the traced code runs. Where it is
another, the code is traced again for the other branch. So nothing ever has to be undone: not buffers, not random
numbers, and not what other processes have been sent.

Only conditions that follow from integer and boolean inputs by a few ops are treated so: they are cheap and seldom
change. What the traced code has written to before the branch is not what a guard would read, and is left alone.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable

# More would be work instead of a look.
_MOST_NODES, _MOST_BYTES = 64, 1 << 20
# Variants of one function for inputs of one shape that are traced for their branches; further ones are cut at them.
_MOST_VARIANTS = 8
_JUMPS = [name for name in dis.opmap if name.startswith("POP_JUMP") and name.endswith(("IF_FALSE", "IF_TRUE"))]
# Functions with which model libraries ask whether they are traced, to do otherwise than in eager: masks that are built
# though nothing is masked, a scan in the place of a loop. Where they are asked in a model, the answer is no.
_QUESTIONS = ("is_tracing", "is_torchdynamo_compiling")
_MODELS = ("transformers.masking_utils", "transformers.models.")


Variants = defaultdict[Hashable, set[int]]


class Branches(threading.local):
    """The variants traced so far where branches are foreseen in this thread now, else None."""

    variants: Variants | None = None


branches = Branches()


@contextmanager
def foreseeing_branches(variants: Variants | None) -> Iterator[None]:
    """Foresee branches while functions are traced in this thread, and note them in `variants`, unless it is None."""
    before = branches.variants
    branches.variants = variants
    asked = _questions(len(sys.modules)) if variants is not None else ()
    for module, name, _ in asked:
        setattr(module, name, _no)
    try:
        yield
    finally:
        branches.variants = before
        for module, name, original in asked:
            setattr(module, name, original)


_asked: dict[tuple[str, str], tuple[Any, str, Any]] = {}


@lru_cache(maxsize=1)
def _questions(num_modules: int) -> tuple[tuple[Any, str, Any], ...]:
    """Return where models ask whether they are traced: module, name and function; looked up when modules have come."""
    del num_modules
    for where, module in list(sys.modules.items()):
        if where.startswith(_MODELS):
            found = ((where, name, vars(module).get(name)) for name in _QUESTIONS)
            # Another thread may be in a call, and have its answer there at the moment.
            _asked.update(
                {(where, name): (module, name, f) for where, name, f in found if callable(f) and f is not _no}
            )
    return tuple(_asked.values())


def _no(*_: Any, **__: Any) -> bool:
    """Answer that nothing is traced: what is decided by reading values is decided as eager does."""
    return False


def _foreseen(translator: Any, variants: Variants) -> bool | None:
    """Return what the condition on top of the stack is, with a guard that it stays so; None if it is no such one."""
    value = translator.stack[-1]
    if isinstance(value, LazyVariableTracker):
        value = value.realize()
    if not isinstance(value, TensorVariable):
        return None
    node = value.as_proxy().node
    nodes = _cheap_ancestors(node)
    if nodes is None or not _are_unchanged(nodes):
        return None
    siblings = variants[_signature(translator.output)]
    if len(siblings) >= _MOST_VARIANTS:
        return None
    inputs = [each for each in nodes if each.op == "placeholder"]
    excerpt = _excerpt(nodes, node)
    answer = _answer_without_chance(excerpt, [each.meta["grapharg"].example for each in inputs])
    if answer is None:
        return None
    if inputs:
        sources = [each.meta["grapharg"].source for each in inputs]
        condition = _Condition(excerpt, answer)
        note = partial(siblings.add, translator.output.compile_id)
        install_guard(sources[0].make_guard(partial(_guard, condition, sources, note)))
    return answer


def _signature(output: Any) -> Hashable:
    """Return what variants of one function have in common: its code and the shapes of its inputs."""
    inputs = (node.meta.get("grapharg") for node in output.graph.find_nodes(op="placeholder"))
    examples = (each.example for each in inputs if each is not None)
    return output.root_tx.f_code, tuple(tuple(each.shape) for each in examples if isinstance(each, torch.Tensor))


class _Condition:
    """Whether a condition on inputs is what it was when it was traced."""

    def __init__(self, condition: fx.GraphModule, answer: bool) -> None:
        self.condition = condition
        self.answer = answer

    def __call__(self, *inputs: torch.Tensor) -> bool:
        """Return whether it is; where it cannot be told, tracing again tells the user why."""
        return _answer(self.condition, inputs) == self.answer


def _answer(condition: fx.GraphModule, inputs: Collection[torch.Tensor]) -> bool | None:
    """Return what a condition is, or None if working it out fails."""
    try:
        # Nobody who watches the model's ops is to see these.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return bool(condition(*inputs))
    except Exception:
        return None


def _answer_without_chance(condition: fx.GraphModule, inputs: Collection[torch.Tensor]) -> bool | None:
    """Return the same, or None if it takes random numbers, which are drawn once and where the model draws them."""
    before = torch.get_rng_state()
    answer = _answer(condition, inputs)
    if torch.equal(before, torch.get_rng_state()):
        return answer
    torch.set_rng_state(before)
    return None


def _guard(
    condition: _Condition, sources: Collection[Any], note: Callable[[], None], builder: GuardBuilder, guard: Any
) -> None:
    """Add the condition to the guards of a function; called when all of it has been traced."""
    del guard
    note()
    name = f"lowtide_holds_{id(condition)}"
    call = f"{name}({', '.join(source.name for source in sources)})"
    known = {**_get_closure_vars(), name: condition}
    builder.add_python_lambda_leaf_guard_to_root([call], [f"{call}  # a branch on the contents of inputs"], known)


def _excerpt(nodes: Collection[fx.Node], result: fx.Node) -> fx.GraphModule:
    """Return the part of a graph that consists of `nodes`, which are in order."""
    graph, copies = fx.Graph(), {}
    for node in nodes:
        copies[node] = graph.placeholder(node.name) if node.op == "placeholder" else graph.node_copy(node, copies.get)
    graph.output(copies[result])
    return fx.GraphModule({}, graph)


def _cheap_ancestors(node: fx.Node) -> list[fx.Node] | None:
    """Return `node` and what it follows from, in order; None unless it is integer and boolean inputs and a few ops."""
    pending, seen, made_bytes = [node], set(), 0
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        made_bytes += 0 if current.op == "placeholder" else _num_bytes(current)
        if len(seen) > _MOST_NODES or made_bytes > _MOST_BYTES or not _is_plain(current):
            return None
        pending += current.all_input_nodes
    return sorted(seen)


def _are_unchanged(nodes: Collection[fx.Node]) -> bool:
    """Whether nothing that was traced so far has written to these values, nor to others that share their memory."""
    for node in nodes:
        if _is_written(node) or any(_writes(user) for user in node.users):
            return False
    mine = {_storage(node) for node in nodes if node.op == "placeholder"}
    others = next(iter(nodes)).graph.find_nodes(op="placeholder")
    return not any(_storage(node) in mine for node in others if _is_written(node))


def _is_written(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, torch.Tensor) and (example.is_inference() or example._version > 0)


def _writes(node: fx.Node) -> bool:
    """Whether `node` is an op that declares that it writes; not all that do are noticed by their arguments."""
    schema = getattr(_op(node), "_schema", None)
    return schema is not None and schema.is_mutable


def _op(node: fx.Node) -> Any:
    """Return what `node` calls; of an op that comes in several kinds, one of them."""
    target = node.target
    return getattr(target, target.overloads()[0]) if isinstance(target, torch._ops.OpOverloadPacket) else target


def _storage(node: fx.Node) -> int | None:
    argument = node.meta.get("grapharg")
    real = argument.example if argument is not None else None
    return real.untyped_storage()._cdata if isinstance(real, torch.Tensor) else None


def _is_plain(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    if node.op == "placeholder":
        argument = node.meta.get("grapharg")
        real = argument.example if argument is not None else None
        if not isinstance(real, torch.Tensor) or argument.pass_arg_as_tensor:
            return False
        return not real.is_floating_point() and not real.is_complex()
    if node.op not in ("call_function", "call_method") or not isinstance(example, torch.Tensor | int | float | bool):
        return False
    # What an op of the user's does, and what it remembers, is not known.
    return getattr(_op(node), "namespace", "aten") == "aten"


def _num_bytes(node: fx.Node) -> int:
    """Return the size of what `node` makes; views count as if they were copies."""
    example = node.meta.get("example_value")
    return example.numel() * example.element_size() if isinstance(example, torch.Tensor) else 0


def _foreseeing(jump: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def inner(translator: Any, instruction: Any) -> None:
        variants = branches.variants
        answer = None if variants is None else _foreseen(translator, variants)
        if answer is not None:
            translator.pop()
            translator.push(ConstantVariable.create(answer))
        jump(translator, instruction)

    return inner


def _install() -> None:
    """Let the tracer ask here first at conditional jumps; it does as ever where nothing is foreseen."""
    pending: list[type] = [InstructionTranslatorBase]
    while pending:
        translator = pending.pop()
        pending += translator.__subclasses__()
        for name in _JUMPS:
            code = dis.opmap[name]
            translator.dispatch_table[code] = _foreseeing(translator.dispatch_table[code])  # type: ignore[attr-defined]


_install()
