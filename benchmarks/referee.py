"""Every architecture of two model libraries: does planned training equal eager's, within the budget?

For each, a small model is built from its configuration with dropout on and trained for three AdamW steps, plain and
wrapped, from equal weights and seeds. The budget is 60 % of the measured peak of eager's step, or the least that
works. Bits are those of every loss and gradient, and at the end of parameters, buffers and the random states of
torch, Python and numpy. The peak is measured in the second wrapped step. An architecture that eager PyTorch does not
train as it could be built here is recorded as not built and does not count.

    python benchmarks/referee.py                       # all that have no row yet; may be stopped and started again
    python benchmarks/referee.py --only llama --again
    python benchmarks/referee.py --failed              # again what was not exact, planned and within its budget
    python benchmarks/referee.py --unbuilt             # again what could not be built
    python benchmarks/referee.py --build --most 40     # only say which of those without a row eager trains
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from common import RESULTS, Row, append_row, commit, read_rows, write_results
from referee_page import is_good, page, verdict

SHARE = 0.6
STEPS = 3
TRIES = 2
PLAN_SECONDS = 4.0
SEED = 7
MEMORY = 8 * 2**30


@dataclass
class Record:
    """What a training run leaves behind, in the order in which it came."""

    values: dict[str, Any] = field(default_factory=dict)
    first_seconds: float = 0.0
    peak_bytes: int = 0
    graphs: int = 0

    def difference(self, other: Record) -> tuple[str, float] | None:
        """Return the name of the first value that differs, and by how much of the largest entry; None if equal."""
        if self.values.keys() != other.values.keys():
            return sorted(self.values.keys() ^ other.values.keys())[0], float("inf")
        for name, value in self.values.items():
            if amount := _difference(value, other.values[name]):
                return name, amount
        return None


def _difference(left: Any, right: Any) -> float:
    """Return 0.0 for equal bits, or the largest difference as a share of the largest entry."""
    import torch

    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return 0.0 if type(left) is type(right) and left == right else float("inf")
    if left.dtype != right.dtype or left.shape != right.shape:
        return float("inf")
    if torch.equal(left, right) or torch.equal(_bits(left), _bits(right)):
        return 0.0
    amount = (left.double() - right.double()).abs().max() / left.double().abs().max().clamp_min(1e-300)
    return float("inf") if amount.isnan() else float(amount)


def _bits(value: Any) -> Any:
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8)


def train(model: Any, call: Callable[..., Any], subject: Any, *, measured: bool = False) -> Record:
    """Return the record of three training steps; of a wrapped model, `measured` takes the peak of the second."""
    import torch

    import lowtide

    record = Record()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    for number in range(STEPS):
        start = time.perf_counter()
        loss, peak = step(call, subject, number, measured=measured and number == 1)
        record.first_seconds = record.first_seconds or time.perf_counter() - start
        record.graphs = record.graphs or len(lowtide.plans(model)) if measured else 0
        record.peak_bytes = max(record.peak_bytes, peak)
        record.values[f"loss {number}"] = loss
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            record.values[f"gradient {number} {name}"] = None if gradient is None else gradient.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _with_state(record, model)


def _with_state(record: Record, model: Any) -> Record:
    import torch

    record.values |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    record.values |= {f"parameter {name}": value.detach().clone() for name, value in model.named_parameters()}
    record.values["random state of torch"] = torch.get_rng_state()
    record.values["random state of Python"] = random.getstate()
    record.values["random state of numpy"] = str(np.random.get_state(legacy=False))
    return record


def step(call: Callable[..., Any], subject: Any, number: int, *, measured: bool) -> tuple[Any, int]:
    """Return the loss of one forward and backward, and its peak if it is measured."""
    import lowtide
    from referee_models import loss_of

    args, kwargs = subject.batch(number)
    losses: list[Any] = []

    def run() -> None:
        output = call(*args, **kwargs)
        loss = loss_of(output)
        loss.backward()
        losses.append(loss.detach())

    peak = lowtide.measure_peak(run) if measured else 0
    if not measured:
        run()
    return losses[0].clone(), peak


def compare(subject: Any, planner: str, report: Callable[[Row], None]) -> None:
    """Report the facts of one subject as they become known."""
    model = subject.model()
    report({"stage": "eager", "parameters": sum(each.numel() for each in model.parameters())})
    _, eager_bytes = step(model, subject, 0, measured=True)
    model = subject.model()
    eager = train(model, model, subject)
    budget = int(SHARE * eager_bytes)
    report({"stage": "wrapped", "eager_bytes": eager_bytes, "budget_bytes": budget})
    record = wrapped_record(subject, budget, planner, report)
    if record is None:
        return
    found = record.difference(eager)
    report({"bits": "exact" if found is None else found[0], "amount": None if found is None else found[1]})
    if found is not None:
        report(_explained(subject, eager, record))


def planner_of(name: str) -> Any:
    """Return the planner; the default one within some seconds, for how good a plan is, is judged elsewhere."""
    from lowtide.plan.registry import get

    planner = get(name)
    return dataclasses.replace(planner, time_limit=PLAN_SECONDS) if hasattr(planner, "time_limit") else planner


def wrapped_record(subject: Any, budget: int, planner: str, report: Callable[[Row], None]) -> Record | None:
    """Return the record of wrapped training, at the least budget if need be, or None if it has raised.

    The error names a least budget, which must work. Where it does not, what is missing is added a few times, and
    `least_tries` says how often.
    """
    from lowtide.errors import InfeasibleBudgetError, LowtideError

    try:
        for tries in range(1, TRIES + 1):
            try:
                return _wrapped(subject, budget, planner, report)
            except InfeasibleBudgetError as error:
                if tries == TRIES or error.least_bytes <= error.budget_bytes:
                    raise
                budget += error.least_bytes - error.budget_bytes
                report({"least_bytes": budget, "budget_bytes": budget, "least_tries": tries})
    except LowtideError as error:
        report({"error": f"{type(error).__name__}: {_line(error)}"})
    except Exception as error:  # anything else, where eager trains, is foreign
        report({"foreign": f"{type(error).__name__}: {_line(error)}"})
    return None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _wrapped(subject: Any, budget: int, planner: str, report: Callable[[Row], None]) -> Record:
    import torch

    import lowtide
    from lowtide.errors import LowtideWarning

    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = lowtide.wrap(subject.model(), budget=budget, planner=planner_of(planner))
        record = train(model, model, subject, measured=True)
    plans = lowtide.plans(model)
    told = [str(each.message).splitlines()[0] for each in caught if issubclass(each.category, LowtideWarning)]
    report(
        {
            "graphs": record.graphs,
            "plans": len(plans),
            "predicted_bytes": max((plan.peak_bytes for plan in plans), default=None),
            "measured_bytes": record.peak_bytes,
            "first_seconds": record.first_seconds,
            "warnings": list(dict.fromkeys(told)),
        }
    )
    return record


def _explained(subject: Any, eager: Record, record: Record) -> Row:
    """Return whether eager differs from itself, and whether PyTorch's own `aot_eager` differs in the same way."""
    import torch

    model = subject.model()
    again = train(model, model, subject)
    torch._dynamo.reset()
    model = subject.model()
    try:
        stock = train(model, torch.compile(model, backend="aot_eager", dynamic=False), subject)
    except Exception as error:  # then there is nothing to compare with
        return {"eager_differs": again.difference(eager) is not None, "aot_eager": f"{type(error).__name__}"}
    against_eager = stock.difference(eager)
    return {
        "eager_differs": again.difference(eager) is not None,
        "aot_eager": "equal" if against_eager is None else f"{against_eager[0]} by {against_eager[1]:.1g}",
        "as_aot_eager": record.difference(stock) is None,
    }


def child(package: str, name: str, planner: str | None, errors: str, pipe: Connection) -> None:
    """Send the facts of one architecture; the process's own output goes to the file `errors`.

    Without a planner the architecture is only built.
    """
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    import torch

    from referee_models import Architecture, NotBuiltError, build, transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    try:
        subject = build(Architecture(package, name))
    except NotBuiltError as error:
        pipe.send({"not_built": _line(error), "stage": "done"})
        return
    pipe.send({"stage": "built", "model": subject.title, "build_seconds": time.perf_counter() - start})
    if planner is not None:
        compare(subject, planner, pipe.send)
    pipe.send({"stage": "done", "cpu_seconds": round(time.process_time(), 1)})


def collect(context: Any, package: str, name: str, planner: str | None, seconds: float) -> Row:
    """Return the row of one architecture from a process of its own."""
    row: Row = {"package": package, "architecture": name, "stage": "build"}
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r") as errors:
        process = context.Process(target=child, args=(package, name, planner, errors.name, sender))
        start = time.monotonic()
        process.start()
        sender.close()
        try:
            while receiver.poll(max(0.0, start + seconds - time.monotonic())):
                row |= receiver.recv()
        except EOFError:
            process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        row["seconds"] = round(time.monotonic() - start, 1)
        if row.pop("stage") != "done":
            late = row["seconds"] >= seconds
            ended = f"no end after {seconds:.0f} s" if late else f"exit code {process.exitcode}: {errors.read()[-300:]}"
            row[("late" if late else "foreign") if "eager_bytes" in row else "not_built"] = ended
    return row


def read(path: Path) -> dict[str, Row]:
    """Return the last row of every architecture."""
    return {f"{row['package']}/{row['architecture']}": row for row in read_rows(path)}


def chosen(options: argparse.Namespace, done: dict[str, Row]) -> list[Any]:
    """Return the architectures to run."""
    from referee_models import architectures

    def wanted(key: str) -> bool:
        if options.only and not any(part in key for part in options.only):
            return False
        if options.failed:
            return key in done and not is_good(done[key]) and "not_built" not in done[key]
        if options.unbuilt:
            return "not_built" in done.get(key, {})
        return options.again or key not in done

    return [each for each in architectures() if wanted(each.key)][: options.most]


def run(options: argparse.Namespace, path: Path) -> None:
    """Add a line to the file for every architecture as it ends; if they are only built, say it and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["referee_models"])
    lock = threading.Lock()
    made_with = {"commit": commit()}
    planner = None if options.build else options.planner

    def one(architecture: Any) -> None:
        row = collect(context, architecture.package, architecture.name, planner, options.seconds) | made_with
        with lock:
            if options.build:
                print(f"{architecture.key:<44} {row.get('not_built', 'is trained by eager')}", flush=True)
                return
            append_row(path, row)
            print(f"{architecture.key:<44} {verdict(row)}", flush=True)

    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        list(pool.map(one, chosen(options, read(path))))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, write the page, and return 1 if a bar does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="PART", help="architectures whose package/name has such a part")
    parser.add_argument("--again", action="store_true", help="also what has a row")
    parser.add_argument("--failed", action="store_true", help="only what has a row that is not exact and in its budget")
    parser.add_argument("--unbuilt", action="store_true", help="only what has a row that says that it was not built")
    parser.add_argument("--build", action="store_true", help="only build and train in eager; writes nothing")
    parser.add_argument("--most", type=int, metavar="N", help="no more than so many architectures")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--seconds", type=float, default=180.0, help="how long one architecture may take")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, of one thread each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for referee.jsonl and referee.md")
    options = parser.parse_args(argv)
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", KINETO_LOG_LEVEL="5", PYTHONPATH=paths)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "referee.jsonl"
    run(options, path)
    if options.build:
        return 0
    rows = read(path)
    text, holds = page(list(rows.values()))
    for written in write_results(
        "referee", rows=[rows[key] for key in sorted(rows)], markdown=text, directory=options.out
    ):
        print(f"Wrote {written}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
