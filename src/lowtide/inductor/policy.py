"""The tuned numbers of the search for a plan whose generated code fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tuning:
    """Options of Inductor's, and what is lost by them.

    Attributes:
        name: What users read.
        options: The options for both halves.
        of_backward: More options for backward.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    of_backward: Mapping[str, Any] = field(default_factory=dict)

    def of_half(self, *, is_backward: bool) -> dict[str, Any]:
        """Return the options for one half."""
        return {**self.options, **(self.of_backward if is_backward else {})}


@dataclass(frozen=True)
class FitPolicy:
    """How long a plan is looked for, and where.

    Attributes:
        tunings: What Inductor is asked for, in this order, the next one only where none before has led to code that
            fits. Fused kernels make all their results at once, and what backward recomputes is fused with what comes
            long after it: without fusion a perceptron's backward for one plan takes 1.49 in place of 2.23 MiB. In
            forward, fusion makes the code smaller, so it goes last. Images in the layout of the kernels need copies
            beside them (a U-Net at 50 %: 57.2 against 43.6 MiB), but are computed faster.
        tries: Plans whose code is tried for each of them: every one takes some seconds.
        close: A plan is not improved any more if its code takes more than this share of the budget.
        cautious: After code that takes too much, the planner is asked for less in proportion, and for this share of it:
            the next one errs, too.
        bold: How much of what a try has left over is given to the next one.
    """

    tunings: tuple[Tuning, ...] = (
        Tuning("as Inductor compiles by default"),
        Tuning("backward unfused", of_backward={"max_fusion_size": 1}),
        Tuning(
            "backward unfused, images as they were",
            options={"layout_optimization": False},
            of_backward={"max_fusion_size": 1},
        ),
        Tuning("unfused, images as they were", options={"layout_optimization": False, "max_fusion_size": 1}),
    )
    tries: int = 3
    close: float = 0.98
    cautious: float = 0.98
    bold: float = 0.8


POLICY = FitPolicy()
