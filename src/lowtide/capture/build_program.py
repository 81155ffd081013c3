"""From a joint graph, as AOTAutograd traces it, to a program that can be planned."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide import device as devices
from lowtide.capture import recompute_rules
from lowtide.capture.alias import view_base
from lowtide.capture.async_collectives import buffer_bytes, holds_inputs, waited_for
from lowtide.capture.copies import drop_copies
from lowtide.capture.deliveries import TARGET, Deliveries
from lowtide.capture.gradient_layout import lay_out_gradients
from lowtide.capture.inplace_fusion import find_tails
from lowtide.capture.normalise import normalise
from lowtide.capture.program import Program, Tail, is_getitem, is_mutable, is_tangent, is_tensor, output_node
from lowtide.capture.shape_only_inputs import is_stand_in, replace_shape_only_inputs
from lowtide.capture.source_lines import source_line
from lowtide.capture.split_conv_backward import split_convolutions
from lowtide.errors import CaptureError
from lowtide.graph.ir import Graph, Op, OpId, Value, ValueId
from lowtide.pytorch.compiler.joint_graph import mutated_input
from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.ops import is_collective, op_name
from lowtide.pytorch.storages import storage_bytes, storage_key


def refuse_unplannable(module: fx.GraphModule) -> None:
    """Raise `CaptureError` if a result has a symbolic shape or a layout other than strided."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if _is_symbolic(value):
            raise CaptureError(
                f"The shape of {node.name!r}{_place(node)} is symbolic, and a byte budget needs sizes that are "
                "numbers. Compile with dynamic=False, and keep data-dependent shapes (nonzero, item, boolean masks) "
                "out of the planned model."
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                f"{node.target}{_place(node)} makes a tensor of layout {value.layout}, whose bytes depend on data, and "
                "a byte budget needs sizes that are numbers. Use dense tensors (nn.Embedding(..., sparse=False), "
                "x.to_dense()), or leave that part of the model unwrapped."
            )


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _place(node: fx.Node) -> str:
    line = source_line(node)
    return f" (at {line})" if line else ""


_ROOT = re.compile(r"^[LG]\['\w+'\](?:\.__closure__\[\d+\]\.cell_contents|\.__self__|\.forward\.plain)*\.?")
_ITEM = re.compile(r"\.?(?:__dict__\['_modules'\]|_modules)\['(?P<name>[^']+)'\]")


_SCATTERS = {"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"}


def make_program(
    module: fx.GraphModule,
    *,
    num_forward_outputs: int,
    parameters: Sequence[int],
    like: Program | None = None,
    deliveries: Deliveries | None = None,
) -> Program:
    """Return the `Program` of a joint graph, which it takes over and normalises in place.

    Tangents that nothing reads are taken not to come.

    Args:
        module: The joint graph; every node carries its fake tensor in `meta["val"]`.
        num_forward_outputs: How many of its outputs belong to forward.
        parameters: Positions of the inputs that live as long as the model.
        like: A program of the same forward graph, whose forward ops and values this one shall have.
        deliveries: Which gradients leave before the end.
    """
    refuse_unplannable(module)
    normalise(module)
    drop_copies(module)
    split_convolutions(module)
    replace_shape_only_inputs(module)
    if _has_tokens(module):
        # Positions of parameters count from behind the tokens that order effects; those of gradients do not.
        parameters = ()
    lay_out_gradients(module, num_forward_outputs, parameters)
    program = _Folder(module, num_forward_outputs, frozenset(parameters), {}, deliveries).fold()
    tails = find_tails(program, like)
    return _Folder(module, num_forward_outputs, frozenset(parameters), tails, deliveries).fold() if tails else program


def fold(module: fx.GraphModule, *, num_forward_outputs: int, parameters: Sequence[int]) -> Program:
    """Return the `Program` of a joint graph as it is: for graphs that another compiler has prepared."""
    return _Folder(module, num_forward_outputs, frozenset(parameters), {}, None).fold()


class _Folder:
    """Walks the joint graph once and collects ops and values; used by `make_program` and `fold` alone."""

    def __init__(
        self,
        module: fx.GraphModule,
        num_forward_outputs: int,
        parameters: frozenset[int],
        tails: Mapping[fx.Node, tuple[Tail, ...]],
        deliveries: Deliveries | None,
    ) -> None:
        self.module = module
        self.tails_of = tails
        self.given = deliveries
        self.deliveries: dict[OpId, tuple[int, ...]] = {}
        self.is_tail = {tail.node for group in self.tails_of.values() for tail in group}
        self.num_forward_outputs = num_forward_outputs
        self.parameters = parameters
        self.device = _device_of(module)
        self.outputs: tuple[Any, ...] = tuple(output_node(module).args[0])  # type: ignore[arg-type]
        self.changed_values: frozenset[ValueId] = frozenset()
        self.values: list[Value] = []
        self.owners: list[fx.Node] = []
        self.value_of: dict[fx.Node, ValueId] = {}
        self.ops: list[Op] = []
        self.calls: list[fx.Node | None] = []
        self.replays: dict[OpId, Any] = {}
        self.tails: dict[OpId, tuple[Tail, ...]] = {}
        # For what a wait returns, the value that the collective fills.
        self.filled: dict[ValueId, ValueId] = {}
        # For collectives, what they hold until they are waited for.
        self.in_flight: dict[OpId, list[ValueId]] = {}

    def fold(self) -> Program:
        forward, backward = _phases(self.module, self.outputs[: self.num_forward_outputs])
        self._add_inputs()
        for node in forward:
            self._add(node, "activation")
        boundary = len(self.ops)
        self._add_tangents()
        waiting = self._waiting_groups(backward)
        for node in backward:
            self._add(node, "gradient")
            for group in waiting.get(node, ()):
                self._add_delivery(group)
        graph = Graph(tuple(self.ops), tuple(self.values), *self._ends(), boundary)
        return Program(
            module=self.module,
            graph=graph,
            device=self.device,
            num_forward_outputs=self.num_forward_outputs,
            calls=tuple(self.calls),
            owners=tuple(self.owners),
            values=self.value_of,
            replays=self.replays,
            tails=self.tails,
            parameters=self.parameters,
            deliveries=self.deliveries,
        )

    def _waiting_groups(self, backward: Sequence[fx.Node]) -> dict[fx.Node, list[tuple[int, ...]]]:
        """Return behind which node each group of gradients can leave: all are made, and no parameter is read again."""
        places = {node: place for place, node in enumerate(backward)}
        primals = [n for n in self.module.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        groups = self.given.groups if self.given is not None else ()
        found: dict[fx.Node, list[tuple[int, ...]]] = {}
        for group in groups:
            made = {position: self.outputs[self.num_forward_outputs + position] for position in group}
            present = tuple(position for position, node in made.items() if node in places)
            if present:
                readers = [each for position in present for each in _readers(primals[position]) if each in places]
                last = max((*(made[position] for position in present), *readers), key=places.__getitem__)
                found.setdefault(last, []).append(present)
        return found

    def _add_delivery(self, positions: tuple[int, ...]) -> None:
        """Add an op that delivers the gradients of the inputs at these positions."""
        assert self.given is not None
        op_id = len(self.ops)
        nodes = [self.outputs[self.num_forward_outputs + position] for position in positions]
        read = tuple(dict.fromkeys(self.value_of[node] for node in nodes))
        copied = int(self.given.copied_share * sum(self.values[value].bytes for value in read))
        outputs: tuple[ValueId, ...] = ()
        if copied:
            outputs = (len(self.values),)
            self.values.append(Value(f"reduced_{len(self.deliveries)}", copied, op_id, "gradient"))
            self.owners.append(nodes[0])
        self.deliveries[op_id] = positions
        self.calls.append(None)
        name = f"deliver_{len(self.deliveries) - 1}"
        self.ops.append(Op(name, TARGET, read, outputs, pinned="gradients leave once"))

    def _add_inputs(self) -> None:
        placeholders = [n for n in self.module.graph.find_nodes(op="placeholder") if not is_tangent(n)]
        for position, node in enumerate(placeholders):
            if not is_tensor(node):
                continue
            self._add_value(node, None, "parameter" if position in self.parameters else "input")
        for node in self.module.graph.find_nodes(op="get_attr"):
            self._add_value(node, None, "buffer")
        self.changed_values = frozenset(self.value_of[node] for node in _changed_inputs(self.module))

    def _add_tangents(self) -> None:
        """Add the arrival of the tangents as an op of its own: they are allocated when backward begins."""
        placeholders = self.module.graph.find_nodes(op="placeholder")
        tangents = [n for n in placeholders if is_tangent(n) and n.users and is_tensor(n)]
        if not tangents:
            return
        op_id = len(self.ops)
        outputs = tuple(self._add_value(node, op_id, "tangent") for node in tangents)
        self.calls.append(None)
        self.ops.append(Op("tangents", "lowtide.tangents", (), outputs, pinned="gradients arrive once"))

    def _add(self, node: fx.Node, kind: str) -> None:
        if node in self.is_tail:
            return
        base = view_base(node)
        if base is not None:
            self.value_of[node] = self.value_of[base]
            if is_mutable(node):
                self._add_op(node, kind, results=())
            return
        if is_getitem(node):
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            if source in self.value_of and node not in self.value_of:
                self.value_of[node] = self.value_of[source]
            return
        self._add_op(node, kind, results=tensors_in(node.meta.get("val")))

    def _add_op(self, node: fx.Node, kind: str, results: Sequence[torch.Tensor]) -> None:
        op_id = len(self.ops)
        read = [self.value_of[n] for n in node.all_input_nodes if n in self.value_of]
        inputs = dict.fromkeys([*read, *self._behind(read), *self._held_until(node)])
        outputs, once = self._add_results(node, op_id, kind, results)
        tails = self.tails_of.get(node, ())
        for tail in tails:
            others = self._add_tail(tail)
            inputs.update(dict.fromkeys([*others, *self._behind(others)]))
        if tails:
            self.tails[op_id] = tails
        changed = {n for n in node.all_input_nodes if self.value_of.get(n) in self.changed_values}
        replay = recompute_rules.replay_call(node)
        if replay is not None:
            self.replays[op_id] = replay
        random = recompute_rules.is_random(node)
        self.calls.append(node)
        self.ops.append(
            Op(
                name=node.name,
                target="+".join(str(each.target) for each in (node, *(tail.node for tail in tails))),
                inputs=tuple(inputs),
                outputs=outputs,
                module=_module_path(node),
                source=source_line(node),
                pinned=recompute_rules.why_pinned(node, changed),
                random=random,
                replay_bytes=devices.rng_state_bytes(self.device) if random else 0,
                first_run_only=once,
            )
        )

    def _behind(self, values: Sequence[ValueId]) -> list[ValueId]:
        """Return the values whose memory `values` are: what a wait returns is what the collective has filled."""
        return [self.filled[value] for value in values if value in self.filled]

    def _held_until(self, node: fx.Node) -> list[ValueId]:
        """Return what a collective holds until `node`, which waits for it."""
        source = waited_for(node)
        if source is None or source not in self.value_of:
            return []
        producer = self.values[self.value_of[source]].producer
        return [] if producer is None else self.in_flight.get(producer, [])

    def _add_in_flight(self, node: fx.Node, op_id: OpId, kind: str) -> list[ValueId]:
        """Note what the collective `node` holds until it is waited for; return the value for the buffers of its own."""
        held = [self.value_of[n] for n in node.all_input_nodes if n in self.value_of] if holds_inputs(node) else []
        self.in_flight[op_id] = [*held, *self._behind(held)]
        size = buffer_bytes(node, self.device)
        if not size:
            return []
        self.values.append(Value(f"{node.name}_in_flight", size, op_id, kind))
        self.owners.append(node)
        self.in_flight[op_id].append(len(self.values) - 1)
        return [len(self.values) - 1]

    def _add_tail(self, tail: Tail) -> list[ValueId]:
        """Let the result of `tail` be the value that it writes over; return the other values that it reads."""
        value = self._value_at(tail.over)
        self.value_of[tail.node] = value
        self.owners[value] = tail.node
        self.values[value] = replace(self.values[value], name=tail.node.name)
        read = [self._value_at(source) for source in tail.node.all_input_nodes]
        return [each for each in read if each != value]

    def _value_at(self, node: fx.Node) -> ValueId:
        """Return the value of `node`, which may be a view of one that is met only later."""
        while node not in self.value_of:
            base = view_base(node) or node.args[0]
            assert isinstance(base, fx.Node)
            node = base
        return self.value_of[node]

    def _add_results(
        self, node: fx.Node, op_id: OpId, kind: str, results: Sequence[torch.Tensor]
    ) -> tuple[tuple[ValueId, ...], tuple[ValueId, ...]]:
        """Add the values that `node` makes; return them, and those that only its first run makes."""
        if not results:
            return (), ()
        source = waited_for(node)
        if source is not None and source in self.value_of:
            # It is there as long as what it waited for, and takes nothing more.
            value = self._add_value(node, op_id, kind)
            self.values[value] = replace(self.values[value], bytes=0)
            self.filled[value] = self.value_of[source]
            return (value,), ()
        outputs, once = self._add_made(node, op_id, kind)
        return (*outputs, *(self._add_in_flight(node, op_id, kind) if is_collective(node.target) else ())), once

    def _add_made(self, node: fx.Node, op_id: OpId, kind: str) -> tuple[tuple[ValueId, ...], tuple[ValueId, ...]]:
        """Add the values in the storages that `node` makes; return them, and those that only its first run makes."""
        if isinstance(node.meta["val"], torch.Tensor):
            value = self._add_value(node, op_id, kind)
            self.values[value] = replace(self.values[value], bytes=self._result_bytes(node))
            return (value,), ()
        outputs: dict[int, ValueId] = {}
        once: list[ValueId] = []
        for user in node.users:
            if not is_getitem(user) or not isinstance(user.meta.get("val"), torch.Tensor):
                continue
            key = storage_key(user.meta["val"])
            if key in outputs:
                self.value_of[user] = outputs[key]
                continue
            outputs[key] = self._add_value(user, op_id, kind)
            if user.args[1] in recompute_rules.first_run_only(node):
                once.append(outputs[key])
        unread = self._add_unread(node, op_id, kind, outputs)
        return (*outputs.values(), *unread), tuple(once)

    def _add_unread(self, node: fx.Node, op_id: OpId, kind: str, taken: Collection[int]) -> list[ValueId]:
        """Add one value for the results nobody takes: they exist while the op runs."""
        unread = {
            storage_key(item): self._bytes(item)
            for index, item in enumerate(node.meta["val"])
            if isinstance(item, torch.Tensor) and index not in recompute_rules.first_run_only(node)
        }
        size = sum(size for key, size in unread.items() if key not in taken)
        if not size:
            return []
        self.values.append(Value(f"{node.name}_unread", size, op_id, kind))
        self.owners.append(node)
        return [len(self.values) - 1]

    def _add_value(self, node: fx.Node, producer: OpId | None, kind: str) -> ValueId:
        value = len(self.values)
        tensor = node.meta.get("val")
        size = self._bytes(tensor) if isinstance(tensor, torch.Tensor) else 0
        self.values.append(Value(node.name, size, producer, kind))
        self.owners.append(node)
        self.value_of[node] = value
        return value

    def _result_bytes(self, node: fx.Node) -> int:
        """Return the size of the storage that `node` makes; scatters into a view copy all of its storage."""
        tensor: torch.Tensor = node.meta["val"]
        if op_name(node.target) not in _SCATTERS or not tensor.numel():
            return self._bytes(tensor)
        return max(self._bytes(tensor), self._bytes(node.args[0].meta["val"]))  # type: ignore[union-attr]

    def _bytes(self, tensor: torch.Tensor) -> int:
        if tensor.device != self.device:
            return 0
        return devices.round_bytes(storage_bytes(tensor), self.device)

    def _ends(self) -> tuple[tuple[ValueId, ...], tuple[ValueId, ...]]:
        """Return the values alive to the end of the step, and those alive to the end of forward."""
        descs = output_node(self.module).meta.get("desc") or [None] * len(self.outputs)
        outputs: dict[ValueId, None] = {}
        handovers: dict[ValueId, None] = {}
        gone = self._gone()
        for index, (node, desc) in enumerate(zip(self.outputs, descs, strict=True)):
            if not isinstance(node, fx.Node) or node not in self.value_of or index in gone:
                continue
            value = self.value_of[node]
            ends = outputs if mutated_input(desc) is None else handovers
            for each in (value, *self._behind([value])):
                if self.values[each].producer is not None:
                    ends.setdefault(each)
        outputs.update(dict.fromkeys(copy for op in self.deliveries for copy in self.ops[op].outputs))
        # A scalar's tangent is the one that `loss.backward()` makes and holds on to until it returns.
        for made, owner in zip(self.values, self.owners, strict=True):
            if made.kind == "tangent" and owner.meta["val"].numel() == 1:
                outputs.setdefault(self.value_of[owner])
        return tuple(outputs), tuple(handovers)

    def _gone(self) -> set[int]:
        """Return the places among the outputs of gradients that die when they are delivered."""
        if self.given is None or self.given.kept:
            return set()
        return {self.num_forward_outputs + position for group in self.deliveries.values() for position in group}


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return what reads `node` or a view of it, and the views."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        users = [user for user in pending.pop().users if user not in found]
        found.update(dict.fromkeys(users))
        pending += [user for user in users if user.op == "call_function" and view_base(user) is not None]
    return list(found)


def _phases(module: fx.GraphModule, forward_outputs: Sequence[Any]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Split the calls into forward and backward, each in the graph's order."""
    needed: set[fx.Node] = set()
    stack = [node for node in forward_outputs if isinstance(node, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    late: set[fx.Node] = {n for n in module.graph.nodes if is_tangent(n)}
    is_tagged = any("forward" in _tag(node) for node in module.graph.nodes if node.op == "call_function")
    forward: list[fx.Node] = []
    backward: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or is_stand_in(node):
            continue
        # What the backward of a `torch.autograd.Function` calls is not tagged; all that forward calls is.
        untagged = is_tagged and not _tag(node) and not is_mutable(node)
        in_backward = "backward" in _tag(node) or untagged
        if node not in needed and (in_backward or any(source in late for source in node.all_input_nodes)):
            late.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return forward, backward


def _tag(node: fx.Node) -> str:
    return str(node.meta.get("partitioner_tag") or "")


def _changed_inputs(module: fx.GraphModule) -> set[fx.Node]:
    """Return the placeholders whose contents the step changes."""
    output = output_node(module)
    by_desc = {repr(n.meta.get("desc")): n for n in module.graph.find_nodes(op="placeholder")}
    mutated = [mutated_input(desc) for desc in output.meta.get("desc") or ()]
    changed = {by_desc[repr(each)] for each in mutated if each is not None and repr(each) in by_desc}
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        changed.add(node.args[0])
    keys = {storage_key(n.meta["val"]) for n in changed if isinstance(n.meta.get("val"), torch.Tensor)}
    return {
        node
        for node in module.graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor) and storage_key(node.meta["val"]) in keys
    }


def _device_of(module: fx.GraphModule) -> torch.device:
    """Return the one device the graph computes on; host scalars beside an accelerator do not count."""
    tensors = [n.meta["val"] for n in module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    found = {tensor.device for tensor in tensors}
    accelerators = {device for device in found if device.type != "cpu"}
    if len(accelerators) > 1:
        raise CaptureError(
            f"The model computes on several devices ({', '.join(sorted(map(str, accelerators)))}); lowtide plans one "
            "device at a time. Wrap the part of the model on each device by itself."
        )
    return accelerators.pop() if accelerators else torch.device("cpu")


def _has_tokens(module: fx.GraphModule) -> bool:
    return any("Token" in type(n.meta.get("desc")).__name__ for n in module.graph.find_nodes(op="placeholder"))


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return _ITEM.sub(r".\g<name>", _ROOT.sub("", path)).lstrip(".")
