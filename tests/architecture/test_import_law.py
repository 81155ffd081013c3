"""The import law: parts of every package import each other one way only, and along the order written down here."""

import textwrap
from pathlib import Path

import pytest

from lowtide.testing.import_graph import (
    ROOT,
    cycle,
    edges,
    imported_names,
    module_imports,
    modules,
    only_importers,
    packages,
    without_shortcuts,
)

# From the bottom up: a part may import those before it.
LAYERS = {
    "lowtide": (
        *("errors", "environment", "units", "files", "text_table", "progress"),
        *("graph", "schedule", "plan", "step", "analysis", "report"),
        *("pytorch", "device", "measure", "capture", "costs", "lower", "settings", "inductor", "distributed", "blocks"),
        "runtime",
        *("api", "chains", "integrations", "reproduce", "testing", "cli", "__main__"),
    ),
    "lowtide.plan": (
        *("core", "diagnose", "search", "bounds", "orders", "planners", "auto", "portfolio", "registry"),
        *("solve", "plan_cache", "menu", "background"),
    ),
    "lowtide.blocks": (
        *(
            "policy",
            "refusals",
            "python_state",
            "block",
            "profile",
            "execute",
            "chain",
            "unroll",
            "layers",
            "step",
            "opaque",
        ),
    ),
}
TORCH_FREE = LAYERS["lowtide"][: LAYERS["lowtide"].index("pytorch")]
# What only the parts at the top may use: integrations need libraries that users may not have.
RESERVED = {
    "api": {"integrations", "reproduce", "cli"},
    "reproduce": {"cli"},
    "integrations": set(),
    "testing": {"cli"},
}
IMPORTS = module_imports()
MOST_WITH_ONE_IMPORTER = 70


def breaches(package, parts):
    """Return the imports between `parts` that break the law of `package`."""
    order = LAYERS[package]
    unknown = [(part, "is not in LAYERS") for part in parts if part not in order]
    against = [
        (part, other)
        for part, others in parts.items()
        for other in others
        if part in order and other in order and order.index(other) >= order.index(part)
    ]
    reserved = [
        (part, other)
        for part, others in parts.items()
        for other in others
        if package == "lowtide" and part not in RESERVED.get(other, {part})
    ]
    return unknown + against + reserved


@pytest.mark.parametrize("package", packages(IMPORTS))
def test_parts_of_a_package_do_not_import_each_other_both_ways(package):
    assert not cycle(edges(package, IMPORTS))


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_down(package):
    assert not breaches(package, edges(package, IMPORTS))


@pytest.mark.parametrize("package", LAYERS)
def test_the_layers_are_those_there_are(package):
    assert set(LAYERS[package]) == set(edges(package, IMPORTS))


def test_what_plans_and_reports_does_not_need_pytorch():
    used = {
        name: imported_names(path.read_text())
        for name, path in modules().items()
        if name.split(".")[1:2] and name.split(".")[1] in TORCH_FREE
    }
    assert not {
        name: names for name, names in used.items() if any(n.split(".")[0] in ("torch", "torchvision") for n in names)
    }


def test_verifier_and_simulator_are_strangers():
    for one, other in (("verify", "simulate"), ("simulate", "verify")):
        assert f"lowtide.schedule.{other}" not in IMPORTS[f"lowtide.schedule.{one}"]


def test_planners_do_not_know_each_other():
    own = {name for name in IMPORTS if name.rpartition(".")[0] == "lowtide.plan.planners"}
    own -= set(packages(IMPORTS))
    assert len(own) > 10
    for name in own:
        assert not own & IMPORTS[name], name


def test_few_modules_serve_a_single_other():
    assert len(only_importers(IMPORTS)) <= MOST_WITH_ONE_IMPORTER


def write_package(folder: Path, files: dict[str, str]) -> Path:
    root = folder / "lowtide"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


@pytest.mark.parametrize(
    "text",
    [
        "from lowtide.one import first",
        "import lowtide.one.first",
        "def late():\n    from lowtide.one import first",
        "import importlib\nimportlib.import_module('lowtide.one.first')",
        "from lowtide.one.first import name",
    ],
)
def test_a_ring_is_found(tmp_path, text):
    root = write_package(
        tmp_path,
        {
            "__init__.py": "",
            "one/__init__.py": "",
            "one/first.py": "from lowtide.two import second",
            "two/__init__.py": "",
            "two/second.py": text,
        },
    )
    found = edges("lowtide", module_imports(root))
    assert found["one"] == {"two"}
    assert set(cycle(found)) == {"one", "two"}


@pytest.mark.parametrize(
    ("package", "parts"),
    [
        ("lowtide", {"graph": {"schedule"}}),
        ("lowtide", {"plan": {"report"}}),
        ("lowtide", {"plan": {"capture"}}),
        ("lowtide", {"lower": {"settings"}}),
        ("lowtide", {"blocks": {"runtime"}}),
        ("lowtide", {"runtime": {"api"}}),
        ("lowtide", {"chains": {"api"}}),
        ("lowtide", {"cli": {"integrations"}}),
        ("lowtide", {"new_part": set()}),
        ("lowtide.plan", {"core": {"planners"}}),
        ("lowtide.plan", {"orders": {"planners"}}),
        ("lowtide.plan", {"search": {"bounds"}}),
        ("lowtide.plan", {"auto": {"registry"}}),
        ("lowtide.blocks", {"profile": {"chain"}}),
    ],
)
def test_the_law_can_be_broken(package, parts):
    assert breaches(package, parts)


def test_relative_imports_are_refused():
    with pytest.raises(ValueError, match="full name"):
        imported_names("from . import ir")


def test_shortcuts_are_left_out_of_the_picture():
    assert without_shortcuts({"c": {"b", "a"}, "b": {"a"}, "a": set()}) == {"c": {"b"}, "b": {"a"}, "a": set()}


def test_files_are_not_too_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert not {name: length for name, length in lengths.items() if length > 500}
