"""Training begins with a first plan and goes on with a better one: same bits, within the budget, captured once."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lowtide
from helpers.exactness import assert_same, train
from lowtide.errors import InfeasibleBudgetError, InvalidOptionError
from lowtide.plan import plan_cache
from lowtide.plan.background import PlanJob
from lowtide.plan.core import child_process
from lowtide.plan.core.result import Plan, Stage
from lowtide.plan.solve import solve
from lowtide.runtime import improvements
from lowtide.runtime.wrapped import wrapped_of
from lowtide.testing.models import MODELS, loss_of

SMALL: dict[str, dict[str, int]] = {
    "gpt": {"layers": 1, "dim": 32, "heads": 2, "tokens": 32, "batch": 4, "vocab": 50},
    "unet": {"levels": 3, "width": 8, "size": 32, "batch": 2},
}


FIRST = "dtr"


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of other tests must not be found; first plans are by another planner, so that better ones differ."""
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "0")
    monkeypatch.setattr("lowtide.runtime.improvements._QUICK", FIRST)


class HeldJob(PlanJob):
    """Work in the background that is not over before the test says so, however long the call takes."""

    released = False

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return super().is_over and HeldJob.released


@pytest.fixture
def _held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(improvements, "PlanJob", HeldJob)
    monkeypatch.setattr(HeldJob, "released", False)


def case(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model, args, kwargs = MODELS[name](**SMALL[name])
    return model, (args, kwargs)


def only_plan(model: nn.Module, *, wait: bool = False) -> Plan:
    HeldJob.released |= wait
    (plan,) = lowtide.plans(model, wait=wait)
    assert isinstance(plan, Plan)
    return plan


def session_of(model: nn.Module) -> Any:
    wrapped = wrapped_of(model)
    assert wrapped is not None
    return wrapped.session


def step(model: nn.Module, batch: Any) -> None:
    args, kwargs = batch
    loss_of(model(*args, **kwargs)).backward()


def peak_of(model: nn.Module, batch: Any) -> int:
    model.zero_grad()
    found = lowtide.measure_peak(lambda: step(model, batch))
    model.zero_grad()
    return found


@pytest.mark.usefixtures("_held")
@pytest.mark.parametrize("name", SMALL)
def test_the_better_plan_is_taken_over_without_capturing_again(name: str) -> None:
    model, batch = case(name)
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    first = only_plan(model)
    assert (first.stage, first.planner) == (Stage.FIRST, FIRST)
    # By now the better one may be there, too.
    assert peak_of(model, batch) == only_plan(model).peak_bytes <= first.budget_bytes
    best = only_plan(model, wait=True)
    assert (best.stage, best.planner) == (Stage.FINAL, "auto")
    assert best.overhead < first.overhead
    assert best.schedule != first.schedule
    assert peak_of(model, batch) == best.peak_bytes <= best.budget_bytes
    assert session_of(model).num_compiled == 1
    whole = copy.deepcopy(model)
    lowtide.wrap(whole, budget="60%", patience="full")
    step(whole, batch)
    assert only_plan(whole).schedule == best.schedule


@pytest.mark.usefixtures("_held")
@pytest.mark.parametrize("name", SMALL)
def test_bits_are_those_of_eager_before_and_after(name: str) -> None:
    model, batch = case(name)
    plain = copy.deepcopy(model)
    expected = train(plain, plain, [batch] * 5, loss=loss_of)
    lowtide.wrap(model, budget="60%", patience=0)
    schedules: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        # It is taken over between a forward and its backward.
        schedules.append(only_plan(model).schedule)
        only_plan(model, wait=len(schedules) == 2)
        return result

    assert_same(expected, train(model, call, [batch] * 5, loss=loss_of))
    assert schedules[0] != schedules[2] == schedules[-1], "nothing was taken over"
    assert session_of(model).num_compiled == 1


@pytest.mark.usefixtures("_held")
def test_two_forwards_in_flight_run_backward_as_they_ran_forward() -> None:
    model, batch = case("gpt")
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="60%", patience=0)
    gradients = []
    for net in (plain, model):
        torch.manual_seed(5)
        first = loss_of(net(*batch[0], **batch[1]))
        if net is model:
            before, after = only_plan(model), only_plan(model, wait=True)
            assert before.schedule != after.schedule
        second = loss_of(net(*batch[0], **batch[1]))
        first.backward()
        second.backward()
        gradients.append([each.grad for each in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_a_first_plan_never_exceeds_the_budget_and_nothing_of_the_users_changes() -> None:
    model, batch = case("unet")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    model.zero_grad()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    found, until = set(), time.monotonic() + 60
    while Stage.FINAL not in found and time.monotonic() < until:
        found.add(only_plan(model).stage)
        assert peak_of(model, batch) <= only_plan(model).budget_bytes
    assert found == {Stage.FIRST, Stage.FINAL}
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), repr(np.random.get_state()))


@pytest.mark.usefixtures("_held")
def test_the_logger_is_told_what_is_planned_and_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = case("unet")
    with caplog.at_level("INFO", "lowtide"):
        lowtide.wrap(model, budget="60%", patience=0)
        step(model, batch)
        only_plan(model, wait=True)
        step(model, batch)
    said = [each.getMessage() for each in caplog.records if each.name == "lowtide"]
    assert [" ".join(each.split()[:2]) for each in said] == ["planning 86", "plan of", "the plan"]
    assert "captured in" in said[0]
    assert f"plan of {FIRST} (first)" in said[1]
    assert "costs took" in said[1]
    assert "the plan of auto is taken over" in said[2]


def test_a_plan_of_an_earlier_run_is_used_at_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOWTIDE_PLAN_CACHE", "1")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan_cache, "_WORTH_SECONDS", 0.0)
    model, batch = case("unet")
    twin = copy.deepcopy(model)
    lowtide.wrap(model, budget="60%", patience="full")
    step(model, batch)
    assert not only_plan(model).is_cached
    lowtide.wrap(twin, budget="60%", patience=0)
    with caplog.at_level("INFO", "lowtide"):
        step(twin, batch)
    assert (only_plan(twin).stage, only_plan(twin).planner) == (Stage.FINAL, "auto")
    assert only_plan(twin).is_cached
    assert "in an earlier run" in str(only_plan(twin))
    assert "from an earlier run" in caplog.text


def test_patience_is_how_long_a_call_waits() -> None:
    model, batch = case("unet")
    lowtide.wrap(model, budget="60%", patience=120)
    step(model, batch)
    assert (only_plan(model).stage, only_plan(model).planner) == (Stage.FINAL, "auto")
    assert session_of(model).improvements.of(only_plan(model)) is None


@pytest.mark.parametrize("patience", ["full", None, "greedy"])
def test_a_call_waits_for_the_plan_if_it_is_told_so_or_has_another_planner(patience: str | None) -> None:
    model, batch = case("unet")
    planner = "greedy" if patience == "greedy" else "auto"
    wait = 0 if patience == "greedy" else patience
    lowtide.wrap(model, budget="60%", planner=planner, patience=wait)
    step(model, batch)
    assert (only_plan(model).stage, only_plan(model).planner) == (Stage.FINAL, planner)


@pytest.mark.usefixtures("_held")
def test_the_environment_says_how_long_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case("unet")
    monkeypatch.setenv("LOWTIDE_PATIENCE", "0")
    lowtide.wrap(model, budget="60%")
    step(model, batch)
    assert only_plan(model).stage is Stage.FIRST
    monkeypatch.setenv("LOWTIDE_PATIENCE", "soon")
    with pytest.raises(InvalidOptionError, match="soon"):
        lowtide.wrap(model, budget="60%")
    monkeypatch.setenv("LOWTIDE_PATIENCE", "")
    lowtide.wrap(model, budget="60%")
    assert session_of(model).improvements.patience == 2.0


@pytest.mark.parametrize("patience", [-1, float("nan"), float("inf"), True, "never", "1", (), 1j])
def test_other_patience_is_refused(patience: Any) -> None:
    with pytest.raises(InvalidOptionError, match="patience"):
        lowtide.wrap(nn.Linear(2, 2), budget="1MiB", patience=patience)


def test_a_budget_that_cannot_be_met_is_refused_before_anything_runs() -> None:
    model, batch = case("unet")
    ran = []
    model.register_forward_hook(lambda *_: ran.append(1))
    lowtide.wrap(model, budget=1000, patience=0)
    with pytest.raises(InfeasibleBudgetError):
        step(model, batch)
    assert not ran
    assert not session_of(model).improvements._begun


def test_a_plan_within_reach_of_auto_alone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case("unet")
    monkeypatch.setattr("lowtide.runtime.improvements._QUICK", "keep_all")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    assert (only_plan(model).stage, only_plan(model).planner) == (Stage.FINAL, "auto")


def test_without_a_process_the_call_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case("unet")
    monkeypatch.setattr(child_process, "can_start", lambda: False)
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    assert (only_plan(model).stage, only_plan(model).planner) == (Stage.FINAL, "auto")


def job_of(model: nn.Module) -> Any:
    (improvement,) = session_of(model).improvements._under_way
    return improvement._job


def test_a_lost_process_leaves_the_first_plan() -> None:
    model, batch = case("gpt")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    started(job_of(model)).kill()
    first = only_plan(model)
    plan = only_plan(model, wait=True)
    assert (plan.schedule, plan.stage) == (first.schedule, Stage.FINAL)
    assert peak_of(model, batch) == first.peak_bytes


def started(job: Any) -> Any:
    """Return the process of a job, once those of others have ended."""
    until = time.monotonic() + 30
    while not job.is_over and job._work._process is None and time.monotonic() < until:
        time.sleep(0.01)
    return job._work._process


def ends(process: Any) -> bool:
    until = time.monotonic() + 30
    while process.returncode is None and time.monotonic() < until:
        time.sleep(0.01)
    return process.returncode is not None


@pytest.mark.parametrize("way", ["unwrap", "wrap", "collected"])
def test_nothing_is_planned_for_a_model_that_is_not_wrapped_any_more(way: str) -> None:
    model, batch = case("gpt")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    process = started(job_of(model))
    if way == "unwrap":
        lowtide.unwrap(model)
    elif way == "wrap":
        lowtide.wrap(model, budget="1TiB")
    else:
        del model
        gc.collect()
    assert ends(process)


def test_copies_and_pickles_of_a_model_that_is_being_planned() -> None:
    model, batch = case("unet")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    twin = pickle.loads(pickle.dumps(model))
    assert wrapped_of(twin) is None
    assert wrapped_of(copy.deepcopy(model)) is None
    assert only_plan(model, wait=True).planner == "auto"


@pytest.mark.usefixtures("_held")
def test_a_plan_can_be_saved_at_any_stage(tmp_path: Any) -> None:
    model, batch = case("unet")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    first = only_plan(model)
    assert "a better one" in str(first)
    first.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == first
    assert again.stage is Stage.FINAL
    assert "a better one" not in str(only_plan(model, wait=True))


def test_a_call_that_fails_meanwhile_changes_nothing() -> None:
    model, batch = case("unet")
    lowtide.wrap(model, budget="60%", patience=0)
    step(model, batch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever eager raises
        model(torch.zeros(1))
    assert only_plan(model, wait=True).planner == "auto"
    assert peak_of(model, batch) == only_plan(model).peak_bytes


def test_a_shape_that_comes_meanwhile_has_a_plan_of_its_own() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(12)))
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="70%", patience=0)
    for rows in (64, 48, 64, 48):
        x = torch.randn(rows, 16)
        for net in (plain, model):
            net(x).square().mean().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]
    found = lowtide.plans(model, wait=True)
    assert [plan.stage for plan in found if isinstance(plan, Plan)] == [Stage.FINAL] * 2


class Wide(nn.Module):
    """Layers that need no more than their sizes to be known."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(8)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def rows_of(count: int) -> Any:
    return (torch.randn(count, 16),), {}


def test_where_nothing_fits_the_least_peak_is_taken_if_that_is_asked_for() -> None:
    model = lowtide.wrap(Wide(), budget=50_000, planner="greedy", on_infeasible="least")
    plain = copy.deepcopy(model)
    batch = rows_of(48)
    with pytest.warns(lowtide.errors.LowtideWarning, match="least peak known") as warned:
        step(model, batch)
    plan = only_plan(model)
    assert not plan.fits
    assert f"{plan.peak_bytes} bytes" in str(warned[0].message)
    step(plain, batch)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]
    assert peak_of(model, batch) == plan.peak_bytes
    assert session_of(model).num_compiled == 1
    # The same call is refused otherwise, with the same bytes.
    lowtide.wrap(model, budget=50_000, planner="greedy")
    with pytest.raises(InfeasibleBudgetError) as refused:
        step(model, batch)
    assert refused.value.least_bytes >= plan.peak_bytes


def test_where_a_plan_fits_nothing_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    model = lowtide.wrap(Wide(), budget=220_000, planner="greedy", on_infeasible="least")
    step(model, rows_of(64))
    assert only_plan(model).fits
    assert not [each for each in recwarn if issubclass(each.category, lowtide.errors.LowtideWarning)]


@pytest.mark.parametrize("option", ["warn", "", None, True, 0])
def test_other_ways_for_what_does_not_fit_are_refused(option: Any) -> None:
    with pytest.raises(InvalidOptionError, match="on_infeasible"):
        lowtide.wrap(nn.Linear(2, 2), budget="1MiB", on_infeasible=option)


class NoJob:
    """Work in the background that never ends."""

    plan, is_over = None, False

    def __init__(self, *_: Any) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Return that it is not over."""
        del seconds
        return False

    def give_way(self) -> None: ...

    def close(self) -> None: ...


def test_another_shape_of_the_same_graph_takes_over_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    # No first plan of its own is as good, and nothing better comes.
    monkeypatch.setattr(improvements, "_QUICK", "chen_sqrt")
    model = lowtide.wrap(Wide(), budget=220_000, patience=60)
    step(model, rows_of(64))
    long = only_plan(model)
    monkeypatch.setattr(improvements, "PlanJob", NoJob)
    for rows in (63, 61):
        step(model, rows_of(rows))
        plan = lowtide.plans(model)[-1]
        assert isinstance(plan, Plan)
        assert (plan.schedule, plan.planner, plan.stage) == (long.schedule, "auto", Stage.FIRST)
        assert plan.problem.graph != long.problem.graph
        assert peak_of(model, rows_of(rows)) == plan.peak_bytes <= plan.budget_bytes


def test_a_schedule_that_does_not_fit_another_shape_is_not_taken_over() -> None:
    model = lowtide.wrap(Wide(), budget=220_000, patience=60)
    step(model, rows_of(56))
    model.zero_grad()
    step(model, rows_of(70))
    short, long = lowtide.plans(model)
    assert isinstance(short, Plan)
    assert isinstance(long, Plan)
    assert long.fits
    assert not solve(long.problem, short.schedule, throw=False).fits


class TwoLosses(nn.Module):
    """A model whose second output gets a gradient now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean(), x


@pytest.mark.filterwarnings("ignore::lowtide.errors.LowtideWarning")
def test_gradients_that_nobody_expects_are_right_under_both_plans() -> None:
    torch.manual_seed(2)
    model = TwoLosses()
    plain = copy.deepcopy(model)
    lowtide.wrap(model, budget="75%", patience=0)
    x = torch.randn(64, 32)
    losses: list[Callable[[Any], Tensor]] = [lambda out: out[0], lambda out: out[0] + out[1].sin().sum()]
    for number in range(4):
        if number == 2:
            lowtide.plans(model, wait=True)
        for net in (plain, model):
            net.zero_grad()
            losses[number % 2](net(x)).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]


def test_the_compiler_backend_takes_patience() -> None:
    model, batch = case("unet")
    plain = copy.deepcopy(model)
    compiled = torch.compile(
        model, backend="lowtide", dynamic=False, options={"budget": "60%", "costs": "analytic", "patience": 0}
    )
    for _ in range(3):
        for net in (plain, compiled):
            step(net, batch)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters(), strict=True))  # type: ignore[arg-type]
