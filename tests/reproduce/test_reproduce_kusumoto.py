"""The authors' graph files, read and simulated, and the page that compares their figures with ours."""

from __future__ import annotations

import pytest

from helpers.paths import published_graph
from lowtide.errors import InvalidGraphError
from lowtide.graph import samples
from lowtide.graph.verify import check_graph
from lowtide.plan.core.problem import Problem
from lowtide.plan.planners.greedy import Greedy
from lowtide.plan.planners.kusumoto import Kusumoto
from lowtide.plan.solve import solve
from lowtide.reproduce import kusumoto
from lowtide.reproduce.chainer_graphs import parse_chainer_graph, read_chainer_graph
from lowtide.schedule.steps import Schedule
from lowtide.schedule.verify import verify

# Plain training at the published batch, in GB, as another simulation of the same files gives it.
PLAIN = {
    "pspnet": 8.69,
    "unet": 7.33,
    "resnet50": 7.88,
    "resnet152": 8.52,
    "vgg19": 5.41,
    "densenet161": 7.84,
    "googlenet": 5.93,
}

# Two convolutions that read the same ReLU, and their sum; the file's order is not the order in which they can run.
SMALL = """\
11 10
0 100 _
1 100 _
2 60 _
4 60 _
5 4 _
6 50 0
7 8 1
8 20 /a/W
9 30 /b/W
10 30 /c/W
11 4 /c/b
forward
2 1
4 _
7 _
5
SoftmaxCrossEntropy
{}
forward
2 1
6 _
8 _
0
Convolution2DFunction
{}
forward
1 1
0 _
1
ReLU
{}
forward
2 1
1 _
9 _
2
Deconvolution2DFunction
{}
forward
3 1
1 _
10 _
2 _
4
Convolution2DFunction
{}
backward
3 2
5 gradient
4 input
7 input
4
7
SoftmaxCrossEntropy
{}
backward
3 2
0 gradient
6 input
8 input
6
8
Convolution2DFunction
{}
backward
2 1
1 gradient
1 output
0
ReLU
{}
backward
3 2
2 gradient
1 input
9 input
1
9
Deconvolution2DFunction
{}
backward
4 3
4 gradient
1 input
10 input
2 input
1
10
2
Convolution2DFunction
{}
"""


def test_a_small_file():
    chainer = parse_chainer_graph(SMALL)
    assert [function.name[:6] for function in chainer.functions] == ["Convol", "ReLU", "Deconv", "Convol", "Softma"]
    dag = chainer.dag
    assert dag.bytes == (100, 100, 60, 60, 4)
    assert dag.ticks == (10, 1, 1, 10, 1)
    assert dag.predecessors == ((), (0,), (1,), (1, 2), (3,))
    assert chainer.parameter_bytes == 20 + 30 + 30 + 4
    assert chainer.input_bytes == 58


def test_a_small_step_by_hand():
    graph, costs = parse_chainer_graph(SMALL).training()
    check_graph(graph)
    verify(graph, Schedule.keep_all(graph))
    trace = Problem(graph, costs, 1).baseline
    # When backward begins: ReLU 100, both results of 60, the loss 4; the first convolution's own result has gone.
    assert trace.saved_bytes == 100 + 60 + 60 + 4
    # Backward of the sum adds the gradients 100, 30 and 60 while its own 60 is there, the loss and what it reads; the
    # deconvolution then adds into the same 100 instead of making another.
    during = dict(zip((op.name for op in graph.ops), trace.bytes_during, strict=True))
    assert during["Convolution2DFunction.3.backward"] == 4 + 60 + (100 + 60) + (100 + 30 + 60)
    assert during["Deconvolution2DFunction.2.backward"] == 4 + 30 + 60 + 100 + 100 + 30
    assert trace.seconds == 23 + 2 * 23
    sizes = {graph.values[value].name: graph.values[value].bytes for value in graph.outputs}
    assert sorted(sizes.values()) == [4, 20, 30, 30]


def test_scaling_leaves_parameters_and_scalars_alone():
    chainer = parse_chainer_graph(SMALL).scaled(6, 2)
    assert chainer.dag.bytes == (300, 300, 180, 180, 4)
    assert chainer.parameter_bytes == 84
    assert chainer.input_bytes == 3 * 58


def edited(line: int, text: str) -> str:
    lines = SMALL.splitlines()
    lines[line - 1] = text
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "line 1: the file ends"),
        (edited(1, "11 ten"), "line 1: .* is not the number of variables"),
        (edited(1, "10 10"), "is neither 'forward' nor 'backward'"),
        (edited(1, "11 9"), "every forward function needs a backward one"),
        (edited(1, "11 8"), "more text after the last function"),
        (edited(1, "11 12"), "the file ends where a function should be"),
        (edited(3, "1 lots _"), "line 3: .* is not a number, the bytes and the name"),
        (edited(3, "0 100 _"), "have the same number"),
        (edited(13, "sideways"), "line 13: 'sideways' is neither"),
        (edited(15, "4 maybe"), "line 15: .* is not the number of an input and what it is"),
        (edited(15, "40 _"), "line 15: '40' is not the number of a variable"),
        (edited(17, "x"), "line 17: 'x' is not the number of a variable"),
        (edited(18, "Sigmoid"), "is paired with"),
        (edited(17, "0"), "does not read the gradient|two functions write"),
        (edited(50, "4 input"), "does not read the gradient"),
        ("\n".join(SMALL.splitlines()[:-1]), "the file ends where a function's attributes should be"),
        (SMALL + "more\n", "more text after the last function"),
    ],
)
def test_malformed_files(text, fact):
    with pytest.raises(InvalidGraphError, match=fact):
        parse_chainer_graph(text, source="here")


def test_a_function_that_depends_on_itself():
    # The first convolution reads the sum.
    lines = SMALL.splitlines()
    assert lines[21] == "6 _"
    lines[21] = "4 _"
    with pytest.raises(InvalidGraphError, match="depends on its own output"):
        parse_chainer_graph("\n".join(lines))


def test_unreadable_files(tmp_path):
    with pytest.raises(InvalidGraphError, match="cannot be read"):
        read_chainer_graph(tmp_path / "nothing.txt")
    (tmp_path / "picture.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidGraphError, match="cannot be read"):
        read_chainer_graph(tmp_path / "picture.txt")
    (tmp_path / "small.txt").write_text(SMALL)
    assert len(read_chainer_graph(tmp_path / "small.txt").dag) == 5


@pytest.mark.parametrize("name", PLAIN)
def test_plain_training_of_the_released_graphs(name):
    published = kusumoto.PUBLISHED[name]
    path = published_graph(f"kusumoto_{published.file}.txt")
    chainer = read_chainer_graph(path).scaled(published.batch, published.file_batch)
    for declared in (False, True):
        graph, costs = chainer.training(declared=declared)
        verify(graph, Schedule.keep_all(graph))
        peak = Problem(graph, costs, 1).baseline.peak_bytes + chainer.parameter_bytes + chainer.input_bytes
        assert peak / 1e9 == pytest.approx(PLAIN[name], abs=0.01) or (declared and peak / 1e9 > PLAIN[name])


@pytest.mark.parametrize("name", ["vgg19", "unet", "resnet50", "densenet161", "googlenet"])
def test_released_graphs_reach_the_published_memory(name):
    published = kusumoto.PUBLISHED[name]
    path = published_graph(f"kusumoto_{published.file}.txt")
    chainer = read_chainer_graph(path).scaled(published.batch, published.file_batch)
    problem = Problem(*chainer.training(), 1)
    plan = solve(problem, Kusumoto(strategy="memory"), throw=False)
    memory = plan.peak_bytes + chainer.parameter_bytes + chainer.input_bytes
    assert memory / 1e9 <= published.least["kusumoto, memory-centric"] + 0.05


def test_rows_of_a_small_network():
    published = kusumoto.PUBLISHED["unet"]
    graph, costs = samples.unet(3, size=1 << 28)
    measured = kusumoto.measure(published, graph, costs, 10**9, {"greedy": Greedy(effort=0)})
    rows = {row.quantity: row for row in kusumoto.rows_of("unet", published, measured)}
    assert set(measured.refused) <= {"chen_sqrt"}
    assert rows["plain training"].ours == (measured.problem.baseline.peak_bytes + 10**9) / 1e9
    for column in measured.least:
        row = rows[f"least memory, {column}"]
        assert row.published == published.least[column]
        assert row.ours <= rows["plain training"].ours
    assert rows["least memory, best of these"].published == 4.7
    assert rows["least memory, best of these"].ours == min(
        rows[f"least memory, {name}"].ours for name in measured.least
    )
    assert "memory, greedy at the best published" in rows
    assert "extra time, kusumoto at the best published" in rows


def test_rows_of_a_released_graph():
    rows = {
        row.quantity: row for row in kusumoto.released_rows(kusumoto.PUBLISHED["vgg19"], parse_chainer_graph(SMALL))
    }
    for family in ("vertices with ancestors", "all lower sets"):
        assert rows[f"least budget of the model, {family}"].ours > 0
        assert 0 <= rows[f"overhead in the model, time-centric, {family}"].ours <= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", kusumoto.PUBLISHED)
def test_every_network_needs_at_most_the_published_memory(name):
    page = kusumoto.page(only=[name], others={"greedy": Greedy(effort=0)})
    assert page.rows
    best = [row for row in page.rows if row.quantity == "least memory, best of these"]
    assert [row.ours <= row.published for row in best] == [True]
    for row in page.rows:
        if row.quantity.startswith("least memory, kusumoto"):
            assert row.ours <= row.published, row
