"""Processes that train together on this machine: a function runs in each, over gloo on loopback."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Of one collective; a process that waits longer ends with an error.
_WAIT = datetime.timedelta(seconds=60)


def run_on_ranks(run: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """Call `run(rank, *args)` in so many processes; raise what one of them raises."""
    mp.spawn(_run, (run, _free_port(), ranks, args), nprocs=ranks)


def outcomes_of_ranks(run: Callable[..., Any], *args: Any, ranks: int = 2, seconds: float = 120) -> list[str]:
    """Return what `run(rank, *args)` returns in each process, as text: its error if it raises, "ended" if it has none.

    A process that is not done after so many seconds is ended and has "hung". No process waits for another at its end.
    """
    context, port = mp.get_context("spawn"), _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    started = [
        context.Process(target=_tell, args=(rank, run, port, ranks, args, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in started:
        process.start()
    for _, sender in pipes:
        sender.close()
    last = time.monotonic() + seconds
    try:
        return [_heard(receiver, last) for receiver, _ in pipes]
    finally:
        for process in started:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _heard(receiver: Connection, last: float) -> str:
    if not receiver.poll(max(last - time.monotonic(), 0)):
        return "hung"
    try:
        return str(receiver.recv())
    except EOFError:
        return "ended"


def _tell(rank: int, run: Callable[..., Any], port: int, ranks: int, args: tuple[Any, ...], sender: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=_WAIT)
    try:
        outcome = str(run(rank, *args))
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    sender.send(outcome)
    # The process that keeps the store stays until all are done; it is then ended.
    time.sleep(600)


def _run(rank: int, run: Callable[..., None], port: int, ranks: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=_WAIT)
    try:
        run(rank, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()
