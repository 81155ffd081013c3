"""A backward graph in chunks gives what the whole gives, frees as early, and lets no gradient go while it is read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.lower.chunks import ChunkedBackward, Part, cut, in_one_piece
from lowtide.lower.emit_graphs import deliver


def backward(x: Tensor, w: Tensor, g: Tensor) -> list[Any]:
    """Return the gradients of three inputs and None for a fourth."""
    first = x.t() @ g
    through = g @ w.t()
    second = through.relu().sum(0)
    third = (through * 2).t()
    return [first, second, None, third]


def graph(*deliveries: tuple[str, tuple[int, ...]]) -> fx.GraphModule:
    """Return the graph of `backward`, with deliveries of these positions behind the nodes of these names."""
    module = make_fx(lambda x, w, g: backward(x, w, g), tracing_mode="fake")(*inputs())
    nodes = list(module.graph.nodes)
    outputs = nodes[-1].args[0]
    for op, positions in deliveries:
        made = [outputs[position] for position in positions]
        behind = next(node for node in nodes if node.name == op)
        with module.graph.inserting_after(behind):
            module.graph.call_function(deliver, (positions, *made))
    module.recompile()
    return module


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, 5), torch.randn(5, 6), torch.randn(8, 6)]


WHOLE = ()
EARLY = (("mm", (0,)), ("sum_1", (1,)), ("t_2", (3,)))
PARTLY = (("sum_1", (0, 1)),)


def pieces(made: Sequence[tuple[str, tuple[int, ...]]]) -> ChunkedBackward:
    return cut(graph(*made), {}) if made else in_one_piece(graph())


@pytest.mark.parametrize("made", [WHOLE, EARLY, PARTLY])
def test_chunks_give_what_the_whole_gives(made: Any) -> None:
    expected = backward(*inputs())
    args = inputs()
    found = pieces(made).whole(args)
    assert not args
    assert [each is None for each in found] == [each is None for each in expected]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True) if one is not None)


def test_every_group_comes_by_itself() -> None:
    assert [sorted(group) for group in pieces(EARLY).start(inputs())] == [[0], [1], [3]]
    # What is not delivered comes at the end, with the gradients that are None left out.
    assert [sorted(group) for group in pieces(PARTLY).start(inputs())] == [[0, 1], [3]]


def test_nothing_lives_longer_than_it_is_read() -> None:
    args = inputs()
    x, g = weakref.ref(args[0]), weakref.ref(args[2])
    source = pieces(EARLY).start(args)
    first = weakref.ref(next(source)[0])
    assert first() is None, "a gradient belongs to its receiver alone"
    assert x() is None
    assert g() is not None
    next(source)
    assert g() is None


def test_a_parameter_is_not_written_while_it_is_read() -> None:
    """Whoever gets the gradient of `w` may change `w`: the product that reads it comes first."""
    module = graph(("mm", (0,)))
    name = module.graph.find_nodes(op="placeholder")[1].name
    early, late = cut(module, {}), cut(module, {0: name})
    w = inputs()[1]
    for chunks, is_safe in ((early, False), (late, True)):
        args = inputs()
        args[1] = w.clone()
        changed = args[1]
        source = chunks.start(args)
        next(source)
        changed.zero_()
        rest = next(source)
        assert torch.equal(rest[3], backward(*inputs())[3]) == is_safe


def test_observers_see_every_part() -> None:
    seen: list[Part] = []
    begun: list[int] = []

    class Watch:
        def forward(self, run: Any, args: list[Any]) -> Any:
            return run(args)

        def begin_backward(self, args: Sequence[Any]) -> None:
            begun.append(len(args))

        def backward(self, run: Any, args: list[Any], part: Part) -> Any:
            seen.append(part)
            return run(args)

    pieces(EARLY).observed([Watch()]).whole(inputs())
    assert begun == [3]
    assert [(part.number, part.is_last, part.num_gradients) for part in seen] == [
        (0, False, 1),
        (1, False, 1),
        (2, True, 1),
    ]
