"""A page of results: published figures beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """Ignore a progress message."""
    del message


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        network: The network, with its size where a paper varies it.
        quantity: What is compared, such as "peak, kusumoto, memory-centric".
        published: The paper's figure, or None where it gives none.
        ours: Our figure, in the same unit.
        unit: The unit, such as "GB" (1e9 bytes), "GiB", "%" or "s".
        note: Why the two differ, where they do.
    """

    network: str
    quantity: str
    published: float | None
    ours: float
    unit: str
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours divided by the published figure; None where there is none or it is zero."""
        return self.ours / self.published if self.published else None


@dataclass(frozen=True)
class Page:
    """All figures of one paper.

    Attributes:
        title: The paper.
        rows: The figures, rows of one network beside each other.
        remarks: What holds for the whole page: memory model, units, known differences.
    """

    title: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
