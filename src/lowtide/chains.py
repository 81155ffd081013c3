"""What users call for chains of blocks: `chain`, `chain_layers` and `unroll`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from lowtide.blocks import layers
from lowtide.blocks.chain import Chain
from lowtide.blocks.unroll import Output, Unrolled
from lowtide.errors import InvalidModelError
from lowtide.plan.core.planner import AbstractPlanner
from lowtide.settings import Settings

Model = TypeVar("Model", bound=nn.Module)


def chain(
    blocks: Sequence[Callable[..., Any]] | nn.Sequential | nn.ModuleList,
    *,
    budget: int | str,
    planner: str | AbstractPlanner = "auto",
    emits: int = 0,
    verify: bool = False,
) -> Chain:
    """Return a module that runs `blocks` one after the other and trains them within the budget.

    Each block takes what the one before returned, a tensor or a flat tuple of tensors. Nothing is traced: at the first
    training call of each input signature every distinct block is run by itself a few times, and the chain is planned
    block by block. It then runs in ordinary eager mode, and blocks are recomputed during backward as planned.

    Example:
        ```python
        model = lowtide.chain([block1, block2, block3], budget="30%")
        loss = model(x).sum()
        loss.backward()
        ```

    Args:
        blocks: An `nn.Sequential`, an `nn.ModuleList`, or a list of modules and functions.
        budget: As for `wrap`; "50%" is of the chain's own unplanned peak.
        planner: As for `wrap`.
        emits: How many tensors at the end of every block's results go to the caller instead of to the next block. The
            chain then returns its result and a list with a tuple of these for every block.
        verify: At every backward, first compare parameters and inputs with those of its forward by checksums, and raise
            if they were changed in a way that PyTorch does not notice (`parameter.data.clamp_()`).
    """
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        # The same module may stand at several places.
        every = blocks.named_modules(remove_duplicate=False)
        names, given = [name for name, _ in every if name and "." not in name], list(blocks)
    elif isinstance(blocks, list | tuple):
        names, given = [str(number) for number in range(len(blocks))], list(blocks)
    else:
        raise InvalidModelError(
            f"{type(blocks).__name__} is not a chain of blocks; give an nn.Sequential, an nn.ModuleList or a list of "
            "modules and functions."
        )
    return Chain(names, given, Settings.make(budget=budget, planner=planner), emits=emits, verify=verify)


def chain_layers(
    model: Model,
    *names: str,
    budget: int | str,
    planner: str | AbstractPlanner = "auto",
    verify: bool = False,
) -> Model:
    """Return `model`, whose repeated layers from now on run as a chain within the budget.

    For models that `wrap` cannot trace. The model's own code stays, `state_dict` keys stay, and `lowtide.unwrap` undoes
    it. The budget is for the layers; what the model does before and after them comes on top.

    Example:
        ```python
        model = lowtide.chain_layers(model, "encoder.layer", budget="30%")
        ```

    Args:
        model: A model with an `nn.ModuleList` or `nn.Sequential` of layers, changed in place.
        *names: Which lists of layers; by default those under a usual name (`layers`, `blocks`, `h`, `encoder.layer`)
            whose layers are of one class.
        budget: As for `chain`; a number of bytes is for one list of layers.
        planner: As for `wrap`.
        verify: As for `chain`.
    """
    if not isinstance(model, nn.Module):
        raise InvalidModelError(f"{type(model).__name__} is not an nn.Module, so it has no layers to chain.")
    layers.chain_layers(model, Settings.make(budget=budget, planner=planner), names, verify=verify)
    return model


def unroll(
    step: Callable[..., Any] | Sequence[nn.Module],
    *,
    budget: int | str,
    planner: str | AbstractPlanner = "auto",
    chunk: int | None = None,
    output: Output = "first",
    batch_first: bool = False,
    verify: bool = False,
) -> Unrolled:
    """Return a module that runs `step` over the time steps of a sequence and trains it within the budget.

    It is called as `outputs, state = module(sequence, state)`, with time first.

    Example:
        ```python
        model = lowtide.unroll([nn.LSTMCell(32, 64), nn.LSTMCell(64, 64)], budget="20%")
        outputs, states = model(sequence)
        ```

    Args:
        step: An `LSTMCell`, `GRUCell` or `RNNCell`, a list of them that are stacked, or a function `step(x, *state)`
            that returns the next state, a tensor or a flat tuple.
        budget: As for `chain`.
        planner: As for `wrap`.
        chunk: Time steps that are one block of the chain; by default such that there are up to 150 blocks.
        output: What each step gives: "first" for the first tensor of the state (the hidden state of the topmost cell),
            a function of the state, or None for nothing.
        batch_first: True if sequences and outputs have the batch first and time second.
        verify: As for `chain`.
    """
    settings = Settings.make(budget=budget, planner=planner)
    return Unrolled(step, settings, chunk=chunk, output=output, batch_first=batch_first, verify=verify)
