"""What is alive at the peak of a schedule: every tensor with its origin and the reason why it is still there."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lowtide.graph.ir import Graph, OpId
from lowtide.plan.core.result import Plan
from lowtide.schedule.simulate import Instance, instances

# What a tensor is there for at the peak; the first that holds is its role.
RETURNED_GRADIENT = "returned gradient"
OUTPUT = "output"
WRITTEN = "written"
READ = "read"
HANDOVER = "handover"
PASSING_GRADIENT = "passing gradient"
KEPT = "kept"
GENERATOR_STATE = "generator state"

_MAX_ORIGINS = 3
_FAR_OPS = 8


@dataclass(frozen=True, slots=True)
class AliveTensor:
    """One tensor that is alive at the peak; steps count from 1.

    Attributes:
        name: Its name in the graph.
        bytes: Its size.
        kind: "activation" or "gradient", or "generator state".
        op: What made it, such as "aten.relu.default".
        module: The module that made it, or "".
        source: The line that made it, as "file:line".
        origin: Modules whose outputs it was made from, if no module of its own made it.
        role: What it is there for, in a word: it is "read" or "written" by the op that runs, a "returned gradient" that
            stays to the end of the step, an "output" that the caller holds or the gradient that arrives for it, a
            "handover", a "passing gradient" of an activation, an activation that is "kept", or a "generator state".
        reason: Why it is alive.
        first_step: When it is made.
        last_step: When it is used last.
        last_forward_step: When forward uses it last; 0 if it is made in backward.
    """

    name: str
    bytes: int
    kind: str
    op: str
    module: str
    source: str
    origin: tuple[str, ...]
    role: str
    reason: str
    first_step: int
    last_step: int
    last_forward_step: int

    @property
    def place(self) -> str:
        """The module that made it, or the modules whose outputs it was made from."""
        return self.module or (f"(top) from {' and '.join(self.origin)}" if self.origin else "(top)")

    @property
    def what(self) -> str:
        """What it is, in words: "relu in down.0", "cat of down.0 and up.2"."""
        words = short_target(self.op)
        if self.kind == "gradient":
            words = f"gradient, by {words}"
        if self.module:
            return f"{words} in {self.module}"
        return f"{words} of {' and '.join(self.origin)}" if self.origin else words


def tensors_at_peak(plan: Plan) -> tuple[AliveTensor, ...]:
    """Return what is alive at the peak of `plan`, largest first."""
    reader = _Reader(plan)
    peak = plan.trace.peak_step
    found = [reader.describe(each) for each in reader.instances if each.birth <= peak <= each.death and each.bytes]
    found += [reader.describe_state(each) for each in reader.states if each.birth <= peak <= each.death]
    return tuple(sorted(found, key=lambda tensor: (-tensor.bytes, tensor.first_step, tensor.name)))


def op_at_peak(plan: Plan) -> str:
    """Return what runs at the peak of `plan`, in words: "aten.mm.default in head (models/net.py:12)"."""
    op = plan.problem.graph.ops[plan.schedule.steps[plan.trace.peak_step]]
    return f"{op.target}{f' in {op.module}' if op.module else ''}{at_source(op.source)}"


def phase_at_peak(plan: Plan) -> str:
    """Return "forward" or "backward"."""
    return "forward" if plan.trace.peak_step < plan.trace.boundary else "backward"


def short_source(source: str) -> str:
    """Return the file of "file:line" with its folder, without what is above."""
    return "/".join(source.replace("\\", "/").split("/")[-2:])


def at_source(source: str) -> str:
    """Return " (folder/file:line)", or "" if the place is not known."""
    return f" ({short_source(source)})" if source else ""


def short_target(target: str) -> str:
    """Return what an op is called without its library and overload: "relu" for "aten.relu.default"."""
    return "+".join(parts[1] if len(parts := one.split(".")) == 3 else one for one in target.split("+"))


class _Reader:
    """Answers questions about one plan's schedule."""

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.problem.graph
        self.steps = plan.schedule.steps
        self.boundary = len(plan.schedule.forward)
        self.peak = plan.trace.peak_step
        self.at_peak: OpId = self.steps[self.peak]
        self.runs: dict[OpId, list[int]] = {}
        for step, op in enumerate(self.steps):
            self.runs.setdefault(op, []).append(step)
        made = instances(self.graph, plan.schedule)
        # Generator states of ops that run again come after all values.
        repeated = sum(bool(self.graph.ops[op].replay_bytes) and len(runs) > 1 for op, runs in self.runs.items())
        self.instances = made[: len(made) - repeated]
        self.states = made[len(made) - repeated :]

    def describe(self, instance: Instance) -> AliveTensor:
        value = self.graph.values[instance.value]
        assert value.producer is not None, "inputs have no instances"
        op = self.graph.ops[value.producer]
        uses = self.uses(instance)
        forward_uses = [step for step in uses if step < self.boundary]
        return AliveTensor(
            name=value.name,
            bytes=instance.bytes,
            kind=value.kind,
            op=op.target,
            module=op.module,
            source=op.source,
            origin=() if op.module else self.origin(value.producer),
            role=self.role(instance, uses),
            reason=self.reason(instance, uses),
            first_step=instance.birth + 1,
            last_step=instance.death + 1,
            last_forward_step=0 if instance.birth >= self.boundary else max(forward_uses, default=instance.birth) + 1,
        )

    def describe_state(self, instance: Instance) -> AliveTensor:
        producer = self.graph.values[instance.value].producer
        assert producer is not None
        op = self.graph.ops[producer]
        return AliveTensor(
            name=f"{op.name} generator state",
            bytes=instance.bytes,
            kind="generator state",
            op=op.target,
            module=op.module,
            source=op.source,
            origin=(),
            role=GENERATOR_STATE,
            reason="it repeats the random numbers when the op runs again",
            first_step=instance.birth + 1,
            last_step=instance.death + 1,
            last_forward_step=0,
        )

    def uses(self, instance: Instance) -> list[int]:
        """Return the steps that read this instance."""
        found = []
        for op in self.graph.readers[instance.value]:
            runs = self.runs.get(op, [])
            found += [step for step in runs if instance.birth < step <= instance.death]
        return sorted(found)

    def origin(self, op: OpId) -> tuple[str, ...]:
        """Return the modules whose outputs `op` computes from, through ops that belong to no module."""
        found: dict[str, int] = {}
        pending, seen = [op], {op}
        while pending:
            current = pending.pop()
            for value in self.graph.ops[current].inputs:
                producer = self.graph.values[value].producer
                if producer is None or producer in seen:
                    continue
                seen.add(producer)
                module = self.graph.ops[producer].module
                if module:
                    found[module] = max(found.get(module, 0), self.graph.values[value].bytes)
                else:
                    pending.append(producer)
        largest = max(found.values(), default=0)
        return tuple(name for name, size in found.items() if 4 * size >= largest)[:_MAX_ORIGINS]

    def role(self, instance: Instance, uses: list[int]) -> str:
        kind = self.graph.values[instance.value].kind
        if self.stays(instance):
            return RETURNED_GRADIENT if kind == "gradient" else OUTPUT
        if kind == "tangent":
            return OUTPUT
        if instance.birth == self.peak:
            return WRITTEN
        if self.peak in uses:
            return READ
        if instance.value in self.graph.handovers and not any(step > self.peak for step in uses):
            return HANDOVER
        return PASSING_GRADIENT if kind == "gradient" else KEPT

    def stays(self, instance: Instance) -> bool:
        """Whether this is the instance that the step returns: backward's copies of what forward made are not."""
        producer = self.graph.values[instance.value].producer
        assert producer is not None
        return (
            instance.value in self.graph.held
            and instance.death == len(self.steps) - 1
            and (instance.birth < self.boundary or not self.graph.is_forward(producer))
        )

    def reason(self, instance: Instance, uses: list[int]) -> str:
        if instance.birth == self.peak:
            return "it is being written there"
        index = bisect_right(uses, self.peak - 1)
        later = uses[index:]
        if later and later[0] == self.peak:
            words = "it is being read there"
            return f"{words}, and {self.next_use(instance, later[1:])}" if later[1:] else words
        return self.next_use(instance, later)

    def next_use(self, instance: Instance, later: list[int]) -> str:
        value = instance.value
        if later:
            words = self.use_in_words(later[0])
            skip = self.skip(instance)
            return f"{words}; {skip}" if skip else words
        if value in self.graph.held:
            gradient = self.graph.values[value].kind == "gradient"
            return "it is a gradient that the step returns" if gradient else "the step returns it"
        if value in self.graph.handovers:
            return "it is the new content of a buffer, handed over when forward ends"
        return "nothing reads it any more"

    def use_in_words(self, step: int) -> str:
        op = self.graph.ops[self.steps[step]]
        phase = "forward" if step < self.boundary else "backward"
        place = f" in {op.module}" if op.module else ""
        return f"{phase} reads it {step - self.peak} steps later, by {short_target(op.target)}{place}"

    def skip(self, instance: Instance) -> str:
        """Return words about a forward reader that is far from where the tensor was made, or ""."""
        reads = [step for step in self.uses(instance) if step < self.boundary]
        if instance.birth >= self.boundary or not reads or reads[-1] - instance.birth < _FAR_OPS:
            return ""
        op = self.graph.ops[self.steps[reads[-1]]]
        far, name = reads[-1] - instance.birth, short_target(op.target)
        return f"a long skip: forward reads it {far} steps after it was made, by {name}"
