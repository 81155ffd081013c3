"""A refiner in a process of its own, which is asked by messages.

The process runs the same interpreter with the same search path and none of the caller's code, so a script without a
guarded main part is not run again, and nothing of PyTorch is loaded. It ends when the caller does.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from typing import Any

from lowtide.plan.bounds.refine import Proof, Refiner
from lowtide.plan.problem import Problem

_MAIN = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from lowtide.plan.bounds.apart import serve
serve()
"""
# How long an idle process may take to end before it is killed.
_PATIENCE_SECONDS = 1.0


class LostError(Exception):
    """The process is not there any more, or never was: no answer will come."""


class Apart:
    """The caller's end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._problem: Problem | None = None

    @staticmethod
    def start() -> Apart | None:
        """Start a process, which goes on by itself while it gets ready, or return None if there can be none."""
        if not sys.executable:
            return None
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            apart = Apart(subprocess.Popen([sys.executable, "-c", _MAIN], **pipes))
        except OSError:
            return None
        try:
            apart._send(sys.path)
        except LostError:
            apart.close()
            return None
        return apart

    def ask(self, problem: Problem, method: str, **arguments: Any) -> tuple[Proof, bool]:
        """Return what the method of the refiner of `problem` returns, and whether that is done.

        Raises:
            LostError: The process has ended before it has answered.
            RuntimeError: The refiner has failed.
        """
        self._send((None if problem is self._problem else problem, method, arguments))
        self._problem = problem
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise LostError(str(error)) from error
        if isinstance(answer, str):
            raise RuntimeError(f"The proof has failed in its own process:\n{answer}")
        proof, done = answer
        return proof, done

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # It may have ended, and then what was to be sent cannot be.
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _send(self, message: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise LostError(str(error)) from error


def serve() -> None:
    """Answer questions until there are no more."""
    # Interrupting the caller from the terminal reaches this process, too; the caller says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Whatever a library prints is not an answer.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    refiner: Refiner | None = None
    while True:
        try:
            problem, method, arguments = pickle.load(questions)
        except EOFError:
            return
        try:
            refiner = refiner if problem is None else Refiner(problem)
            answer: object = (getattr(refiner, method)(**arguments), refiner is not None and refiner.done)
        except Exception:  # whatever it is, the caller shall know
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()
