"""The command line: the demo runs, and bad arguments end in a sentence and exit code 2."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.cli import demo, main
from lowtide.plan.planners.greedy import Greedy
from lowtide.report.image_file import Course, Panel
from lowtide.testing.models import SMALL, gpt


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the demo plan quickly, without measuring."""
    monkeypatch.setattr(lowtide, "wrap", partial(lowtide.wrap, planner=Greedy(effort=0.02), costs="analytic"))


@pytest.mark.usefixtures("quick")
def test_demo_shows_equal_results_and_writes_picture_and_plans(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["demo", "--size", "tiny", "--steps", "3", "--out", str(tmp_path)]
    code = main(arguments)
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "DIFFERENT" not in printed
    assert printed.count("equal to the last bit") == 2
    for name in ("gpt.plan.json", "unet.plan.json", "memory.png", "memory.svg"):
        assert (tmp_path / name).stat().st_size > 0
    assert main(arguments) == 1
    assert "--force" in capsys.readouterr().err


def test_demo_notices_a_difference_in_the_last_bit() -> None:
    model, args, kwargs = gpt(**SMALL["gpt"])
    same, other = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        weight = other.norm.weight
        weight[0] = torch.nextafter(weight[0], torch.tensor(2.0))
    runners = [demo.Runner.make(each, (args, kwargs)) for each in (model, same, copy.deepcopy(model), other)]
    assert demo.train_both(*runners[:2], steps=2)[0]
    assert not demo.train_both(*runners[2:], steps=2)[0]


def test_demo_fails_when_results_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = Panel("nothing", [Course("plain", [(0.0, 1), (1.0, 2)])])
    monkeypatch.setattr(demo, "compare", lambda name, options: (panel, name == "gpt"))
    assert main(["demo", "--out", str(tmp_path)]) == 1


@pytest.mark.usefixtures("quick")
def test_infeasible_budget_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["demo", "--size", "tiny", "--budget", "1KiB", "--out", str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "lowtide demo:" in error


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["demo", "--budget", "12 parsecs"],
        ["demo", "--budget", "150%"],
        ["demo", "--steps", "1"],
        ["demo", "--steps", "many"],
        ["demo", "--size", "enormous"],
    ],
)
def test_bad_arguments_give_exit_code_2_and_no_traceback(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "usage:" in error


def test_help_is_not_an_error(capsys: pytest.CaptureFixture) -> None:
    assert main(["demo", "--help"]) == 0
    assert "--budget" in capsys.readouterr().out


def test_module_runs_as_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lowtide", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "demo" in done.stdout
