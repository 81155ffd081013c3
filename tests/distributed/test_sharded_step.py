"""What FSDP holds along a step, worked out by hand and by what any step keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.distributed.sharded_step import ShardedStep
from lowtide.pytorch.fully_sharded import GroupNow, ModelNow, ShardedGroup, StateNow
from lowtide.step.problem import Gap
from lowtide.step.surroundings import Around, Gaps, ModuleRun, with_surroundings

# Layers of 100 bytes among 2 ranks, and a root of 10.
LAYER = ShardedGroup(2, 0, 100, 100, 0, 0, 100, 50, 0, is_replicated=False, kept_shard=0, is_asynchronous=False)
ROOT = replace(LAYER, gathered=10, unsharded=10, scattered=10, reduced=5)
NOW = GroupNow(
    reshards_forward=True,
    reshards_backward=True,
    gathers_backward=True,
    reduces=True,
    replicates=True,
    is_unsharded=False,
    has_waiting=False,
    has_gradients=False,
    has_partial=False,
)
PATHS = {"": 0, "a": 1, "b": 2}


def call(path: str, **other: bool) -> ModuleRun:
    return ModuleRun(path, is_call=True, gradient_bytes=100, **other)


def model(layer: ShardedGroup = LAYER, **changes: bool) -> ShardedStep:
    now = replace(NOW, **changes)
    states = (StateNow(replace(now, reshards_forward=False), (), ()), StateNow(now, (), ()), StateNow(now, (), ()))
    return ShardedStep(PATHS, [ROOT, layer, layer], ModelNow(states, is_last_backward=True, most_inputs=1))


def levels(around: list[Around]) -> list[int]:
    """Return the level behind each gap."""
    found, level = [], 0
    for each in around:
        level += sum(part.after for part in each.parts)
        found.append(level)
    return found


def test_layers_are_gathered_one_after_the_other() -> None:
    forward, backward = model().around([call("a"), call("b")], 0)
    # The root, then the layer with the buffer that it was gathered into; at the end the root alone.
    assert levels(list(forward)) == [210, 210, 10]
    assert [part.peak for part in forward[0].parts] == [20, 190]
    # With the last layer the one before it is gathered ahead; then its gradients are on their way, and its shard stays.
    # Gradients of parameters are the blocks': here they only go.
    assert levels(list(backward)) == [200, 200 - 100 + 100 - 100 + 50, 50 + 50 - 10 - 200]


def test_a_layer_that_stays_unsharded_is_gathered_once() -> None:
    forward, backward = model(reshards_forward=False).around([call("a"), call("b")], 0)
    assert levels(list(forward)) == [210, 310, 210]
    assert sum(part.after for part in backward[0].parts) == 0


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("reshards", [False, True])
@pytest.mark.parametrize("cast", [0, 30])
@pytest.mark.parametrize("types", [0, 25])
@pytest.mark.parametrize("copies", [False, True])
def test_a_step_leaves_the_sharded_gradients(
    gathers: bool, reshards: bool, cast: int, types: int, copies: bool
) -> None:
    layer = replace(LAYER, cast=cast, gradients=types, is_replicated=copies)
    step = model(layer, reshards_forward=reshards, gathers_backward=gathers or reshards)
    runs = [call("a"), call("b"), replace(call("b"), continues=True), ModuleRun("", gradient_bytes=7)]
    forward, backward = step.around(runs, 3)
    gone = 3 * 100 + 7 + 3
    # The root is unsharded from the beginning of forward to the end of backward.
    assert levels([*forward, *backward])[-1] == 2 * (types or 50) + 5 - gone


def test_gradients_wait_for_a_call_that_synchronises() -> None:
    _, backward = model(reduces=False).around([call("a"), call("b")], 0)
    # Nothing is reduced; what was gathered in forward goes.
    assert levels(list(backward))[-1] == -10
    _, backward = model(reduces=False, has_waiting=True).around([call("a"), call("b")], 0)
    # They are added to those that wait.
    assert levels(list(backward))[-1] == -10 - 200


def test_a_layer_whose_input_needs_no_gradient_ends_with_the_step() -> None:
    runs = [call("a", trains_inputs=False), call("b")]
    _, backward = model().around(runs, 0)
    assert len(backward[-1].parts) == 3
    assert backward[-1].parts[0].after == 0


def test_modules_that_share_a_group_are_gathered_once() -> None:
    states = (StateNow(replace(NOW, reshards_forward=False), (), ()), StateNow(NOW, (), ()))
    step = ShardedStep({"": 0, "a": 1, "b": 1}, [ROOT, LAYER], ModelNow(states, is_last_backward=True, most_inputs=1))
    forward, backward = step.around([call("a"), call("b")], 0)
    assert levels(list(forward)) == [210, 210, 10]
    assert levels([*forward, *backward])[-1] == 50 - 200


def test_code_runs_where_the_peak_is_highest() -> None:
    around = Around((Gap(10, 10), Gap(5, -10)), 0, 2)
    own = Gaps((Gap(3, 1),), (Gap(0, 0),))
    assert with_surroundings(own, [around], [around]).forward == (Gap(16, 1),)
    assert with_surroundings(own, [replace(around, first=2)], [around]).forward == (Gap(15, 1),)
