"""Training calls of wrapped models with sharded parameters: which modules are blocks, and one answer for all ranks.

A sharded model exchanges parameters with other ranks while it is called. What one rank repeats, others wait for. So the
first call is run by all ranks for its blocks alone, and they agree whether it fits; from then on no call is made twice.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.blocks.step.find_layers import Cuts, Layers, find_layers
from lowtide.blocks.step.module_places import ModulePlaces
from lowtide.distributed.sharded_model import ShardedModel, find_sharded, refuse_sharded
from lowtide.errors import InfeasibleBudgetError, InvalidModelError, InvalidOptionError, LowtideError
from lowtide.plan.core.result import Plan
from lowtide.pytorch.contents import contents_of
from lowtide.runtime.inductor_backend import refuse_sharded_model
from lowtide.runtime.layer_blocks import LayerBlocks
from lowtide.runtime.model_plans import Session
from lowtide.runtime.opaque_modules import has_recurrent_parts
from lowtide.settings import Settings


class ShardedCalls:
    """The training calls of one sharded model.

    Attributes:
        model: Its sharded modules.
        layers: The modules that are blocks; None if only the root is sharded.
        is_explored: Whether the first call has shown its blocks, and all ranks have agreed.
    """

    def __init__(self, model: ShardedModel, layers: LayerBlocks | None, session: Session) -> None:
        self.model, self.layers, self.is_explored = model, layers, False
        self._session = session

    def explore(self, run: Callable[[], LowtideError | None]) -> None:
        """Explore the first call; raise on every rank if the step of one does not fit.

        Args:
            run: Runs the call for its blocks alone, and returns why it does not fit.
        """
        refused = run()
        self.model.forget_forward()
        gc.collect()
        anywhere = self.model.any_rank(refused is not None)
        if refused is not None:
            raise refused
        if anywhere:
            raise _refused_elsewhere(self._session.step.budget_bytes or 0)
        self.is_explored = True


def sharded_calls(
    model: nn.Module | None, plain: Callable[..., Any], session: Session, layers: LayerBlocks | None, *, verify: bool
) -> ShardedCalls | None:
    """Return what is different about the calls of a model because its parameters are sharded; None if they are not.

    Args:
        model: The model, or None if a function was wrapped.
        plain: What was wrapped.
        session: Plans it. The sharded modules become the blocks of its steps.
        layers: The modules that have been blocks until now.
        verify: Whether the user wants the first call to be verified.
    """
    if model is None:
        refuse_sharded(
            contents_of(plain).modules,
            "The wrapped function calls a model that is sharded. Wrap the model itself: its sharded modules are the "
            "blocks of its step.",
        )
        return None
    sharded = find_sharded(model)
    if sharded is None or sharded.is_inner:
        return None
    if session.settings.engine == "inductor":
        refuse_sharded_model(model)
    _refuse_settings(session.settings, sharded, verify=verify)
    if has_recurrent_parts(model):
        raise InvalidModelError(
            "The model is sharded and has recurrent modules. These are not captured; they would run again in backward "
            "from parameters that have come and gone since. Leave such a model unwrapped, or do not shard it."
        )
    chosen = {} if isinstance(session.settings.blocks, str) else find_layers(model, session.settings.blocks).modules
    modules = sharded.blocks(chosen, model)
    cuts = Cuts.fixed(model, sharded_layers(modules))
    if layers is not None:
        layers.remove()
    session.cuts, session.is_undecided = cuts, False
    session.step.modules = ModulePlaces(model.named_modules(), modules)
    session.step.around.surroundings = sharded
    return ShardedCalls(sharded, LayerBlocks(cuts.now, session) if modules else None, session)


def sharded_layers(modules: dict[str, nn.Module]) -> Layers:
    """Return blocks that are what they are because they are sharded."""
    return Layers(modules, "sharded modules are blocks: their parameters come and go around them")


def _refuse_settings(settings: Settings, sharded: ShardedModel, *, verify: bool) -> None:
    """Raise if the user asked for what a sharded model cannot have."""
    if isinstance(settings.plan, Plan):
        raise InvalidOptionError(
            "plan is a plan of one graph, and the model is sharded, so that its step has blocks. Give a budget."
        )
    if verify:
        raise InvalidOptionError(
            "verify=True runs the first step twice, and a sharded model exchanges gradients with other ranks in each. "
            "Wrap it without verify; to compare, wrap the model before it is sharded, in one process."
        )
    if settings.blocks == "whole" and sharded.has_parts:
        raise InvalidOptionError(
            'blocks="whole" makes one graph of the model, and it has sharded parts, whose parameters come and go '
            "between graphs. Leave blocks out: then every sharded module is a block."
        )


def _refused_elsewhere(budget_bytes: int) -> InfeasibleBudgetError:
    """Return the error on a rank whose step fits the budget where that of another rank does not."""
    return InfeasibleBudgetError(
        "The step of this rank fits the budget, that of another rank does not, and no rank of a sharded model trains "
        "without the others. The error of the other rank says what would be enough.",
        budget_bytes=budget_bytes,
        least_bytes=budget_bytes,
    )
