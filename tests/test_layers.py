"""The import law, read from the sources: delayed imports count like any other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "lowtide"
TORCH_FREE = ("errors", "units", "graph", "schedule", "plan", "report")
LAYERS = {"errors": 0, "units": 0, "graph": 1, "schedule": 2, "plan": 3, "report": 4}
FORBIDDEN = {
    "pytorch": {"plan", "blocks", "capture", "costs", "lower", "run", "device", "measure", "chains", "api", "cli"},
    "blocks": {"plan", "capture", "costs", "lower", "run", "chains", "api", "cli"},
    "capture": {"plan", "lower", "run", "api", "cli"},
    "costs": {"plan", "lower", "run", "api", "cli"},
    "lower": {"plan", "run", "api", "cli"},
    "run": {"api", "cli"},
    "device": {"plan", "lower", "run", "api", "cli"},
    "measure": {"plan", "lower", "run", "api", "cli"},
    "chains": {"api", "cli"},
    "api": {"cli"},
    "reproduce": {"cli"},
    "integrations": {"cli"},
}


def imports(source):
    """Return the modules that `source` imports anywhere, by full name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide what is imported"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "importlib.import_module"):
            found.update(arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))
    return found


def layers(source):
    """Return the parts of lowtide that `source` imports; "" is the package root."""
    named = [name.split(".") for name in imports(source) if name.split(".")[0] == "lowtide"]
    return {parts[1] if len(parts) > 1 else "" for parts in named}


def part(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(ROOT.rglob("*.py"))
IDS = [str(path.relative_to(ROOT)) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_file_keeps_the_import_law(path):
    assert not breaches(part(path), path.read_text())


def breaches(own, source):
    """Return what in `source`, a file of the part `own`, breaks the law."""
    found = []
    used = layers(source)
    known = {name for name in used if name in LAYERS or (ROOT / name).exists() or (ROOT / f"{name}.py").exists()}
    if own in TORCH_FREE:
        found += [name for name in imports(source) if name.split(".")[0] in ("torch", "torchvision")]
        found += [name for name in known if LAYERS.get(name, 99) > LAYERS[own]]
    found += sorted(FORBIDDEN.get(own, set()) & used)
    if own not in ("api", "reproduce", "integrations", "cli", "__init__", "__main__"):
        found += sorted({"api"} & used)
    if own not in ("reproduce", "cli"):
        found += sorted({"reproduce"} & used)
    # Integrations need libraries that users may not have: nothing else may need an integration.
    if own != "integrations":
        found += sorted({"integrations"} & used)
    return found


@pytest.mark.parametrize(
    ("own", "source"),
    [
        ("graph", "import torch"),
        ("plan", "def f():\n    from torch import nn"),
        ("graph", "from lowtide.schedule.steps import Schedule"),
        ("schedule", "def late():\n    import lowtide.plan.core.problem"),
        ("plan", "from lowtide.report import text"),
        ("plan", "from lowtide.capture.build_program import capture"),
        ("lower", "from lowtide.plan.core.problem import Problem"),
        ("capture", "import lowtide.plan"),
        ("blocks", "from lowtide.blocks.profile.captured_chain import Blocks"),
        ("pytorch", "from lowtide.settings import Settings"),
        ("plan", "from lowtide.pytorch.required import check_pytorch"),
        ("chains", "from lowtide.api import wrap"),
        ("run", "from lowtide.api import wrap"),
        ("report", "__import__('torch')"),
        ("reproduce", "from lowtide.cli import main"),
        ("api", "from lowtide.reproduce.table import Row"),
        ("plan", "import lowtide.reproduce.chainer_graphs"),
        ("integrations", "from lowtide.cli import main"),
        ("api", "from lowtide.integrations.apply import Wish"),
        ("cli", "import lowtide.integrations.lightning"),
    ],
)
def test_the_law_can_be_broken(own, source):
    assert breaches(own, source)


def test_verifier_and_simulator_are_strangers():
    for one, other in (("verify", "simulate"), ("simulate", "verify")):
        assert f"lowtide.schedule.{other}" not in imports((ROOT / "schedule" / f"{one}.py").read_text())


def test_planners_do_not_know_each_other():
    for path in (ROOT / "plan" / "planners").glob("*.py"):
        assert not [name for name in imports(path.read_text()) if name.startswith("lowtide.plan.planners")], path.name


def test_searching_parts_do_not_know_planners():
    above = ("planners", "auto", "registry", "solve", "result", "files")
    for path in (ROOT / "plan" / "search").glob("*.py"):
        used = {".".join(name.split(".")[:3]) for name in imports(path.read_text())}
        assert not used & {f"lowtide.plan.{name}" for name in above}, path.name


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= 400
