"""What each op costs: seconds, and bytes that exist only while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.errors import InvalidGraphError
from lowtide.graph.ir import Graph

# Far more than any step takes, and still within the range of floats of 4 bytes, in which some planners keep tables.
MOST_SECONDS = 1e30
MOST_WORKSPACE_BYTES = 2**52


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs per op, in the graph's order.

    Attributes:
        seconds: Time of one run.
        workspace_bytes: Bytes allocated and freed inside one run, beyond its outputs, at their highest.
        source: Where the figures come from, for people: "measured on cpu", "analytic a100-80gb", "unit".
    """

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    source: str = "unit"

    @property
    def total_seconds(self) -> float:
        """Time of running every op once."""
        return sum(self.seconds)

    @staticmethod
    def unit(graph: Graph) -> Costs:
        """Return costs of one second and no workspace for every op."""
        return Costs((1.0,) * len(graph.ops), (0,) * len(graph.ops))


def check_costs(graph: Graph, costs: Costs) -> None:
    """Raise `InvalidGraphError` unless `costs` has one finite figure of at least zero for every op."""
    if not len(costs.seconds) == len(costs.workspace_bytes) == len(graph.ops):
        raise InvalidGraphError(
            f"Costs cover {len(costs.seconds)} ops (seconds) and {len(costs.workspace_bytes)} (workspace), "
            f"but the graph has {len(graph.ops)}."
        )
    for op, seconds, workspace in zip(graph.ops, costs.seconds, costs.workspace_bytes, strict=True):
        if not (isinstance(seconds, int | float) and isinstance(workspace, int)):
            raise InvalidGraphError(
                f"Op {op.name!r} costs {seconds!r} s and {workspace!r} B; these must be numbers, and bytes whole."
            )
        if not 0 <= seconds < float("inf") or workspace < 0:
            raise InvalidGraphError(
                f"Op {op.name!r} costs {seconds} s and {workspace} B; both must be finite and >= 0."
            )
        if workspace > MOST_WORKSPACE_BYTES:
            raise InvalidGraphError(
                f"Op {op.name!r} needs {workspace} B of workspace; at most {MOST_WORKSPACE_BYTES} can be reckoned with."
            )
    if costs.total_seconds > MOST_SECONDS:
        raise InvalidGraphError(
            f"All ops together cost {costs.total_seconds} s; at most {MOST_SECONDS} s can be reckoned with."
        )
