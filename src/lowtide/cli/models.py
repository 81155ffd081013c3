"""Models named on the command line: `package.module:factory` or `path/to/file.py:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lowtide.errors import InvalidModelError, LowtideError

Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_RETURNS = "it must return (model, args) or (model, args, kwargs)"


def load_case(name: str, *, meta: bool = False) -> Case:
    """Return the model and the arguments of its call that the factory called `name` returns.

    Args:
        name: "package.module:factory" or "path/to/file.py:factory".
        meta: Call the factory where new tensors have no data.
    """
    made = call(name, meta=meta)
    if not isinstance(made, tuple | list) or len(made) not in (2, 3):
        raise InvalidModelError(f"{name} returned {_kind(made)}; {_RETURNS}.")
    model, args, kwargs = made[0], made[1], made[2] if len(made) == 3 else {}
    if not callable(model) or isinstance(model, type):
        raise InvalidModelError(f"{name} returned a {type(model).__name__} in the model's place; {_RETURNS}.")
    if not isinstance(args, tuple | list):
        raise InvalidModelError(f"{name} returned a {type(args).__name__} as args; {_RETURNS}, args being a tuple.")
    if not isinstance(kwargs, Mapping):
        raise InvalidModelError(
            f"{name} returned a {type(kwargs).__name__} as kwargs; {_RETURNS}, kwargs being a dictionary."
        )
    return model, tuple(args), dict(kwargs)


def call(name: str, *, meta: bool = False) -> Any:
    """Return what the factory called `name` returns."""
    factory = find(name)
    try:
        if not meta:
            return factory()
        import torch

        with torch.device("meta"):
            return factory()
    except LowtideError:
        raise
    except Exception as error:
        raise InvalidModelError(f"{name} raised {type(error).__name__}: {error}. --debug shows where.") from error


def find(name: str) -> Callable[..., Any]:
    """Return the function called `name`."""
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise InvalidModelError(
            f"{name!r} does not name a model; write package.module:factory or path/to/file.py:factory."
        )
    found: Any = _from_file(Path(place)) if place.endswith(".py") or os.sep in place else _from_module(place)
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [key for key, item in vars(found).items() if callable(item) and not key.startswith("_")]
            there = f" There are {', '.join(functions[:8])}." if functions else ""
            raise InvalidModelError(f"{place} has no {part!r}.{there}")
        found = getattr(found, part)
    if not callable(found):
        raise InvalidModelError(f"{name} is a {type(found).__name__}; it must be a function.")
    return found  # type: ignore[no-any-return]


def _from_module(name: str) -> ModuleType:
    # As with `python -m`: modules of the folder one is in are found.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise InvalidModelError(
                f"There is no module {missing!r}. Write package.module:factory for a module that can be imported from "
                "here, or path/to/file.py:factory."
            ) from error
        raise InvalidModelError(f"Importing {name} failed: {error}. --debug shows where.") from error
    except Exception as error:
        raise InvalidModelError(
            f"Importing {name} failed with {type(error).__name__}: {error}. --debug shows where."
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidModelError(f"There is no file {str(path)!r}.")
    name = path.stem
    # What is imported beside the file is found, and the module can be found by those who look for it by name.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidModelError(f"{str(path)!r} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    shadowed = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if shadowed is None:
            del sys.modules[name]
        else:
            sys.modules[name] = shadowed
        raise InvalidModelError(
            f"Running {path} failed with {type(error).__name__}: {error}. --debug shows where."
        ) from error
    return module


def _kind(made: Any) -> str:
    return f"{len(made)} things" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
