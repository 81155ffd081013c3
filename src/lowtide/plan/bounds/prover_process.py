"""A selector in a process of its own, which is asked by messages.

The process runs the same interpreter and none of the caller's code: a script without a guarded main part is not run
again, what lies in the working directory is not imported, and nothing of PyTorch is loaded. It ends when the caller
does, and at any failure; whoever asked then asks elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from lowtide.plan.bounds.moment_selection import MomentSelector, Proof
from lowtide.plan.core.problem import Problem

# The package is loaded from its file: the caller's folders, if they came first, would be searched for all else, too.
_MAIN = """
import importlib.util, sys
_, greeting, package, *folders = sys.argv
sys.path += [folder for folder in folders if folder not in sys.path]
spec = importlib.util.spec_from_file_location("lowtide", package)
module = sys.modules["lowtide"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from lowtide.plan.bounds.prover_process import serve
serve(greeting)
"""
# In the environment of the process, so that it never starts another.
_MARK = "LOWTIDE_PROVER_PROCESS"
# Seconds in which a process must have said that it is ready.
_READY_SECONDS = 60.0
_PACKAGE = Path(__file__).parents[2] / "__init__.py"


class LostError(Exception):
    """The process is not there any more, or cannot be asked: no answer will come."""


class ProverProcess:
    """The caller's end."""

    def __init__(self, process: subprocess.Popen[bytes], greeting: str) -> None:
        self._child = process
        self._greeting: bytes | None = greeting.encode()
        self._problem: Problem | None = None

    @staticmethod
    def start() -> ProverProcess | None:
        """Start a process, which goes on by itself while it gets ready, or return None if there can be none."""
        if not _can_start():
            return None
        # Whatever is printed before this, by whoever has a say in how the interpreter starts, is not an answer.
        greeting = secrets.token_hex(16)
        folders = [folder for folder in sys.path if isinstance(folder, str) and folder]
        command = [sys.executable, "-P", "-c", _MAIN, greeting, str(_PACKAGE), *folders]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, _MARK: "1"},
            )
        except (OSError, ValueError):
            return None
        return ProverProcess(process, greeting)

    def ask(self, problem: Problem, method: str, **arguments: Any) -> tuple[Proof, bool]:
        """Return what the method of the selector of `problem` returns, and whether that is done.

        Raises:
            LostError: The process has ended before it has answered, or `problem` cannot be sent.
        """
        try:
            # All of it or nothing.
            question = pickle.dumps((None if problem is self._problem else problem, method, arguments))
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(question)
            self._child.stdin.flush()
            self._problem = problem
            self._await_greeting()
            proof, done = pickle.load(self._child.stdout)
        except Exception as error:  # whatever it is, there is another way
            raise LostError(str(error)) from error
        return proof, done

    def close(self) -> None:
        """End the process, whatever it is at."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            # What was to be sent cannot be any more.
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _await_greeting(self) -> None:
        if self._greeting is None:
            return
        assert self._child.stdout is not None
        too_late = threading.Timer(_READY_SECONDS, self._child.kill)
        too_late.daemon = True
        too_late.start()
        try:
            while True:
                line = self._child.stdout.readline()
                if line.rstrip(b"\r\n").endswith(self._greeting):
                    self._greeting = None
                    return
                if not line:
                    raise EOFError("it has ended before it was ready")
        finally:
            too_late.cancel()


def _can_start() -> bool:
    """Whether there is an interpreter to start: in a frozen or embedding program, the executable is that program."""
    name = Path(sys.executable or "").name.lower()
    if not name.startswith(("python", "pypy")) or getattr(sys, "frozen", False) or _MARK in os.environ:
        return False
    try:
        for standard in range(3):
            os.fstat(standard)
    except OSError:
        return False
    return True


def serve(greeting: str) -> None:
    """Answer questions until there are no more; runs in the process."""
    # Interrupting the caller from the terminal reaches this process, too; the caller says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints is not an answer.
    os.dup2(2, 1)
    questions: queue.SimpleQueue[tuple[Problem | None, str, dict[str, Any]]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    answers.write(f"\n{greeting}\n".encode())
    answers.flush()
    selector: MomentSelector | None = None
    while True:
        problem, method, arguments = questions.get()
        selector = selector if problem is None else MomentSelector(problem)
        assert selector is not None, "the first question has a problem"
        pickle.dump((getattr(selector, method)(**arguments), selector.done), answers)
        answers.flush()


def _read(questions: queue.SimpleQueue[tuple[Problem | None, str, dict[str, Any]]]) -> None:
    """Pass questions on; when there are no more, nobody waits for the answer to the last one, either."""
    try:
        while True:
            questions.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)
