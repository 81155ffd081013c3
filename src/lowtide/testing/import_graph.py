"""Which part of the package imports which, read from the sources: delayed imports count like any other.

The parts of a package are its modules and subpackages. `edges` gives the imports between the parts of one package,
`cycle` finds parts that import each other, directly or in a ring.

    python -m lowtide.testing.import_graph docs/images/imports.png

draws it: parts in rows, arrows down to what they import. A part stands in the row below the lowest part that imports
it, so that it is near its users. An arrow that passes other rows gets a place in each of them, and the order within a
row puts everything near what it is connected with: few arrows cross, and none runs through a name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
Edges = Mapping[str, Collection[str]]
# A part, or an arrow where it passes a row: its two ends and the row.
Place = str | tuple[str, str, int]

# The picture.
DRAWN = ("lowtide", "lowtide.plan", "lowtide.blocks")
PANEL_WIDTHS = (3.2, 1.6, 1.3)
# Widths in letters: of a box beyond its name, and of an arrow that passes a row.
BOX_MARGIN, ARROW_WIDTH = 4.0, 3.0
# Rounds of placing every row near its neighbours, down and up; more of them change nothing in the pictures there are.
SWEEPS = 24
WITHOUT_TORCH, WITH_TORCH, ARROWS = "#e7f3ec", "#fdeee2", "0.55"


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


def torch_users(package: str, parts: Edges) -> set[str]:
    """Return the parts of `package` that import PyTorch, themselves or through others of its parts."""
    known = modules()
    found: set[str] = set()
    for part in TopologicalSorter(parts).static_order():
        own = (path for name, path in known.items() if _part(package, name) == part)
        itself = any(name.split(".")[0] == "torch" for path in own for name in imported_names(path.read_text()))
        if itself or found & set(parts.get(part, ())):
            found.add(part)
    return found


def draw(path: Path) -> None:
    """Write the picture of `DRAWN`: arrows point to what is imported; those that others imply are left out."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    imports = module_imports()
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    for axes, package in zip(figure.subplots(1, len(DRAWN), width_ratios=PANEL_WIDTHS), DRAWN, strict=True):
        parts = edges(package, imports)
        _draw_parts(axes, parts, torch_users(package, parts))
        axes.set_title(package, fontsize=13)
    legend = [
        Patch(fc=WITHOUT_TORCH, ec="0.3", label="works without torch"),
        Patch(fc=WITH_TORCH, ec="0.3", label="needs torch"),
    ]
    figure.legend(handles=legend, loc="outside lower right", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def heights(parts: Edges) -> dict[str, int]:
    """Return the row of every part, 0 at the bottom: right below the lowest part that imports it."""
    from_bottom: dict[str, int] = {}
    order = list(TopologicalSorter(parts).static_order())
    for part in order:
        from_bottom[part] = max((from_bottom[other] + 1 for other in parts.get(part, ())), default=0)
    found: dict[str, int] = {}
    for part in reversed(order):
        users = [found[user] - 1 for user in found if part in parts.get(user, ())]
        found[part] = min(users, default=from_bottom[part])
    return found


def lines(parts: Edges, row_of: Mapping[str, int]) -> list[list[Place]]:
    """Return every arrow as the places it passes, its two ends included."""
    return [
        [part, *((part, other, row) for row in range(row_of[part] - 1, row_of[other], -1)), other]
        for part, others in sorted(without_shortcuts(parts).items())
        for other in sorted(others)
    ]


def arrange(row_of: Mapping[str, int], arrows: Sequence[Sequence[Place]]) -> dict[Place, float]:
    """Return how far to the right every place is."""
    near: dict[Place, list[Place]] = {part: [] for part in row_of}
    for arrow in arrows:
        for one, other in pairwise(arrow):
            near.setdefault(one, []).append(other)
            near.setdefault(other, []).append(one)
    rows: dict[int, list[Place]] = {}
    for place in near:
        rows.setdefault(_row(place, row_of), []).append(place)
    across: dict[Place, float] = {place: float(index) for row in rows.values() for index, place in enumerate(row)}
    for sweep in range(SWEEPS):
        for height in sorted(rows, reverse=sweep % 2 == 0):
            across.update(_spread(rows[height], near, across))
    return across


def _row(place: Place, row_of: Mapping[str, int]) -> int:
    return row_of[place] if isinstance(place, str) else place[2]


def _spread(
    row: Sequence[Place], near: Mapping[Place, Sequence[Place]], across: Mapping[Place, float]
) -> Iterator[tuple[Place, float]]:
    """Yield the places of one row, each as near to the middle of its neighbours as those before it allow."""
    wanted = {
        place: sum(across[other] for other in near[place]) / len(near[place]) if near[place] else across[place]
        for place in row
    }
    order = sorted(row, key=lambda place: wanted[place])
    placed: list[float] = []
    for place in order:
        free = placed[-1] + (_width(order[len(placed) - 1]) + _width(place)) / 2 if placed else wanted[place]
        placed.append(max(wanted[place], free))
    shift = sum(wanted[place] - at for place, at in zip(order, placed, strict=True)) / len(order)
    yield from ((place, at + shift) for place, at in zip(order, placed, strict=True))


def _width(place: Place) -> float:
    return len(place) + BOX_MARGIN if isinstance(place, str) else ARROW_WIDTH


def _draw_parts(axes: Axes, parts: Edges, with_torch: set[str]) -> None:
    row_of = heights(parts)
    arrows = lines(parts, row_of)
    across = arrange(row_of, arrows)
    points = {place: (x, float(_row(place, row_of))) for place, x in across.items()}
    for arrow in arrows:
        _draw_arrow(axes, [points[place] for place in arrow])
    for part in row_of:
        box = {"boxstyle": "round,pad=0.35", "fc": WITH_TORCH if part in with_torch else WITHOUT_TORCH, "ec": "0.3"}
        axes.text(*points[part], part, ha="center", va="center", fontsize=11, bbox=box)
    xs = [x + side * _width(place) / 2 for place, x in across.items() for side in (-1, 1)]
    axes.set_xlim(min(xs), max(xs))
    axes.set_ylim(-0.5, max(row_of.values()) + 0.5)
    axes.axis("off")


def _draw_arrow(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw a curve through `points`, from the lower edge of the first box to the upper edge of the last."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    (x, y), *between, (x_last, y_last) = points
    corners = [(x, y - 0.17), *between, (x_last, y_last + 0.17)]
    vertices, codes = corners[:1], [Curve.MOVETO]
    for (x, y), (x_next, y_next) in pairwise(corners):
        middle = (y + y_next) / 2
        vertices += [(x, middle), (x_next, middle), (x_next, y_next)]
        codes += [Curve.CURVE4] * 3
    curve = Curve(vertices, codes)
    axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="->", mutation_scale=11, color=ARROWS, lw=1))


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
