"""Ways of calling a wrapped model that once trained it without its plan, left it unusable, or said the wrong thing."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import (
    CaptureError,
    InfeasibleBudgetError,
    InvalidInputError,
    LowtideError,
    LowtideWarning,
    UnsupportedBackwardError,
)
from lowtide.runtime.eager_errors import eager_error, eager_error_within

LOOSE: dict[str, Any] = {"budget": "1TiB", "costs": "analytic"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(8, 8), nn.Linear(8, 4), 0

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))).square().mean() * scale


def wrapped_net(**options: Any) -> nn.Module:
    return lowtide.wrap(Net(), **(LOOSE | options))


def is_planned(loss: torch.Tensor) -> bool:
    """Whether a planned graph is somewhere in the graph of `loss`."""
    pending, seen = [loss.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CompiledFunctionBackward":
            return True
        seen.add(node)
        pending += [parent for parent, _ in node.next_functions]
    return False


# Other ways in


def plain_backend(module: Any, inputs: Any) -> Any:
    return module.forward


def compiled_model(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(model, backend=plain_backend)(x)


def compiled_function(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda x: model(x * 2) + 1, backend=plain_backend)(x)


def compiled_by_aot(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(lambda x: model(x) * 3, backend="aot_eager")(x)


def forward_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.forward(x, scale=2.0)


def inside_another_module(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(nn.Sequential(nn.Linear(8, 8), model), backend=plain_backend)(x)


def after_accelerates_patch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    return model(x)


@pytest.mark.parametrize(
    "call",
    [
        compiled_model,
        compiled_function,
        compiled_by_aot,
        forward_alone,
        inside_another_module,
        after_accelerates_patch,
    ],
    ids=lambda function: function.__name__,
)
def test_every_way_in_runs_the_plan(call: Callable[..., torch.Tensor]) -> None:
    model, x = wrapped_net(), torch.randn(4, 8)
    for _ in range(2):
        assert is_planned(call(model, x))
    assert lowtide.plans(model)


def test_forward_alone_leaves_out_hooks_as_ever() -> None:
    model, x, seen = wrapped_net(), torch.randn(4, 8), []
    model.register_forward_hook(lambda *_: seen.append(1))
    expected = copy.deepcopy(model).forward(x)
    assert torch.equal(model.forward(x), expected)
    assert not seen


def test_forward_is_planned_while_another_thread_trains() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Waiting(Net):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            self.wait()
            return super().forward(x, scale=scale)

        @torch._dynamo.disable
        def wait(self) -> None:
            entered.set()
            leave.wait(30)

    x, waiting, model = torch.randn(4, 8), lowtide.wrap(Waiting(), **LOOSE), wrapped_net()
    other = threading.Thread(target=lambda: waiting(x))
    other.start()
    entered.wait(30)
    loss = model.forward(x)
    leave.set()
    other.join()
    assert is_planned(loss)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_hook"])
def test_hooks_of_all_modules_that_come_and_go(kind: str) -> None:
    def hook(module: nn.Module, first: Any, *others: Any) -> Any:
        if not isinstance(module, nn.Linear):
            return None
        return others[0] * 2 if kind == "forward_hook" else tuple(None if each is None else each * 2 for each in first)

    model, x = wrapped_net(), torch.randn(4, 8)
    plain, gradients = copy.deepcopy(model), []
    for each in (model, plain):
        each(x).backward()
        handle = getattr(nn.modules.module, f"register_module_{kind}")(hook)
        each(x).backward()
        handle.remove()
        each(x).backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_whole_graph_of_others_is_refused_in_our_words() -> None:
    model = wrapped_net()
    with pytest.raises(Exception, match="wrapped by lowtide"):
        torch.compile(lambda x: model(x) + 1, backend=plain_backend, fullgraph=True)(torch.randn(4, 8))


def test_the_module_in_a_container_says_that_it_is_not_planned() -> None:
    container, x = lowtide.wrap(nn.DataParallel(Net()), **LOOSE), torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_planned(container(x))
        with torch.no_grad():
            container.module(x)
    with pytest.warns(LowtideWarning, match="without the plan"):
        container.module(x)
    lowtide.unwrap(container)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_planned(container.module(x))


@pytest.mark.parametrize("method", ["deepcopy", "pickle", "save"])
def test_copies_are_plain_and_independent(method: str) -> None:
    model, x = wrapped_net(), torch.randn(4, 8)
    model(x).backward()
    if method == "deepcopy":
        twin = copy.deepcopy(model)
    elif method == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        twin.head.weight.zero_(), twin.head.bias.zero_()
    assert twin(x) == twin.forward(x) == 0
    assert model(x) > 0
    assert not is_planned(twin(x))
    assert copy.deepcopy(twin)(x) == 0
    assert is_planned(lowtide.wrap(twin, **LOOSE).forward(x))


def test_unwrapping_leaves_no_trace() -> None:
    model = Net()
    before = set(vars(model))
    lowtide.unwrap(lowtide.wrap(lowtide.wrap(model, **LOOSE), **LOOSE))
    assert set(vars(model)) - {"_compiled_call_impl"} == before
    assert not is_planned(model(torch.randn(4, 8)))
    assert not is_planned(model.forward(torch.randn(4, 8)))


class CallsItself(Net):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(torch.cat([x, x]).sigmoid())


def test_a_call_of_the_models_own_class_is_not_planned_and_says_so() -> None:
    plain = CallsItself()
    with pytest.warns(LowtideWarning, match=r"CallsItself.__call__ .* not planned.* not counted"):
        model = lowtide.wrap(copy.deepcopy(plain), **LOOSE)
    x = torch.randn(4, 8)
    for each in (plain, model):
        each(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    # As it is advised: all of the call is then within the budget.
    whole = lowtide.wrap(lambda x: plain(x), **LOOSE)
    whole(x).backward()
    assert lowtide.plans(whole)[0].baseline_peak_bytes > lowtide.plans(model)[0].baseline_peak_bytes


@pytest.mark.filterwarnings("error::lowtide.errors.LowtideWarning")
def test_a_call_that_pytorch_has_made_is_no_reason_to_warn() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    assert type(traced).__call__ is not nn.Module.__call__
    lowtide.wrap(traced, **LOOSE)


# Errors of the user's own


class Picky(nn.Module):
    """Raises in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.bad = nn.Linear(8, 8), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bad == "first":
            raise ValueError("a bad batch")
        h = torch.tanh(self.body(x))
        if self.bad == "traced":
            raise KeyError("a bad batch")
        if self.bad == "late":
            torch._dynamo.graph_break()
            raise OSError("a bad batch")
        if self.bad == "index":
            return [h][3]
        if self.bad == "assert":
            assert x.shape[0] == 0, "a bad batch"
        if self.bad == "op":
            return h @ h
        if self.bad == "data":
            h = h[:, torch.tensor([99])]
        return h.square().mean()


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
@pytest.mark.parametrize("bad", ["first", "traced", "late", "index", "assert", "op", "data"])
def test_the_users_error_arrives_and_training_goes_on(bad: str) -> None:
    plain = Picky()
    plain.bad = bad
    with pytest.raises(Exception) as expected:  # noqa: PT011 - whatever it is, ours must be the same
        plain(torch.randn(4, 8))
    for first in (True, False):
        model, x = lowtide.wrap(Picky(), **LOOSE), torch.randn(4, 8)
        if not first:
            model(x).backward()
        for _ in range(2):
            model.bad = bad
            with pytest.raises(type(expected.value)) as found:
                model(x)
            assert type(found.value) is type(expected.value)
            assert str(found.value) == str(expected.value)
            model.bad = ""
            loss = model(x)
            assert is_planned(loss)
            loss.backward()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, 8, dtype=torch.long), "same dtype"),
        (torch.ones(4, 8, dtype=torch.float64), "same dtype"),
        (torch.ones(4, 9), "cannot be multiplied"),
        (torch.ones(3), "mat1 and mat2|size mismatch|cannot be multiplied"),
    ],
    ids=["long", "double", "shape", "dims"],
)
@pytest.mark.parametrize("costs", ["measured", "analytic"])
@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
def test_a_wrong_tensor_is_eagers_error(x: torch.Tensor, message: str, costs: str) -> None:
    model = Net()
    with pytest.raises(RuntimeError) as expected:
        model(x)
    lowtide.wrap(model, budget="50%", costs=costs)
    with pytest.raises(RuntimeError, match=message) as found:
        model(x)
    assert str(found.value) == str(expected.value)
    assert not isinstance(found.value, LowtideError)
    assert is_planned(lowtide.wrap(model, budget="100%", costs=costs)(torch.ones(4, 8)))


def test_looking_for_the_users_error_leaves_no_trace() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            self.calls += 1
            return super().forward(self.drop(self.norm(x)), scale=scale)

    model, x = lowtide.wrap(Counting(), budget=64, costs="analytic"), torch.randn(4, 8)
    state, buffers = torch.get_rng_state(), {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(InfeasibleBudgetError):
        model(x)
    assert model.calls == 0
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


class Differentiated(Net):
    """Needs gradients inside, and looks for them."""

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        losses = [loss for loss in (super().forward(x), x.sum()) if loss.requires_grad]
        return torch.stack(losses).sum()


def test_an_infeasible_budget_is_not_taken_for_the_users_error() -> None:
    with pytest.raises(InfeasibleBudgetError):
        lowtide.wrap(Differentiated(), budget=64, costs="analytic")(torch.randn(4, 8))


class Tall(nn.Module):
    """Needs more at its second layer than at its first, and may fail at either."""

    def __init__(self, *, fails_at: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)])
        self.fails_at = fails_at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x.double() if number == self.fails_at - 1 else x))
        return x.square().mean()


ROWS = torch.randn(4096, 8)
ROW_BYTES = 4096 * 4


def test_a_refused_call_takes_no_more_than_the_budget() -> None:
    budget = 100 * ROW_BYTES
    assert lowtide.measure_peak(lambda: eager_error(Tall(), Tall(), (ROWS,), {})) > budget
    model = lowtide.wrap(Tall(), budget=budget, costs="analytic")

    def run() -> None:
        with pytest.raises(InfeasibleBudgetError):
            model(ROWS)

    assert ROW_BYTES < lowtide.measure_peak(run) <= budget


@pytest.mark.parametrize("as_function", [False, True])
def test_the_users_error_is_found_behind_a_refusal_as_far_as_the_budget_goes(as_function: bool) -> None:
    for fails_at, expected in ((1, RuntimeError), (2, InfeasibleBudgetError)):
        model = Tall(fails_at=fails_at)
        called = (lambda x, model=model: model(x)) if as_function else model
        with pytest.raises(expected, match="dtype" if expected is RuntimeError else "budget"):
            lowtide.wrap(called, budget=170 * ROW_BYTES, costs="analytic")(ROWS)


def test_functions_are_copied_with_what_they_close_over_to_look_for_errors() -> None:
    model = Tall()
    loose = torch.ones(8)
    found = eager_error_within(2**30, lambda x: (model(x) * loose).sum() + x.missing, None, (ROWS,), {})
    assert isinstance(found, AttributeError)
    assert not any("fake" in type(tensor).__name__.lower() for tensor in (*model.parameters(), loose))
    # What a global refers to is not copied, so that nothing is tried.
    assert eager_error_within(2**30, calls_global, None, (ROWS,), {}) is None


GLOBAL = Tall()


def calls_global(x: torch.Tensor) -> torch.Tensor:
    return GLOBAL(x) + x.missing


# Refusals


class Sub(torch.Tensor):
    """A tensor with rules of its own."""


def dual_numbers(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, torch.ones_like(x)))


def functional_grad(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: model(x))(x)


def functional_map(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.vmap(lambda x: model(x), randomness="same")(x[None])


def functional_jvp(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.func.jvp(lambda x: model(x), (x,), (x,))


def subclass(model: nn.Module, x: torch.Tensor) -> Any:
    return model(x.as_subclass(Sub))


def checkpointed(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(model, x, use_reentrant=False)


def counted(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        return model(x)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (dual_numbers, UnsupportedBackwardError, "forward-mode AD"),
        (functional_grad, UnsupportedBackwardError, "torch.func"),
        (functional_map, UnsupportedBackwardError, "torch.func"),
        (functional_jvp, UnsupportedBackwardError, "torch.func"),
        (subclass, InvalidInputError, "subclasses Sub"),
        (counted, CaptureError, "FlopCounterMode"),
        (checkpointed, UnsupportedBackwardError, "torch.utils.checkpoint"),
    ],
    ids=lambda case: getattr(case, "__name__", None),
)
def test_what_is_not_served_is_refused(
    call: Callable[..., Any], error: type[Exception], message: str, warm: bool
) -> None:
    model, x = wrapped_net(), torch.randn(4, 8)
    if warm:
        model(x).backward()
    with pytest.raises(error, match=message):
        call(model, x)
    assert is_planned(model(x))


def test_hooks_for_saved_tensors_see_what_the_plan_keeps() -> None:
    model, x = wrapped_net(), torch.randn(4, 8)
    with torch.autograd.graph.save_on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).backward()
    changing = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: 2 * tensor)
    with changing, pytest.warns(LowtideWarning, match="saved_tensors_hooks"):
        model(x)


def test_a_checkpoint_that_runs_without_gradients_first() -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = wrapped_net(), torch.randn(4, 8, requires_grad=True)
    plain = copy.deepcopy(model)
    for each in (model, plain):
        checkpoint(each, x, use_reentrant=True).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Returning(nn.Module):
    """Returns a result that eager makes as a tensor of its own and the planned graph as a view."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.up(x))
        if self.kind == "sum":
            return x + self.down(h)
        if self.kind == "product":
            return h @ self.down.weight
        if self.kind == "copy":
            return h.transpose(0, 1).reshape(-1, 8)
        found = x + self.down(h)
        return found, found.view(-1)


@pytest.mark.parametrize("kind", ["sum", "product", "copy", "two"])
def test_a_result_may_be_written_to_as_in_eager(kind: str) -> None:
    plain, x = Returning(kind), torch.randn(4, 3, 8)
    model = lowtide.wrap(copy.deepcopy(plain), **LOOSE)
    for each in (plain, model):
        found = each(x)
        results = found if isinstance(found, tuple) else (found,)
        results[0].add_(1)
        results[-1].square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)


def test_a_result_that_backward_reads_may_not_be_written_to() -> None:
    class Saving(Returning):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.down(torch.tanh(self.up(x))))

    x = torch.randn(4, 3, 8)
    for model in (Saving("tanh"), lowtide.wrap(Saving("tanh"), **LOOSE)):
        found = model(x)
        found.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            found.sum().backward()


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        h = self.body(x)
        h = torch.index_put(h, (x[:, 0] > 0,), self.token)  # the line that is named
        return h.square().mean()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.abs().long()).square().mean()  # the line that is named


class Looped(Net):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        h = self.body(x)
        for limit in range(2):
            if h.sum() > limit:  # the line that is named
                h = torch.tanh(h)
        return h.square().mean()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Masked, "aten.nonzero.*depends on data"),
        (Sparse, "torch.sparse_coo"),
        (Looped, "Data-dependent branching"),
    ],
)
def test_a_refusal_names_the_cause_and_the_line(model: type[nn.Module], message: str) -> None:
    with open(__file__, encoding="utf-8") as file:
        lines = [number for number, line in enumerate(file, start=1) if line.rstrip().endswith("line that is named")]
    wrapped = lowtide.wrap(model(), **LOOSE)
    with pytest.raises(CaptureError, match=message) as found:
        wrapped(torch.randn(4, 8))
    assert any(f"{__file__}:{number}" in str(found.value) for number in lines)


def test_a_lazy_model_gets_its_parameters_as_ever() -> None:
    model, x = nn.Sequential(nn.LazyLinear(8), nn.Tanh()), torch.randn(4, 8)
    lowtide.wrap(model, **LOOSE)
    torch.manual_seed(0)
    loss = model(x).sum()
    assert is_planned(loss)
    loss.backward()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LazyLinear(8), nn.Tanh())
    plain(x).sum().backward()
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)


# What is written

SCRIPT = """
import torch, lowtide
from torch import nn
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.token = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
    def forward(self, x):
        h = self.body(x)
        return torch.index_put(h, (x[:, 0] > 0,), self.token).square().mean()
for model, x in ((Masked(), torch.randn(4, 8)), (nn.LSTM(8, 8), torch.randn(4, 8)), (nn.Linear(8, 8), torch.ones(9))):
    try:
        lowtide.wrap(model, budget="1TiB", costs="analytic")(x)
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize("debug", ["0", "1"])
def test_pytorchs_noise_is_off_unless_asked_for(debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_DEBUG", debug)
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.split() == ["CaptureError", "CaptureError", "RuntimeError"]
    assert bool(run.stderr) == (debug == "1"), run.stderr


def test_loggers_of_others_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    class Talking(Net):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale=scale)

    wrapped_net()(torch.randn(4, 8))
    with caplog.at_level(logging.WARNING):
        logging.getLogger("torch._dynamo").warning("mine")
    assert "mine" in caplog.text


def test_a_warning_names_the_users_line() -> None:
    model = lowtide.wrap(Net(), **LOOSE)
    for rows in range(2, 7):
        model(torch.randn(rows, 8))
    with pytest.warns(LowtideWarning, match="compiled 6 times") as found:
        model(torch.randn(7, 8))
    assert found[0].filename == __file__


class Edge(Net):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.head(self.body(x)).square().mean()


def test_code_outside_of_one_graph_is_counted_with_it() -> None:
    model, x = lowtide.wrap(Edge(), **LOOSE), torch.randn(4, 8)
    model(x).backward()
    (step, block) = lowtide.plans(model)
    assert isinstance(step, lowtide.StepPlan)
    assert step.plans == (block,)


# Percentages


def deep(depth: int = 8) -> nn.Module:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.Tanh())])


def test_percentages_are_of_the_first_call() -> None:
    model = lowtide.wrap(deep(), budget="70%")
    budgets, recomputed = [], []
    for batch in (256, 256, 7, 1):
        model.zero_grad()
        model(torch.randn(batch, 16)).sum().backward()
        model.zero_grad()
        peak = lowtide.measure_peak(lambda batch=batch: model(torch.randn(batch, 16)).sum().backward())
        budgets.append(lowtide.plans(model)[-1].budget_bytes)
        recomputed.append(lowtide.plans(model)[-1].num_recomputed)
        assert peak <= budgets[0] + 2 * batch * 64  # and the input made inside
    assert len(set(budgets)) == 1
    assert budgets[0] == int(0.7 * lowtide.plans(model)[0].baseline_peak_bytes)
    assert recomputed[0] > 0
    assert recomputed[2:] == [0, 0]


def test_a_larger_batch_gets_no_more_than_the_first() -> None:
    model = lowtide.wrap(deep(), budget="70%", costs="analytic")
    model(torch.randn(64, 16)).sum().backward()
    with pytest.raises(InfeasibleBudgetError, match="70%") as found:
        model(torch.randn(4096, 16))
    first = lowtide.plans(model)[0]
    assert found.value.budget_bytes == first.budget_bytes
    model(torch.randn(64, 16)).sum().backward()


def test_a_first_call_that_fails_fixes_nothing() -> None:
    model = lowtide.wrap(deep(), budget="5%", costs="analytic")
    for batch in (64, 1024):
        with pytest.raises(InfeasibleBudgetError) as found:
            model(torch.randn(batch, 16))
        assert found.value.plan is not None
        assert found.value.budget_bytes == int(0.05 * found.value.plan.baseline_peak_bytes)


def test_evaluation_is_compiled_by_others_as_ever() -> None:
    model, x, graphs = wrapped_net().eval(), torch.randn(4, 8), []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compile(lambda x: model(x) + 1, backend=backend, fullgraph=True)(x)
    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert len(graphs) == 2


def test_verifying_compares_with_plain_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.runtime.wrapped import Wrapped

    honest = Wrapped.train
    monkeypatch.setattr(Wrapped, "train", lambda self, *args: honest(self, *args) + 1)
    with pytest.raises(lowtide.errors.VerificationError):
        wrapped_net(verify=True)(torch.randn(4, 8))
