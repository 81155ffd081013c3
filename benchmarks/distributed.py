"""Does the budget hold on every rank, and do collectives still overlap with backward?

Processes train the same model on this machine, over gloo on loopback: once with the engine alone, once wrapped with a
share of the peak that the engine alone has on that rank, or with the least budget if that share cannot be had. Every
rank has batches and dropout of its own, but for ranks that share the parts of a layer. Bits are those of losses,
gradients and random states over three steps. The places of the collectives that reduce gradients are shares of the ops
that backward runs. Steps of both are timed in turns. Rows are written as they come; those that are there are kept.

    python benchmarks/distributed.py                     # all cases
    python benchmarks/distributed.py --only ddp --ranks 2
    python benchmarks/distributed.py --large             # a model of 70 billion parameters on 8 and on 64 ranks
    python benchmarks/distributed.py --cold 20           # so many runs of 4 ranks that have measured nothing yet
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
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import lowtide
from common import (
    RESULTS,
    Row,
    append_row,
    describe_machine,
    emit,
    number,
    read_rows,
    refuse_unknown,
    run_child,
    table,
    text,
)
from large_llama import TOKENS, llama
from lowtide.errors import InfeasibleBudgetError
from lowtide.plan.planners.greedy import Greedy

DIM, ROWS, LAYERS, STEPS, TIMED_STEPS, TRIES = 256, 512, 8, 3, 9, 3
# What reduces gradients: of DDP, and of FSDP2.
REDUCE = ("c10d::allreduce", "c10d::_reduce_scatter", "c10d::reduce_scatter")
WAIT = timedelta(seconds=300)
SHARES = ("70", "50")
DATA, PAGE = RESULTS / "distributed.jsonl", RESULTS / "distributed.md"
Wrap = Callable[[nn.Module], nn.Module]
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


def sharded(model: nn.Module, wrap: Wrap, mesh: Any = None) -> nn.Module:
    options = {} if mesh is None else {"mesh": mesh}
    for layer in model.layers:
        fully_shard(layer, **options)
    return wrap(fully_shard(model, **options))


def hybrid(model: nn.Module, wrap: Wrap) -> nn.Module:
    """Two copies of the sharded model."""
    ranks = dist.get_world_size()
    return sharded(model, wrap, init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard")))


def spread(model: nn.Module, mesh: Any, *, sequence: bool = False) -> nn.Module:
    """Spread every layer over the ranks of a mesh."""
    wide: dict[str, Any] = {"input_layouts": Shard(0)} if sequence else {}
    narrow: dict[str, Any] = {"output_layouts": Shard(0)} if sequence else {}
    plan: dict[str, Any] = {"up": ColwiseParallel(**wide), "down": RowwiseParallel(**narrow)}
    if sequence:
        plan["norm"] = SequenceParallel(sequence_dim=0)
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    if sequence:
        first = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True
        )
        parallelize_module(model.layers[0], mesh, first)
        parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())})
    return model


def tensor_parallel(model: nn.Module, wrap: Wrap, *, sequence: bool = False) -> nn.Module:
    return wrap(spread(model, init_device_mesh("cpu", (dist.get_world_size(),)), sequence=sequence))


def both(model: nn.Module, wrap: Wrap) -> nn.Module:
    """Layers are spread over two ranks, and their parts are sharded among the others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "parts"))
    return sharded(spread(model, mesh["parts"]), wrap, mesh["data"])


def ddp(model: nn.Module, wrap: Wrap, **options: Any) -> nn.Module:
    return DistributedDataParallel(wrap(model), bucket_cap_mb=1, **options)


def ddp_in_half(model: nn.Module, wrap: Wrap) -> nn.Module:
    container = DistributedDataParallel(wrap(model), bucket_cap_mb=1)
    container.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return container


@dataclass(frozen=True)
class Engine:
    """An engine around a model.

    Attributes:
        make: Puts it around a model that is wrapped where that is usual.
        options: What the model is wrapped with.
        alike: How many ranks in a row have the same batches: they compute parts of them.
        least: The least number of ranks.
    """

    make: Callable[[nn.Module, Wrap], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    alike: int = 1
    least: int = 2


ENGINES: dict[str, Engine] = {
    "ddp": Engine(ddp),
    "ddp-views": Engine(partial(ddp, gradient_as_bucket_view=True)),
    "ddp-fp16": Engine(ddp_in_half),
    "ddp-blocks": Engine(ddp, {"blocks": ["layers"]}),
    "fsdp2": Engine(sharded),
    "hsdp": Engine(hybrid, least=4),
    "tp": Engine(tensor_parallel, alike=8),
    "tp-sequence": Engine(partial(tensor_parallel, sequence=True), alike=8),
    "fsdp2-tp": Engine(both, alike=2, least=4),
}


def plain_of(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(model: nn.Module, rank: int) -> list[Tensor]:
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    left: list[Tensor] = []
    for _ in range(STEPS):
        loss = model(torch.randn(ROWS, DIM))
        loss.backward()
        gradients = [local(each.grad).clone() for each in model.parameters()]
        left += [local(loss.detach()), *gradients, torch.get_rng_state()]
        optimizer.step()
        optimizer.zero_grad()
    return left


def peak_of_step(model: nn.Module) -> int:
    """Return the least peak of some steps: threads of gloo free what they took when nobody looks."""
    batch, found = torch.randn(ROWS, DIM), []
    for _ in range(TRIES):
        model.zero_grad()
        found.append(lowtide.measure_peak(lambda: model(batch).backward()))
    return min(found)


def places(model: nn.Module) -> list[float]:
    loss = model(torch.randn(ROWS, DIM))
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        loss.backward()
    events = sorted(watched.events(), key=lambda event: event.time_range.start)
    ops = [event.name for event in events if event.name.startswith(("aten::", *REDUCE))]
    return [place / len(ops) for place, name in enumerate(ops) if name.startswith(REDUCE)]


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
    engine = ENGINES[name]
    torch.manual_seed(0)
    plain, seed = Net(), rank // engine.alike
    eager = engine.make(copy.deepcopy(plain), lambda model: model)
    expected = train(eager, seed)
    budget = share * peak_of_step(eager) // 100

    def wrapped(budget: int) -> nn.Module:
        options = {"budget": budget, "planner": Greedy(effort=0.1), **engine.options}
        return engine.make(copy.deepcopy(plain), lambda model: lowtide.wrap(model, **options))

    model, is_least = wrapped(budget), False
    try:
        found = train(model, seed)
    except InfeasibleBudgetError as error:
        # Where the budget of another rank is too small, the own one is the least that this rank knows.
        budget, is_least = max(budget, error.least_bytes), True
        model = wrapped(budget)
        found = train(model, seed)
    measured = peak_of_step(model)
    (ours, theirs), (time_ours, time_theirs) = (places(model), places(eager)), seconds((model, eager))
    predicted = lowtide.plans(plain_of(model))[0].peak_bytes
    row = {} if not ours or not theirs else overlap(ours, theirs)
    return row | {
        "bits": all(map(torch.equal, found, expected)),
        "used": measured / budget,
        "predicted": predicted / measured,
        "is_least": is_least,
        "ratio": time_ours / time_theirs,
    }


def overlap(ours: Sequence[float], theirs: Sequence[float]) -> Row:
    """Return where gradients are reduced, as shares of the ops of backward."""
    return {
        "first": ours[0] - theirs[0],
        "median": statistics.median_low(ours) - statistics.median_low(theirs),
        "places": [ours[0], theirs[0], statistics.median_low(ours), statistics.median_low(theirs)],
    }


def joined(rows: Sequence[Row]) -> Row:
    """Return the worst of all ranks; what is used of the budget, by rank."""
    return {
        "bits": all(row["bits"] for row in rows),
        "kept": all(row["used"] <= 1 for row in rows),
        "used": [round(row["used"], 4) for row in rows],
        "predicted": max((row["predicted"] for row in rows), key=lambda each: abs(each - 1)),
        "is_least": any(row["is_least"] for row in rows),
        **(
            {name: max((row[name] for row in rows), key=abs) for name in ("first", "median")}
            if "first" in rows[0]
            else {}
        ),
        **({"places": rows[0]["places"]} if "places" in rows[0] else {}),
        "ratio": statistics.median(row["ratio"] for row in rows),
    }


def spawn(run: Callable[..., None], ranks: int, *args: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as cache:
        mp.spawn(run, (port, *args, cache), nprocs=ranks)


def run_case(name: str, ranks: int, share: int) -> None:
    spawn(run_rank, ranks, name, ranks, share)


def run_cold_rank(rank: int, port: int, ranks: int, cache: str) -> None:
    """Measure, plan and train a step from an empty cache that all ranks share; emit whether plans are equal."""
    torch.set_num_threads(1)
    os.environ["LOWTIDE_CACHE_DIR"] = cache
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=WAIT)
    torch.manual_seed(0)
    model = tensor_parallel(Net(), lambda model: lowtide.wrap(model, budget="70%", planner=Greedy(effort=0.02)))
    begin = time.perf_counter()
    model(torch.randn(ROWS, DIM)).backward()
    plan = lowtide.plans(model)[0]
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (plan.schedule.steps, plan.problem.costs))
    if rank == 0:
        emit({"ranks": ranks, "equal": all(each == found[0] for each in found), "seconds": time.perf_counter() - begin})
    dist.destroy_process_group()


def run_large(ranks: int) -> None:
    """Plan a model of the shape of LLaMA 70B for one of so many ranks."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model, batch = llama(), torch.empty(1, TOKENS, dtype=torch.int64)
    memory = "141GB" if ranks == 8 else "80GB"
    begin, begin_cpu = time.perf_counter(), time.process_time()
    parallel = lowtide.Parallel("fsdp2", ranks)
    plan = lowtide.plan(model, (batch, batch), memory=memory, costs="h100-80gb", parallel=parallel)
    taken = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - begin_cpu}
    facts = {"memory": memory, "overhead": plan.overhead, "num_ops": plan.num_ops, "planner": plan.planner}
    emit({"ranks": ranks, **taken, **facts, **plan.account.to_dict(), "peak_of_training": plan.account.peak_bytes})


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


COLD_COLUMNS = {
    "run": text("run"),
    "ranks": text("ranks"),
    "equal plans": text("equal"),
    "seconds": number("seconds", ".1f"),
    "error": text("error"),
}
LARGE_COLUMNS: dict[str, Callable[[Row], str]] = {
    "ranks": text("ranks"),
    "memory": text("memory"),
    "parameters": lambda row: gib(row, "parameter_bytes"),
    "optimizer": lambda row: gib(row, "optimizer_bytes"),
    "step": lambda row: gib(row, "step_bytes"),
    "sharding, of that": lambda row: gib(row, "sharding_bytes"),
    "all": lambda row: gib(row, "peak_of_training"),
    "overhead": number("overhead", ".2%"),
    "seconds": number("seconds", ".1f"),
    "of the processor": number("cpu_seconds", ".1f"),
    "error": text("error"),
}


def gib(row: Row, name: str) -> str:
    return f"{row[name] / 2**30:.1f} GiB" if name in row else "-"


def run_rows(about: Row, arguments: Sequence[str]) -> None:
    """Run one case in a process of its own and keep its rows, unless they are there."""
    known = [row for row in read_rows(DATA) if about.items() <= row.items() and "error" not in row]
    if known:
        return
    for row in run_child(__file__, arguments, env={"OMP_NUM_THREADS": "1"}):
        append_row(DATA, about | row)
        print(about | row, flush=True)


def last_rows(kind: str) -> list[Row]:
    """Return the rows of one kind, of each case the last one."""
    names = {"engine": ("engine", "ranks", "share"), "cold": ("run",), "large": ("ranks",)}[kind]
    rows = [row for row in read_rows(DATA) if row.get("kind") == kind]
    return list({tuple(row.get(name) for name in names): row for row in rows}.values())


def page() -> str:
    parts = [f"# Training in several processes\n\n{describe_machine()} All ranks share it, so that times say little."]
    for kind, title, columns in (
        ("engine", "Engines", COLUMNS),
        ("cold", "Nothing measured yet", COLD_COLUMNS),
        ("large", "80 layers of the shape of LLaMA 70B, planned without processes", LARGE_COLUMNS),
    ):
        rows = last_rows(kind)
        if kind == "cold" and rows:
            done = [row for row in rows if row.get("equal")]
            parts.append(f"## {title}\n\n{len(done)} of {len(rows)} runs of tensor parallel ended with equal plans.")
        elif rows:
            parts.append(f"## {title}\n\n{table(rows, columns)}")
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(ENGINES))
    parser.add_argument("--ranks", nargs="+", default=list(RANKS))
    parser.add_argument("--shares", nargs="+", default=list(SHARES))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--cold", type=int, default=0, metavar="RUNS")
    parser.add_argument("--child", nargs="+", metavar="CASE")
    options = parser.parse_args()
    if options.child:
        kind, *rest = options.child
        if kind == "engine":
            run_case(rest[0], int(rest[1]), int(rest[2]))
        elif kind == "large":
            run_large(int(rest[0]))
        else:
            spawn(run_cold_rank, int(rest[0]), int(rest[0]))
        return
    refuse_unknown(parser, "engines", options.only, ENGINES)
    if options.large:
        for ranks in (8, 64):
            run_rows({"kind": "large", "ranks": ranks}, ["--child", "large", str(ranks)])
    for run in range(options.cold):
        run_rows({"kind": "cold", "run": run, "ranks": 4}, ["--child", "cold", "4"])
    for name in options.only if not (options.large or options.cold) else ():
        for ranks in options.ranks:
            for share in options.shares if int(ranks) >= ENGINES[name].least else ():
                about = {"kind": "engine", "engine": name, "ranks": int(ranks), "share": int(share)}
                run_rows(about, ["--child", "engine", name, ranks, share])
    PAGE.write_text(page() + "\n")
    print(f"Wrote {DATA} and {PAGE}")
    engines = last_rows("engine")
    sys.exit(any("error" in row or not row["bits"] or not row["kept"] for row in engines))


if __name__ == "__main__":
    main()
