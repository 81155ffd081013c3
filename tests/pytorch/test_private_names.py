"""The versions of PyTorch: one package uses private names, a table lists them, and a check finds those that moved."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from helpers.paths import ROOT
from helpers.private_names import Uses, is_private, sources, uses_by_file
from lowtide.errors import LowtideError, LowtideWarning, UnsupportedTorchError
from lowtide.pytorch import required
from lowtide.pytorch.required import NAMES, PrivateName

# The one package that may use private names.
PACKAGE = "pytorch/"
# The attributes of their objects are listed under them.
ATTRIBUTES_OF = (
    "torch.Tensor",
    "torch.UntypedStorage",
    "torch.nn.Module",
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.utils.prune.BasePruningMethod",
    "torch.autograd.graph.Node",
    "torch._ops.OpOverload",
    "torch._library.custom_ops.CustomOpDef",
    "torch.distributed.fsdp.FSDPModule",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
    "torch._functorch._aot_autograd.utils.make_boxed_func",
)


def attribute(name: PrivateName) -> str | None:
    """Return the last part of a name that stands for an attribute of objects."""
    parent, _, last = name.path.rpartition(".")
    return last if parent in ATTRIBUTES_OF else None


def not_listed(found: dict[str, Uses]) -> set[str]:
    """Return what is used and not in the table, each with its file."""
    paths = {each.path for each in NAMES}
    attributes = {attribute(each) for each in NAMES}
    # A module that is imported whole is known by what is used of it.
    paths |= {path.rpartition(".")[0] for path in paths}
    names = {f"{file}: {name}" for file, uses in found.items() for name in uses.names - paths}
    return names | {f"{file}: .{name}" for file, uses in found.items() for name in uses.attributes - attributes}


def uses(name: PrivateName, file: str) -> bool:
    """Return True if `file` uses `name`; what is public in private objects is looked for in its text."""
    last, found = name.path.rpartition(".")[2], used_here()[file]
    if not is_private(last) and name.path not in found.names:
        return re.search(rf"\b{last}\b", sources()[file]) is not None
    return name.path in found.names or attribute(name) in found.attributes


@cache
def used_here() -> dict[str, Uses]:
    """Return what the sources use, by file."""
    return uses_by_file(sources())


def test_what_is_used_is_in_the_table() -> None:
    assert not_listed(used_here()) == set()


def outside(found: dict[str, Uses]) -> dict[str, Uses]:
    """Return what files use that are not in the package for it."""
    return {file: uses for file, uses in found.items() if not file.startswith(PACKAGE)}


def test_private_names_are_used_in_one_package_alone() -> None:
    assert outside(used_here()) == {}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_what_is_in_the_table_is_used(name: PrivateName) -> None:
    assert name.purpose
    table = f"{PACKAGE}required.py"
    assert [file for file in used_here() if uses(name, file) and file != table]


def test_no_name_is_listed_twice() -> None:
    assert len({each.path for each in NAMES}) == len(NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\ntorch._C._new()", "torch._C._new"),
        ("import torch._dynamo.moved", "torch._dynamo.moved"),
        ("from torch._lazy import config", "torch._lazy.config"),
        ("def late():\n    from torch._guards import Guard", "torch._guards.Guard"),
        ("from torch.fx.graph import _New as Known", "torch.fx.graph._New"),
        ("from torch.utils import _pytree as tree\ntree.tree_new(1)", "torch.utils._pytree.tree_new"),
        ("import torch as t\naten = t.ops.aten\nx = aten._new.default", "torch.ops.aten._new"),
        ("import torch\nx: 'int' = 1\nwith torch._dynamo.config.patch(new=1): pass", "torch._dynamo.config.new"),
        ("import torch\ntorch._dynamo.config.patch({'new': 1})", "torch._dynamo.config.new"),
        ("import torch\ntorch._dynamo.config.patch('new', 1)", "torch._dynamo.config.new"),
        ("from torch._functorch import config as c\nc.patch(new=True)", "torch._functorch.config.new"),
        ("import torch\ntorch._dynamo.config.new = True", "torch._dynamo.config.new"),
        ("from torch import nn\ndef f(module): return module._new", ".new"),
        ("import torch\ndef f(x): return getattr(x.grad_fn, '_new', None)", ".new"),
    ],
)
def test_the_search_finds(text: str, expected: str) -> None:
    used = uses_by_file({"some.py": text})
    assert f"some.py: {'._new' if expected == '.new' else expected}" in not_listed(used)
    assert outside(used) == used


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos._exit(1)",
        "import torch\nimport sys\nsys._getframe()",
        "import torch\nclass Own:\n    def f(self): return self._own",
        "import torch\nclass Own:\n    def __init__(self): self._own = 1\n    def f(self, other): return other._own",
        "import torch\ntorch.nn.Module.__init__",
        "from torch import nn\nstate = object()\nstate._replace()",
    ],
)
def test_the_search_leaves_alone(text: str) -> None:
    assert not_listed(uses_by_file({"some.py": text})) == set()


def test_nothing_is_missing_here() -> None:
    assert required.missing_names(NAMES) == []


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Let the checks run again, and once more afterwards."""
    checks = (required.check_pytorch, required.check_compiler)
    for check in checks:
        check.cache_clear()
    yield
    for check in checks:
        check.cache_clear()


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("holder", "name", "path"),
    [
        (torch._C, "_will_engine_execute_node", "torch._C._will_engine_execute_node"),
        (torch.fx.graph, "_BoxedCodeGen", "torch.fx.graph._BoxedCodeGen"),
        (torch.nn.Module, "_call_impl", "torch.nn.Module._call_impl"),
        (torch.utils._pytree, "tree_leaves", "torch.utils._pytree.tree_leaves"),
    ],
)
def test_a_name_that_moved_is_named(monkeypatch: pytest.MonkeyPatch, holder: object, name: str, path: str) -> None:
    set_version(monkeypatch, "2.17.1+cpu")
    monkeypatch.delattr(holder, name)
    with pytest.raises(UnsupportedTorchError) as caught:
        required.check_pytorch()
    message = str(caught.value)
    assert isinstance(caught.value, LowtideError)
    assert isinstance(caught.value, ImportError)
    assert re.search(r"PyTorch 2\.17\.1\+cpu does not have", message)
    assert re.findall(r"^  (\S+) \(", message, re.MULTILINE) == [path]
    assert required.SUPPORTED in message
    assert f"pip install '{required.SUPPORTED}'" in message


@pytest.mark.usefixtures("unchecked")
def test_names_of_the_compiler_that_moved_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "counters")
    required.check_pytorch()
    with pytest.raises(UnsupportedTorchError, match=r"torch\._dynamo\.utils\.counters .*graph breaks"):
        required.check_compiler()


@pytest.mark.usefixtures("unchecked")
def test_one_error_has_all_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils

    monkeypatch.delattr(torch._dynamo.utils, "counters")
    monkeypatch.delattr(torch.nn.Module, "_call_impl")
    monkeypatch.delattr(torch._C, "_DisableAutocast")
    with pytest.raises(UnsupportedTorchError) as caught:
        required.check_pytorch()
    for path in ("torch._dynamo.utils.counters", "torch.nn.Module._call_impl", "torch._C._DisableAutocast"):
        assert f"  {path} (" in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_an_option_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PrivateName("torch._dynamo.config.no_such_option", "nothing")
    monkeypatch.setattr(required, "NAMES", (*NAMES, gone))
    with pytest.raises(UnsupportedTorchError, match="no_such_option"):
        required.check_compiler()


@pytest.mark.parametrize(
    "path",
    [
        "torch._no_such_module.name",
        "torch._dynamo.no_such_module.name",
        "torch.nn.Module._no_such_attribute",
        "torch._ops.OpOverload._no_such_attribute",
        "torch.ops.aten._no_such_op",
        "torch._functorch.config.no_such_option",
        "torch.Tensor._no_such_attribute",
        "torch.autograd.graph._engine_run_backward.no_such_argument",
    ],
)
def test_what_does_not_exist_is_missing(path: str) -> None:
    name = PrivateName(path, "nothing")
    assert required.missing_names([name]) == [name]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("version", ["2.13.0", "2.14.1+cu130", "2.15.0a0+git123"])
def test_a_supported_version_with_a_name_missing_asks_for_a_new_installation(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    set_version(monkeypatch, version)
    monkeypatch.delattr(torch._C, "_DisableAutocast")
    with pytest.raises(UnsupportedTorchError, match=rf"--force-reinstall 'torch=={re.escape(version)}'"):
        required.check_pytorch()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("version", ["2.16.0", "3.0.0+cpu", "2.12.1", "2.16.0.dev20270101"])
def test_another_version_that_has_everything_warns_once(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    set_version(monkeypatch, version)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        required.check_compiler()
        required.check_pytorch()
        required.check_compiler()
    told = [str(each.message) for each in seen if each.category is LowtideWarning]
    assert len(told) == 1
    assert version in told[0]
    assert required.SUPPORTED in told[0]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.15.0+cu132", "2.15.1"])
def test_supported_versions_say_nothing(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    set_version(monkeypatch, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        required.check_compiler()


ENTRY_POINTS = [
    "import lowtide; lowtide.measure_peak",
    "import lowtide; lowtide.chain",
    "import lowtide.blocks.profile.chain_profile",
    "import lowtide.blocks.block.block_graph",
    "import lowtide.costs.device_table",
    "import lowtide.lower.execute",
    "import lowtide.capture.build_program",
    "import lowtide.runtime.model_plans",
    "import torch, lowtide; lowtide.wrap(torch.nn.Linear(1, 1), budget='50%')",
    "import torch, lowtide; lowtide.plan(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), budget='50%')",
    "from lowtide.runtime.backend import lowtide_backend",
]


def missing_at(codes: list[str], gone: str) -> list[int]:
    """Return how many missing names the error of each of `codes` lists, in one new process without these names."""
    script = f"""
import torch, torch._dynamo.backends.common, torch._dynamo.exc, torch._dynamo.utils
from torch._functorch._aot_autograd import descriptors
from torch._subclasses import fake_tensor
del {gone}
from lowtide.errors import UnsupportedTorchError
for code in {codes!r}:
    try:
        exec(code)
    except UnsupportedTorchError as error:
        print(str(error).count("\\n  torch."))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


def test_names_are_checked_before_anything_is_imported() -> None:
    gone = (
        "torch._dynamo.exc.BackendCompilerFailed, torch._dynamo.backends.common.aot_autograd, "
        "torch._C._autograd._get_current_graph_task_keep_graph, torch._C._autograd._enable_profiler_legacy, "
        "torch.autograd.graph._engine_run_backward, torch.fx.graph._BoxedCodeGen, fake_tensor.FakeTensorMode, "
        "descriptors.InputMutationAOTOutput, torch._dynamo.exc.Unsupported, fake_tensor.DynamicOutputShapeException"
    )
    # An argument of one of them is listed as well.
    assert missing_at(ENTRY_POINTS, gone) == [11] * len(ENTRY_POINTS)


def test_names_of_the_compiler_are_checked_by_themselves() -> None:
    words = ("build_program", "runtime.", "wrap", "plan", "lower.execute")
    codes = [code for code in ENTRY_POINTS if any(word in code for word in words)]
    assert len(codes) == 6
    gone = "torch._dynamo.utils.counters, descriptors.InputMutationAOTOutput, torch._dynamo.exc.Unsupported"
    assert missing_at(codes, gone) == [3] * 6


def test_metadata_readme_and_check_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert required.SUPPORTED in project["dependencies"]
    readme = (ROOT / "README.md").read_text()
    pages = readme, (ROOT / "docs" / "troubleshooting.md").read_text()
    assert all(required.SUPPORTED in page for page in pages)
    for version in required.TESTED:
        assert version in readme
        assert f"tested with torch {version}" in project["keywords"]
    assert (ROOT / "constraints.txt").read_text().strip() == f"torch=={required.TESTED[0]}"


def test_tested_versions_are_supported() -> None:
    for version in required.TESTED:
        major, minor = map(int, version.split(".")[:2])
        assert required.OLDEST <= (major, minor) < required.BEYOND
