"""From a program and a schedule to the forward and the backward graph that run it.

The order of fx nodes decides how long tensors live: generated code drops each name after its last use. So
running ops in the schedule's order, taking tuples apart at once and emitting views just before their first use makes
the program allocate and free exactly what the simulator says.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.capture.async_collectives import held_until, waited_for
from lowtide.capture.fused_op import written_over
from lowtide.capture.program import Program, Tail, is_getitem
from lowtide.capture.recompute_rules import is_foreign
from lowtide.capture.shape_only_inputs import is_stand_in
from lowtide.graph.ir import OpId, ValueId
from lowtide.lower.collective_wait import wait_until_released
from lowtide.lower.early_accumulation import RunningBackward, accumulate_early
from lowtide.lower.random_replay import replay_random, take_rng_state
from lowtide.pytorch.dispatch_modes import without_modes
from lowtide.pytorch.fake_tensors import FakeTensor, fake_mode_of
from lowtide.pytorch.profiler import recorded_as
from lowtide.schedule.steps import Schedule

# A traced stride can differ from the real one; there a view must become a copy instead of an error.
_RELAXED: dict[Any, Any] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


@dataclass(frozen=True)
class Frame:
    """What forward hands to backward, in order: values, generator states of ops, parameters by position, objects."""

    saved: tuple[ValueId, ...]
    states: Mapping[OpId, fx.Node]
    handles: tuple[int, ...]
    objects: tuple[fx.Node, ...] = ()

    @property
    def num_others(self) -> int:
        """How many of them come behind the values and states: they are the same for all schedules of a program."""
        return len(self.handles) + len(self.objects)


@dataclass(frozen=True)
class Lowered:
    """The graphs, in AOTAutograd's calling convention, and what is handed from one to the other."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    frame: Frame


def lower(
    program: Program,
    schedule: Schedule,
    spare: tuple[Program, Schedule] | None = None,
    *,
    shared: Handover | None = None,
) -> Lowered:
    """Return the graphs that run `schedule`.

    Forward takes the primals and returns the program's outputs, then what is saved for backward: values, generator
    states, parameters, and inputs that are no tensors. Backward takes what was saved, then the tangents, and returns
    one gradient or None for every primal. The program is not changed.

    Args:
        program: What to run.
        schedule: In which order.
        spare: Another program with the same forward ops and values, and a schedule, whose backward this forward must
            be able to serve as well.
        shared: What is handed over in any case, because other schedules of the same program need it.
    """
    own = handover(program, schedule, spare)
    saved = dict.fromkeys((*own.saved, *(shared.saved if shared else ())))
    handles = own.handles if shared is None else shared.handles
    forward = Emitter(program, repeated_ops(schedule))
    for node in program.primals:
        forward.take(node)
    for op in schedule.forward:
        forward.run(op)
    returned = [forward.result(node) for node in program.forward_outputs]
    kept = [forward.resolve(program.owners[value]) for value in saved] + list(forward.states.values())
    kept += [_unchecked(forward.resolve(program.primals[position])) for position in handles]
    kept += [forward.resolve(node) for node in program.objects]
    frame = Frame(tuple(saved), forward.states, tuple(handles), program.objects)
    module = forward.finish((*returned, *kept), descriptors_of(program)[: len(returned)])
    return Lowered(module, lower_backward(program, schedule, frame), frame)


@dataclass(frozen=True)
class Handover:
    """What forward must hand to backward: values, and parameters by position, to reach their gradients."""

    saved: tuple[ValueId, ...]
    handles: tuple[int, ...]


def handover(program: Program, schedule: Schedule, spare: tuple[Program, Schedule] | None = None) -> Handover:
    """Return what the backward passes of `schedule`, and of `spare`, read of forward."""
    served = [(program, schedule), *([spare] if spare else [])]
    saved = dict.fromkeys(value for each in served for value in saved_values(*each))
    owed = dict.fromkeys(position for each, _ in served for position in accumulated(each))
    handles = [position for position in owed if program.values[program.primals[position]] not in saved]
    return Handover(tuple(saved), tuple(handles))


def lower_backward(program: Program, schedule: Schedule, frame: Frame) -> fx.GraphModule:
    """Return the graph that runs the backward pass of `schedule` from what `frame` hands over."""
    backward = Emitter(program, repeated_ops(schedule), seen=set(schedule.forward))
    taken = {program.owners[value] for value in frame.saved}
    for node in dict.fromkeys(program.owners[value] for value in frame.saved):
        backward.take(node)
    for op, state in frame.states.items():
        backward.states[op] = backward.graph.placeholder(state.name)
        backward.states[op].meta["val"] = state.meta["val"]
    handles = (program.primals[position] for position in frame.handles)
    for node in (*handles, *program.objects, *program.tangents):
        backward.take(node, again=node in taken)
    gradients = _run_backward(program, schedule, backward)
    return backward.finish(tuple(gradients), descriptors_of(program)[program.num_forward_outputs :])


def label_of(op: OpId) -> str:
    """Return the name under which the memory of `op` can be found in a recording."""
    return f"lowtide op {op}"


def run_labelled(label: str, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return `target(*args, **kwargs)`, recorded under `label` where something records."""
    with recorded_as(label):
        return target(*args, **kwargs)


def run_over(
    target: Callable[..., Any], strides: tuple[int, ...], over: torch.Tensor, /, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return `target(*args, **kwargs)`, written over the argument `over`, in the layout that `target` would give it.

    A result that is written over an argument has its strides. Dimensions of size 1 do not say where elements are, but
    kernels choose by their strides, so they are corrected. Where the argument turns out to have another layout than in
    the trace, the result is a new tensor: in another layout, later sums would round differently.
    """
    found = over.stride()
    if any(size != 1 and one != other for size, one, other in zip(over.shape, found, strides, strict=True)):
        return target(*args, **kwargs)  # type: ignore[no-any-return]
    kernel, args, kwargs = written_over((target, args, kwargs), over)
    kernel(*args, **kwargs)
    return over if found == strides else over.as_strided(over.shape, strides, over.storage_offset())


@fx.has_side_effect
def deliver(positions: tuple[int, ...], *gradients: torch.Tensor) -> None:
    """Mark where the gradients of the inputs at `positions` leave a backward graph; see `lower.chunks`."""


def repeated_ops(schedule: Schedule) -> set[OpId]:
    """Return the ops that run more than once."""
    return {op for op, runs in Counter(schedule.steps).items() if runs > 1}


class Emitter:
    """Emits ops, recomputations and views into one new fx graph."""

    def __init__(self, program: Program, repeated: set[OpId], seen: set[OpId] | None = None) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.states: dict[OpId, fx.Node] = {}
        self._repeated = repeated
        self._seen = set(seen or ())
        self._present: dict[fx.Node, fx.Node] = {}
        self._views: dict[ValueId, list[fx.Node]] = {}
        self._results: dict[fx.Node, fx.Node] = {}
        constants = program.module.graph.find_nodes(op="get_attr")
        stand_ins = filter(is_stand_in, program.module.graph.nodes)
        for node in (*constants, *stand_ins):
            self._present[node] = self.graph.node_copy(node)

    def take(self, node: fx.Node, *, again: bool = False) -> None:
        """Receive the tensor of the joint graph's `node` as an argument, possibly for the second time."""
        placeholder = self.graph.placeholder(f"{node.name}_again" if again else node.name)
        placeholder.meta = copy.copy(node.meta)
        self._present[node] = placeholder

    def run(self, op: OpId) -> None:
        """Emit one run of `op`; after the first it is a recomputation."""
        node = self.program.calls[op]
        if node is None:
            return
        again = op in self._seen
        self._seen.add(op)
        made = self._emit_again(op, node) if again else self._emit_first(op, node)
        self._forget_views(op)
        self._present[node] = made
        for item in self.program.owned.get(node, ()):
            if not again or self.program.values[item] not in self.program.graph.ops[op].first_run_only:
                self._present[item] = self._copy(item, item.target, (made, item.args[1]), {}, again=again)
        for tail in self.program.tails.get(op, ()):
            self._present[tail.node] = self._emit_over(tail, again=again)

    def deliver(self, positions: tuple[int, ...]) -> None:
        """Mark that gradients leave here."""
        gradients = [self.resolve(self.program.backward_outputs[position]) for position in positions]
        self.graph.call_function(deliver, (positions, *gradients)).meta["val"] = None

    def resolve(self, node: fx.Node) -> fx.Node:
        """Return the present tensor of the joint graph's `node`, emitting views of it where they are not there."""
        pending = [node]
        while pending:
            current = pending[-1]
            if current in self._present:
                pending.pop()
                continue
            sources = [source for source in current.all_input_nodes if source not in self._present]
            if sources:
                pending += sources
                continue
            pending.pop()
            self._emit_view(current)
        return self._present[node]

    def output(self, node: Any) -> Any:
        """Return what to put in the output for `node`, which may be None or a constant."""
        return self.resolve(node) if isinstance(node, fx.Node) else node

    def result(self, node: Any) -> Any:
        """Return the same as `output`, for what the caller gets: a tensor that is nobody's view.

        Ops may run as others whose results are views, such as a product of matrices in the place of one of stacks of
        them. PyTorch refuses to write in place into a view that a graph returns. Behind a detach it is none, and what
        is written is still noticed where backward reads the same memory.
        """
        found = self.output(node)
        if not isinstance(node, fx.Node) or not self._may_be_view(node):
            return found
        if node not in self._results:
            self._results[node] = self.graph.call_function(torch.ops.aten.detach.default, (found,))
            self._results[node].meta = copy.copy(found.meta)
        return self._results[node]

    def _may_be_view(self, node: fx.Node) -> bool:
        value = self.program.values.get(node)
        producer = None if value is None else self.program.graph.values[value].producer
        if producer is None:
            return False
        made = {self.program.owners[each] for each in self.program.graph.ops[producer].outputs}
        return producer in self.program.tails or node not in made

    def finish(self, outputs: tuple[Any, ...], descriptors: list[Any]) -> fx.GraphModule:
        """Return the module; results that nobody takes out of a tuple are dropped."""
        result = self.graph.output(outputs)
        result.meta["desc"] = [*descriptors, *[None] * (len(outputs) - len(descriptors))]
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (is_getitem(node) or is_stand_in(node) or node.op == "get_attr"):
                self.graph.erase_node(node)
        self.graph.lint()
        return fx.GraphModule(self.program.module, self.graph)

    def _emit_first(self, op: OpId, node: fx.Node) -> fx.Node:
        if self.program.graph.ops[op].random and op in self._repeated:
            state = self.graph.call_function(take_rng_state, (self.program.device,), name=f"{node.name}_state")
            state.meta["val"] = _fake_state(self.program)
            self.states[op] = state
        args, kwargs = self._arguments(node.args, node.kwargs)
        if waited_for(node) is not None and self.program.device.type == "cpu":
            held = (self._present[each] for each in held_until(node) if each in self._present)
            return self._copy(node, wait_until_released, (*args, *held), kwargs, again=False)
        if is_foreign(node):
            return self._copy(node, run_labelled, (label_of(op), node.target, *args), kwargs, again=False)
        return self._copy(node, node.target, args, kwargs, again=False)

    def _emit_again(self, op: OpId, node: fx.Node) -> fx.Node:
        target, args, kwargs = self.program.replays.get(op, (node.target, node.args, node.kwargs))
        args, kwargs = self._arguments(args, kwargs)
        if op in self.states:
            args = (target, self.states[op], self.program.device, *args)
            target = replay_random
        return self._copy(node, target, args, kwargs, again=True)

    def _emit_over(self, tail: Tail, *, again: bool) -> fx.Node:
        node = tail.node
        args, kwargs = self._arguments(node.args, node.kwargs)
        given = (node.target, node.meta["val"].stride(), self.resolve(tail.over), *args)
        return self._copy(node, run_over, given, kwargs, again=again)

    def _emit_view(self, node: fx.Node) -> None:
        args, kwargs = self._arguments(node.args, node.kwargs)
        target = _RELAXED.get(node.target, node.target)
        self._present[node] = self._copy(node, target, args, kwargs, again=False)
        self._views.setdefault(self.program.values[node], []).append(node)

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        return fx.node.map_arg((tuple(args), dict(kwargs)), self.resolve)

    def _copy(self, node: fx.Node, target: Any, args: Any, kwargs: Any, *, again: bool) -> fx.Node:
        name = f"{node.name}_recomputed" if again else node.name
        made = self.graph.create_node("call_function", target, args, kwargs, name=name)
        made.meta = copy.copy(node.meta)
        return made

    def _forget_views(self, op: OpId) -> None:
        """Drop views of an earlier run's results, which must not be taken for views of the new ones."""
        for value in self.program.graph.rewrites[op]:
            for view in self._views.pop(value, ()):
                self._present.pop(view, None)


def _run_backward(program: Program, schedule: Schedule, backward: Emitter) -> list[Any]:
    """Emit the backward pass; a parameter's gradient is accumulated right after the op that completes it."""
    owed: dict[OpId, list[int]] = {}
    for position in accumulated(program):
        value = program.values[program.backward_outputs[position]]
        owed.setdefault(program.graph.values[value].producer, []).append(position)  # type: ignore[arg-type]
    last_run = {op: step for step, op in enumerate(schedule.backward)}
    running = backward.graph.call_function(RunningBackward) if owed else None
    settled: dict[int, fx.Node] = {}
    for step, op in enumerate(schedule.backward):
        backward.run(op)
        if op in program.deliveries:
            backward.deliver(program.deliveries[op])
        if last_run[op] == step:
            for position in owed.get(op, ()):
                gradient: fx.Node = program.backward_outputs[position]
                args = (backward.resolve(gradient), backward.resolve(program.primals[position]), running)
                settled[position] = backward.graph.call_function(accumulate_early, args)
                settled[position].meta = copy.copy(gradient.meta)
    return [
        settled[position] if position in settled else backward.output(node)
        for position, node in enumerate(program.backward_outputs)
    ]


def accumulated(program: Program) -> list[int]:
    """Return the positions of the parameters whose gradient a backward op makes."""
    return [
        position
        for position, node in enumerate(program.backward_outputs)
        if position in program.parameters
        and position not in program.delivered
        and isinstance(node, fx.Node)
        and program.graph.values[program.values[node]].producer is not None
        and program.graph.values[program.values[node]].kind == "gradient"
    ]


def saved_values(program: Program, schedule: Schedule) -> list[ValueId]:
    """Return the values that backward reads before it makes them itself, in order of first use."""
    graph = program.graph
    saved: dict[ValueId, None] = {}
    made: set[ValueId] = set()
    seen = set(schedule.forward)

    def need(node: Any) -> None:
        value = program.values.get(node) if isinstance(node, fx.Node) else None
        if value is None or value in made or graph.values[value].kind == "tangent":
            return
        if program.owners[value].op != "get_attr":
            saved.setdefault(value)

    for op in schedule.backward:
        for node in program.reads(op, replay=op in seen):
            need(node)
        made.update(graph.ops[op].outputs if op not in seen else graph.rewrites[op])
        seen.add(op)
    for node in program.backward_outputs:
        need(node)
    return list(saved)


def _unchecked(node: fx.Node) -> fx.Node:
    """Mark a saved parameter as a handle only: backward does not read its contents, so they may change meanwhile."""
    node.meta["saved_tensor_with_no_vc_check"] = True
    return node


def _fake_state(program: Program) -> torch.Tensor:
    """Return a fake tensor like a generator state."""
    values = (node.meta.get("val") for node in program.module.graph.nodes)
    mode = next(fake_mode_of(value) for value in values if isinstance(value, FakeTensor))
    with without_modes():
        size = take_rng_state(program.device).numel()
    with mode:
        return torch.empty(size, dtype=torch.uint8)


def descriptors_of(program: Program) -> list[Any]:
    """Return what AOTAutograd notes about the outputs of the joint graph."""
    output = next(reversed(program.module.graph.find_nodes(op="output")))
    return list(output.meta.get("desc") or [None] * len(output.args[0]))
