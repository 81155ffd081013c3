"""Modules of a wrapped model that the compiler cannot capture: they run between its graphs, as blocks of the step.

Recurrent modules always are. Repeated layers are where a layer cannot be captured as one graph, which is found out when
the model turns out to be captured in several graphs: the model is then called once in eager mode, and the first layer
of each list is traced by itself. A layer that cannot be a block either, as it hands out tensors by another way than its
result, leaves it to its parts: the experts of a layer, for instance.

All of them are profiled in that call, which keeps nothing: in a planned call, a profile would come on top of what the
blocks before it keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lowtide.blocks.opaque.opaque_block import CannotBeOpaque, OpaqueBlock
from lowtide.blocks.policy import PLANNING
from lowtide.errors import CaptureError
from lowtide.pytorch.autograd_graph import innermost_hooks_off, saved_tensors_hook_module
from lowtide.pytorch.modules import children
from lowtide.runtime.entry_points import ForwardOverride, between_graphs
from lowtide.runtime.failure_causes import first_break
from lowtide.runtime.model_plans import LayersUndecidedError, Session

Call = Callable[..., Any]


class BlockForward(ForwardOverride):
    """A `forward` that runs as a block of the step in planned training calls, and plainly everywhere else.

    Args:
        module: The module.
        session: Plans the model.
        run: What runs it as a block.
    """

    def __init__(self, module: nn.Module, session: Session, run: Call) -> None:
        super().__init__(module, run, torch.is_grad_enabled)
        self._session = session
        module.forward = self

    @between_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns."""
        if not self.is_active or not self._session.is_running or not self.trains():
            return self.plain(*args, **kwargs)
        return self.training(*args, **kwargs)


def is_capturable(plain: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why a layer called with these arguments is not captured as one graph, or None if it is.

    It is traced with them, and so is its backward. Nothing runs and nothing changes, random states included.

    Args:
        plain: The layer's own `forward`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    return first_break(plain, args, kwargs, backward=True)


def has_recurrent_parts(model: nn.Module) -> bool:
    """Return True if recurrent modules are part of `model`, and it is not one itself."""
    return not isinstance(model, nn.RNNBase) and any(isinstance(module, nn.RNNBase) for module in model.modules())


class LayerDecisions:
    """Which repeated layers of a model run as blocks, found out in a call in eager mode that keeps nothing.

    Every list is decided there by the first of its layers that is called, so the compiler begins once all is known.

    Args:
        model: The model.
        session: Plans it.
        overrides: What undoes it is added here.
    """

    def __init__(self, model: nn.Module, session: Session, overrides: list[ForwardOverride]) -> None:
        self.session, self.overrides = session, overrides
        self.in_call = False
        self._lists = repeated_layers(model) if session.settings.blocks == "auto" else []
        self._pending: list[_Alike] = []
        self._profiles_recurrent = self._make_recurrent_opaque(model)

    @property
    def are_open(self) -> bool:
        """Whether there are layers on which nothing was decided yet, or recurrent ones that were not profiled."""
        return bool(self._lists) or self._profiles_recurrent

    def _make_recurrent_opaque(self, model: nn.Module) -> bool:
        """Let the recurrent parts of `model`, which are never captured, run as blocks; return whether there are any."""
        named = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.RNNBase) and name]
        for name, module in named:
            self.overrides.append(BlockForward(module, self.session, self._recurrent(name, module)))
        return bool(named)

    def _recurrent(self, name: str, module: nn.Module) -> Call:
        block, plain = _block(name, module, self.session), module.forward
        opaque = _opaque(block, self.session)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.in_call:
                return opaque(*args, **kwargs)
            profile_alone(block, args, kwargs)
            return plain(*args, **kwargs)

        return run

    def add(self, modules: list[tuple[str, nn.Module]]) -> None:
        """Let modules that do the same in several layers show what they are."""
        self._pending.append(_Alike(modules, self))

    def make(self, call: Callable[[], object]) -> None:
        """Decide in `call()`; modules that are not called there are captured with what is around them.

        If `call()` does not return, nothing is decided.
        """
        lists, self._lists = self._lists, []
        recurrent, self._profiles_recurrent = self._profiles_recurrent, False
        for name, container in lists:
            self.add(_parts(name, container))
        self.in_call = True
        try:
            with self.session.running():
                call()
        except BaseException:
            self._lists, self._profiles_recurrent = lists, recurrent
            for alike in self._pending:
                alike.remove()
            raise
        finally:
            self.in_call = False
            for alike in self._pending:
                alike.settle()
            self._pending.clear()


def repeated_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the lists of layers of one class with parameters that are not inside another such list, by name."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        layers = list(children(module).values())
        if (
            not any(name.startswith(f"{outer}.") for outer, _ in found)
            and type(module) in (nn.ModuleList, nn.Sequential)
            and len(layers) >= PLANNING.least_layers
            and len({type(layer) for layer in layers}) == 1
            and all(layer is not None and any(True for _ in layer.parameters()) for layer in layers)
        ):
            found.append((name, module))
    return found


def profile_alone(block: OpaqueBlock, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Profile a module where nothing of the call is held, and not in the planned call, whose budget that may exceed.

    If it cannot be a block, the planned call says why.
    """
    with innermost_hooks_off():
        block.refusal(args, kwargs)


class _Alike:
    """Modules that do the same in several layers: all are blocks or none is, as the first one that is called shows.

    Where they cannot be blocks, the parts that they are made of are looked at in their place.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]], decisions: LayerDecisions) -> None:
        self._modules, self._decisions = modules, decisions
        self._is_opaque: bool | None = None
        session = decisions.session
        self._overrides = [BlockForward(module, session, self._runs(name, module)) for name, module in modules]
        decisions.overrides += self._overrides

    def _runs(self, name: str, module: nn.Module) -> Call:
        session, plain = self._decisions.session, module.forward
        block = _block(name, module, session)
        opaque = _opaque(block, session)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._decisions.in_call:
                if self._is_opaque is None:
                    self._decide(block, plain, args, kwargs)
                elif self._is_opaque:
                    profile_alone(block, args, kwargs)
                return plain(*args, **kwargs)
            try:
                return opaque(*args, **kwargs)
            except CaptureError:
                if not session.is_deciding or not self._look_inside():
                    raise
            raise LayersUndecidedError(f"{name!r} cannot be a block; its parts may be.")

        return run

    def _decide(self, block: OpaqueBlock, plain: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # What runs inside of a checkpoint is run again by it.
        in_checkpoint = saved_tensors_hook_module() == "torch.utils.checkpoint"
        with innermost_hooks_off():
            self._is_opaque = not in_checkpoint and is_capturable(plain, args, kwargs) is not None
            refused = self._is_opaque and block.refusal(args, kwargs) is not None
        if refused and self._look_inside():
            return
        if not self._is_opaque:
            # They are captured together with what is around them.
            self.remove()

    def settle(self) -> None:
        """Leave modules to the compiler of which nothing was found out."""
        if self._is_opaque is None:
            self.remove()

    def remove(self) -> None:
        """Let the modules be what they were."""
        for override in self._overrides:
            override.remove()

    def _look_inside(self) -> bool:
        """Let parts be blocks in the place of these modules; return False if they have none."""
        groups: dict[tuple[str, type], list[tuple[str, nn.Module]]] = {}
        for name, module in self._modules:
            for path, part in _parts(name, module):
                groups.setdefault((path.removeprefix(name), type(part)), []).append((path, part))
        if not groups:
            return False
        self.remove()
        for group in groups.values():
            self._decisions.add(group)
        return True


def _parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with parameters that a module is made of, those in lists one by one, each once."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for key, child in children(module).items():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            found |= {id(part): (inner, part) for inner, part in _parts(path, child)}
        elif child is not None and any(True for _ in child.parameters()):
            found[id(child)] = (path, child)
    return list(found.values())


def _block(name: str, module: nn.Module, session: Session) -> OpaqueBlock:
    return OpaqueBlock(name, module, module.forward, session.step, verify=session.verifies)


def _opaque(block: OpaqueBlock, session: Session) -> Call:
    """Return what runs a module as a block in eager mode."""

    def call(*args: Any, **kwargs: Any) -> Any:
        session.ran = True
        try:
            return block(*args, **kwargs)
        except CannotBeOpaque as error:
            raise CaptureError(
                f"{block.name!r}, a {type(block.layer).__name__}, is not captured as one graph, and cannot run in "
                f"eager mode as a block of the step either: {error.reason} Or leave that part of the model unwrapped."
            ) from error

    return call
