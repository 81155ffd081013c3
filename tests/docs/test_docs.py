"""The Python in README.md and docs/ runs as printed, from top to bottom of each page."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import types
from pathlib import Path

import pytest

import lowtide
from helpers.paths import ROOT
from lowtide import errors
from lowtide.plan import registry

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "planners").glob("*.md"))]
# Drawn by `make curves` for all planners at once.
CURVES = ROOT / "docs" / "images" / "planners"
SNIPPET = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def snippets(page: Path) -> list[str]:
    return SNIPPET.findall(page.read_text())


def test_readme_has_python_to_run() -> None:
    assert snippets(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A module of its own, as if the page were a file: the compiler looks names up in it.
    module = types.ModuleType(f"page_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, snippet in enumerate(snippets(page), 1):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), vars(module))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_to_files_resolve(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        path = page.parent / target
        if path.resolve().parent == CURVES and not any(CURVES.glob("*.png")):
            continue
        assert path.exists(), f"{page.name} links to {target}, which does not exist"


def test_troubleshooting_has_every_error_with_cause_and_remedy() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    tree = {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, Exception)}
    assert set(sections) == tree
    for name in tree - {"LowtideError", "LowtideWarning"}:
        assert "**Cause.**" in sections[name], name
        assert "**Remedy.**" in sections[name], name


def test_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = {line.split(".")[-1] for line in page.splitlines() if line.startswith("::: ")}
    assert set(lowtide.__all__) - shown == set()


def test_every_planner_is_in_the_tables() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "planners" / "index.md"):
        named = set(re.findall(r"`(\w+)`", page.read_text()))
        assert set(registry.names()) <= named, page


def test_planner_example_is_twenty_lines() -> None:
    planner = next(each for each in snippets(ROOT / "docs" / "custom-planner.md") if "class DropLargest" in each)
    code = planner[planner.index("@dataclass") :].strip().splitlines()
    assert len(code) <= 20


@pytest.mark.slow
def test_documentation_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings")
    if not any(CURVES.glob("*.png")):
        pytest.skip("the pictures of the planners are missing: `make curves` draws them")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "lowtide.wrap" in (tmp_path / "quickstart" / "index.html").read_text()


def commands_in_readme() -> list[list[str]]:
    """Return the two commands that lead from a clone to a report."""
    block = re.search(r"<!-- two commands -->\n+```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md must show the two commands"
    return [shlex.split(line, comments=True) for line in block[1].splitlines() if line.strip()]


MODEL = """
import torch
from torch import nn

def make():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)])
    return (lambda x: model(x).square().mean()), (torch.randn(512, 64),)
"""


@pytest.mark.slow
def test_two_commands_lead_from_a_clone_to_a_report_of_an_own_model(tmp_path: Path) -> None:
    """Do what README.md says, in a new environment that sees the installed libraries but not this checkout."""
    install, plan = commands_in_readme()
    assert install[:3] == ["pip", "install", "."]
    assert plan[0] == "lowtide"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    libraries = sysconfig.get_path("purelib")
    python = tmp_path / "env" / "bin" / "python"
    offline = ["--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", *offline, *install[2:]],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": libraries},
        check=True,
    )
    (tmp_path / "my_model.py").write_text(MODEL)
    done = subprocess.run(
        [str(tmp_path / "env" / "bin" / "lowtide"), *plan[1:]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": libraries},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "plan.html" in done.stdout.splitlines()[-1]
    page = (tmp_path / "plan.html").read_text()
    assert "echarts" in page
    assert "my_model.py" in page


PATH = re.compile(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`")


@pytest.mark.parametrize("page", ["docs/glossary.md", "docs/architecture.md"])
def test_files_named_for_contributors_are_there(page: str) -> None:
    named = PATH.findall((ROOT / page).read_text())
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / "src" / "lowtide" / path).exists()]


def test_the_version_is_one() -> None:
    assert lowtide.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
