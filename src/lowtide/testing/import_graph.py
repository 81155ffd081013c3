"""Which part of the package imports which, read from the sources: delayed imports count like any other.

The parts of a package are its modules and subpackages. `edges` gives the imports between the parts of one package,
`cycles` those that go both ways, directly or in a ring. `python -m lowtide.testing.import_graph FILE.png` draws the
parts of lowtide and those of `lowtide.plan`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
Edges = Mapping[str, Collection[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the file of every module below `root`, by its full name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported_names(source: str) -> set[str]:
    """Return the full names of the modules, and of what is taken from them, that `source` imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError("Relative imports hide what is imported; write the full name.")
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            found.update(str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant))
    return found


def module_imports(root: Path = ROOT) -> dict[str, set[str]]:
    """Return for every module below `root` the modules below it that it imports."""
    known = modules(root)
    return {name: _known_modules(imported_names(path.read_text()), known) for name, path in known.items()}


def _known_modules(names: Collection[str], known: Collection[str]) -> set[str]:
    """Return the modules among `names`; a package counts only where something of its own is taken from it."""
    found = {name for name in names if name in known}
    inner = {name.rpartition(".")[0] for name in found}
    own = {name.rpartition(".")[0] for name in names if name not in known}
    return {name for name in found if name not in inner or name in own}


def edges(package: str, imports: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Return which part of `package` imports which other one; what stands in its `__init__` is not a part."""
    found: dict[str, set[str]] = {}
    for importer, imported in imports.items():
        own = _part(package, importer)
        if own is not None:
            others = (_part(package, name) for name in imported)
            found.setdefault(own, set()).update(other for other in others if other not in (own, None))
    return found


def _part(package: str, module: str) -> str | None:
    inside = module.removeprefix(f"{package}.")
    return None if inside == module else inside.split(".")[0]


def packages(imports: Collection[str]) -> list[str]:
    """Return the modules that have others inside them."""
    return sorted({name.rpartition(".")[0] for name in imports if "." in name})


def cycle(parts: Edges) -> list[str]:
    """Return parts that import each other in a ring, the first one again at the end, or nothing if there is no ring."""
    try:
        TopologicalSorter(parts).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def only_importers(imports: Mapping[str, Collection[str]]) -> dict[str, str]:
    """Return the modules that exactly one other module imports, with that one; packages themselves do not count."""
    importers: dict[str, set[str]] = {}
    for importer, imported in imports.items():
        for name in imported:
            importers.setdefault(name, set()).add(importer)
    inner = set(packages(imports))
    return {name: next(iter(of)) for name, of in importers.items() if len(of) == 1 and name not in inner}


def rows(parts: Edges) -> Iterator[list[str]]:
    """Yield the parts from the bottom up: each row imports only rows before it."""
    sorter = TopologicalSorter(parts)
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        yield ready
        sorter.done(*ready)


def without_shortcuts(parts: Edges) -> dict[str, set[str]]:
    """Return the edges that are not implied by a longer way."""
    below: dict[str, set[str]] = {}
    for part in TopologicalSorter(parts).static_order():
        direct = set(parts.get(part, ()))
        below[part] = direct.union(*(below[other] for other in direct))
    return {
        part: {other for other in others if not any(other in below[third] for third in others if third != other)}
        for part, others in parts.items()
    }


def draw(path: Path) -> None:
    """Write a picture of the parts of lowtide and of its planning package; arrows point to what is imported."""
    from matplotlib.figure import Figure

    imports = module_imports()
    titles = ("lowtide", "lowtide.plan")
    figure = Figure(figsize=(15, 11), layout="constrained")
    for axes, package in zip(figure.subplots(1, 2, width_ratios=(3, 2)), titles, strict=True):
        _draw_parts(axes, edges(package, imports))
        axes.set_title(package)
    figure.savefig(path, dpi=110)


def _draw_parts(axes: object, parts: Edges) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    places = {}
    for height, row in enumerate(rows(parts)):
        for number, part in enumerate(row):
            # Rows are shifted against each other, so that arrows do not run through the names between.
            places[part] = ((number + 1) / (len(row) + 1) + (0.06 if height % 2 else 0.0), height)
    for part, others in without_shortcuts(parts).items():
        for other in others:
            axes.annotate(
                "",
                places[other],
                places[part],
                arrowprops={"arrowstyle": "->", "color": "0.6", "shrinkA": 12, "shrinkB": 12},
            )
    for part, (across, height) in places.items():
        axes.text(
            across, height, part, ha="center", va="center", bbox={"boxstyle": "round", "fc": "white", "ec": "0.3"}
        )
    axes.set_xlim(0, 1.1)
    axes.set_ylim(-0.5, max(height for _, height in places.values()) + 0.5)
    axes.axis("off")


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
