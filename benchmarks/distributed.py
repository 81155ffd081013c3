"""Does the budget hold on every rank, and do collectives still overlap with backward?

Processes train the same model on this machine, over gloo on loopback: once with the engine alone, once wrapped with a
share of the peak that the engine alone has on that rank, or with the least budget if that share cannot be had. Every
rank has batches and dropout of its own. Bits are those of losses, gradients and random states over three steps. The
places of the all-reduces are shares of the ops that backward runs. Steps of both are timed in turns.

    python benchmarks/distributed.py                     # all cases
    python benchmarks/distributed.py --only ddp --ranks 2
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import lowtide
from common import Row, describe_machine, emit, number, refuse_unknown, run_child, table, text, write_results
from lowtide.errors import InfeasibleBudgetError
from lowtide.plan.planners.greedy import Greedy

DIM, ROWS, LAYERS, STEPS, TIMED_STEPS = 256, 512, 8, 3, 9
WAIT = timedelta(seconds=300)
SHARES = ("70", "50")
RANKS = ("2", "4")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1, **options)


def ddp_in_half(model: nn.Module) -> nn.Module:
    container = DistributedDataParallel(model, bucket_cap_mb=1)
    container.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return container


# The engine around a model, and the options that it is wrapped with.
Engine = tuple[Callable[[nn.Module], nn.Module], dict[str, Any]]
ENGINES: dict[str, Engine] = {
    "ddp": (ddp, {}),
    "ddp-views": (lambda model: ddp(model, gradient_as_bucket_view=True), {}),
    "ddp-fp16": (ddp_in_half, {}),
    "ddp-blocks": (ddp, {"blocks": ["layers"]}),
}


def train(model: nn.Module, rank: int) -> list[Tensor]:
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    left: list[Tensor] = []
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, DIM))
        loss.backward()
        left += [loss.detach(), *(each.grad.clone() for each in model.parameters()), torch.get_rng_state()]
        optimizer.step()
        optimizer.zero_grad()
    return left


def peak_of_step(model: nn.Module) -> int:
    model.zero_grad()
    batch = torch.randn(ROWS, DIM)
    return lowtide.measure_peak(lambda: model(batch).backward())


def places(model: nn.Module) -> list[float]:
    loss = model(torch.randn(ROWS, DIM))
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        loss.backward()
    events = sorted(watched.events(), key=lambda event: event.time_range.start)
    ops = [event.name for event in events if event.name.startswith(("aten::", "c10d::allreduce"))]
    return [place / len(ops) for place, name in enumerate(ops) if name.startswith("c10d")]


def seconds(models: Sequence[nn.Module]) -> list[float]:
    """Return the median step of each, in turns, so that what else the machine does hits all of them."""
    batch, taken = torch.randn(ROWS, DIM), [[] for _ in models]
    for _ in range(TIMED_STEPS):
        for model, each in zip(models, taken, strict=True):
            model.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            model(batch).backward()
            each.append(time.perf_counter() - begin)
    return [statistics.median(each) for each in taken]


def run_rank(rank: int, port: int, name: str, ranks: int, share: int, cache: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOWTIDE_CACHE_DIR"] = f"{cache}/{rank}"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=WAIT)
    row = compare(rank, name, share)
    found: list[Row] = [{}] * ranks
    dist.all_gather_object(found, row)
    if rank == 0:
        emit({"engine": name, "ranks": ranks, "share": share, **joined(found)})
    dist.destroy_process_group()


def compare(rank: int, name: str, share: int) -> Row:
    """Return what this rank shows."""
    engine, options = ENGINES[name]
    torch.manual_seed(0)
    plain = Net()
    eager = engine(copy.deepcopy(plain))
    expected = train(eager, rank)
    budget = share * peak_of_step(eager) // 100

    def wrapped(budget: int) -> nn.Module:
        return engine(lowtide.wrap(copy.deepcopy(plain), budget=budget, planner=Greedy(effort=0.1), **options))

    model, is_least = wrapped(budget), False
    try:
        found = train(model, rank)
    except InfeasibleBudgetError as error:
        budget, is_least = error.least_bytes, True
        model = wrapped(budget)
        found = train(model, rank)
    measured = peak_of_step(model)
    (ours, theirs), (time_ours, time_theirs) = (places(model), places(eager)), seconds((model, eager))
    return {
        "bits": all(map(torch.equal, found, expected)),
        "used": measured / budget,
        "predicted": lowtide.plans(model.module)[0].peak_bytes / measured,
        "is_least": is_least,
        "first": ours[0] - theirs[0],
        "median": statistics.median_low(ours) - statistics.median_low(theirs),
        "places": [ours[0], theirs[0], statistics.median_low(ours), statistics.median_low(theirs)],
        "ratio": time_ours / time_theirs,
    }


def joined(rows: Sequence[Row]) -> Row:
    """Return the worst of all ranks; what is used of the budget, by rank."""
    return {
        "bits": all(row["bits"] for row in rows),
        "kept": all(row["used"] <= 1 for row in rows),
        "used": [round(row["used"], 4) for row in rows],
        "predicted": max((row["predicted"] for row in rows), key=lambda each: abs(each - 1)),
        "is_least": any(row["is_least"] for row in rows),
        "first": max((row["first"] for row in rows), key=abs),
        "median": max((row["median"] for row in rows), key=abs),
        "places": rows[0]["places"],
        "ratio": statistics.median(row["ratio"] for row in rows),
    }


def run_case(name: str, ranks: int, share: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as cache:
        mp.spawn(run_rank, (port, name, ranks, share, cache), nprocs=ranks)


def used(row: Row) -> str:
    return ", ".join(f"{each:.4f}" for each in row.get("used", ()))


def pair(first: int) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        found = row.get("places")
        return "-" if found is None else f"{found[first]:.2f} / {found[first + 1]:.2f}"

    return show


COLUMNS: dict[str, Callable[[Row], str]] = {
    "engine": text("engine"),
    "ranks": text("ranks"),
    "share": lambda row: f"{row['share']} %" + (" (least)" if row.get("is_least") else ""),
    "bits": text("bits"),
    "kept": text("kept"),
    "measured / budget, by rank": used,
    "predicted / measured": number("predicted", ".4f"),
    "first all-reduce, ours / eager": pair(0),
    "median all-reduce, ours / eager": pair(2),
    "step time against eager": number("ratio", ".2f"),
    "error": text("error"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ENGINES))
    parser.add_argument("--ranks", nargs="+", default=list(RANKS))
    parser.add_argument("--shares", nargs="+", default=list(SHARES))
    parser.add_argument("--child", nargs=3, metavar=("ENGINE", "RANKS", "SHARE"))
    options = parser.parse_args()
    if options.child:
        name, ranks, share = options.child
        run_case(name, int(ranks), int(share))
        return
    refuse_unknown(parser, "engines", options.only, ENGINES)
    rows: list[Row] = []
    for name in options.only:
        for ranks in options.ranks:
            for share in options.shares:
                about = {"engine": name, "ranks": int(ranks), "share": int(share)}
                for row in run_child(__file__, ["--child", name, ranks, share], env={"OMP_NUM_THREADS": "1"}):
                    rows.append(about | row)
                    print(rows[-1], flush=True)
    head = f"# Training in several processes\n\n{describe_machine()} All ranks share it, so that times say little.\n\n"
    for path in write_results("distributed", rows=rows, markdown=head + table(rows, COLUMNS)):
        print(f"Wrote {path}")
    sys.exit(any("error" in row or not row["bits"] or not row["kept"] for row in rows))


if __name__ == "__main__":
    main()
