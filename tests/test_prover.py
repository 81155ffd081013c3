"""The proof beside the search: the same in a process of its own, and what happens when that is lost."""

import os
import subprocess
import sys
import time

import pytest

from lowtide.graph.samples import transformer
from lowtide.plan import registry
from lowtide.plan.bounds import apart as apart_module
from lowtide.plan.bounds.apart import Apart, LostError
from lowtide.plan.bounds.program import Limits
from lowtide.plan.bounds.prover import Prover
from lowtide.plan.bounds.refine import Refiner
from lowtide.plan.problem import Problem
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
    assert process.returncode == 0


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
    for executable in ("", str(tmp_path / "missing")):
        monkeypatch.setattr(sys, "executable", executable)
        assert Apart.start() is None
    with Prover(apart=True) as prover:
        assert stages(prover, problem)[-1].bound > 0


def test_an_interpreter_without_lowtide_is_lost_at_the_first_question(problem, monkeypatch):
    monkeypatch.setattr(apart_module, "_MAIN", "raise SystemExit(3)")
    started = Apart.start()
    if started is not None:
        with pytest.raises(LostError):
            started.ask(problem, "glance", seconds=1.0)
        started.close()


def test_a_proof_that_fails_in_its_process_says_why(problem):
    started = Apart.start()
    try:
        with pytest.raises(RuntimeError, match="has no attribute 'guess'"):
            started.ask(problem, "guess")
        # It still answers.
        proof, done = started.ask(problem, "glance", seconds=60.0)
        assert proof.bound > 0
        assert not done
    finally:
        started.close()


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
        "from lowtide.plan.problem import Problem\n"
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


def test_the_process_ends_with_its_caller(tmp_path):
    """One whose caller is killed reads the end of its questions."""
    code = (
        "import time; from lowtide.plan.bounds.apart import Apart; a = Apart.start(); "
        "print(a._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        pid = int(caller.stdout.readline())
        caller.kill()
    for _ in range(300):
        if not _is_alive(pid):
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("it is still there")


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_auto_gives_the_same_plan_with_and_without_a_process(monkeypatch):
    graph, costs = transformer(5)
    assert len(graph.ops) > 150
    problem = Problem(graph, costs, Problem(graph, costs, 1).baseline.peak_bytes * 2 // 5)
    auto = registry.get("auto")
    apart = solve(problem, auto)
    monkeypatch.setattr(Apart, "start", staticmethod(lambda: None))
    here = solve(problem, auto)
    assert (apart.schedule, apart.bound) == (here.schedule, here.bound)
