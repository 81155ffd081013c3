"""Which private names of PyTorch the sources use, read from them without running them.

Private is what begins with one underscore, and everything inside a private module. Three kinds are found: dotted names
(`torch._ops.OpOverload`, also under another name: `aten = torch.ops.aten`), options given to the `patch` of a private
configuration, and attributes of objects (`tensor._version`), which are known by their last part only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from helpers.paths import ROOT

SRC = ROOT / "src" / "lowtide"
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
# Of named tuples.
_NOT_PRIVATE = {"_replace", "_asdict", "_fields", "_make"}


@dataclass(frozen=True)
class Uses:
    """The private names in one file: full dotted names, and attributes of objects of any type."""

    names: frozenset[str]
    attributes: frozenset[str]


def is_private(part: str) -> bool:
    """Whether one part of a dotted name begins with one underscore."""
    return part.startswith("_") and not part.startswith("__") and part != "_"


def sources() -> dict[str, str]:
    """Return the sources by path relative to the package."""
    return {path.relative_to(SRC).as_posix(): path.read_text() for path in sorted(SRC.rglob("*.py"))}


def uses_by_file(texts: Mapping[str, str]) -> dict[str, Uses]:
    """Return the private names of PyTorch in each file that has any."""
    trees = {name: ast.parse(text) for name, text in texts.items() if "torch" in text}
    found = {name: _uses(tree, aliases(tree)) for name, tree in trees.items()}
    return {name: uses for name, uses in found.items() if uses.names or uses.attributes}


def aliases(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what `tree` calls by shorter ones."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                root = each.name.split(".")[0]
                found[each.asname or root] = each.name if each.asname else root
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            full = dotted(node.value, found)
            if full is not None and full.startswith("torch."):
                found[node.targets[0].id] = full
    return found


def dotted(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """Return the full name that a chain of attributes stands for, or None if it begins with something else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def _uses(tree: ast.Module, names: Mapping[str, str]) -> Uses:
    imported = set(_imported(tree))
    if not any(full.split(".")[0] == "torch" for full in (*imported, *names.values())):
        return Uses(frozenset(), frozenset())
    full = imported | set(_chains(tree, names)) | set(_options(tree, names))
    private = {_shortened(name) for name in full if name.startswith("torch.")}
    private = {name for name in private if any(map(is_private, name.split(".")))}
    longest = {name for name in private if not any(other.startswith(f"{name}.") for other in private)}
    attributes = set(_attributes(tree, names)) - set(_own_names(tree)) - _NOT_PRIVATE
    return Uses(frozenset(longest), frozenset(attributes))


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _chains(tree: ast.Module, names: Mapping[str, str]) -> Iterator[str]:
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            full = dotted(node, names)
            if full is not None:
                yield full


def _options(tree: ast.Module, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the options that are given to the `patch` of a configuration, by keyword or as a dictionary."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "patch":
            continue
        config = dotted(node.func.value, names)
        given = [each.arg for each in node.keywords]
        given += [key.value for arg in node.args if isinstance(arg, ast.Dict) for key in arg.keys if _is_text(key)]
        given += [arg.value for arg in node.args[:1] if _is_text(arg)]
        if config is not None:
            yield from (f"{config}.{option}" for option in given if option)


def _attributes(tree: ast.Module, names: Mapping[str, str]) -> Iterator[str]:
    """Yield private attributes of what is not a module and not the object itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and dotted(node, names) is None:
                yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_NAME:
            yield from (arg.value for arg in node.args[1:2] if _is_text(arg) and is_private(arg.value))


def _own_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file gives to what it defines: functions, classes, fields, constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for each in targets if isinstance(each, ast.Name))
            yield from (
                each.slice.value for each in targets if isinstance(each, ast.Subscript) and _is_text(each.slice)
            )
            yield from (
                each.attr
                for each in targets
                if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
            )


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _shortened(name: str) -> str:
    """Return `name` without what follows an op, which are its overloads, and without what Python adds to objects."""
    parts = [part for part in name.split(".") if not part.startswith("__")]
    return ".".join(parts[:4] if parts[:2] == ["torch", "ops"] else parts)
