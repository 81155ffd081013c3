"""Running a lowered graph: boxed calling convention, so that arguments are freed as the graph uses them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen


def boxed(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Return a function that takes the list of arguments, empties it, and runs `module` op by op."""
    del example_inputs
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    _allow_retain_graph()
    return run


def _allow_retain_graph() -> None:
    """Tell AOTAutograd that no saved tensor is written over, so that backward may run again on a retained graph."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []
