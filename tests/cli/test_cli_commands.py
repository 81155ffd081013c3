"""The commands on a model of one's own: words for people, JSON for machines, files that are not overwritten."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from lowtide.cli import COMMANDS, completion, main
from lowtide.plan.core.result import Plan

MODEL = '''
"""A model of one's own."""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(32, 32), nn.GELU())])

    def forward(self, x, scale=1.0):
        return (scale * self.layers(x)).square().mean()


def make():
    return Net(), (torch.randn(128, 32),)


def make_with_keywords():
    return Net(), (torch.randn(128, 32),), {"scale": 2.0}


def make_with_batches():
    return Net(), make_batch


def make_batch(size):
    return (torch.randn(size, 32),)
'''
QUICK = ["--planner", "greedy", "--costs", "analytic"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    here = tmp_path / "here"
    here.mkdir()
    (here / "my_model.py").write_text(MODEL)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    yield here
    sys.modules.pop("my_model", None)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def test_plan_prints_and_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "my_model.py:make", "--budget", "60%", *QUICK, "--out", "plan.json", "--report", "plan.html"]
    text = printed(capsys, *arguments)
    assert text.startswith("Plan by ")
    assert text.splitlines()[-1] == "Wrote plan.json, plan.html"
    plan = Plan.load("plan.json")
    assert plan.peak_bytes <= plan.budget_bytes
    page = Path("plan.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert main(arguments) == 1
    assert "--force" in capsys.readouterr().err
    assert printed(capsys, *arguments, "--force")


def test_plan_as_json_leaves_stdout_to_the_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "my_model:make_with_keywords", "--budget", "60%", *QUICK, "--json", "--out", "plan.json"])
    captured = capsys.readouterr()
    assert code == 0
    data = json.loads(captured.out)
    plan = Plan.load("plan.json")
    assert data["peak_bytes"] == plan.peak_bytes
    assert data["written"] == ["plan.json"]
    assert sum(row["recomputed"] for row in data["modules"]) == plan.num_recomputed
    assert captured.err.splitlines()[-1] == "Wrote plan.json"


def test_plan_says_what_the_planner_did_and_why(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "my_model.py:make", "--budget", "70%", "--costs", "analytic", "--out", "plan.json"]
    assert main([*arguments, "-v"]) == 0
    words = capsys.readouterr()
    assert "asks      keep_all, drop_cheap" in words.err
    assert "asks" not in words.out
    assert main(["plan", "plan.json", "--verbose"]) == 0
    assert "of the proved bound" in capsys.readouterr().err


def test_plan_for_a_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", "my_model.py:make", "--meta", "--device", "a100-80gb", "--optimizer", "sgd")
    assert "peak of training" in text
    assert "analytic a100-80gb" in text


def test_compare_and_explain_of_a_model_and_of_its_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "plan", "my_model.py:make", "--budget", "100%", *QUICK, "--out", "plan.json")
    some = ["--budgets", "80%", "60%", "--planners", "greedy", "chen_sqrt"]
    of_model = json.loads(printed(capsys, "compare", "my_model.py:make", *some, "--costs", "analytic", "--json"))
    of_plan = json.loads(printed(capsys, "compare", "plan.json", *some, "--json"))
    for data in (of_model, of_plan):
        for row in data["rows"]:
            row.pop("seconds")
    assert of_model == of_plan
    text = printed(capsys, "compare", "plan.json", *some, "--out", "comparison.json")
    assert text.splitlines()[-1] == "Wrote comparison.json"
    assert len(json.loads(Path("comparison.json").read_text())["rows"]) == 4
    of_model = json.loads(printed(capsys, "explain", "my_model.py:make", *QUICK, "--no-less", "--json"))
    of_plan = json.loads(printed(capsys, "explain", "plan.json", "--no-less", "--json"))
    assert of_model["tensors"] == of_plan["tensors"]
    assert "What less memory costs" in printed(capsys, "explain", "plan.json", "--planner", "greedy")


def test_max_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ["--memory", "300KiB", "--optimizer", "sgd", "--planner", "hong_linear", "--costs", "analytic"]
    one = json.loads(printed(capsys, "max-batch", "my_model.py:make_with_batches", *memory, "--json"))
    other = json.loads(
        printed(capsys, "max-batch", "my_model.py:make", "--batch", "my_model:make_batch", *memory, "--json")
    )
    assert one == other
    assert one["batch"] > 1
    assert {trial["batch"]: trial["fits"] for trial in one["trials"]}[one["batch"] + 1] is False
    text = printed(capsys, "max-batch", "my_model.py:make_with_batches", *memory, "--most", "4", "--out", "plan.json")
    assert "Largest batch: 4 (larger ones were not tried)" in text
    assert Plan.load("plan.json").account is not None


def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "my_model.py:make", "--budgets", "60%", "--steps", "1", *QUICK, "--out", "bench.json"]
    text = printed(capsys, *arguments)
    assert text.splitlines()[-1] == "Wrote bench.json"
    (row,) = json.loads(Path("bench.json").read_text())["rows"]
    assert row["equal"]
    assert row["within"]
    assert row["budget_bytes"] < row["plain_peak_bytes"]
    assert abs(row["measured_peak_bytes"] - row["predicted_peak_bytes"]) <= 1024


def test_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = json.loads(printed(capsys, "cache", "--json"))
    assert [kind["files"] for kind in empty["kinds"].values()] == [0, 0]
    printed(capsys, "plan", "my_model.py:make", "--budget", "60%", "--planner", "greedy")
    plans = Path(os.environ["LOWTIDE_CACHE_DIR"]) / "plans"
    plans.mkdir(exist_ok=True)
    (plans / "plan-0.json").write_text("{}")
    (plans / "precious.txt").write_text("not a plan")
    text = printed(capsys, "cache")
    assert "op costs" in text
    assert "plans" in text
    assert "Deleted" in printed(capsys, "cache", "--clear")
    assert json.loads(printed(capsys, "cache", "--json")) == empty
    assert (plans / "precious.txt").exists()


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, command, "--help")
    assert "--debug" in text
    assert f"lowtide {command}" in text.split("examples:")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(printed(capsys, "completion", shell))
    for command, options in completion.commands().items():
        assert command in script.read_text()
        assert "--help" in options or "--debug" in options
    if shutil.which(shell):
        subprocess.run([shell, "-n", script], check=True)


def completed(script: Path, *words: str) -> list[str]:
    quoted = " ".join(f"'{word}'" for word in words)
    line = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}"
    code = f"source {script}; {line}; _lowtide; printf '%s\\n' ${{COMPREPLY[@]}}"
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(printed(capsys, "completion", "bash"))
    assert completed(script, "lowtide", "co") == ["compare", "completion"]
    assert completed(script, "lowtide", "plan", "--planner", "gre") == ["greedy"]
    assert completed(script, "lowtide", "plan", "--rep") == ["--report"]
    assert completed(script, "lowtide", "plan", "--device", "a100") == ["a100-40gb", "a100-80gb"]
    assert completed(script, "lowtide", "completion", "b") == ["bash"]
    (tmp_path / "my_model.py").write_text("")
    assert completed(script, "lowtide", "plan", f"{tmp_path}/my_") == [f"{tmp_path}/my_model.py"]


def test_progress_is_shown_to_people_on_stderr(folder: Path) -> None:
    main(["plan", "my_model.py:make", "--budget", "100%", *QUICK, "--out", "plan.json"])
    # The line appears after a second, or here at once.
    code = (
        "from lowtide import progress\nprogress._SHOWN_AFTER_SECONDS = 0.0\n"
        "from lowtide.plan.planners import greedy\nplain = greedy.Greedy.propose\n"
        "def propose(self, problem, progress=None):\n    progress('thinking')\n"
        "    return plain(self, problem, progress)\n"
        "greedy.Greedy.propose = propose\n"
        "from lowtide.cli import main\n"
        "main(['compare', 'plan.json', '--budgets', '80%', '--planners', 'greedy'])"
    )
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, check=False)
    os.close(theirs)
    seen = os.read(ours, 10_000).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "lowtide: thinking" in seen
    assert b"thinking" not in done.stdout


def test_from_clone_to_a_report_of_ones_own_model_with_two_commands(folder: Path, tmp_path: Path) -> None:
    clone, site = tmp_path / "clone", tmp_path / "site"
    clone.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, clone / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, clone / name)
    # What it depends on is installed already, and the tests must not need the network.
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    install += ["--disable-pip-version-check", "--target", str(site), str(clone)]
    plan = ["-m", "lowtide", "plan", "my_model.py:make", "--budget", "50%", "--report", "plan.html"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    for command in (install, plan):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Wrote plan.html"
    page = (folder / "plan.html").read_text()
    assert "my_model.py" in page
    assert "layers.0" in page
    assert 'src="http' not in page
    assert 'href="http' not in page
