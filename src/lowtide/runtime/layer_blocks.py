"""Layers of a wrapped model as blocks of its step: each is captured by itself, and equal layers share one capture.

While a planned call of the model runs, the `forward` of such a layer runs what was compiled for its class, with the
layer as an argument; the compiler does not trace it as part of what is around it. The layer's hooks are called by
`nn.Module` around its `forward`, so they stay outside, in eager code. At any other time a layer is what it was before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from lowtide.blocks.step.find_layers import Layers
from lowtide.blocks.step.join_layers import Group, Row
from lowtide.errors import LowtideError, UnsupportedBackwardError
from lowtide.pytorch.autograd_graph import saved_tensors_hook_module
from lowtide.pytorch.modules import call_in_slot, hooks_of, hooks_of_all_modules, plain_call, put_in_slot
from lowtide.pytorch.nested import tensor_leaves
from lowtide.runtime.backend import training_backend
from lowtide.runtime.compiled_entry import Entry
from lowtide.runtime.entry_points import ForwardOverride, between_graphs
from lowtide.runtime.model_plans import LayersAreWholeError, Session

# What runs a layer in a planned call: it is given the layer and its arguments.
LayerRun = Callable[..., Any]
MakeRun = Callable[[LayerRun, Session, int], LayerRun]


class _Depth(threading.local):
    """How many planned calls of the model, and how many of its blocks, this thread is inside of."""

    calls = 0
    blocks = 0


class LayerBlocks:
    """The layers of one model that are blocks, and what was compiled for them.

    It is a context: inside of it, this thread is in a planned call of the model.

    Args:
        layers: The layers.
        session: Plans their graphs.
        make_run: Makes what runs a layer; by default it runs as planned.
    """

    def __init__(self, layers: Layers, session: Session, make_run: MakeRun | None = None) -> None:
        self._make_run = make_run or block_run
        self.session = session
        # Read while tracing, where it becomes a constant with a guard: it can be neither a counter, which would be
        # guarded at every value, nor one for each thread, which cannot be traced.
        self.active_anywhere = False
        self.depth = _Depth()
        self._calls = 0
        self._lock = threading.Lock()
        self._runs: dict[Hashable, LayerRun] = {}
        self.overrides: list[LayerOverride] = []
        self._rows: list[RowOverride] = []
        self._calls_of_layers: list[LayerCall] = []
        # Whether a container has run joined layers: its owner may call them one by one.
        self.has_joined = False
        self.install(layers)

    def install(self, layers: Layers) -> None:
        """Let these layers be the blocks, in the place of those that were."""
        self.remove()
        self._runs.clear()
        self.has_joined = False
        self.overrides = [LayerOverride(layer, self, name) for name, layer in layers.modules.items()]
        self._rows = [RowOverride(row, layers.joined, self) for row in layers.rows]
        called = [*layers.modules.values(), *(row.container for row in layers.rows)]
        self._calls_of_layers = [LayerCall(layer, self) for layer in called if call_in_slot(layer) is None]
        for override in (*self.overrides, *self._rows):
            override.module.forward = override
        for call in self._calls_of_layers:
            put_in_slot(call.layer, call)

    def is_active(self) -> bool:
        """Return True if this thread is in a planned call that records gradients; while traced, if any thread is."""
        is_planned = self.active_anywhere if torch.compiler.is_compiling() else self.depth.calls > 0
        return is_planned and torch.is_grad_enabled()

    def __enter__(self) -> None:
        """Note that a planned call of the model begins in this thread."""
        self.depth.calls += 1
        self._count(1)

    def __exit__(self, *_: object) -> None:
        """Note that it ends."""
        self.depth.calls -= 1
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self._calls += change
            self.active_anywhere = self._calls > 0

    @between_graphs
    def run(self, override: LayerOverride, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a layer returns, run as a block; inside of another block, as a part of it."""
        if self.depth.blocks:
            return override.plain(*args, **kwargs)
        trains = any(each.requires_grad for each in tensor_leaves((args, kwargs)))
        with self.session.step.around.in_layer(override.name, trains_inputs=trains):
            return self._run_inside(self._run_of(override), override.module, *args, **kwargs)

    @between_graphs
    def run_row(self, override: RowOverride, state: Any) -> Any:
        """Return what a container returns, whose layers run as blocks, several of them as one."""
        if self.depth.blocks or not override.row.is_as_found:
            return override.plain(state)
        for group in override.groups:
            if len(group) > 1 and not any(hooks_of_all_modules()) and all(map(self._is_plain, group)):
                self.has_joined = True
                state = self._run_inside(self._run_of_group(group), group, state)
            else:
                for layer in group:
                    state = layer(state)
        return state

    def _run_inside(self, run: LayerRun, *args: Any, **kwargs: Any) -> Any:
        """Return what `run` returns, inside of which layers are no blocks of their own."""
        if saved_tensors_hook_module() == "torch.utils.checkpoint":
            raise self._inside_checkpoint()
        self.depth.blocks += 1
        try:
            return run(*args, **kwargs)
        finally:
            self.depth.blocks -= 1

    def _is_plain(self, layer: nn.Module) -> bool:
        """Return True if a call of a layer is one of its class's `forward`, and nobody has changed that since."""
        override = vars(layer).get("forward")
        is_ours = isinstance(override, LayerOverride) and override.blocks is self and override.hides_method
        return is_ours and isinstance(call_in_slot(layer), LayerCall) and not any(hooks_of(layer))

    def _inside_checkpoint(self) -> LowtideError:
        """Return what to raise where a layer runs inside of a checkpoint, which runs it again and ends it half way."""
        if self.session.settings.blocks == "auto" and self.session.can_restart and not self.session.step.has_run:
            return LayersAreWholeError("Layers run inside torch.utils.checkpoint; the model is one graph then.")
        return UnsupportedBackwardError(
            "A layer that is a block of the step runs inside torch.utils.checkpoint, which runs it again in backward "
            "and ends that run half way; a planned graph recomputes by itself and runs as a whole. Call layers without "
            'checkpoint (gradient_checkpointing_disable() in transformers), or use blocks="whole": the budget decides '
            "what is recomputed."
        )

    def _run_of(self, override: LayerOverride) -> LayerRun:
        """Return what runs a layer; layers of one class share it."""
        what = type(override.module) if override.hides_method else override
        # The compiler does not guard hooks of all modules; see `wrap`.
        key = (what, self.session.generation, self.session.replica, *map(tuple, hooks_of_all_modules()))
        if key not in self._runs:
            alike = sum(type(each.module) is type(override.module) for each in self.overrides)
            self._runs[key] = self._make_run(forward_of(override), self.session, alike)
        return self._runs[key]

    def _run_of_group(self, group: Group) -> LayerRun:
        """Return what runs joined layers; groups of the same classes share it."""
        classes = tuple(map(type, group))
        key = (classes, self.session.generation)
        if key not in self._runs:
            alike = sum(tuple(map(type, other)) == classes for row in self._rows for other in row.groups)
            self._runs[key] = self._make_run(forward_of_group(group), self.session, alike)
        return self._runs[key]

    def remove(self) -> None:
        """Give all layers their calls and their `forward` back."""
        for call in self._calls_of_layers:
            if call_in_slot(call.layer) is call:
                put_in_slot(call.layer, None)
        for override in reversed((*self.overrides, *self._rows)):
            override.remove()
        self._calls_of_layers, self.overrides, self._rows = [], [], []


def block_run(forward: LayerRun, session: Session, alike: int) -> LayerRun:
    """Return what runs layers of one kind as blocks of the step.

    Here is decided how: a layer is captured and planned op by op. If its code cannot be traced as a whole, each graph
    that the compiler makes of it is a block. A block that runs such a layer eagerly would be returned from here.

    Args:
        forward: The `forward` of a layer of the kind, as a function of the layer.
        session: Plans.
        alike: How many layers there are of the kind.
    """
    return Entry(forward, training_backend(session), expect_branches=True, instances=alike)


def forward_of(override: LayerOverride) -> LayerRun:
    """Return the `forward` that the layer had, as a function of the layer."""
    if override.hides_method:
        forward: LayerRun = type(override.module).forward
        return forward
    plain = override.plain

    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del layer
        return plain(*args, **kwargs)

    return run


def forward_of_group(group: Group) -> LayerRun:
    """Return the `forward` of joined layers, as a function of the layers and of what the first one takes.

    They are called without what `nn.Module` does around a call, which is nothing for them, and not by the `forward`
    that makes them blocks.
    """
    forwards = tuple(type(layer).forward for layer in group)

    def run(layers: Group, state: Any) -> Any:
        for layer, forward in zip(layers, forwards, strict=True):
            state = forward(layer, state)
        return state

    return run


class LayerOverride(ForwardOverride):
    """The `forward` of a layer that runs as a block in planned calls of its model."""

    def __init__(self, layer: nn.Module, blocks: LayerBlocks, name: str) -> None:
        super().__init__(layer, blocks.run, torch.is_grad_enabled)
        self.blocks, self.name = blocks, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the block or the plain `forward` returns."""
        if self.is_active and self.blocks.is_active():
            return self.blocks.run(self, args, kwargs)
        return self.plain(*args, **kwargs)


class RowOverride(ForwardOverride):
    """The `forward` of a container whose layers run as blocks, several of them as one."""

    def __init__(self, row: Row, size: int, blocks: LayerBlocks) -> None:
        super().__init__(row.container, blocks.run_row, torch.is_grad_enabled)
        self.row, self.groups, self.blocks = row, row.groups(size), blocks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the blocks or the plain `forward` return."""
        if self.is_active and self.blocks.is_active() and len(args) == 1 and not kwargs:
            return self.blocks.run_row(self, *args)
        return self.plain(*args, **kwargs)


class LayerCall:
    """The call of a layer with its hooks, which the compiler does not trace in planned calls of its model.

    Traced, hooks would become graphs of their own, and one that counts its calls would be compiled again at each.
    """

    def __init__(self, layer: nn.Module, blocks: LayerBlocks) -> None:
        self.layer = layer
        self.blocks = blocks
        self.plain = plain_call(layer)
        self.untraced = between_graphs(self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns."""
        return self.untraced(*args, **kwargs) if self.blocks.is_active() else self.plain(*args, **kwargs)
