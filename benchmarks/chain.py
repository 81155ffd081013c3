"""Chains of blocks: an unrolled LSTM, a ResNet of 1,001 layers, PyTorch's own checkpointing, and the cost of a call.

Peaks are measured by the allocator's events. Seconds are the process's own, on one thread; plain and planned steps take
turns, and a figure is the median over the pairs of one over the other. A step is forward and backward from a ready
gradient.

    python benchmarks/chain.py --only lstm resnet
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lowtide
from common import (
    MIB,
    RESULTS,
    Row,
    describe_machine,
    emit,
    kept_rows,
    mib,
    number,
    run_child,
    table,
    text,
    write_results,
)
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.chain_dp.emit import emit as schedule_of
from lowtide.plan.planners.chain_dp.operations import Action, Operation
from lowtide.plan.planners.chain_dp.pieces import pieces_of
from lowtide.plan.planners.chen_recursive import ChenRecursive
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

HIDDEN, LAYERS, BATCH = 1024, 4, 8
LENGTHS = (64, 128, 256, 512, 1024, 2048)
LEAST_FACTOR, MOST_EXTRA = 8, 0.35
WIDTH, DEPTH, IMAGE, IMAGES = 64, 500, 32, 4
RESNET_FACTOR, RESNET_EXTRA = 7, 0.30
SEGMENTS = (2, 3, 4, 6, 8)
# Where both recompute the same blocks they are equally fast, and either is the slower one by chance.
UNLIKELY = 0.005
PLANNED: dict[str, tuple[str | AbstractPlanner, str, int | None]] = {
    "chen_sqrt": ("chen_sqrt", "100%", 1),
    "rotor, 1/8": ("rotor", "12.5%", None),
    "chen_recursive, k = 1": (ChenRecursive(k=1, depth=-1), "100%", 1),
}
# With large tensors in the C library's heap, the events of a measurement between them keep it from being used again.
ALONE = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4194304:glibc.malloc.hugetlb=1"}
Step = Callable[[], None]


def seconds_of(step: Step) -> float:
    """Return the processor seconds of one step."""
    start = time.process_time()
    step()
    return time.process_time() - start


def turns(plain: Step, others: Sequence[Step], pairs: int) -> list[list[float]]:
    """Return, for each of `others`, its seconds over those of `plain` in every turn."""
    for step in (plain, *others):
        step()
    taken: list[list[float]] = [[] for _ in others]
    for _ in range(pairs):
        base = seconds_of(plain)
        for row, step in zip(taken, others, strict=True):
            row.append(seconds_of(step) / base)
    return taken


def ratios(plain: Step, others: Sequence[Step], pairs: int) -> list[float]:
    """Return, for each of `others`, the median of its seconds over those of `plain`, taking turns."""
    return [median(row) for row in turns(plain, others, pairs)]


def chance(slower: int, pairs: int) -> float:
    """Return how likely one of two equal things is to be slower than the other in so many turns or more."""
    return sum(math.comb(pairs, k) for k in range(slower, pairs + 1)) / 2**pairs


def cleared(step: Step, parameters: Sequence[Tensor]) -> Step:
    """Return `step` beginning without gradients."""

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        step()

    return run


class Stack(nn.Module):
    """Cells unrolled in plain PyTorch."""

    def __init__(self, cells: Sequence[nn.LSTMCell]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def forward(self, sequence: Tensor) -> Tensor:
        """Return the sum of the last states."""
        zero = sequence.new_zeros(sequence.shape[1], HIDDEN)
        states = [(zero, zero) for _ in self.cells]
        for x in sequence.unbind(0):
            for index, cell in enumerate(self.cells):
                states[index] = cell(x, states[index])
                x = states[index][0]
        return sum((hidden.sum() + kept.sum() for hidden, kept in states), start=torch.zeros(()))


def unrolled(cells: Sequence[nn.LSTMCell], planner: str | AbstractPlanner, budget: str, chunk: int | None) -> nn.Module:
    """Return the same as `Stack`, planned."""
    return lowtide.unroll(list(cells), budget=budget, planner=planner, chunk=chunk, output=None)


def total(model: nn.Module, sequence: Tensor) -> Tensor:
    """Return the sum of the last states of an unrolled model."""
    _, states = model(sequence)
    return sum((hidden.sum() + kept.sum() for hidden, kept in states), start=torch.zeros(()))


def peak_and_seconds(step: Step) -> tuple[int, float]:
    """Return the peak of one step, and its processor seconds meanwhile."""
    seconds: list[float] = []
    peak = lowtide.measure_peak(lambda: seconds.append(seconds_of(step)))
    return peak, seconds[0]


def bench_lstm(pairs: int) -> Iterator[Row]:
    """Yield peaks and times of an unrolled LSTM at every length."""
    del pairs
    torch.manual_seed(0)
    cells = [nn.LSTMCell(HIDDEN, HIDDEN) for _ in range(LAYERS)]
    parameters = [parameter for cell in cells for parameter in cell.parameters()]
    for length in LENGTHS:
        sequence = torch.randn(length, BATCH, HIDDEN)
        stack = Stack(cells)
        plain = cleared(lambda s=sequence, m=stack: m(s).backward(), parameters)
        peak, base = peak_and_seconds(plain)
        expected = [parameter.grad for parameter in parameters]
        for name, (planner, budget, chunk) in PLANNED.items():
            # In shorter sequences the gradients of the weights are more than an eighth.
            if name == "rotor, 1/8" and length < LENGTHS[-1]:
                continue
            model = unrolled(cells, planner, budget, chunk)
            # Planning happens in the first forward pass.
            total(model, sequence)
            step = cleared(lambda s=sequence, m=model: total(m, s).backward(), parameters)
            measured, seconds = peak_and_seconds(step)
            exact = all(torch.equal(one, p.grad) for one, p in zip(expected, parameters, strict=True))
            plan = model.plans[0]
            yield {
                "case": "lstm",
                "length": length,
                "planner": name,
                "plain_bytes": peak,
                "exact": exact,
                "predicted_bytes": plan.peak_bytes,
                "measured_bytes": measured,
                "factor": peak / measured,
                "predicted_extra": plan.overhead,
                "planning_seconds": plan.seconds,
                "blocks": sum(op.name.endswith(" gradients") for op in plan.problem.graph.ops),
                "extra": seconds / base - 1,
            }


class Bottleneck(nn.Module):
    """A bottleneck with its normalisations before its convolutions (He et al. 2016)."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(fan_in),
            nn.ReLU(),
            nn.Conv2d(fan_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        )
        same = stride == 1 and fan_in == 4 * width
        self.shortcut = nn.Identity() if same else nn.Conv2d(fan_in, 4 * width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after the block."""
        return self.shortcut(x) + self.body(x)


class Basic(nn.Module):
    """Two convolutions with their normalisations before them, beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [
            (nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False)) for _ in range(2)
        ]
        self.body = nn.Sequential(*(part for row in parts for part in row))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` after the block."""
        return x + self.body(x)


def resnet_1001() -> nn.Sequential:
    """Return the 1,001-layer network: a first convolution, and blocks of two; pooled channels are the logits."""
    first = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
    last = nn.Sequential(nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(first, *(Basic(WIDTH) for _ in range(DEPTH)), last)


def train_steps(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return losses, gradients, parameters and buffers of three steps of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    left: list[Tensor] = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        left += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return left + [tensor.clone() for tensor in model.state_dict().values()]


def bench_resnet(pairs: int) -> Iterator[Row]:
    """Yield the row of the 1,001-layer ResNet."""
    torch.manual_seed(0)
    model = resnet_1001()
    plain = copy.deepcopy(model)
    chained = lowtide.chain(model, budget=f"{100 / RESNET_FACTOR:.4f}%", planner="rotor")
    batches = [(torch.randn(IMAGES, 3, IMAGE, IMAGE), torch.randint(WIDTH, (IMAGES,))) for _ in range(3)]
    expected, found = train_steps(plain, batches), train_steps(chained, batches)
    exact = all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    gradient = torch.randn(IMAGES, WIDTH) / IMAGES
    steps = [
        cleared(lambda m=each: m(batches[0][0]).backward(gradient), list(each.parameters()))
        for each in (plain, chained)
    ]
    peaks = [lowtide.measure_peak(step) for step in steps]
    plan = chained.plans[0]
    yield {
        "case": "resnet",
        "layers": 2 * DEPTH + 1,
        "blocks": len(model),
        "exact": exact,
        "plain_bytes": peaks[0],
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": peaks[1],
        "factor": peaks[0] / peaks[1],
        "predicted_extra": plan.overhead,
        "extra": ratios(steps[0], [steps[1]], pairs)[0] - 1,
        "planning_seconds": plan.seconds,
        "planner": "rotor",
    }


def four_chains() -> dict[str, tuple[nn.Sequential, Tensor]]:
    """Return the chains on which rotor meets `checkpoint_sequential`."""
    widths = [256, 512, 128, 768, 256, 256, 1024, 128, 512, 256, 384, 128, 640, 256]
    mlp = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()) for a, b in pairwise(widths)))
    layer = [nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True) for _ in range(12)]
    narrowing: list[nn.Module] = []
    fan_in = 8
    for stage in range(4):
        for index in range(4):
            fan_out = 8 << stage
            narrowing.append(
                nn.Sequential(
                    nn.Conv2d(fan_in, fan_out, 3, 2 if stage and not index else 1, 1),
                    nn.BatchNorm2d(fan_out),
                    nn.ReLU(),
                )
            )
            fan_in = fan_out
    residual = [Bottleneck(32, 8, 1) for _ in range(20)]
    return {
        "uneven perceptron": (mlp, torch.randn(1024, 256)),
        "transformer": (nn.Sequential(*layer), torch.randn(8, 128, 128)),
        "narrowing convolutions": (nn.Sequential(*narrowing), torch.randn(16, 8, 64, 64)),
        "residual bottlenecks": (nn.Sequential(*residual), torch.randn(16, 32, 32, 32)),
    }


def bench_sequential(pairs: int) -> Iterator[Row]:
    """Yield a row for every chain and number of segments."""
    torch.manual_seed(0)
    for name, (model, x) in four_chains().items():
        parameters = list(model.parameters())
        gradient = torch.randn_like(model(x).detach())
        plain = cleared(lambda m=model, x=x, g=gradient: m(x).backward(g), parameters)
        plain_peak = lowtide.measure_peak(plain)
        for segments in SEGMENTS:
            theirs = cleared(
                lambda m=model, x=x, g=gradient, s=segments: checkpoint_sequential(
                    m, s, x, use_reentrant=False
                ).backward(g),
                parameters,
            )
            theirs()
            peak = lowtide.measure_peak(theirs)
            chained = lowtide.chain(model, budget=peak, planner="rotor")
            ours = cleared(lambda m=chained, x=x, g=gradient: m(x).backward(g), parameters)
            ours()
            their_turns, our_turns = turns(plain, [theirs, ours], pairs)
            yield {
                "case": "sequential",
                "chain": name,
                "segments": segments,
                "plain_bytes": plain_peak,
                "their_bytes": peak,
                "our_bytes": lowtide.measure_peak(ours),
                "their_extra": median(their_turns) - 1,
                "our_extra": median(our_turns) - 1,
                "predicted_extra": chained.plans[0].overhead,
                "their_predicted_extra": in_segments(chained.plans[0].problem, segments),
                "slower": sum(our > their for our, their in zip(our_turns, their_turns, strict=True)),
                "pairs": pairs,
            }


def in_segments(problem: Problem, segments: int) -> float:
    """Return the overhead predicted for what `checkpoint_sequential` does: it recomputes all segments but the last."""
    pieces = pieces_of(problem.graph, problem.costs, len(problem.graph.ops))
    size = len(pieces) // segments
    starts = [k * size for k in range(segments)]
    stretches = [range(start, stop) for start, stop in pairwise([*starts, len(pieces)])]
    steps = [
        Operation(Action.PASS if layer > stretch.start else Action.KEEP_INPUT, layer)
        for stretch in stretches[:-1]
        for layer in stretch
    ]
    for stretch in reversed(stretches):
        steps += [Operation(Action.KEEP_ALL, layer) for layer in stretch]
        steps += [Operation(Action.BACKWARD, layer) for layer in reversed(stretch)]
    return problem.overhead(problem.price(schedule_of(pieces, steps)))


@dataclass(frozen=True, kw_only=True)
class EveryBlock(AbstractPlanner):
    """Keep what is between blocks and recompute what is inside, as a checkpoint around every block does."""

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return that schedule."""
        graph = problem.graph
        kept = [
            value
            for op in graph.forward
            for value in graph.ops[op].outputs
            if not graph.values[value].name.endswith(("inside", "begun"))
        ]
        return Proposal(expand(graph, kept))


def bench_call(pairs: int) -> Iterator[Row]:
    """Yield what a call of a very small block costs beside plain PyTorch, recomputed once in every way."""
    torch.manual_seed(0)
    blocks = 100
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(blocks)))
    x, gradient = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    chained = lowtide.chain(model, budget="1TiB", planner=EveryBlock())

    def checkpointed(reentrant: bool) -> Step:
        def run() -> None:
            y = x
            for block in model:
                y = checkpoint(block, y, use_reentrant=reentrant)
            y.backward(gradient)

        return run

    def twice() -> None:
        with torch.no_grad():
            model(x)
        model(x).backward(gradient)

    steps = {
        "plain": lambda: model(x).backward(gradient),
        "plain, forward twice": twice,
        "lowtide.chain": lambda: chained(x).backward(gradient),
        "checkpoint": checkpointed(False),
        "checkpoint, reentrant": checkpointed(True),
    }
    for step in steps.values():
        step()
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(4 * pairs):
        for name, step in steps.items():
            taken[name].append(seconds_of(step) / blocks)
    base = median(taken["plain, forward twice"])
    theirs = median(taken["checkpoint"]) - base
    for name, row in taken.items():
        extra = median(row) - base
        yield {
            "case": "call",
            "way": name,
            "microseconds": 1e6 * median(row),
            "own": 1e6 * extra,
            "ratio": extra / theirs,
        }


CASES: dict[str, Callable[[int], Iterator[Row]]] = {
    "call": bench_call,
    "sequential": bench_sequential,
    "resnet": bench_resnet,
    "lstm": bench_lstm,
}


def percent(key: str) -> Callable[[Row], str]:
    """Return a column that shows a share in percent."""
    return lambda row: "-" if row.get(key) is None else f"{100 * row[key]:.1f} %"


LSTM_COLUMNS = {
    "steps": text("length"),
    "planner": text("planner"),
    "blocks": text("blocks"),
    "plain MiB": mib("plain_bytes"),
    "predicted MiB": mib("predicted_bytes"),
    "measured MiB": mib("measured_bytes"),
    "below plain": number("factor", ".1f"),
    "extra time, predicted": percent("predicted_extra"),
    "extra time": percent("extra"),
    "planning s": number("planning_seconds", ".1f"),
    "same bits": text("exact"),
}
RESNET_COLUMNS = {"layers": text("layers")} | {key: LSTM_COLUMNS[key] for key in list(LSTM_COLUMNS)[1:]}
SEQUENTIAL_COLUMNS = {
    "chain": text("chain"),
    "segments": text("segments"),
    "plain MiB": mib("plain_bytes"),
    "at a peak of, MiB": text("peaks"),
    "checkpoint_sequential extra": percent("their_extra"),
    "rotor extra": percent("our_extra"),
    "rotor slower in": text("slower"),
    "checkpoint_sequential extra, predicted": percent("their_predicted_extra"),
    "rotor extra, predicted": percent("predicted_extra"),
}
CALL_COLUMNS = {
    "way": text("way"),
    "us per block and step": number("microseconds", ".0f"),
    "us beyond plain with forward twice": number("own", ".0f"),
    "share of checkpoint's": number("ratio", ".2f"),
}


def chain_lines(rows: Sequence[Row]) -> list[Row]:
    """Return one line per chain beside `checkpoint_sequential`: medians over its numbers of segments."""
    lines = []
    for name in dict.fromkeys(row["chain"] for row in rows):
        mine = [row for row in rows if row["chain"] == name]
        keys = ("their_extra", "our_extra", "their_predicted_extra", "predicted_extra")
        line: Row = {"chain": name, **{key: median(row[key] for row in mine) for key in keys}}
        line["plain_bytes"] = mine[0]["plain_bytes"]
        line["segments"] = ", ".join(str(row["segments"]) for row in mine)
        peaks = sorted(row["their_bytes"] / MIB for row in mine)
        line["peaks"] = f"{peaks[0]:.1f} to {peaks[-1]:.1f}"
        line["slower"] = f"{sum(row['slower'] for row in mine)} of {sum(row['pairs'] for row in mine)}"
        lines.append(line)
    return lines


def growth(rows: Sequence[Row]) -> list[str]:
    """Return one line for every planner: the exponent of its peak's growth, and the bytes added by each doubling."""
    lines = []
    for name in dict.fromkeys(row["planner"] for row in rows):
        own = sorted((row["length"], row["measured_bytes"]) for row in rows if row["planner"] == name)
        if len(own) < len(LENGTHS):
            continue
        exponents = [math.log2(after / before) for (_, before), (_, after) in pairwise(own)]
        added = [f"{(after - before) / 2**20:.2f}" for (_, before), (_, after) in pairwise(own)]
        lines.append(
            f"- {name}: exponents from doubling to doubling {', '.join(f'{each:.2f}' for each in exponents)}; "
            f"MiB added by each doubling {', '.join(added)}."
        )
    plain = sorted({(row["length"], row["plain_bytes"]) for row in rows})
    exponents = [math.log2(after / before) for (_, before), (_, after) in pairwise(plain)]
    return [f"- plain training: exponents {', '.join(f'{each:.2f}' for each in exponents)}.", *lines]


def page(rows: Sequence[Row], pairs: int) -> str:
    """Return the result page."""
    of = {case: [row for row in rows if row.get("case") == case and "error" not in row] for case in CASES}
    parts = ["# Chains of blocks", "", "Written by `make bench-chain`; " + describe_machine(), ""]
    parts += [*(__doc__ or "").split("\n\n")[1].splitlines(), f"{pairs} pairs.", ""]
    parts += [
        "## LSTM, unrolled",
        "",
        f"{LAYERS} layers of {HIDDEN:,} hidden units, batch {BATCH}: the published network with a smaller batch (64), "
        "so that 2,048 steps of plain training fit this machine. Peaks include the gradients of the weights. "
        "Times are of one step each, for a step takes minutes, while its peak is measured.",
        "",
        table([row for row in of["lstm"] if row["length"] in (LENGTHS[0], LENGTHS[-1])], LSTM_COLUMNS),
        "",
        "Every length is in `chain.jsonl`. What the peaks grow by:",
        "",
        *(growth(of["lstm"]) if of["lstm"] else []),
        "",
        "## ResNet of 1,001 layers",
        "",
        f"{DEPTH} pre-activation blocks of two {WIDTH}-channel convolutions after a first one, batch {IMAGES} of "
        f"{IMAGE} x {IMAGE} images; three steps with momentum. On a CPU the forward pass of batch normalisation takes "
        "longer than its backward: in narrower networks forward is close to half of a step, and so is recomputing it.",
        "",
        table(of["resnet"], RESNET_COLUMNS),
        "",
        "## rotor and checkpoint_sequential at the same measured peak",
        "",
        "The budget is the peak measured for `checkpoint_sequential`. Where blocks are alike, recomputing the fewest "
        "that fit is all there is to choose, and `checkpoint_sequential` often recomputes as few: then both take "
        "as long, and which of them is slower in a turn is chance. A row counts as higher if the prediction is, or if "
        f"rotor is the slower one in so many turns that chance has a probability of less than {UNLIKELY:.1%}. "
        "A line is the median over the numbers of segments.",
        "",
        table(chain_lines(of["sequential"]), SEQUENTIAL_COLUMNS),
        "",
        "## The cost of a call",
        "",
        "100 blocks of two 8 x 8 linear layers, each recomputed once.",
        "",
        table(of["call"], CALL_COLUMNS),
    ]
    errors = [f"- {row['case']}: {row['error']}" for row in rows if "error" in row]
    return "\n".join([*parts, *(["", "Failed:", "", *errors] if errors else [])])


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what does not hold."""
    found = [f"{row['case']}: {row['error']}" for row in rows if "error" in row]
    for row in rows:
        if row.get("exact") is False:
            found.append(f"{row['case']} {row.get('length', '')} {row['planner']}: other bits")
        if "error" in row:
            continue
        last = row.get("case") == "lstm" and row.get("length") == LENGTHS[-1] and row["planner"].startswith("rotor")
        if last and (row["factor"] < LEAST_FACTOR or row.get("extra", 0) > MOST_EXTRA):
            found.append(f"lstm: {row['factor']:.2f} times below plain at {row.get('extra', 0):.3f} extra")
        if row.get("case") == "resnet" and (row["factor"] < RESNET_FACTOR or row["extra"] > RESNET_EXTRA):
            found.append(f"resnet: {row['factor']:.2f} times below plain at {row['extra']:.3f} extra")
        if row.get("case") == "sequential" and (
            row["our_bytes"] > row["their_bytes"]
            or row["predicted_extra"] > row["their_predicted_extra"] + 1e-9
            or chance(row["slower"], row["pairs"]) < UNLIKELY
        ):
            found.append(
                f"{row['chain']}, {row['segments']} segments: {row['our_extra']:.3f} against {row['their_extra']:.3f}"
            )
        if row.get("case") == "call" and row["way"] == "lowtide.chain" and row["ratio"] >= 1:
            found.append(f"a call costs {row['ratio']:.2f} times a checkpoint's")
    return found


def earlier(directory: Path, cases: set[str]) -> list[Row]:
    """Return the rows of `cases` that are in `directory` already."""
    return [row for row in kept_rows("chain", directory=directory) if row["case"] in cases]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code is 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    parser.add_argument("--pairs", type=int, default=11, help="timed pairs of steps, at least 8")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for chain.md and chain.jsonl")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        torch.set_num_threads(1)
        for row in CASES[options.child](options.pairs):
            emit(row)
        return 0
    rows = earlier(options.out, set(CASES) - set(options.only))
    for case in options.only:
        for row in run_child(__file__, ["--child", case, "--pairs", str(options.pairs)], env=ALONE):
            rows.append({"case": case, **row})
            print(rows[-1], flush=True)
    for path in write_results("chain", rows=rows, markdown=page(rows, options.pairs), directory=options.out):
        print(f"Wrote {path}")
    broken = failures(rows)
    print("\n".join(broken) or "All claims hold.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
