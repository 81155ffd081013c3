"""Layers that an `nn.Sequential` runs one after the other, joined: several of them are one block.

A block keeps its input until its backward, so the inputs of all blocks are alive at the turn of the step, whatever is
recomputed. With fewer blocks there are fewer inputs, and inside of a block the plan recomputes through several layers.
Only layers are joined of which nobody sees the borders: they have no hooks, and no call or `forward` of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lowtide.pytorch.modules import call_in_slot, children, hooks_of

Group = tuple[nn.Module, ...]


@dataclass(frozen=True)
class Row:
    """A container that runs layers one after the other.

    Attributes:
        name: Its name in the model.
        container: The container.
        layers: The layers.
    """

    name: str
    container: nn.Sequential
    layers: tuple[nn.Module, ...]

    @property
    def is_as_found(self) -> bool:
        """Whether the container still runs these layers, and they alone."""
        there = list(children(self.container).values())
        return len(there) == len(self.layers) and all(a is b for a, b in zip(there, self.layers, strict=True))

    def groups(self, size: int) -> tuple[Group, ...]:
        """Return the layers, so many of them together."""
        return tuple(self.layers[first : first + size] for first in range(0, len(self.layers), size))


def find_rows(model: nn.Module, layers: Mapping[str, nn.Module]) -> tuple[Row, ...]:
    """Return the containers of the model whose parts are all among `layers`, and can be joined."""
    known = set(map(id, layers.values()))
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            continue
        parts = [part for part in children(module).values() if part is not None and id(part) in known]
        if len(parts) == len(children(module)) > 1 and all(map(_runs_its_class, (module, *parts))):
            found.append(Row(name, module, tuple(parts)))
    return tuple(found)


def _runs_its_class(module: nn.Module) -> bool:
    """Return True if a call of `module` is one of the `forward` of its class, and of nothing else."""
    is_own = "forward" in vars(module) or call_in_slot(module) is not None or any(hooks_of(module))
    return type(module).__call__ is nn.Module.__call__ and not is_own
