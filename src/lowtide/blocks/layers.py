"""Repeated layers of a model as a chain, in place: the model's own loop over them stays as it is.

During a training call the loop meets stand-ins. All but the last note what they are called with and return a promise;
the last one runs the whole chain. A promise can only be handed to the next layer, so a model that looks at what is
between its layers gets an error and never wrong numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowtide.blocks import refusals as refused
from lowtide.blocks.block.side_effects import RandomStates, random_devices, read_random_states
from lowtide.blocks.chain import Chain, PlannedBlocks
from lowtide.blocks.policy import PLANNING
from lowtide.blocks.python_state.random_streams import StreamStates, mark_streams
from lowtide.blocks.python_state.reachable import is_plain
from lowtide.blocks.python_state.snapshot import PythonState
from lowtide.blocks.unroll import Unrolled
from lowtide.errors import InvalidInputError, InvalidModelError
from lowtide.plan.core.result import Plan
from lowtide.pytorch.modules import children
from lowtide.pytorch.nested import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from lowtide.pytorch.tensor_versions import version_of
from lowtide.settings import Settings

_NAMES = re.compile(r"(layers?|blocks?|h|stages?|resblocks|transformer_blocks|transformer_layers)\d*")
_MARK = "_lowtide_chained"


def chain_layers(model: nn.Module, settings: Settings, names: Sequence[str], *, verify: bool = False) -> list[str]:
    """Chain the layers of `model` that `names` name, or those it finds, in place; return their names."""
    if getattr(model, _MARK, None):
        raise InvalidModelError("The layers of this model are chained already; call lowtide.unwrap(model) first.")
    found = [_container(model, name) for name in names] if names else _repeated(model)
    if not found:
        raise InvalidModelError(
            f"{type(model).__name__} has no list of at least {PLANNING.least_layers} layers of one class under a "
            "usual name (layers, blocks, h, ...). Name the one to chain: "
            'lowtide.chain_layers(model, "encoder.parts", budget=...).'
        )
    if len(found) > 1 and settings.budget is not None and settings.budget.fraction is None:
        raise InvalidModelError(
            f"{type(model).__name__} has {len(found)} lists of layers ({', '.join(name for name, _ in found)}), and a "
            'budget in bytes is for one chain. Name one of them, or give a share such as budget="50%".'
        )
    undo = []
    for name, container in found:
        parent = model.get_submodule(name.rpartition(".")[0])
        made: nn.Module
        if type(container) is nn.Sequential:
            layers = _layers_of(container)
            made = Chain(list(layers), list(layers.values()), settings, verify=verify)
        else:
            made = ChainedLayers(container, settings, name, verify=verify)
            made.watch(model)
        # Not `train()`, which would also reach layers that the user keeps in eval mode.
        made.training = container.training
        children(parent)[name.rpartition(".")[2]] = made
        undo.append((parent, name.rpartition(".")[2], container, made))
    model.__dict__[_MARK] = undo
    return [name for name, _ in found]


def unchain_layers(model: nn.Module) -> None:
    """Put the layers of `model` back as they were before `chain_layers`."""
    for parent, name, container, made in model.__dict__.pop(_MARK, ()):
        if isinstance(made, ChainedLayers):
            made.unwatch()
        container.training = made.training
        children(parent)[name] = container


def chains_in(model: Any) -> list[Chain | ChainedLayers | Unrolled]:
    """Return the chains that are part of `model`."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, Chain | ChainedLayers | Unrolled)]


def _repeated(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the lists of layers of one class under a usual name that are not inside another such list."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        layers = list(children(module).values())
        if (
            not inside
            and type(module) in (nn.ModuleList, nn.Sequential)
            and _NAMES.fullmatch(name.rpartition(".")[2])
            and len(layers) >= PLANNING.least_layers
            and len({type(layer) for layer in layers}) == 1
            and any(parameter.requires_grad for parameter in module.parameters())
        ):
            found.append((name, module))
    return found


def _container(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        near = [path for path, _ in _repeated(model)]
        raise InvalidModelError(
            f"{type(model).__name__} has no part called {name!r}. Lists of layers found: {', '.join(near) or 'none'}."
        ) from None
    if type(module) not in (nn.ModuleList, nn.Sequential) or not name or not children(module):
        raise InvalidModelError(
            f"{name or 'The model'!r} is a {type(module).__name__} with {len(children(module))} parts; layers to chain "
            "must be an nn.ModuleList or an nn.Sequential that is part of the model. Give a list of blocks to "
            "lowtide.chain instead."
        )
    return name, module


def _layers_of(container: nn.Module) -> Mapping[str, nn.Module]:
    """Return the layers of a list by name; one that is None fails when it is called, as in the list itself."""
    return cast("Mapping[str, nn.Module]", children(container))


class ChainedLayers(nn.ModuleList):
    """A list of layers that runs as a chain while its model is called in training."""

    _adapters: list[_Layer]
    _planned: PlannedBlocks

    def __init__(self, layers: nn.Module, settings: Settings, name: str, *, verify: bool = False) -> None:
        own = _layers_of(layers)
        super().__init__(own.values())
        names = [f"{name}.{number}" for number in own]
        # Past `nn.Module.__setattr__`: the layers are a part of this module under one name only.
        self.__dict__["_adapters"] = [_Layer(layer) for layer in own.values()]
        self.__dict__["_planned"] = PlannedBlocks(names, self._adapters, settings, verify=verify)
        self._active = 0
        self._calls: list[_Call] = []
        self._places: tuple[torch.device, ...] = ()
        self._random: RandomStates = ()
        self._drawn = False
        self._streams: StreamStates = ()
        self._handles: list[Any] = []

    @property
    def plans(self) -> list[Plan]:
        """The plans made so far."""
        return self._planned.plans

    def watch(self, model: nn.Module) -> None:
        """Stand in for the layers while `model` runs."""
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def unwatch(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, model: nn.Module, args: Any) -> None:
        del model, args
        self._active += 1
        self._calls = []

    def _leave(self, model: nn.Module, args: Any, result: Any) -> None:
        del model, args, result
        self._active -= 1
        self._calls = []

    def _stands_in(self) -> bool:
        return bool(self._active) and self.training and torch.is_grad_enabled()

    def __iter__(self) -> Iterator[Any]:
        """Yield the layers, or their stand-ins while the model is called in training."""
        if not self._stands_in():
            return super().__iter__()
        return iter([_StandIn(self, number) for number in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        """Return a layer or a part of the list, or stand-ins for them."""
        if not self._stands_in():
            # A part of this list is not a chain of its own.
            return nn.ModuleList(list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)
        return list(self)[index]

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the call of a layer; run all of them if it is the last."""
        if not number:
            self._calls = []
        if number != len(self._calls):
            raise InvalidModelError(
                f"Layer {number} was called after layer {len(self._calls) - 1}. Chained layers must all be called, "
                "each once and in order; lowtide.unwrap(model) undoes the chain."
            )
        self._calls.append(_noted(number, args, kwargs, self._adapters[number].layer))
        if not number:
            self._places = random_devices(self.parameters())
            self._streams = mark_streams()
        before, self._random = self._random, read_random_states(self._places)
        self._drawn = bool(number) and (self._drawn or not _same(before, self._random))
        if number < len(self) - 1:
            return Promise(number)
        calls, self._calls = self._calls, []
        self._drawn = self._drawn or self._streams != mark_streams()
        self._streams = mark_streams()
        for place, call in enumerate(calls):
            call.check(place)
        return self._run(calls)

    def _run(self, calls: Sequence[_Call]) -> Any:
        state = calls[0].state
        if not isinstance(state, Tensor):
            raise InvalidInputError(
                f"The first layer was called with a {type(state).__name__}; chained layers take a tensor first."
            )
        result = self._planned((state,), [call.extras for call in calls], {}, training=self.training)
        drew = self._drawn and not _same(self._random, read_random_states(self._places))
        if drew or (self._drawn and self._streams != mark_streams()):
            raise InvalidModelError(
                "The model draws random numbers between its layers, as dropping layers at random does, and the layers "
                "draw some themselves. Chained layers all run when the last one is called, so they would not get the "
                "numbers of plain training. Set the dropout of the layers to 0, or undo the chain by "
                "lowtide.unwrap(model)."
            )
        return (result,) if calls[-1].extras[0].returns_tuple else result


def _same(one: RandomStates, other: RandomStates) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class _Call:
    """What a layer was called with: the state, and the rest flattened; and what it remembered then."""

    def __init__(self, state: Any, extras: tuple[Any, ...], layer: nn.Module) -> None:
        self.state, self.extras = state, extras
        self._tensors = [value for value in extras if isinstance(value, Tensor)]
        self._versions = [version_of(tensor) for tensor in self._tensors]
        self._python_state = PythonState((layer, *(value for value in extras if not is_plain(value))))
        self._then = self._python_state.snapshot()

    def check(self, number: int) -> None:
        """Raise if the model has changed something since that the layer would see only now."""
        if [version_of(tensor) for tensor in self._tensors] != self._versions:
            raise _changed_since(number, "a tensor that it was given")
        if self._python_state.snapshot() is not self._then:
            raise _changed_since(number, "an attribute of it or of something that it reads")


def _changed_since(number: int, what: str) -> InvalidModelError:
    return InvalidModelError(
        f"Between the call of layer {number} and that of the last one the model changed {what}. Chained layers all run "
        "when the last one is called, so the layer would see the new one. Pass what changes from layer to layer as an "
        "argument, or undo the chain by lowtide.unwrap(model)."
    )


def _noted(number: int, args: tuple[Any, ...], kwargs: dict[str, Any], layer: nn.Module) -> _Call:
    """Return the call of a layer, whose first argument must be the promise of the one before."""
    if args:
        name, state, args = "", args[0], args[1:]
    else:
        name = next((key for key in ("hidden_states", "x", "input", "hidden") if key in kwargs), "")
        if not name:
            raise InvalidModelError(
                f"Layer {number} was called without positional arguments, and none of its keywords "
                f"({', '.join(kwargs)}) is known to be its input."
            )
        state = kwargs[name]
        kwargs = {key: value for key, value in kwargs.items() if key != name}
    if number and not (isinstance(state, Promise) and state.number == number - 1):
        raise InvalidModelError(
            f"Layer {number} was not called with the output of layer {number - 1}, so the layers are no chain. "
            "lowtide.unwrap(model) undoes the chain."
        )
    given: tuple[Any, ...] = (kwargs.get("past_key_values"), kwargs.get("past_key_value"))
    # Some models pass it by position; then it is known by what it can do.
    given += tuple(value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length"))
    if (cache := next((value for value in given if value is not None), None)) is not None:
        raise InvalidInputError(
            f"The layers were given a {type(cache).__name__} of past keys and values, which they would extend again "
            "when they are recomputed. Call the model with use_cache=False."
        )
    leaves, structure = tree_flatten((args, kwargs))
    if any(isinstance(leaf, Promise) for leaf in leaves):
        raise InvalidModelError(f"Layer {number} takes the output of an earlier layer twice; that is no chain.")
    return _Call(state, (_Form(name, structure), *leaves), layer)


class _Form:
    """How a layer was called: the name of its input, if it has one, and the structure of its other arguments.

    It notes whether the layer returned its output in a tuple.
    """

    def __init__(self, name: str, structure: TreeSpec) -> None:
        self.name, self.structure = name, structure
        self.returns_tuple = False


class _Layer(nn.Module):
    """A layer as a block: one tensor in, one tensor out, other arguments flattened."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: Tensor, form: _Form, *leaves: Any) -> Tensor:
        """Return the layer's output."""
        args, kwargs = tree_unflatten(list(leaves), form.structure)
        result: Any = self.layer(**{form.name: state}, **kwargs) if form.name else self.layer(state, *args, **kwargs)
        if not _is_unchanged((args, kwargs), leaves, form.structure):
            raise refused.argument(type(self.layer).__name__)
        form.returns_tuple = isinstance(result, tuple | list)
        if not form.returns_tuple:
            return cast("Tensor", result)
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(tuple(result[1:]))):
            raise InvalidModelError(
                f"{type(self.layer).__name__} returns tensors beside its output; chained layers return their output "
                "only. Switch off what makes them return more (attention weights, caches)."
            )
        return cast("Tensor", result[0])


def _is_unchanged(given: Any, leaves: Sequence[Any], structure: Any) -> bool:
    """Return True if lists and dictionaries that a layer was given still have the same in them."""
    now, as_now = tree_flatten(given)
    return as_now == structure and all(one is other for one, other in zip(now, leaves, strict=True))


class _StandIn:
    """Takes the place of a layer in the model's loop; for all but calls it is the layer."""

    def __init__(self, layers: ChainedLayers, number: int) -> None:
        self.__dict__["_layers"], self.__dict__["_number"] = layers, number

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Be of the layer's class where that is asked for."""
        return type(self._layers._adapters[self._number].layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and run the chain if this is the last layer."""
        return self._layers.call(self._number, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the layer has under `name`."""
        return getattr(self._layers._adapters[self._number].layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the layer."""
        setattr(self._layers._adapters[self._number].layer, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the layer."""
        delattr(self._layers._adapters[self._number].layer, name)


class Promise:
    """Stands for the output of a layer that has not run yet."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getitem__(self, index: Any) -> Promise:
        """Return the promise of the first entry: layers may return their output in a tuple."""
        if index == 0 and isinstance(index, int):
            return self
        raise self._refusal(f"its entry {index!r}")

    def __iter__(self) -> Iterator[Any]:
        """Refuse."""
        raise self._refusal("its entries")

    def __bool__(self) -> bool:
        """Refuse."""
        raise self._refusal("its truth")

    def __getattr__(self, name: str) -> Any:
        """Refuse."""
        raise self._refusal(f"its attribute {name!r}")

    def _refusal(self, what: str) -> InvalidModelError:
        return InvalidModelError(
            f"The model looks at the output of layer {self.number} ({what}) before the last layer has run. Chained "
            "layers show only the output of the last one; lowtide.unwrap(model) undoes the chain."
        )
