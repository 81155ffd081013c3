"""The costs that a user asks for: measured, worked out for a device, or given."""

from __future__ import annotations

from lowtide.costs.analytic import analytic_costs
from lowtide.costs.device_table import DEVICES, recognise
from lowtide.costs.measured import measure_costs
from lowtide.costs.op_signature import Calls
from lowtide.errors import InvalidOptionError
from lowtide.graph.costs import Costs, check_costs
from lowtide.progress import Progress, silent


def resolve_costs(program: Calls, costs: str | Costs, progress: Progress = silent) -> Costs:
    """Return the costs that `costs` asks for.

    Args:
        program: The captured program.
        costs: "measured", "analytic" (for the program's own device), the name of a device to work them out for, or
            ready costs, which are checked.
        progress: Is told what is being done.
    """
    if isinstance(costs, Costs):
        check_costs(program.graph, costs)
        return costs
    check_source(costs)
    source = costs.strip().lower()
    if is_measured(source):
        return measure_costs(program, progress=progress)
    progress("estimating op costs")
    return analytic_costs(program, _own_device(program) if source == "analytic" else source)


def is_measured(costs: str | Costs) -> bool:
    """Return True if `costs` asks for costs that are measured."""
    return isinstance(costs, str) and costs.strip().lower() == "measured"


def check_source(costs: str) -> None:
    """Raise `InvalidOptionError` unless `costs` is "measured", "analytic" or the name of a device in the table."""
    if not isinstance(costs, str) or costs.strip().lower() not in {"measured", "analytic", *DEVICES}:
        raise InvalidOptionError(
            f'costs={costs!r} is not known; there are "measured", "analytic" and the devices {", ".join(DEVICES)}.'
        )


def _own_device(program: Calls) -> str:
    figures = recognise(program.device)
    if figures is None:
        raise InvalidOptionError(
            f'costs="analytic" has no figures for {program.device}. Use "measured", or name the device most like it: '
            f"{', '.join(DEVICES)}."
        )
    return figures.name
