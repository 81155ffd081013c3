"""The proof beside the search: the same in a process of its own, and what happens when that is lost."""

import os
import select
import signal
import subprocess
import sys

import pytest

from lowtide.graph.costs import Costs
from lowtide.graph.samples import transformer
from lowtide.plan import registry
from lowtide.plan.bounds import prover as prover_module
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.bounds.moment_selection import MomentSelector
from lowtide.plan.bounds.prover import LostError, Prover, ProverProcess
from lowtide.plan.core.problem import Problem
from lowtide.plan.solve import solve
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

LIMITS = Limits(work=0.2, gap=1e-4)


@pytest.fixture(scope="module")
def problem():
    graph, costs = transformer(2)
    return Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 2)


def stages(prover, problem):
    """Return what a quick bound and two stages prove."""
    known = Schedule.keep_all(problem.graph)
    prover.set_problem(problem)
    return [prover.quick_bound(seconds=60.0)(), prover.advance(LIMITS, known)(), prover.advance(LIMITS, known)()]


def test_a_process_of_its_own_proves_the_same(problem):
    with Prover(own_process=False) as here, Prover(own_process=True) as there:
        assert there._process is not None
        process = there._process._child
        assert process.pid != os.getpid()
        expected = stages(here, problem)
        assert stages(there, problem) == expected
        assert expected[-1].bound > 0
        assert (there.rerun_ops, there.done) == (here.rerun_ops, here.done)
        assert there.suggested_schedule is not None
        verify(problem.graph, there.suggested_schedule)
        assert there._selector is None
        # Another problem, with less memory, starts over.
        tighter = Problem(problem.graph, problem.costs, problem.budget_bytes * 9 // 10)
        assert stages(there, tighter)[-1].bound > expected[-1].bound
        there.set_problem(None)
        assert (there.problem, there.proof.bound) == (None, 0.0)
        assert (there.rerun_ops, there.suggested_schedule) == (frozenset(), None)
    assert process.returncode is not None


def test_a_lost_process_is_replaced_and_nothing_proved_is_lost(problem):
    with Prover(own_process=True) as prover:
        before = stages(prover, problem)[-1]
        prover._process._child.kill()
        prover._process._child.wait()
        after = prover.advance(LIMITS, Schedule.keep_all(problem.graph))()
        assert after.bound >= before.bound
        assert prover._process is None
        assert isinstance(prover._selector, MomentSelector)


def test_without_an_interpreter_there_is_no_process(problem, monkeypatch, tmp_path):
    for executable in (None, "", str(tmp_path / "python-missing"), str(tmp_path / "app")):
        monkeypatch.setattr(sys, "executable", executable)
        assert ProverProcess.start() is None
    with Prover(own_process=True) as prover:
        assert stages(prover, problem)[-1].bound > 0


def test_a_frozen_program_and_the_process_itself_start_none(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert ProverProcess.start() is None
    monkeypatch.delattr(sys, "frozen")
    monkeypatch.setenv("LOWTIDE_PROVER_PROCESS", "1")
    assert ProverProcess.start() is None


def pretend(monkeypatch, tmp_path, script):
    """Let `script` stand for the interpreter."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize("script", ["exit 3", "echo hello", "printf 'Building cache'"])
def test_what_is_not_lowtide_is_lost_at_the_first_question(problem, monkeypatch, tmp_path, script):
    pretend(monkeypatch, tmp_path, script)
    started = ProverProcess.start()
    assert started is not None
    with pytest.raises(LostError):
        started.ask(problem, "quick_bound", seconds=1.0)
    started.close()
    with Prover(own_process=True) as prover:
        assert stages(prover, problem)[-1].bound > 0


def test_what_never_gets_ready_is_lost(problem, monkeypatch, tmp_path):
    monkeypatch.setattr(prover_module, "_READY_SECONDS", 0.3)
    pretend(monkeypatch, tmp_path, "exec sleep 600")
    with Prover(own_process=True) as prover:
        assert stages(prover, problem)[-1].bound > 0
        assert prover._process is None


def test_a_time_limit_holds_whoever_is_asked(problem, monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, "exec sleep 600")
    with Prover(own_process=True) as prover:
        prover.set_problem(problem)
        assert prover.quick_bound(seconds=0.1)().bound == 0.0
        assert prover.done
        # Who asks again all the same is told so at once.
        prover.set_problem(problem)
        assert prover.advance(LIMITS, None)().bound == 0.0
        assert prover.done
    assert prover._selector is None


def test_what_an_interpreter_prints_while_it_starts_is_not_an_answer(problem, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('Building cache\\ncode'); print('B' * 100)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    started = ProverProcess.start()
    proof, done = started.ask(problem, "quick_bound", seconds=60.0)
    started.close()
    assert proof.bound > 0
    assert not done


def test_files_beside_the_caller_are_not_imported(problem, monkeypatch, tmp_path):
    for name in ("pickle", "queue", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", tmp_path, str(tmp_path), *sys.path])
    started = ProverProcess.start()
    proof, _ = started.ask(problem, "quick_bound", seconds=60.0)
    started.close()
    assert proof.bound > 0


def test_what_cannot_be_sent_is_proved_here(problem):
    class OwnCosts(Costs):
        """Defined in a function, so it has no name elsewhere."""

    costs = OwnCosts(**{field: getattr(problem.costs, field) for field in problem.costs.__dataclass_fields__})
    own = Problem(problem.graph, costs, problem.budget_bytes)
    with Prover(own_process=True) as prover:
        assert stages(prover, own)[-1].bound > 0
        assert prover._process is None


def test_an_error_in_the_process_is_raised_by_the_thread(problem):
    with Prover(own_process=True) as prover:
        prover.set_problem(problem)
        with pytest.raises(TypeError, match="argument"):
            prover._begin("quick_bound", float("inf"), {"guess": True})()
        assert prover._process is None


def interrupted(prover, problem):
    """Begin what takes very long, and be interrupted."""
    with prover:
        prover.set_problem(problem)
        prover.advance(Limits(work=1e6), Schedule.keep_all(problem.graph))
        raise KeyboardInterrupt


def test_leaving_does_not_wait_for_the_proof():
    graph, costs = transformer(12)
    large = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 3)
    prover = Prover(own_process=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(prover, large)
    assert prover._process._child.returncode is not None
    assert prover._selector is None


def test_the_process_runs_none_of_the_callers_script(tmp_path):
    """A script without a guarded main part plans once, and its own output is all there is."""
    script = tmp_path / "train.py"
    script.write_text(
        "from lowtide.graph.samples import transformer\n"
        "from lowtide.plan.core.problem import Problem\n"
        "from lowtide.plan.solve import solve\n"
        "print('begin')\n"
        "graph, costs = transformer(5)\n"
        "problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 2)\n"
        "plan = solve(problem, 'auto')\n"
        "print(len(graph.ops), plan.fits, plan.bound > 0)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["begin", "193 True True"]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system does not tell when another's process ends")
@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_with_its_caller(busy):
    """One whose caller is killed reads the end of its questions, also while it works."""
    asking = "threading.Thread(target=ask).start(); " if busy else ""
    code = f"""
import threading, time
from lowtide.graph.samples import transformer
from lowtide.plan.bounds.prover import ProverProcess
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.core.problem import Problem

graph, costs = transformer(12)
problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 3)

def ask():
    while True:
        process.ask(problem, "advance", limits=Limits(work=1e6))

process = ProverProcess.start()
process.ask(problem, "quick_bound", seconds=60.0)
{asking}time.sleep(0.5)
print(process._child.pid, flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        process = os.pidfd_open(int(caller.stdout.readline()))
        ended = select.poll()
        ended.register(process, select.POLLIN)
        assert not ended.poll(0)
        caller.kill()
    try:
        if not ended.poll(30_000):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            pytest.fail("it is still there")
    finally:
        os.close(process)


def test_auto_gives_the_same_plan_with_and_without_a_process(monkeypatch):
    graph, costs = transformer(5)
    assert len(graph.ops) > 150
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes * 2 // 5)
    auto = registry.get("auto").with_effort(0.1)
    there = solve(problem, auto)
    monkeypatch.setattr(ProverProcess, "start", staticmethod(lambda: None))
    here = solve(problem, auto)
    assert (there.schedule, there.bound) == (here.schedule, here.bound)
