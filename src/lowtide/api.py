"""What users call: `wrap`, `unwrap`, `plans`, `plan`, `max_batch`, `compare` and `explain`.

PyTorch and its compiler are imported by the calls that need them, so that `import lowtide` and the command line's help
take a fraction of the time that `import torch` takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lowtide.analysis.batch_search import MOST, BatchFit
from lowtide.analysis.explain_peak import Explanation
from lowtide.analysis.explain_step import StepExplanation, explain_any
from lowtide.analysis.planner_comparison import BUDGETS, Comparison, check_comparison, compare_plan
from lowtide.errors import InvalidBudgetError, InvalidInputError, InvalidModelError, InvalidOptionError
from lowtide.graph.costs import Costs
from lowtide.plan.core.parallel import Parallel
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.plan.core.result import Plan
from lowtide.step.plan import StepPlan

if TYPE_CHECKING:
    from lowtide.runtime.wrapped import Wrapped
    from lowtide.settings import Settings

Model = TypeVar("Model", bound=Callable[..., Any])


def wrap(
    model: Model,
    *,
    budget: int | str | None = None,
    planner: str | AbstractPlanner = "auto",
    costs: str | Costs = "measured",
    plan: Plan | StepPlan | str | Path | None = None,
    blocks: str | Sequence[str | type] = "auto",
    verify: bool = False,
    patience: float | str | None = None,
    on_infeasible: str = "raise",
    engine: str = "exact",
) -> Model:
    """Return `model`, whose training steps from now on fit the budget; a function is returned as a new function.

    Example:
        ```python
        model = lowtide.wrap(model, budget="6GiB")
        loss = model(batch)
        loss.backward()
        ```

    Planning happens at the first training call of each input signature. Calls in eval mode or without gradients are
    not touched. The model object, its parameters and its `state_dict` keys stay what they are. What is computed outside
    of the model, such as a loss of its outputs, is not planned and its memory comes on top.

    Args:
        model: An `nn.Module`, changed in place, or a function.
        budget: Peak bytes that a step may allocate on top of what is allocated when it starts: an `int`, "6GiB",
            "500MB", "50%" of the unplanned peak, or "auto" on an accelerator (what is free).
        planner: Name of a planner, or a planner.
        costs: "measured", "analytic", the name of a device for analytic costs, or ready costs.
        plan: A plan, or the path of a saved one, for the graph or the blocks it was made for; the plan of a step needs
            the `blocks` it was made with.
        blocks: How the step is cut into blocks that are planned together: "auto" (one graph where that can be had, and
            else what the compiler leaves), "whole" (never more than the compiler makes necessary), or a list of names
            or classes of modules that are to be blocks.
        verify: Run the first training call plainly as well and compare bit for bit; and at every backward compare
            what recomputation reads with what forward read, by checksums.
        patience: Seconds that a first call waits for the best plan; then it trains with a first one, and the best one
            is made in the background and taken over between two steps. "full" waits for the best one. By default 2, or
            what the environment variable `LOWTIDE_PATIENCE` says.
        on_infeasible: "raise" an error where no plan of a graph fits the budget, before anything is computed; or train
            with the "least" peak known and a warning. Steps of several blocks always raise.
        engine: What runs the plan: "exact" runs ops one by one, with the bits of eager training; "inductor" runs the
            code that PyTorch's compiler generates, which is faster and needs a C++ compiler (see the page on engines).
    """
    from torch import nn

    from lowtide.runtime.wrap import wrap_function, wrap_module
    from lowtide.settings import Settings

    settings = Settings.make(
        budget=budget,
        planner=planner,
        costs=costs,
        plan=plan,
        blocks=blocks,
        patience=patience,
        on_infeasible=on_infeasible,
        engine=engine,
    )
    if isinstance(model, nn.Module):
        wrap_module(model, settings, verify=verify)
        return model
    if callable(model) and not isinstance(model, type):
        return wrap_function(model, settings, verify=verify)  # type: ignore[return-value]
    raise InvalidModelError(
        f"{model!r} is a {type(model).__name__}; lowtide.wrap takes an nn.Module or a function that is trained."
    )


def unwrap(model: Model) -> Model:
    """Return `model` as it was before `wrap` or `chain_layers`; a model without either is returned as it is."""
    from torch import nn

    from lowtide.blocks.layers import unchain_layers
    from lowtide.runtime.wrap import unwrap_module
    from lowtide.runtime.wrapped import wrapped_of

    if isinstance(model, nn.Module):
        unchain_layers(model)
    wrapped = wrapped_of(model)
    if wrapped is None:
        return model
    if isinstance(model, nn.Module):
        unwrap_module(model)
        return model
    return wrapped.plain  # type: ignore[return-value]


def plans(model: Callable[..., Any], *, wait: bool = False) -> list[Plan | StepPlan]:
    """Return the plans made so far for a wrapped model, one for each captured graph, or for the chains in a model.

    If the step consists of several blocks, the first is the `StepPlan` of all of it, and the plans that its blocks run
    come behind it. `plan.stage` says whether a better plan is being made in the background.

    Args:
        model: What was wrapped.
        wait: Wait until nothing is planned in the background any more; the next step runs the plans returned.
    """
    from lowtide.blocks.layers import chains_in

    chains = chains_in(model)
    if chains:
        return [plan for each in chains for plan in each.plans]
    session = _wrapped(model).session
    if wait:
        session.improvements.finish()
    step = session.step_plan()
    return [*session.plans] if step is None else [step, *step.block_plans, *session.plans]


def main_plan(found: Sequence[Plan | StepPlan]) -> Plan | StepPlan:
    """Return the plan that says most of what `plans` returns: that of the step, or of the largest graph."""
    steps = [each for each in found if isinstance(each, StepPlan)]
    return steps[0] if steps else max(found, key=lambda each: each.baseline_peak_bytes)


def plan(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str | None = None,
    planner: str | AbstractPlanner = "auto",
    costs: str | Costs | None = None,
    memory: int | str | None = None,
    device: str | None = None,
    optimizer: str | int = "adam",
    blocks: str | Sequence[str | type] = "auto",
    parallel: Parallel | str | None = None,
) -> Plan | StepPlan:
    """Return the plan for training `model` on such arguments, without running it.

    Shapes are worked out on fake tensors: no activation memory is needed, and parameters, gradients, buffers and the
    random number generators are not touched. Model and arguments may be on the meta device, where they have no data at
    all; the plan is then the one of the same model on the CPU. If the step consists of several blocks, because it is
    captured as several graphs, has very many equal layers, or `blocks` names some, the plan is a `StepPlan`.

    Example:
        ```python
        with torch.device("meta"):
            model, batch = LargeModel(), torch.empty(8, 4096, dtype=torch.int64)
        plan = lowtide.plan(model, (batch,), device="a100-80gb", optimizer="adam")
        ```

    With `memory` or `device` the budget is what parameters, buffers, batch and the optimizer's state leave of it, and
    `plan.account` adds everything up. Gradients are taken to be freed after every update, as `zero_grad()` does.

    With `parallel` the plan is that of one of several processes, and so are budget, memory and account; no process is
    started. `args` are then the batch of one process. With "fsdp2" the repeated layers of the model are taken to be
    sharded by themselves, or the modules that `blocks` names, and the model around them.

    Args:
        model: An `nn.Module` in train mode, or a function.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        budget: As for `wrap`.
        planner: As for `wrap`.
        costs: As for `wrap`; by default worked out for `device` if that is given, else measured.
        memory: In place of a budget: all the memory there is for training, such as "24GiB".
        device: In place of a budget: the name of a device such as "a100-80gb", whose memory it is.
        optimizer: With `memory`, `device` or `parallel`: "sgd", "sgd-momentum", "adam", "adamw", or the bytes of its
            state.
        blocks: As for `wrap`.
        parallel: The processes that train together: `Parallel("fsdp2", 8)`, or "fsdp2:8" for short.
    """
    if memory is not None or device is not None:
        if budget is not None:
            raise InvalidBudgetError(
                f"budget={budget!r} was given beside memory= or device=; the budget is what they leave, so give one."
            )
        there = _Memory(memory, device, optimizer)
        return _plan_within("plan", model, args, kwargs, there, planner, costs, blocks, parallel)
    costs = "measured" if costs is None else costs
    options: dict[str, Any] = {"budget": budget, "planner": planner, "costs": costs, "blocks": blocks}
    if parallel is None:
        return _plan_call("plan", model, args, kwargs, **options)
    from lowtide.runtime.memory_fit import plan_with_account
    from lowtide.settings import Settings

    _check_callable("plan", model)
    _check_arguments(args, kwargs)
    settings = Settings.make(**options, parallel=parallel)
    return plan_with_account(model, (tuple(args), dict(kwargs or {})), settings, optimizer=optimizer)


def max_batch(
    model: Callable[..., Any],
    make_batch: Callable[[int], Any],
    *,
    memory: int | str | None = None,
    device: str | None = None,
    optimizer: str | int = "adam",
    planner: str | AbstractPlanner = "auto",
    costs: str | Costs | None = None,
    most: int = MOST,
    blocks: str | Sequence[str | type] = "auto",
    parallel: Parallel | str | None = None,
) -> BatchFit:
    """Return the largest batch with which `model` trains in the memory there is, by planning, without running it.

    Parameters, buffers, batch, optimizer state, gradients, activations and temporaries all count. The answer is exact
    for this planner: it has a plan for the batch returned, and none for one more.

    Example:
        ```python
        fit = lowtide.max_batch(model, lambda size: (torch.randn(size, 3, 224, 224),), memory="8GiB", optimizer="sgd")
        model = lowtide.wrap(model, plan=fit.plan)  # trains batches of fit.batch
        ```

    Args:
        model: An `nn.Module` in train mode, also on the meta device, or a function that has one in its closure.
        make_batch: Returns the arguments of a call with a batch of the given size: a tuple, a dictionary of keyword
            arguments, or one tensor. It is called where tensors have no data, if it allows that.
        memory: All the memory there is for training, such as "24GiB".
        device: In place of `memory`: the name of a device, such as "a100-80gb".
        optimizer: "sgd", "sgd-momentum", "adam", "adamw", or the bytes of its state.
        planner: As for `wrap`.
        costs: As for `wrap`; by default worked out for `device` if that is given, else measured.
        most: The largest batch to try.
        blocks: As for `wrap`.
        parallel: As for `plan`; the batch is then the one of each process.
    """
    from lowtide.runtime.memory_fit import largest_batch, memory_of

    _check_callable("max_batch", model)
    if not callable(make_batch):
        raise InvalidInputError(f"make_batch is a {type(make_batch).__name__}; it must be a function of a batch size.")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise InvalidOptionError(f"most={most!r} is not a whole number of at least 1.")
    memory_bytes = memory_of(memory, device)
    settings = _settings_without_budget(planner, costs, device, blocks, parallel)
    return largest_batch(model, make_batch, settings, memory_bytes=memory_bytes, optimizer=optimizer, most=most)


def compare(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budgets: Sequence[int | str] = BUDGETS,
    planners: Sequence[str | AbstractPlanner] | None = None,
    costs: str | Costs = "measured",
    blocks: str | Sequence[str | type] = "auto",
) -> Comparison:
    """Return what each planner makes of each budget for training `model` on such arguments, without running it.

    Example:
        ```python
        print(lowtide.compare(model, (batch,), budgets=["65%", "50%"], planners=["auto", "chen_sqrt", "rotor"]))
        ```

    Args:
        model: As for `plan`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        budgets: Bytes, sizes such as "6GiB", or shares of the unplanned peak such as "50%".
        planners: Names or planners; by default all that are registered, without `brute_force` and `auto_thorough`. For
            a step of several blocks they make the menus of the blocks, and the default is `greedy`.
        costs: As for `wrap`.
        blocks: As for `wrap`.
    """
    from lowtide.progress import ProgressLine

    check_comparison(budgets, planners)
    options = {"planner": "keep_all", "costs": costs, "blocks": blocks}
    found = _plan_call("compare", model, args, kwargs, budget="100%", **options)
    with ProgressLine() as progress:
        return compare_plan(found, budgets=budgets, planners=planners, progress=progress)


def explain(
    model: Callable[..., Any] | Plan | StepPlan,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | str = "100%",
    planner: str | AbstractPlanner = "auto",
    costs: str | Costs = "measured",
    less: bool = True,
    blocks: str | Sequence[str | type] = "auto",
) -> Explanation | StepExplanation:
    """Return what is alive at the peak of a training step and why, whom to blame, and what less memory would cost.

    Example:
        ```python
        print(lowtide.explain(model, (batch,)))
        print(lowtide.explain(plan))
        ```

    Args:
        model: As for `plan`; or a plan, of whose own schedule the peak is explained.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        budget: As for `wrap`; by default plain training is explained.
        planner: As for `wrap`; it also says what less memory would cost.
        costs: As for `wrap`.
        less: Compute what each 10 % less memory would cost, which takes one plan each.
        blocks: As for `wrap`.
    """
    from lowtide.progress import ProgressLine

    if isinstance(model, Plan | StepPlan):
        found = model
    else:
        options = {"planner": planner, "costs": costs, "blocks": blocks}
        found = _plan_call("explain", model, args, kwargs, budget=budget, **options)
    with ProgressLine() as progress:
        return explain_any(found, planner=planner, less=less, progress=progress)


def _plan_call(
    name: str, model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, **options: Any
) -> Plan | StepPlan:
    """Return the plan of a call; `name` is the function that the user called."""
    from lowtide.runtime.dry_run import plan_call
    from lowtide.runtime.model_plans import Session
    from lowtide.settings import Settings

    _check_callable(name, model)
    _check_arguments(args, kwargs)
    return plan_call(model, args, kwargs or {}, Session(Settings.make(**options)))


@dataclass(frozen=True)
class _Memory:
    """What there is for training, as the user said it."""

    memory: int | str | None
    device: str | None
    optimizer: str | int


def _plan_within(
    name: str,
    model: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    there: _Memory,
    planner: str | AbstractPlanner,
    costs: str | Costs | None,
    blocks: str | Sequence[str | type],
    parallel: Parallel | str | None,
) -> Plan | StepPlan:
    from lowtide.runtime.memory_fit import memory_of, plan_within

    _check_callable(name, model)
    _check_arguments(args, kwargs)
    memory_bytes = memory_of(there.memory, there.device)
    settings = _settings_without_budget(planner, costs, there.device, blocks, parallel)
    batch = tuple(args), dict(kwargs or {})
    return plan_within(model, batch, settings, memory_bytes=memory_bytes, optimizer=there.optimizer)


def _settings_without_budget(
    planner: str | AbstractPlanner,
    costs: str | Costs | None,
    device: str | None,
    blocks: str | Sequence[str | type],
    parallel: Parallel | str | None,
) -> Settings:
    from lowtide.settings import Settings

    source = (device or "measured") if costs is None else costs
    # The budget is replaced for every batch.
    return Settings.make(budget="100%", planner=planner, costs=source, blocks=blocks, parallel=parallel)


def _check_callable(name: str, model: Callable[..., Any]) -> None:
    if not callable(model) or isinstance(model, type):
        raise InvalidModelError(
            f"{model!r} is a {type(model).__name__}; lowtide.{name} takes an nn.Module or a function."
        )


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    if not isinstance(args, tuple | list):
        raise InvalidInputError(f"args is a {type(args).__name__}; it must be a tuple of the call's arguments.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidInputError(f"kwargs is a {type(kwargs).__name__}; it must be a dictionary of keyword arguments.")


def _wrapped(model: Callable[..., Any]) -> Wrapped:
    from lowtide.runtime.wrapped import wrapped_of

    wrapped = wrapped_of(model)
    if wrapped is None:
        raise InvalidModelError(f"{type(model).__name__} is not wrapped; call lowtide.wrap(model, budget=...) first.")
    return wrapped
