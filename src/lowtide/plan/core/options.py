"""Whether the options of a planner have the types they are declared with."""

from __future__ import annotations

from dataclasses import fields
from numbers import Integral, Real
from typing import TYPE_CHECKING

from lowtide.errors import InvalidOptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_NUMBERS: dict[str, tuple[type, str]] = {"int": (Integral, "a whole number"), "float": (Real, "a number")}


def check_numbers(planner: DataclassInstance) -> None:
    """Raise `InvalidOptionError` unless every option of `planner` declared as `int` or `float` is such a number."""
    for field in fields(planner):
        kind, words = _NUMBERS.get(str(field.type), (object, ""))
        value = getattr(planner, field.name)
        if not isinstance(value, kind) or (words and isinstance(value, bool)):
            raise InvalidOptionError(f"The option {field.name} is {value!r:.40}; it must be {words}.")
