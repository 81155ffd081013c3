"""Bad input to commands, calls and plan files: lowtide's own error, the right exit code, and nothing touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import errors
from lowtide.cli import main
from lowtide.plan.core import plan_file as record
from lowtide.plan.core.result import Plan

MODELS = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def make():
    return net(), (torch.ones(6, 4),)


def frozen():
    return net().requires_grad_(False), (torch.ones(6, 4),)


def evaluated():
    return net().eval(), (torch.ones(6, 4),)


def wrong_shape():
    return net(), (torch.ones(6, 5),)


def number():
    return 3


def alone():
    return net()


def four():
    return net(), (), {}, None


def no_model():
    return 3, (torch.ones(6, 4),)


def a_class():
    return nn.Linear, (torch.ones(6, 4),)


def bare_tensor():
    return net(), torch.ones(6, 4)


def bad_kwargs():
    return net(), (torch.ones(6, 4),), [1]


def raises():
    raise RuntimeError("the dataset is missing")


def make_batch(size):
    return (torch.ones(size, 4),)


def bad_batch(size):
    return size


constant = 7
"""
BUDGET = ["--budget", "50%", "--costs", "analytic"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, plan files good and bad, and a file that must not be overwritten."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "models.py").write_text(MODELS)
    (folder / "broken.py").write_text("def make(:\n")
    (folder / "failing.py").write_text("raise ValueError('not today')\n")
    (folder / "needy.py").write_text("import a_module_that_is_not_there\n")
    (folder / "precious.json").write_text("do not overwrite")
    (folder / "precious.html").write_text("do not overwrite")
    (folder / "folder.json").mkdir()
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    good = folder / "good.json"
    lowtide.plan(net, (torch.ones(6, 4),), budget="100%", costs="analytic").save(good)
    text = good.read_text()
    for name, spoil in SPOILT.items():
        (folder / f"{name}.json").write_bytes(spoil(text))
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    shutil.copytree(template, here)
    monkeypatch.chdir(here)
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    return here


def edited(**changes: Any) -> Callable[[str], bytes]:
    return lambda text: json.dumps(json.loads(text) | changes).encode()


def nested(part: str, **changes: Any) -> Callable[[str], bytes]:
    def spoil(text: str) -> bytes:
        data = json.loads(text)
        data[part] |= changes
        return json.dumps(data).encode()

    return spoil


SPOILT: dict[str, Callable[[str], bytes]] = {
    "empty": lambda text: b"",
    "truncated": lambda text: text[: len(text) // 2].encode(),
    "almost": lambda text: text.rstrip()[:-1].encode(),
    "binary": lambda text: b"\x80\x04\x95\x1f\x00\x00\x00cos\nsystem\n",
    "list": lambda text: b"[]",
    "null": lambda text: b"null",
    "deep": lambda text: b"[" * 200_000,
    "other": lambda text: b'{"format": "pickle"}',
    "version": edited(version=99),
    "foreign": edited(fingerprint="0" * 32),
    "extra": edited(run="import os"),
    "peak": edited(peak_bytes=1),
    "negative": edited(budget_bytes=-5),
    "huge": edited(budget_bytes=10**30),
    "word": edited(seconds="soon"),
    "infinite": lambda text: text.replace('"seconds": ', '"seconds": Infinity, "x": ', 1).encode(),
    "outcome": edited(outcome="__import__('os')"),
    "account": edited(account={"parameter_bytes": 1}),
    "graph": edited(graph={}),
    "schedule": nested("schedule", forward=[10**9]),
    "twice": nested("schedule", backward=[0] * 50),
    "costs": nested("costs", seconds=[]),
}

# Arguments, exit code, and words of the message.
COMMANDS: list[tuple[list[str], int, str]] = [
    ([], 2, "required"),
    (["nothing"], 2, "invalid choice"),
    (["plan"], 2, "required"),
    (["plan", "models.py:make"], 1, "Say what memory there is"),
    (["plan", "models.py:make", "--budget", "12 parsecs"], 2, "unknown unit"),
    (["plan", "models.py:make", "--budget", "0"], 2, "not above zero"),
    (["plan", "models.py:make", "--budget", "150%"], 2, "outside"),
    (["plan", "models.py:make", "--budget", "auto"], 1, "needs an accelerator"),
    (["plan", "models.py:make", "--budget", "50%", "--memory", "1GiB"], 2, "not allowed with"),
    (["plan", "models.py:make", "--memory", "50%"], 2, "not a size"),
    (["plan", "models.py:make", "--memory", "1KiB"], 3, "Training does not fit"),
    (["plan", "models.py:make", "--device", "abacus"], 1, "There is no device"),
    (["plan", "models.py:make", "--device", "t4", "--optimizer", "lion"], 2, "lion"),
    (["plan", "models.py:make", *BUDGET, "--planner", "gredy"], 2, "Did you mean 'greedy'"),
    (["plan", "models.py:make", "--budget", "50%", "--costs", "guessed"], 1, "guessed"),
    (["plan", "models.py:make", "--budget", "100", "--costs", "analytic"], 3, "least budget known"),
    (["plan", "models.py:make", *BUDGET, "--unknown"], 2, "unrecognized"),
    (["plan", "models.py:make", *BUDGET, "--out", "precious.json"], 1, "--force"),
    (["plan", "models.py:make", *BUDGET, "--report", "precious.html"], 1, "--force"),
    (["plan", "models.py:make", *BUDGET, "--out", "folder.json", "--force"], 1, "is a folder"),
    (["plan", "models.py:make", *BUDGET, "--out", "nowhere/plan.json"], 1, "There is no folder"),
    (["plan", "models.py:make", *BUDGET, "--report", "plan.docx"], 1, "suffix"),
    (["plan", "models.py:make", *BUDGET, "--out", "a.html", "--report", "a.html"], 1, "two things"),
    (["plan", "models.py", *BUDGET], 1, "does not name a model"),
    (["plan", ":make", *BUDGET], 1, "does not name a model"),
    (["plan", "models.py:", *BUDGET], 1, "does not name a model"),
    (["plan", "models.py:missing", *BUDGET], 1, "has no 'missing'"),
    (["plan", "models.py:constant", *BUDGET], 1, "must be a function"),
    (["plan", "absent.py:make", *BUDGET], 1, "There is no file"),
    (["plan", "no_such_package.module:make", *BUDGET], 1, "There is no module"),
    (["plan", "broken.py:make", *BUDGET], 1, "SyntaxError"),
    (["plan", "failing.py:make", *BUDGET], 1, "not today"),
    (["plan", "needy.py:make", *BUDGET], 1, "a_module_that_is_not_there"),
    (["plan", "needy:make", *BUDGET], 1, "a_module_that_is_not_there"),
    (["plan", "models.py:number", *BUDGET], 1, "must return (model, args)"),
    (["plan", "models.py:alone", *BUDGET], 1, "must return (model, args)"),
    (["plan", "models.py:four", *BUDGET], 1, "returned 4 things"),
    (["plan", "models.py:no_model", *BUDGET], 1, "in the model's place"),
    (["plan", "models.py:a_class", *BUDGET], 1, "in the model's place"),
    (["plan", "models.py:bare_tensor", *BUDGET], 1, "args being a tuple"),
    (["plan", "models.py:bad_kwargs", *BUDGET], 1, "kwargs being a dictionary"),
    (["plan", "models.py:raises", *BUDGET], 1, "the dataset is missing"),
    (["plan", "models.py:frozen", *BUDGET], 1, "needs a gradient"),
    (["plan", "models.py:evaluated", *BUDGET], 1, "eval mode"),
    (["plan", "models.py:wrong_shape", *BUDGET], 1, "could not be captured"),
    (["plan", "good.json", "--budget", "50%"], 1, "cannot be used with the saved plan"),
    (["plan", "absent.json"], 1, "no such file"),
    (["plan", "folder.json"], 1, "not a regular file"),
    (["plan", "precious.json", "--out", "new.json"], 1, "not complete JSON"),
    (["compare", "models.py:make", "--budgets"], 2, "expected at least one"),
    (["compare", "good.json", "--budgets", "auto"], 1, "cannot be compared"),
    (["compare", "good.json", "--budgets", "x"], 2, "not understood"),
    (["compare", "good.json", "--planners", "nobody"], 2, "No planner is called"),
    (["compare", "good.json", "--costs", "analytic"], 1, "cannot be used with the saved plan"),
    (["compare", "good.json", "--out", "precious.json"], 1, "--force"),
    (["compare", "truncated.json"], 1, "truncated"),
    (["explain"], 2, "required"),
    (["explain", "truncated.json"], 1, "truncated"),
    (["explain", "good.json", "--out", "precious.json"], 1, "--force"),
    (["explain", "good.json", "--budget", "50%"], 1, "cannot be used with the saved plan"),
    (["max-batch", "models.py:make"], 2, "required"),
    (["max-batch", "models.py:make", "--memory", "1GiB"], 1, "--batch must name"),
    (["max-batch", "models.py:make", "--memory", "1GiB", "--device", "t4"], 2, "not allowed with"),
    (["max-batch", "models.py:make", "--memory", "1GiB", "--batch", "models.py:nothing"], 1, "has no 'nothing'"),
    (["max-batch", "models.py:make", "--memory", "1GiB", "--batch", "models.py:bad_batch"], 1, "returned a int"),
    (["max-batch", "models.py:make", "--memory", "100", "--batch", "models.py:make_batch"], 3, "batch of one"),
    (["max-batch", "models.py:make", "--memory", "1GiB", "--most", "0"], 2, "whole number"),
    (["bench", "models.py:make", "--steps", "none"], 2, "whole number"),
    (["bench", "models.py:make", "--meta"], 1, "no data to run on"),
    (["bench", "models.py:make", "--out", "precious.json"], 1, "--force"),
    (["cache", "--burn"], 2, "unrecognized"),
    (["completion", "tcsh"], 2, "invalid choice"),
    (["demo", "--steps", "many"], 2, "invalid"),
    (["demo", "--size", "enormous"], 2, "invalid choice"),
    (["reproduce", "newton"], 2, "invalid choice"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(("arguments", "code", "message"), COMMANDS, ids=[" ".join(case[0]) for case in COMMANDS])
def test_commands(
    arguments: list[str], code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(folder)
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    assert message in " ".join(captured.err.split())
    assert captured.err.splitlines()[-1].startswith("lowtide") or len(captured.err.splitlines()) > 1
    assert "%%" not in captured.err
    assert captured.out == ""
    assert contents(folder) == before


@pytest.mark.parametrize("name", sorted(SPOILT))
def test_plan_files(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / f"{name}.json"
    before = contents(folder)
    for use in (Plan.load, lambda file: lowtide.wrap(nn.Linear(4, 2), plan=file)):
        with pytest.raises(errors.PlanFileError, match="Cannot load the plan file"):
            use(path)
    for command in ("plan", "explain", "compare"):
        assert main([command, path.name]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"lowtide {command}: Cannot load the plan file")
        assert "Traceback" not in captured.err
        assert captured.out == ""
    assert contents(folder) == before


def test_enormous_plan_files_are_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(folder / "enormous.json", "wb") as file:
        file.truncate(record.MAX_FILE_BYTES + 1)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(errors.PlanFileError, match="at most"):
        Plan.load(folder / "enormous.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")
    with pytest.raises(errors.PlanFileError, match="not a regular file"):
        Plan.load(folder / "pipe.json")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


X = (torch.ones(6, 4),)
CALLS: list[tuple[Callable[[], object], type[errors.LowtideError], str]] = [
    (lambda: lowtide.plan(net(), X), errors.InvalidBudgetError, "No budget"),
    (lambda: lowtide.plan(net(), X, budget="50%", memory="1GiB"), errors.InvalidBudgetError, "give one"),
    (lambda: lowtide.plan(net(), X, memory="1GiB", device="t4"), errors.InvalidBudgetError, "one of them"),
    (lambda: lowtide.plan(net(), X, device="abacus"), errors.InvalidOptionError, "no device"),
    (lambda: lowtide.plan(net(), X, memory="1GiB", optimizer="lion"), errors.InvalidOptionError, "lion"),
    (lambda: lowtide.plan(net(), X, memory=-1), errors.InvalidBudgetError, "not above zero"),
    (lambda: lowtide.plan(net(), X[0], budget="50%"), errors.InvalidInputError, "args is a Tensor"),
    (lambda: lowtide.plan(net(), X, [1], budget="50%"), errors.InvalidInputError, "kwargs is a list"),
    (lambda: lowtide.plan(net(), X, memory="1GiB", costs=3), errors.InvalidOptionError, "costs=3"),
    (lambda: lowtide.compare(net(), X, budgets="50%"), errors.InvalidBudgetError, "list of budgets"),
    (lambda: lowtide.compare(net(), X, planners=["nobody"]), errors.UnknownPlannerError, "nobody"),
    (lambda: lowtide.compare(nn.Linear, X), errors.InvalidModelError, "compare takes"),
    (lambda: lowtide.explain("model"), errors.InvalidModelError, "explain takes"),
    (lambda: lowtide.explain(net(), X, budget="none"), errors.InvalidBudgetError, "not understood"),
    (lambda: lowtide.explain(net(), X, planner="nobody"), errors.UnknownPlannerError, "nobody"),
    (lambda: lowtide.max_batch(net(), None, memory="1GiB"), errors.InvalidInputError, "make_batch is a NoneType"),
    (lambda: lowtide.max_batch(net(), lambda size: X, memory="60%"), errors.InvalidBudgetError, "not a size"),
    (lambda: lowtide.wrap(net(), plan="absent.json"), errors.PlanFileError, "no such file"),
    (lambda: lowtide.plans(net()), errors.InvalidModelError, "not wrapped"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS, ids=range(len(CALLS)))
def test_calls(call: Callable[[], object], error: type[errors.LowtideError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_there_are_many_cases() -> None:
    assert len(COMMANDS) + len(SPOILT) + len(CALLS) >= 60


def test_debug_shows_the_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "models.py:raises", *BUDGET, "--debug"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "RuntimeError: the dataset is missing" in error
    assert error.splitlines()[-1].startswith("lowtide plan: ")


def test_what_is_unexpected_is_a_sentence_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(Plan, "load", fail)
    assert main(["plan", "good.json"]) == 1
    error = capsys.readouterr().err
    assert "unexpected ZeroDivisionError" in error
    assert "Traceback" not in error
