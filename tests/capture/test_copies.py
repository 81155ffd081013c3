"""Copies that nobody can tell from their originals do not run; all others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from helpers.exactness import STEPS, Batch, DropEverything, assert_exact
from lowtide.capture.alias import view_base
from lowtide.capture.copies import drop_copies


def floats(*shape: int) -> list[Batch]:
    return [((torch.randn(*shape, generator=torch.Generator().manual_seed(s)),), {}) for s in range(STEPS)]


class Between(nn.Module):
    """A function of what one layer makes, read by another."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(8, 8), function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def num_copies(model: nn.Module) -> int:
    (plan,) = lowtide.plans(model)
    return sum("clone" in op.target for op in plan.problem.graph.ops)


def view_of_copy(x: Tensor) -> Tensor:
    y = x.clone().view(2, 2, 8)[:, 1:].tanh()
    return (y + x.view(2, 2, 8).exp()).reshape(4, 8)


def copy_of_view(x: Tensor) -> Tensor:
    return (x.t().clone().sin() * x.t().exp()).t()


def copy_of_copy(x: Tensor) -> Tensor:
    return x.clone().clone().sin() + x.cos()


def both_overwritten(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2).tanh_()
    x.add_(1).sigmoid_()
    return x * y


@pytest.mark.parametrize(
    "function",
    [
        nn.SiLU(inplace=True),
        nn.Hardswish(inplace=True),
        nn.Dropout(0.0),
        view_of_copy,
        copy_of_view,
        copy_of_copy,
        both_overwritten,
    ],
    ids=lambda function: getattr(function, "__name__", type(function).__name__),
)
@pytest.mark.parametrize("planner", ["keep_all", DropEverything(again=True)], ids=["keep_all", "drop"])
def test_needless_copies_do_not_run(function: Callable[[Tensor], Tensor], planner: object) -> None:
    model = assert_exact(Between(function), floats(4, 8), wrap={"planner": planner})
    assert num_copies(model) == 0


class Ends(nn.Module):
    """A model whose copies reach, or come from, outside."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "input":
            return self.layer(x.clone()).sin(), x.sum()
        y = self.layer(x)
        if self.kind == "copy":
            return y.clone(), y.sin()
        if self.kind == "original":
            return y, y.clone().sin()
        if self.kind == "view":
            return y.clone()[:2], y.sin()
        return y, y.clone()


@pytest.mark.parametrize("kind", ["input", "copy", "original", "view", "both"])
def test_copies_stay_if_somebody_could_tell(kind: str) -> None:
    """Callers may write into what they gave and what they got; the rest must not change with it."""
    model = assert_exact(Ends(kind), floats(4, 8), loss=lambda result: result[0].square().sum() + result[1].exp().sum())
    assert num_copies(model) >= 1
    first, second = model(floats(4, 8)[0][0][0])
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t().clone(memory_format=torch.contiguous_format).t() + x.exp(),
        lambda x: x.clone(memory_format=torch.contiguous_format).sin() + x.exp(),
        lambda x: x[:2].clone().repeat(2, 1) + x.exp(),
        lambda x: x[:, 2:].clone().repeat(1, 2)[:, :8] + x.exp(),
        lambda x: x[:1].expand(4, 8).clone().sin() + x.exp(),
    ],
    ids=["transposed", "contiguous", "rows", "columns", "expanded"],
)
def test_copies_in_another_layout_or_of_a_part_run(function: Callable[[Tensor], Tensor]) -> None:
    assert num_copies(assert_exact(Between(function), floats(4, 8))) == 1


def test_views_of_a_copy_become_views_of_the_original() -> None:
    model = assert_exact(Between(view_of_copy), floats(4, 8))
    (plan,) = lowtide.plans(model)
    graph = plan.problem.graph
    assert not [op.target for op in graph.ops if "view" in op.target or "slice." in op.target]
    (source,) = {op.inputs for op in graph.ops if op.target in ("aten.tanh.default", "aten.exp.default")}
    assert len(source) == 1


def _traced(function: Callable[[Tensor], tuple[Tensor, ...]]) -> fx.GraphModule:
    """Return what `function` calls, in-place ops included, with fake tensors."""
    module = make_fx(function, tracing_mode="fake")(torch.randn(4, 4))
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        # As in graphs from AOTAutograd, in which it passes for a fresh tensor.
        with node.meta["val"].fake_mode:
            node.meta["val"] = torch.empty_like(node.meta["val"])
    drop_copies(module)
    module.recompile()
    return module


def written_later(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    z = y.clone()
    y.add_(1)
    return (z.exp() + y.exp(),)


def writes_into_copy(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    z = y.clone()
    z.add_(1)
    return (z.exp() + y.exp(),)


def returned_in_disguise(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y.view(-1), torch.ops.aten._unsafe_view(y, [16]).clone().exp()


def copied_in_disguise(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    z = y.clone()
    return torch.ops.aten._unsafe_view(z, [16]), y.exp()


@pytest.mark.parametrize("function", [written_later, writes_into_copy, returned_in_disguise, copied_in_disguise])
def test_copies_stay_in_graphs_that_write_or_hide_views(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    module = _traced(function)
    assert sum("clone" in str(node.target) for node in module.graph.nodes) == 1
    x = torch.randn(4, 4)
    assert all(map(torch.equal, module(x), function(x)))


def test_disguised_views_of_a_dropped_copy() -> None:
    """The second copy is of a view of the first, which is the storage that is returned."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        z = torch.ops.aten._unsafe_view(y.clone(), [16]).clone()
        return z.exp(), y.exp()

    module = _traced(function)
    assert not any("clone" in str(node.target) for node in module.graph.nodes)
    x = torch.randn(4, 4)
    assert all(map(torch.equal, module(x), function(x)))


def test_buffers_that_change_keep_their_copies() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            before = self.seen.clone()
            y = self.layer(x)
            self.seen.add_(y.detach())
            return (y * before).sin() + (y * self.seen).cos()

    assert_exact(Remembers(), floats(4, 8))


@pytest.mark.parametrize("name", ["view", "t", "transpose", "slice_1", "exp"])
def test_views_are_known_even_if_the_call_before_them_was_taken_out(name: str) -> None:
    """Their fake tensors are then views of what that call made."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "view": lambda x: x.clone().view(-1),
        "t": lambda x: x.clone().t(),
        "transpose": lambda x: x.clone().transpose(0, 1),
        "slice_1": lambda x: x.clone()[1:],
        "exp": lambda x: x.clone().exp(),
    }
    module = make_fx(functions[name], tracing_mode="fake")(torch.randn(4, 4))
    (clone,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    (source,) = clone.all_input_nodes
    clone.replace_all_uses_with(source)
    module.graph.erase_node(clone)
    result = next(node for node in module.graph.nodes if node.name == name)
    assert view_base(result) is (None if name == "exp" else source)
