"""One call of a layer, flat: the tensors that go in, all else that goes in, and how both are put together again.

A tensor that is given or returned twice is one tensor here. Its gradients then add up in the order of plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.blocks import refusals as refused
from lowtide.blocks.block.position import Arguments
from lowtide.blocks.block.tensor_spec import State, is_dense_tensor, label_of, specs_of
from lowtide.errors import InvalidModelError
from lowtide.pytorch.nested import TreeSpec, tree_flatten, tree_unflatten

# What a layer may return beside tensors: it cannot hold any.
_SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
# Values of these types decide what a layer does; numbers of other types change from call to call.
_SWITCHES = (bool, str, type(None))


@dataclass(frozen=True, eq=False)
class ResultForm:
    """How a layer's result is put together: a leaf is a tensor by its number, or -1 less the number of another one."""

    structure: TreeSpec
    slots: tuple[int, ...]
    others: tuple[Any, ...]

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """Return the result that has these tensors."""
        return tree_unflatten(_filled(self.slots, tensors, self.others), self.structure)


@dataclass(eq=False)
class CallForm:
    """How a layer is called, and what the last run with it has returned; leaves are written as in `ResultForm`."""

    structure: TreeSpec
    slots: tuple[int, ...]
    result: ResultForm | None = None


@dataclass(frozen=True, eq=False)
class FlatCall:
    """A call of a layer.

    Attributes:
        state: The dense tensors among its arguments, each once.
        others: All other leaves of its arguments.
        form: How both are put together.
    """

    state: State
    others: tuple[Any, ...]
    form: CallForm

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """Return the call with these arguments."""
        leaves, structure = tree_flatten((args, kwargs))
        state, others, slots = _sorted(leaves)
        return FlatCall(state, others, CallForm(structure, slots))

    @property
    def arguments(self) -> Arguments:
        """What the layer takes beside the state."""
        return Arguments(((self.form, *self.others),), {}, [])

    @property
    def key(self) -> tuple[Any, ...]:
        """What calls share that have the same plans."""
        switches = tuple(each if isinstance(each, _SWITCHES) else None for each in self.others)
        return self.form.structure, self.form.slots, specs_of(self.state), specs_of(self.others), switches


class FlatLayer(nn.Module):
    """A layer as a block: tensors in, tensors out; the call's form says how they are put together.

    Args:
        layer: The layer.
        plain: Its own `forward`: its hooks run outside, once.
        name: Its name in the model.
    """

    def __init__(self, layer: nn.Module, plain: Callable[..., Any], name: str) -> None:
        super().__init__()
        self.layer, self.plain = layer, plain
        self._label = label_of(name, layer)

    @property
    def stands_for(self) -> nn.Module:
        """The layer that messages are about."""
        return self.layer

    def forward(self, *values: Any) -> State:
        """Return the tensors that the layer returns."""
        place = next(index for index, value in enumerate(values) if isinstance(value, CallForm))
        form, state, others = values[place], values[:place], values[place + 1 :]
        args, kwargs = tree_unflatten(_filled(form.slots, state, others), form.structure)
        result = self.plain(*args, **kwargs)
        _check_arguments(self._label, (args, kwargs), form, state, others)
        tensors, form.result = _read_result(self._label, result)
        return tensors


def _read_result(label: str, result: Any) -> tuple[State, ResultForm]:
    leaves, structure = tree_flatten(result)
    tensors, others, slots = _sorted(leaves)
    unusual = next((each for each in others if not isinstance(each, _SIMPLE)), None)
    if unusual is not None:
        raise InvalidModelError(
            f"{label} returned a {type(unusual).__name__}, in which tensors would lose their gradients. Return "
            "tensors, numbers, tuples, lists and dictionaries, or a class that torch.utils._pytree knows."
        )
    if not tensors:
        raise InvalidModelError(f"{label} returned no tensor, so there is nothing to differentiate.")
    return tensors, ResultForm(structure, slots, others)


def _sorted(leaves: Sequence[Any]) -> tuple[State, tuple[Any, ...], tuple[int, ...]]:
    """Return the dense tensors, each once, the other leaves, and where each leaf is."""
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    others: list[Any] = []
    slots: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and is_dense_tensor(leaf):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            slots.append(numbers[id(leaf)])
        else:
            others.append(leaf)
            slots.append(-len(others))
    return tuple(tensors), tuple(others), tuple(slots)


def _filled(slots: Sequence[int], tensors: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    return [tensors[slot] if slot >= 0 else others[-1 - slot] for slot in slots]


def _check_arguments(label: str, given: Any, form: CallForm, state: Sequence[Any], others: Sequence[Any]) -> None:
    """Raise if the layer has changed a container among its arguments, which is a copy of the caller's."""
    leaves, structure = tree_flatten(given)
    before = _filled(form.slots, state, others)
    if structure != form.structure or any(one is not other for one, other in zip(leaves, before, strict=True)):
        raise refused.argument(label)
