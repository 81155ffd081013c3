"""Where the parameters of a running graph are in the model: its name, and how many modules like it follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Spot:
    """A place in a list of modules.

    Attributes:
        container: Path of the list.
        place: Which of its modules.
        following: Places of the modules of the same class that stand behind it.
    """

    container: str
    place: int
    following: tuple[int, ...]


class ModulePlaces:
    """The modules of a model by their parameters.

    Args:
        modules: The named modules, the model first.
        layers: Paths of those that are blocks: what is inside of them goes by their names.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], layers: Iterable[str] = ()) -> None:
        self._modules = dict(modules)
        self._layers = tuple(layers)
        self._paths: dict[int, str] = {}
        self._index()

    def _index(self) -> None:
        for path, module in self._modules.items():
            for parameter in module.parameters(recurse=False):
                self._paths.setdefault(id(parameter), path)

    def owner(self, tensors: Sequence[Any]) -> str | None:
        """Return the path of the innermost module that has all of the parameters among `tensors`; None if none are."""
        if tensors and not any(id(tensor) in self._paths for tensor in tensors):
            # Sharded modules have other parameters while they run.
            self._index()
        paths = [self._paths[id(tensor)] for tensor in tensors if id(tensor) in self._paths]
        if not paths:
            return None
        common = paths[0].split(".")
        for path in paths[1:]:
            parts = path.split(".")
            same = next((i for i, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), None)
            common = common[: min(len(common), len(parts)) if same is None else same]
        found = ".".join(common)
        return next((layer for layer in self._layers if f"{found}.".startswith(f"{layer}.")), found)

    def spot(self, path: str | None) -> Spot | None:
        """Return where a module stands in the innermost list of modules that it is in; None if it is in none."""
        while path:
            parent = path.rpartition(".")[0]
            container, module = self._modules.get(parent), self._modules.get(path)
            if isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                siblings = list(container.children())
                place = next((i for i, sibling in enumerate(siblings) if sibling is module), len(siblings))
                behind = range(place + 1, len(siblings))
                return Spot(parent, place, tuple(k for k in behind if type(siblings[k]) is type(module)))
            path = parent
        return None
