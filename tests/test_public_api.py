"""What `import lowtide` offers: every name resolves and is documented."""

from __future__ import annotations

import inspect

import pytest

import lowtide
from lowtide import errors

PROMISED = {"wrap", "unwrap", "plans", "plan", "measure_peak", "solve"}


def test_all_is_sorted_unique_and_holds_what_the_readme_promises() -> None:
    assert len(set(lowtide.__all__)) == len(lowtide.__all__)
    assert set(lowtide.__all__) >= PROMISED


@pytest.mark.parametrize("name", lowtide.__all__)
def test_public_name_resolves_and_is_documented(name: str) -> None:
    value = getattr(lowtide, name)
    if inspect.isclass(value) or callable(value) or inspect.ismodule(value):
        assert (inspect.getdoc(value) or "").strip(), f"lowtide.{name} has no docstring"


@pytest.mark.parametrize("name", [name for name in lowtide.__all__ if inspect.isclass(getattr(lowtide, name))])
def test_public_methods_are_documented(name: str) -> None:
    for attribute, value in vars(getattr(lowtide, name)).items():
        is_code = inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod)
        if is_code and not attribute.startswith("_"):
            assert (value.__doc__ or "").strip(), f"lowtide.{name}.{attribute} has no docstring"


def test_every_error_is_in_one_tree_and_also_a_builtin() -> None:
    own = [each for each in vars(errors).values() if inspect.isclass(each) and each.__module__ == errors.__name__]
    for error in own:
        if not issubclass(error, Warning) and error is not errors.LowtideError:
            assert issubclass(error, errors.LowtideError), error
            assert error.__bases__[-1].__module__ == "builtins", error
