"""Planning a step of several blocks without running it, and running such a plan."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import errors
from lowtide.cli import main
from lowtide.measure import measure_peak
from lowtide.step.plan import StepPlan
from lowtide.step.policy import POLICY

OPTIONS: dict[str, Any] = {"costs": "analytic", "planner": "greedy"}


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Broken(nn.Module):
    """A model that the compiler cuts in two."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.first = nn.Sequential(Layer(dim), Layer(dim))
        self.second = nn.Sequential(Layer(dim), Layer(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


class Deep(nn.Module):
    def __init__(self, layers: int = 5, dim: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def batch() -> tuple[Tensor]:
    return (torch.randn(256, 32),)


def broken() -> tuple[Broken, tuple[Tensor]]:
    return Broken(), batch()


def deep() -> tuple[Deep, tuple[Tensor]]:
    return Deep(), batch()


def planned(model: nn.Module, args: Any, budget: int | str = "60%", **options: Any) -> StepPlan:
    found = lowtide.plan(model, args, budget=budget, **OPTIONS | options)
    assert isinstance(found, StepPlan)
    found.verify()
    return found


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def test_a_model_in_two_graphs_has_a_plan_of_the_whole_step() -> None:
    plan = planned(*broken())
    assert plan.blocks == ("first", "second")
    assert plan.peak_bytes <= plan.budget_bytes == int(0.6 * plan.baseline_peak_bytes)


def test_nothing_of_the_model_is_touched() -> None:
    model, args = broken()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    planned(model, args)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "forward" not in vars(model)


def test_the_plan_is_that_of_training_and_of_the_measured_peak() -> None:
    model, args = broken()
    plan = planned(model, args)
    twin = copy.deepcopy(model)
    lowtide.wrap(model, plan=plan)
    for _ in range(2):
        loss = model(*args)
        loss.backward()
        expected = twin(*args)
        expected.backward()
        assert torch.equal(loss, expected)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        model.zero_grad()
        twin.zero_grad()
    ran = lowtide.plans(model)[0]
    assert isinstance(ran, StepPlan)
    assert ran.menus == plan.menus
    assert ran.peak_bytes == plan.peak_bytes
    assert ran.baseline_peak_bytes == plan.baseline_peak_bytes
    measured = measure_peak(lambda: model(*args).backward())
    assert measured <= plan.budget_bytes
    assert 0 <= plan.peak_bytes - measured <= POLICY.scalar_bytes + 1024


def test_named_layers_are_one_block_that_runs_several_times() -> None:
    model, args = deep()
    plan = planned(model, args, blocks=["layers"])
    # The input of the first one needs no gradient.
    assert plan.blocks == ("layers.0", *4 * ["layers.1"])
    assert len(plan.problem.blocks) == 2
    assert planned(model, args, blocks=[Layer]).problem == plan.problem
    whole = lowtide.plan(model, args, budget="60%", **OPTIONS)
    assert isinstance(whole, lowtide.Plan)
    # What lies outside of the layers is small here.
    assert plan.baseline_peak_bytes == pytest.approx(whole.baseline_peak_bytes, rel=0.05)


def test_layers_are_planned_without_data() -> None:
    with torch.device("meta"):
        bare, args = deep()
    model, real = deep()
    assert planned(bare, args, blocks=["layers"]).problem == planned(model, real, blocks=["layers"]).problem


def test_a_plan_by_layers_runs_with_its_blocks_and_is_refused_with_others() -> None:
    model, args = deep()
    plan = planned(model, args, blocks=["layers"])
    lowtide.wrap(model, plan=plan, blocks=["layers"])
    model(*args).backward()
    assert lowtide.plans(model)[0].peak_bytes <= plan.budget_bytes
    other = Deep()
    lowtide.wrap(other, plan=plan)
    with pytest.raises(errors.PlanFileError, match=r"other blocks.*blocks= that the plan was made with"):
        other(*args)


def test_a_budget_that_cannot_be_met_names_the_block() -> None:
    with pytest.raises(errors.InfeasibleBudgetError, match="2 block runs") as failed:
        planned(*broken(), budget="5%")
    text = " ".join(str(failed.value).split())
    assert "within the budget of 5% (" in text
    assert "(block run " in text
    assert isinstance(failed.value.plan, StepPlan)
    planned(*broken(), budget=failed.value.least_bytes)


def test_training_says_the_same_of_such_a_budget() -> None:
    model, args = broken()
    lowtide.wrap(model, budget="5%", **OPTIONS)
    with pytest.raises(errors.InfeasibleBudgetError, match="The step has 2 block runs") as failed:
        model(*args)
    assert "within the budget of 5% (" in str(failed.value)


def test_a_share_is_kept_from_the_first_call_on() -> None:
    model, args = broken()
    lowtide.wrap(model, budget="60%", **OPTIONS)
    model(*args).backward()
    plan = lowtide.plans(model)[0]
    assert plan.peak_bytes <= plan.budget_bytes


def test_functions_have_no_modules_to_name() -> None:
    model, args = deep()
    with pytest.raises(errors.InvalidOptionError, match="a function has none"):
        lowtide.plan(lambda x: model(x), args, budget="60%", blocks=["layers"], **OPTIONS)


def test_the_largest_batch_of_a_step_of_blocks() -> None:
    fit = lowtide.max_batch(
        Broken(), lambda size: (torch.randn(size, 32),), memory="1MiB", optimizer="sgd", most=4000, **OPTIONS
    )
    assert isinstance(fit.plan, StepPlan)
    assert fit.account.peak_bytes <= 2**20
    assert fit.plan.account is not None
    assert "peak of training" in str(fit.plan)
    with pytest.raises(errors.InfeasibleBudgetError, match="A batch of one does not fit"):
        lowtide.max_batch(Broken(), lambda size: (torch.randn(size, 32),), memory="20KiB", optimizer="sgd", **OPTIONS)


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    path = tmp_path / "two_graphs_model.py"
    path.write_text(Path(__file__).read_text().replace("from lowtide.cli import main\n", ""))
    return f"{path}:"


def test_the_command_line_plans_explains_and_compares(
    model_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page = str(tmp_path / "step.json"), str(tmp_path / "step.html")
    common = ["--costs", "analytic"]
    assert main(["plan", f"{model_file}broken", "--budget", "60%", "--out", saved, "--report", page, *common]) == 0
    assert "2 block runs" in capsys.readouterr().out
    assert "template" in Path(page).read_text()
    assert main(["plan", saved, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in data["blocks"]] == ["first", "second"]
    assert main(["explain", saved]) == 0
    assert "What less memory costs" in capsys.readouterr().out
    assert main(["compare", saved, "--budgets", "70%", "--planners", "greedy", "chen_sqrt"]) == 0
    assert "chen_sqrt" in capsys.readouterr().out
    assert main(["plan", f"{model_file}deep", "--budget", "60%", "--blocks", "layers", *common]) == 0
    assert "5 block runs, 2 of them distinct" in capsys.readouterr().out
    assert main(["plan", saved, "--blocks", "whole"]) == 1
    assert "--blocks cannot be used" in capsys.readouterr().err
    assert main(["plan", f"{model_file}deep", "--budget", "60%", "--blocks", "nothing", *common]) != 0
    assert "no module of this name" in capsys.readouterr().err


class Kept(Deep):
    """The result of a graph between layers is read by its own backward, and by a layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(torch.sin(self.layers[1](self.layers[0](x))))
        return self.head(self.layers[4](self.layers[3](self.layers[2](x)))).square().mean()


@pytest.mark.parametrize("make", [Deep, Kept, Broken])
def test_the_level_is_that_of_a_step_that_ran(make: type[nn.Module]) -> None:
    """Also where no peak is: what is expected behind each block is what was seen there."""
    model, args = make(), batch()
    blocks = "auto" if make is Broken else ["layers"]
    plan = planned(model, args, "100%", blocks=blocks)
    lowtide.wrap(model, budget=plan.budget_bytes, blocks=blocks, **OPTIONS)
    for _ in range(2):
        model.zero_grad()
        model(*args).backward()
    ran = lowtide.plans(model)[0]
    assert isinstance(ran, StepPlan)
    for ours, seen in (
        (plan.problem.forward_gaps, ran.problem.forward_gaps),
        (plan.problem.backward_gaps, ran.problem.backward_gaps),
    ):
        assert [each.after for each in ours] == pytest.approx([each.after for each in seen], abs=64)
