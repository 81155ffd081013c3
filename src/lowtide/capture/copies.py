"""Removes copies that cannot be told from the original from the joint graph.

Traced graphs copy what an in-place op is about to overwrite (an in-place SiLU saves its input that way) and what a
dropout of probability 0 passes on. In the traced graph nothing is overwritten, so reading the original gives the same
bits in the same layout, for less time and memory. A copy stays if it could be told from the original: if one of them
is returned or comes from outside, or if anything in the graph may write into one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from lowtide.capture.alias import is_hidden_view
from lowtide.capture.program import may_write, output_node
from lowtide.pytorch.fake_tensors import fake_mode_of
from lowtide.pytorch.nested import tensors_in
from lowtide.pytorch.storages import storage_bytes, storage_key

_CLONE = torch.ops.aten.clone.default


def drop_copies(module: fx.GraphModule) -> None:
    """Read the original instead of a copy that cannot be told from it, in place."""
    clones = module.graph.find_nodes(op="call_function", target=_CLONE)
    if clones:
        storages = _Storages(module)
        for clone in clones:
            storages.drop(clone)


class _Storages:
    """The nodes of a joint graph by the storage of their fake tensors; used by `drop_copies` alone."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._sharing: dict[int, list[fx.Node]] = {}
        # For storages that only fake tensors have, those that the real tensors have in their place.
        self._real: dict[int, int] = {}
        exposed = set(output_node(module).all_input_nodes)
        for node in module.graph.nodes:
            for key in _keys([node]):
                self._sharing.setdefault(key, []).append(node)
            if is_hidden_view(node):
                self._join(storage_key(node.meta["val"]), storage_key(node.all_input_nodes[0].meta["val"]))
            if node.op in ("placeholder", "get_attr"):
                exposed.add(node)
            if may_write(node):
                exposed.update((node, *node.all_input_nodes))
        self._exposed = set(map(self._find, _keys(exposed)))

    def drop(self, clone: fx.Node) -> None:
        """Put the original in the place of `clone` if they cannot be told from each other."""
        source = clone.all_input_nodes[0]
        copied, original = clone.meta["val"], source.meta["val"]
        layout = clone.kwargs.get("memory_format") or torch.preserve_format
        if layout is not torch.preserve_format or not _is_same(copied, original):
            return
        old, new = self._find(storage_key(copied)), self._find(storage_key(original))
        views = self._sharing[old]
        if {old, new} & self._exposed or not all(_has_type(node.meta["val"], original.dtype) for node in views):
            return
        for node in views:
            node.meta["val"] = _moved(node.meta["val"], original)
        self._join(old, new)
        clone.replace_all_uses_with(source)
        clone.graph.erase_node(clone)

    def _join(self, fake: int, real: int) -> None:
        if self._find(fake) != self._find(real):
            self._real[self._find(fake)] = self._find(real)

    def _find(self, key: int) -> int:
        while key in self._real:
            key = self._real[key]
        return key


def _keys(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_key(tensor) for node in nodes for tensor in tensors_in(node.meta.get("val")) if _is_strided(tensor)}


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _is_same(copied: torch.Tensor, original: torch.Tensor) -> bool:
    """Return True if the copy has the layout of the original, and a storage of the same size."""
    return (
        _is_strided(original)
        and _is_strided(copied)
        and copied.stride() == original.stride()
        and original.storage_offset() == 0
        and storage_bytes(copied) == storage_bytes(original)
    )


def _has_type(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _moved(view: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return the fake tensor that is to the storage of `original` what `view` is to its own."""
    with fake_mode_of(original), torch.no_grad():
        return original.as_strided(view.shape, view.stride(), view.storage_offset())
