"""The tests themselves: folders mirror the source, files do not import each other, missing data is not overlooked."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers import paths
from helpers.paths import ROOT, TESTS, published_graph

# What is tested here is not in one folder of the source.
OTHERS = {"architecture", "benchmarks", "docs", "helpers", "promises"}


def imported(text: str) -> set[str]:
    """Return the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_folders_mirror_the_source() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    folders = {folder for folder in folders if not OTHERS & set(folder.parts)}
    assert [str(folder) for folder in folders if not (ROOT / "src" / "lowtide" / folder).is_dir()] == []


def test_files_do_not_import_each_other() -> None:
    files = {path.stem: imported(path.read_text()) for path in TESTS.rglob("test_*.py")}
    assert {name: modules & set(files) for name, modules in files.items() if modules & set(files)} == {}


def test_an_import_would_be_seen() -> None:
    assert imported("def f():\n    from test_chain import x\nimport test_auto as a") == {"test_chain", "test_auto"}


def test_names_of_files_are_unique() -> None:
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_missing_graphs_skip_here_and_fail_under_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "GRAPHS", tmp_path)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="missing"):
        published_graph("kusumoto_unet.txt")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="missing"):
        published_graph("kusumoto_unet.txt")
    (tmp_path / "kusumoto_unet.txt").write_text("")
    assert published_graph("kusumoto_unet.txt") == tmp_path / "kusumoto_unet.txt"
