"""Reader of the graph files that Kusumoto et al. released: a training step of a Chainer model, function by function.

A file is text. The first line has the number of variables and of functions. A line for every variable follows: its
number, bytes and name ("_" for a result, a number for an input of the network, a path such as "/conv1/W" for a
parameter). Then come the functions, first all forward ones and then, in the same order, their backward ones: a line
"forward" or "backward", the number of inputs and of outputs, a line for each input with its number and what it is
("gradient", "input" or "output" for a backward function), a line for each output, the name of the function's class, and
a line of attributes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lowtide.errors import InvalidGraphError
from lowtide.graph.build import GraphBuilder
from lowtide.graph.costs import Costs
from lowtide.graph.ir import Graph, ValueId
from lowtide.plan.planners.kusumoto_lower_sets.dag import Dag

_TAGS = ("gradient", "input", "output")
_CONVOLUTION_TICKS = 10
_SCALAR_BYTES = 4
_NEED_NOTHING = frozenset(["Add", "Concat", "Dropout", "GetItem", "MulConstant", "Reshape", "ResizeImages"])


@dataclass(frozen=True)
class Variable:
    """A variable: its bytes and the name in the file."""

    bytes: int
    name: str

    @property
    def is_parameter(self) -> bool:
        """True if it is a parameter of the model."""
        return self.name.startswith("/")


@dataclass(frozen=True)
class Function:
    """A forward function with what its backward reads and which gradients that writes.

    Attributes:
        name: Class of the function.
        inputs: Variables that forward reads.
        output: The variable that forward writes.
        reads: Variables whose values backward reads, besides the gradient of the output.
        gradients: Variables whose gradients backward writes.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    reads: tuple[int, ...]
    gradients: tuple[int, ...]

    @property
    def ticks(self) -> int:
        """Its time as the paper counts: 10 for a convolution, 1 for everything else, deconvolutions included."""
        return _CONVOLUTION_TICKS if self.name.startswith("Conv") else 1


@dataclass(frozen=True)
class ChainerGraph:
    """A training step.

    Attributes:
        variables: The variables by number.
        functions: The functions in an order in which they can run.
    """

    variables: dict[int, Variable]
    functions: tuple[Function, ...]

    @cached_property
    def _place(self) -> dict[int, int]:
        """For every variable that a function writes, that function's place."""
        return {function.output: place for place, function in enumerate(self.functions)}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(variable.bytes for variable in self.variables.values() if variable.is_parameter)

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs of the network."""
        given = (variable for number, variable in self.variables.items() if number not in self._place)
        return sum(variable.bytes for variable in given if not variable.is_parameter)

    @cached_property
    def dag(self) -> Dag:
        """The paper's DAG: one vertex for every result; inputs and parameters are not part of it."""
        return Dag(
            bytes=tuple(self.variables[function.output].bytes for function in self.functions),
            ticks=tuple(function.ticks for function in self.functions),
            predecessors=tuple(
                tuple(sorted({self._place[number] for number in function.inputs if number in self._place}))
                for function in self.functions
            ),
        )

    def scaled(self, batch: int, captured: int) -> ChainerGraph:
        """Return the step with `batch` samples instead of the `captured` ones; parameters and scalars stay."""
        variables = {
            number: variable
            if variable.is_parameter or variable.bytes <= _SCALAR_BYTES
            else Variable(variable.bytes * batch // captured, variable.name)
            for number, variable in self.variables.items()
        }
        return ChainerGraph(variables, self.functions)

    def training(self, *, declared: bool = True) -> tuple[Graph, Costs]:
        """Return the same step as a joint graph.

        A tick is a second and backward takes twice as long as forward. Gradients of parameters are outputs; those of
        the network's inputs are not computed. If several functions read a variable, the first backward makes the
        buffer of its gradient and the others add into it, so there is never a second buffer; such ops run once.

        Args:
            declared: True if backward reads all that the file says it reads; otherwise additions, concatenations and
                other functions that only move numbers read nothing but the gradient, as is enough for them.
        """
        return _Joint(self, declared).build()


class _Joint:
    """Builds the joint graph."""

    def __init__(self, chainer: ChainerGraph, declared: bool) -> None:
        self._variables, self._functions, self._declared = chainer.variables, chainer.functions, declared
        self._builder = GraphBuilder()
        self._value: dict[int, ValueId] = {}
        # For every variable, the buffer of its gradient and the marks of those who added to it since.
        self._gradient: dict[int, list[ValueId]] = {}
        self._made = {function.output for function in self._functions}
        self._read = {number for function in self._functions for number in function.inputs}
        self._writers = Counter(number for function in self._functions for number in set(function.gradients))

    def build(self) -> tuple[Graph, Costs]:
        builder = self._builder
        for number, variable in self._variables.items():
            if number not in self._made:
                kind = "parameter" if variable.is_parameter else "input"
                self._value[number] = builder.add_input(variable.name, variable.bytes, kind=kind)
        for place, function in enumerate(self._functions):
            (self._value[function.output],) = builder.add_op(
                f"{function.name}.{place}",
                [self._value[number] for number in function.inputs],
                [(f"v{function.output}", self._variables[function.output].bytes)],
                target=function.name,
                seconds=float(function.ticks),
            )
        builder.begin_backward()
        for place in reversed(range(len(self._functions))):
            self._add_backward(place)
        losses = [self._value[number] for number in sorted(self._made - self._read)]
        results = [value for number, parts in self._gradient.items() if number not in self._made for value in parts]
        return builder.build(outputs=[*losses, *results]), builder.costs("ticks of the paper")

    def _add_backward(self, place: int) -> None:
        function = self._functions[place]
        name = f"{function.name}.{place}.backward"
        if function.output not in self._read:
            size = self._variables[function.output].bytes
            seed = self._builder.add_op(f"{name}.seed", [], [(f"g{function.output}", size)], kind="gradient", seconds=0)
            self._gradient[function.output] = list(seed)
        if function.output not in self._gradient:
            return
        wanted = [n for n in dict.fromkeys(function.gradients) if n in self._made or self._variables[n].is_parameter]
        reads = list(self._gradient[function.output])
        if self._declared or function.name not in _NEED_NOTHING:
            reads += [self._value[number] for number in function.reads]
        outputs = []
        for number in wanted:
            # Whoever adds into a buffer holds it, and leaves a mark without bytes for the one who reads the sum.
            reads += self._gradient.get(number, [])
            outputs.append((f"g{number}.{place}", 0 if number in self._gradient else self._variables[number].bytes))
        made = self._builder.add_op(
            name,
            list(dict.fromkeys(reads)),
            outputs,
            target=f"{function.name}.backward",
            kind="gradient",
            pinned="it adds into a gradient" if any(self._writers[number] > 1 for number in wanted) else "",
            seconds=2.0 * function.ticks,
        )
        for number, value in zip(wanted, made, strict=True):
            self._gradient.setdefault(number, []).append(value)


def read_chainer_graph(path: Path | str) -> ChainerGraph:
    """Return the training step in the file at `path`; raise `InvalidGraphError` if it does not follow the format."""
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidGraphError(f"The graph file {path} cannot be read: {error}.") from None
    return parse_chainer_graph(text, source=str(path))


def parse_chainer_graph(text: str, *, source: str = "the text") -> ChainerGraph:
    """Return the training step that `text` describes; errors name `source` and the line."""
    lines = _Lines(text, source)
    num_variables, num_functions = lines.numbers(2, "the number of variables and of functions")
    variables = dict(lines.variable() for _ in range(num_variables))
    if len(variables) != num_variables:
        lines.fail(f"two of the {num_variables} variables have the same number")
    if num_functions % 2:
        lines.fail(f"there are {num_functions} functions, but every forward function needs a backward one")
    raw = [lines.function(variables) for _ in range(num_functions)]
    lines.end()
    half = num_functions // 2
    pairs = list(zip(raw[:half], raw[half:], strict=True))
    return ChainerGraph(variables, _sorted([_paired(lines, index, *pair) for index, pair in enumerate(pairs)], lines))


@dataclass(frozen=True)
class _Raw:
    """A function as the file has it."""

    kind: str
    name: str
    inputs: tuple[tuple[int, str], ...]
    outputs: tuple[int, ...]


class _Lines:
    """The lines of a file, one after the other."""

    def __init__(self, text: str, source: str) -> None:
        self._lines = text.splitlines()
        self._source = source
        self._at = 0

    def fail(self, fact: str) -> None:
        """Raise the error that says `fact`, and where."""
        raise InvalidGraphError(
            f"{self._source}, line {self._at}: {fact}. It must be a graph file of the program that Kusumoto et al. "
            "released, unchanged."
        )

    def _next(self, what: str) -> str:
        self._at += 1
        if self._at > len(self._lines):
            self.fail(f"the file ends where {what} should be")
        return self._lines[self._at - 1]

    def numbers(self, count: int, what: str) -> list[int]:
        """Return the `count` whole numbers of the next line."""
        words = self._next(what).split()
        if len(words) != count or not all(word.isdigit() for word in words):
            self.fail(f"{' '.join(words)!r:.60} is not {what}")
        return [int(word) for word in words]

    def variable(self) -> tuple[int, Variable]:
        """Return the variable of the next line, with its number."""
        words = self._next("a variable").split(maxsplit=2)
        if len(words) != 3 or not (words[0].isdigit() and words[1].isdigit()):
            self.fail(f"{' '.join(words)!r:.60} is not a number, the bytes and the name of a variable")
        return int(words[0]), Variable(int(words[1]), words[2])

    def function(self, variables: dict[int, Variable]) -> _Raw:
        """Return the function of the next lines."""
        kind = self._next("a function").strip()
        if kind not in ("forward", "backward"):
            self.fail(f"{kind!r:.60} is neither 'forward' nor 'backward'")
        num_inputs, num_outputs = self.numbers(2, "the number of inputs and of outputs")
        inputs = []
        for _ in range(num_inputs):
            words = self._next("an input").split()
            if len(words) != 2 or words[1] not in ("_", *_TAGS):
                self.fail(f"{' '.join(words)!r:.60} is not the number of an input and what it is")
            inputs.append((self._known(words[0], variables), words[1]))
        outputs = tuple(self._known(self._next("an output").strip(), variables) for _ in range(num_outputs))
        name = self._next("the name of a function's class").strip()
        self._next("a function's attributes")
        return _Raw(kind, name, tuple(inputs), outputs)

    def _known(self, word: str, variables: dict[int, Variable]) -> int:
        if not word.isdigit() or int(word) not in variables:
            self.fail(f"{word!r:.60} is not the number of a variable")
        return int(word)

    def end(self) -> None:
        """Check that nothing but blank lines follows."""
        if any(line.strip() for line in self._lines[self._at :]):
            self._at += 1
            self.fail("there is more text after the last function")


def _paired(lines: _Lines, index: int, forward: _Raw, backward: _Raw) -> Function:
    """Return the function made of a forward function and its backward one."""
    if (forward.kind, backward.kind) != ("forward", "backward") or forward.name != backward.name:
        lines.fail(f"function {index} ({forward.kind} {forward.name}) is paired with {backward.kind} {backward.name}")
    if len(forward.outputs) != 1:
        lines.fail(f"function {index} ({forward.name}) has {len(forward.outputs)} outputs; only one is supported")
    (output,) = forward.outputs
    if [number for number, tag in backward.inputs if tag == "gradient"] != [output]:
        lines.fail(f"backward of function {index} ({forward.name}) does not read the gradient of variable {output}")
    return Function(
        name=forward.name,
        inputs=tuple(number for number, _ in forward.inputs),
        output=output,
        reads=tuple(number for number, tag in backward.inputs if tag != "gradient"),
        gradients=backward.outputs,
    )


def _sorted(functions: Sequence[Function], lines: _Lines) -> tuple[Function, ...]:
    """Return the functions in an order in which each follows what it reads; as early in the file as possible."""
    makers = {function.output: index for index, function in enumerate(functions)}
    if len(makers) < len(functions):
        lines.fail("two functions write the same variable")
    state: dict[int, bool] = {}
    order: list[Function] = []
    for root in range(len(functions)):
        stack = [(root, _makers(functions[root], makers))] if root not in state else []
        state.setdefault(root, False)
        while stack:
            index, rest = stack[-1]
            other = next((maker for maker in rest if not state.get(maker, False)), None)
            if other is None:
                state[index] = True
                order.append(functions[index])
                stack.pop()
            elif other in state:
                lines.fail(f"function {other} ({functions[other].name}) depends on its own output")
            else:
                state[other] = False
                stack.append((other, _makers(functions[other], makers)))
    return tuple(order)


def _makers(function: Function, makers: dict[int, int]) -> Iterator[int]:
    return (makers[number] for number in function.inputs if number in makers)
