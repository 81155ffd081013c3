"""The proof beside the search: the same in a process of its own, and what happens when that is lost."""

import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from lowtide.graph.costs import Costs
from lowtide.graph.samples import transformer
from lowtide.plan import registry
from lowtide.plan.bounds import prover_process as apart_module
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.bounds.moment_selection import Refiner
from lowtide.plan.bounds.prover import Prover
from lowtide.plan.bounds.prover_process import Apart, LostError
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
    """Return what a glance and two stages prove."""
    known = Schedule.keep_all(problem.graph)
    prover.turn_to(problem)
    return [prover.glance(seconds=60.0)(), prover.advance(LIMITS, known)(), prover.advance(LIMITS, known)()]


def test_a_process_of_its_own_proves_the_same(problem):
    with Prover(apart=False) as here, Prover(apart=True) as there:
        assert there._apart is not None
        process = there._apart._process
        assert process.pid != os.getpid()
        expected = stages(here, problem)
        assert stages(there, problem) == expected
        assert expected[-1].bound > 0
        assert (there.hint, there.done) == (here.hint, here.done)
        assert there.suggestion is not None
        verify(problem.graph, there.suggestion)
        assert there._refiner is None
        # Another problem, with less memory, begins anew.
        tighter = Problem(problem.graph, problem.costs, problem.budget_bytes * 9 // 10)
        assert stages(there, tighter)[-1].bound > expected[-1].bound
        there.turn_to(None)
        assert (there.problem, there.proof.bound, there.hint, there.suggestion) == (None, 0.0, frozenset(), None)
    assert process.returncode is not None


def test_a_lost_process_is_replaced_and_nothing_proved_is_lost(problem):
    with Prover(apart=True) as prover:
        before = stages(prover, problem)[-1]
        prover._apart._process.kill()
        prover._apart._process.wait()
        after = prover.advance(LIMITS, Schedule.keep_all(problem.graph))()
        assert after.bound >= before.bound
        assert prover._apart is None
        assert isinstance(prover._refiner, Refiner)


def test_without_an_interpreter_there_is_no_process(problem, monkeypatch, tmp_path):
    for executable in (None, "", str(tmp_path / "python-missing"), str(tmp_path / "app")):
        monkeypatch.setattr(sys, "executable", executable)
        assert Apart.start() is None
    with Prover(apart=True) as prover:
        assert stages(prover, problem)[-1].bound > 0


def test_a_frozen_program_and_the_process_itself_start_none(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert Apart.start() is None
    monkeypatch.delattr(sys, "frozen")
    monkeypatch.setenv("LOWTIDE_APART", "1")
    assert Apart.start() is None


def pretend(monkeypatch, tmp_path, script):
    """Let `script` stand for the interpreter."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize("script", ["exit 3", "echo hello", "printf 'Building cache'"])
def test_what_is_not_lowtide_is_lost_at_the_first_question(problem, monkeypatch, tmp_path, script):
    pretend(monkeypatch, tmp_path, script)
    started = Apart.start()
    assert started is not None
    with pytest.raises(LostError):
        started.ask(problem, "glance", seconds=1.0)
    started.close()
    with Prover(apart=True) as prover:
        assert stages(prover, problem)[-1].bound > 0


def test_what_never_gets_ready_is_lost(problem, monkeypatch, tmp_path):
    monkeypatch.setattr(apart_module, "_READY_SECONDS", 0.3)
    pretend(monkeypatch, tmp_path, "exec sleep 600")
    with Prover(apart=True) as prover:
        assert stages(prover, problem)[-1].bound > 0
        assert prover._apart is None


def test_a_time_limit_holds_whoever_is_asked(problem, monkeypatch, tmp_path):
    pretend(monkeypatch, tmp_path, "exec sleep 600")
    with Prover(apart=True) as prover:
        prover.turn_to(problem)
        assert prover.glance(seconds=0.1)().bound == 0.0
        assert prover.done
        # Who asks again all the same is told so at once.
        prover.turn_to(problem)
        assert prover.advance(LIMITS, None)().bound == 0.0
        assert prover.done
    assert prover._refiner is None


def test_what_an_interpreter_prints_while_it_starts_is_not_an_answer(problem, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('Building cache\\ncode'); print('B' * 100)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    started = Apart.start()
    proof, done = started.ask(problem, "glance", seconds=60.0)
    started.close()
    assert proof.bound > 0
    assert not done


def test_files_beside_the_caller_are_not_imported(problem, monkeypatch, tmp_path):
    for name in ("pickle", "queue", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", tmp_path, str(tmp_path), *sys.path])
    started = Apart.start()
    proof, _ = started.ask(problem, "glance", seconds=60.0)
    started.close()
    assert proof.bound > 0


def test_what_cannot_be_sent_is_proved_here(problem):
    class OwnCosts(Costs):
        """Defined in a function, so it has no name elsewhere."""

    costs = OwnCosts(**{field: getattr(problem.costs, field) for field in problem.costs.__dataclass_fields__})
    own = Problem(problem.graph, costs, problem.budget_bytes)
    with Prover(apart=True) as prover:
        assert stages(prover, own)[-1].bound > 0
        assert prover._apart is None


def test_an_error_in_the_process_is_raised_by_the_thread(problem):
    with Prover(apart=True) as prover:
        prover.turn_to(problem)
        with pytest.raises(TypeError, match="argument"):
            prover._begin("glance", float("inf"), {"guess": True})()
        assert prover._apart is None


def interrupted(prover, problem):
    """Begin what takes very long, and be interrupted."""
    with prover:
        prover.turn_to(problem)
        prover.advance(Limits(work=1e6), Schedule.keep_all(problem.graph))
        raise KeyboardInterrupt


def test_leaving_does_not_wait_for_the_proof():
    graph, costs = transformer(12)
    large = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 3)
    prover = Prover(apart=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(prover, large)
    assert prover._apart._process.returncode is not None
    assert prover._refiner is None


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
from lowtide.plan.bounds.prover_process import Apart
from lowtide.plan.bounds.integer_program import Limits
from lowtide.plan.core.problem import Problem

graph, costs = transformer(12)
problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes // 3)

def ask():
    while True:
        apart.ask(problem, "advance", limits=Limits(work=1e6))

apart = Apart.start()
apart.ask(problem, "glance", seconds=60.0)
{asking}time.sleep(0.5)
print(apart._process.pid, flush=True)
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
    auto = replace(registry.get("auto"), effort=0.1)
    apart = solve(problem, auto)
    monkeypatch.setattr(Apart, "start", staticmethod(lambda: None))
    here = solve(problem, auto)
    assert (apart.schedule, apart.bound) == (here.schedule, here.bound)
