"""Processes of our own beside the caller's: the same interpreter, and none of the caller's code.

A script without a guarded main part is not run again, what lies in the working directory is not imported, and nothing
of PyTorch is loaded. What such a process prints is nobody's answer.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

# The package is loaded from its file: the caller's folders, if they came first, would be searched for all else, too.
_MAIN = """
import importlib, importlib.util, sys
_, greeting, package, place, function, *folders = sys.argv
sys.path += [folder for folder in folders if folder not in sys.path]
spec = importlib.util.spec_from_file_location("lowtide", package)
module = sys.modules["lowtide"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
getattr(importlib.import_module(place), function)(greeting)
"""
_PACKAGE = Path(__file__).parents[2] / "__init__.py"


def can_start() -> bool:
    """Return whether there is an interpreter to start: in a frozen or embedding program, it is that program."""
    name = Path(sys.executable or "").name.lower()
    if not name.startswith(("python", "pypy")) or getattr(sys, "frozen", False):
        return False
    try:
        for standard in range(3):
            os.fstat(standard)
    except OSError:
        return False
    return True


def start(
    module: str, function: str, environment: Mapping[str, str], *, own_group: bool = False
) -> tuple[subprocess.Popen[bytes], str] | None:
    """Start a process that runs a function of ours, which goes on by itself while it gets ready.

    Args:
        module: The function's module.
        function: Its name; it is called with the greeting.
        environment: Variables that the process has on top of the caller's.
        own_group: Let the process and those it starts be a group of their own.

    Returns:
        The process, and the greeting with which its answers begin; None if there can be no process.
    """
    if not can_start():
        return None
    # Whatever is printed before this, by whoever has a say in how the interpreter starts, is not an answer.
    greeting = secrets.token_hex(16)
    folders = [folder for folder in sys.path if isinstance(folder, str) and folder]
    command = [sys.executable, "-P", "-c", _MAIN, greeting, str(_PACKAGE), module, function, *folders]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=own_group and hasattr(os, "setsid"),
        )
    except (OSError, ValueError):
        return None
    return process, greeting


def begin_answers(greeting: str) -> BinaryIO:
    """Return where answers go, after the greeting; runs in the process, once it is ready."""
    # Interrupting the caller from the terminal reaches this process, too; the caller says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints is not an answer.
    os.dup2(2, 1)
    answers.write(f"\n{greeting}\n".encode())
    answers.flush()
    return answers
