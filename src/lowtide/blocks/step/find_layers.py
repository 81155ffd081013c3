"""Which modules of a model are blocks of its step: those that the user names, or the layers of a deep model.

Blocks keep their inputs and hand over gradients one by one, so a budget may be below what any choice of their plans
takes and still be one that the plan of the whole graph keeps. The finest cut comes first; where it does not fit, the
next one is tried.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowtide.blocks.policy import LAYERS, LayerPolicy
from lowtide.blocks.step.join_layers import Row, find_rows
from lowtide.errors import InfeasibleBudgetError, InvalidModelError, InvalidOptionError, PlanFileError
from lowtide.pytorch.modules import children
from lowtide.settings import Blocks
from lowtide.units import counted

# Modules that are never called: who names one means what it holds.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# So many names are shown where one is not found.
_MOST_SHOWN = 8


@dataclass(frozen=True)
class Layers:
    """The modules that are blocks.

    Attributes:
        modules: Each of them under the first of its names; none is inside another one.
        reason: Why they are, for people.
        rows: Containers that run some of them one after the other.
        joined: So many layers of such a container are one block.
    """

    modules: dict[str, nn.Module]
    reason: str
    rows: tuple[Row, ...] = ()
    joined: int = 1

    @property
    def of_step(self) -> str:
        """Why a step of several blocks has those that it has."""
        found = "each graph that the compiler captures is a block, as it cannot trace all of the model"
        return self.reason if self.modules else found


# No choice of the blocks' plans fits, or the plan that was given is of other blocks.
Refusal = InfeasibleBudgetError | PlanFileError


class Cuts:
    """The cut of one model's step, and the budgets that others have refused.

    Attributes:
        first: The finest cut.
        now: The present one.
        has_others: Whether there is another one.

    Args:
        model: The model.
        blocks: What the user asked for.
    """

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        self.first = self.now = find_layers(model, blocks)
        self._rows = find_rows(model, self.first.modules)
        self._may_be_whole = blocks == "auto"
        self.has_others = bool(self._rows) or (self._may_be_whole and bool(self.first.modules))
        self._refused: list[Refusal] = []

    @staticmethod
    def fixed(model: nn.Module, layers: Layers) -> Cuts:
        """Return the one way to cut a model whose blocks must be these."""
        cuts = Cuts(model, "whole")
        cuts.first = cuts.now = layers
        return cuts

    def coarser(self, refused: Refusal | None = None, *, can_join: bool = True) -> bool:
        """Go on to the next cut, as the present one does not fit; return False if there is none.

        Args:
            refused: Why it does not fit the budget, or the plan that was given, if that was an error.
            can_join: False if it has shown that no layers can be joined.
        """
        if refused is not None:
            self._refused.append(refused)
        joined = LAYERS.join * self.now.joined
        if can_join and self.now.modules and self.now.joined < max((len(row.layers) for row in self._rows), default=0):
            reason = f"up to {joined} layers in a row as one block: with smaller blocks the step does not fit"
            self.now = replace(self.first, reason=reason, rows=self._rows, joined=joined)
            return True
        if not self._may_be_whole or not self.now.modules:
            return False
        self.as_whole(f"with {len(self.now.modules)} layers as blocks the step does not fit")
        return True

    @property
    def of_graph(self) -> str | None:
        """Why the model is one graph though its layers would be blocks; None if they would not."""
        return self.now.reason if self.first.modules and not self.now.modules else None

    def as_whole(self, reason: str) -> None:
        """Let the layers be parts of the model's graph."""
        self.now = Layers({}, f"one graph: {reason}")

    def begin_again(self) -> Refusal:
        """Go back to the finest cut, as none fits; return the refusal with the least budget that is known to work."""
        refused = self._refused
        self.now, self._refused = self.first, []
        of_budget = [each for each in refused if isinstance(each, InfeasibleBudgetError)]
        return min(of_budget, key=lambda each: each.least_bytes) if of_budget else refused[0]


def refuse_names_in_function(blocks: Blocks) -> None:
    """Raise `InvalidOptionError` if `blocks` names modules: a function has none of its own."""
    if not isinstance(blocks, str):
        raise InvalidOptionError(
            f"blocks={list(blocks)!r} names modules, and a function has none of its own. Give the model that has them."
        )


def find_layers(model: nn.Module, blocks: Blocks, policy: LayerPolicy = LAYERS) -> Layers:
    """Return the modules of `model` that `blocks` makes blocks; raise if it names what is not there."""
    if blocks == "whole":
        return Layers({}, "the user asked for the whole graph")
    if blocks == "auto":
        return _deep(model, policy)
    asked = [each for entry in blocks for each in _asked(model, entry)]
    return Layers(_outermost(asked), "the modules that the user named")


def repeated_layers(model: nn.Module, policy: LayerPolicy = LAYERS) -> dict[str, nn.Module]:
    """Return the layers of one class in lists that are not inside another such list, by name."""
    found: dict[str, nn.Module] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not _is_repeated(module, policy):
            continue
        inside.update(map(id, module.modules()))
        found |= _children(name, module)
    return found


def _deep(model: nn.Module, policy: LayerPolicy) -> Layers:
    """Return the repeated layers of a model that is deep enough, else none."""
    found = repeated_layers(model, policy)
    kinds = {_kind(layer) for layer in found.values()}
    repeats = len(found) - len(kinds)
    counts = f"{counted(len(found), 'repeated layer')} of {counted(len(kinds), 'kind')}"
    if repeats < policy.repeats:
        return Layers({}, f"one graph: {counts}, so that fewer than {policy.repeats} captures would be saved")
    return Layers(found, f"layers as blocks: {counts}, so that {repeats} captures are saved")


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return what layers that share one capture have in common, as far as their parameters show it."""
    return type(layer), *((name, tuple(each.shape), each.dtype) for name, each in layer.named_parameters())


def _is_repeated(module: nn.Module, policy: LayerPolicy) -> bool:
    layers = [layer for layer in children(module).values() if layer is not None]
    return (
        isinstance(module, nn.ModuleList | nn.Sequential)
        and len(layers) >= policy.equal
        and len({type(layer) for layer in layers}) == 1
        and not isinstance(layers[0], _CONTAINERS)
        and all(next(layer.parameters(), None) is not None for layer in layers)
        and min(sum(1 for _ in layer.modules()) for layer in layers) >= policy.parts
    )


def _children(name: str, module: nn.Module) -> dict[str, nn.Module]:
    prefix = f"{name}." if name else ""
    return {f"{prefix}{each}": child for each, child in children(module).items() if child is not None}


def _asked(model: nn.Module, entry: str | type) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that one entry of the user's list means."""
    matches = _named(model, entry) if isinstance(entry, str) else _of_class(model, entry)
    for name, module in matches:
        yield from _callable_parts(name, module)


def _callable_parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    if not isinstance(module, _CONTAINERS):
        yield name, module
        return
    for each, child in _children(name, module).items():
        yield from _callable_parts(each, child)


def _named(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    if name in modules and name:
        return [(name, modules[name])]
    if not name:
        raise _the_model(model, name)
    near = difflib.get_close_matches(name, [each for each in modules if each], _MOST_SHOWN)
    raise InvalidOptionError(
        f"blocks names {name!r}, and {type(model).__name__} has no module of this name. "
        f"{_shown('Similar names', near) if near else _shown('Its modules', [each for each in modules if each])} "
        "model.named_modules() lists all."
    )


def _of_class(model: nn.Module, kind: type) -> list[tuple[str, nn.Module]]:
    if not issubclass(kind, nn.Module):
        raise InvalidOptionError(
            f"blocks has the class {kind.__name__}, which is no nn.Module; give classes of modules of the model."
        )
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]
    inside = [(name, module) for name, module in found if name]
    if inside:
        return inside
    if found:
        raise _the_model(model, kind.__name__)
    there = dict.fromkeys(type(module).__name__ for name, module in model.named_modules() if name)
    raise InvalidOptionError(
        f"blocks has the class {kind.__name__}, and {type(model).__name__} has no module of it. "
        f"{_shown('Classes of its modules', list(there))}"
    )


def _the_model(model: nn.Module, asked: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"blocks has {asked!r}, which is the model itself ({type(model).__name__}); blocks are parts of it. "
        'blocks="whole" plans it as one graph.'
    )


def _shown(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"{what}: {', '.join(names[:_MOST_SHOWN]) or 'none'}{more}."


def _outermost(asked: Sequence[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    """Return each module once, and none that is part of another one."""
    inner = {id(part) for _, module in asked for part in module.modules() if part is not module}
    kept = {id(module): name for name, module in reversed(asked) if id(module) not in inner}
    found = {name: module for name, module in asked if kept.get(id(module)) == name}
    if asked and not found:
        raise InvalidModelError("Every module that blocks names is part of another one; their modules form a circle.")
    return found
