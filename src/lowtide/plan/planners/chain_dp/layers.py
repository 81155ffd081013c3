"""A chain as two rows of bytes, for algorithms that choose which layers keep their output.

Layer `k` of `n` has `sizes[k]` bytes of output; `sizes[0]` is the input of the chain. `inside[k]` are bytes that exist
only while the segment of layer `k` is materialised, and are zero in the models of the papers.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import InvalidOptionError
from lowtide.graph.analysis import Chain

MIN_LAYERS = 1


def check_layers(sizes: Sequence[int], inside: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Return both rows as lists, `inside` as zeros if it is None; raise `InvalidOptionError` if they are not bytes."""
    if len(sizes) <= MIN_LAYERS:
        raise InvalidOptionError(
            f"The chain has {len(sizes)} sizes; give the bytes of its input and of at least one layer's output."
        )
    if inside is not None and len(inside) != len(sizes):
        raise InvalidOptionError(
            f"There are {len(sizes)} sizes and {len(inside)} figures of bytes inside; both start with the chain's "
            "input and must be of equal length."
        )
    rows = [int(size) for size in sizes], [0] * len(sizes) if inside is None else [int(size) for size in inside]
    for row in rows:
        if min(row) < 0:
            raise InvalidOptionError(f"Layer {row.index(min(row))} has {min(row)} bytes; sizes must be at least 0.")
    if rows[1][0]:
        raise InvalidOptionError(f"The chain's input has {rows[1][0]} bytes inside; only layers have any, so give 0.")
    return rows


def layers_of(chain: Chain) -> tuple[list[int], list[int]]:
    """Return sizes and bytes inside of `chain`: layer `k` is link `k - 1`, and the chain's input costs nothing."""
    sizes = [0, *(link.bytes for link in chain.links)]
    return sizes, [0, *(link.inside_bytes for link in chain.links)]


def checkpoint_links(chain: Chain, checkpoints: Sequence[int]) -> list[int]:
    """Return the links of the layers in `checkpoints`, without the last one, which has no value to keep."""
    return [layer - 1 for layer in checkpoints if 0 < layer < len(chain.links)]


def no_chain(found: int, least: int = 2) -> str | None:
    """Return why a forward pass with `found` cut points is no chain to plan on, or None if there are `least`."""
    if found < least:
        return f"it needs at least {least} cut points in forward and the graph has {found}"
    return None
