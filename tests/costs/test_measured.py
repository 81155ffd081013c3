import dataclasses
import threading
import warnings

import pytest
import torch

from helpers.cost_cases import CPU, FAKE, aten, call, fake, index, mask, mixed_ops, ops, program
from lowtide.costs import clock, measured
from lowtide.costs.measured import materialize
from lowtide.costs.op_signature import signature
from lowtide.costs.resolve import resolve_costs
from lowtide.errors import InvalidGraphError, InvalidOptionError, LowtideWarning, MeasureError
from lowtide.graph.costs import Costs
from lowtide.measure import measure_peak, run_with_peak
from lowtide.pytorch.nested import tensors_in

MIB = 2**20
OPS = [pytest.param(one, id=f"{one[0]}-{k}") for k, one in enumerate(ops(torch.float32))]
OPS += [pytest.param(one, id=f"{one[0]}-bf16-{k}") for k, one in enumerate(ops(torch.bfloat16))]
OPS += [pytest.param(one, id=f"{one[0]}-mixed-{k}") for k, one in enumerate(mixed_ops())]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("one", OPS)
def test_every_op_is_measurable_and_accounts_for_its_bytes(one):
    cost = measured._measure(one, CPU, 0.0)
    target, args, kwargs = materialize(one)
    old = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
    kept = []
    peak = measure_peak(lambda: kept.append(target(*args, **kwargs)))
    new = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(kept)}
    results = sum(number for pointer, number in new.items() if pointer not in old)
    # The reference recorder and the quick one agree, whatever data the op got.
    assert peak == results + cost.workspace_bytes
    assert cost.seconds > 0


@pytest.mark.parametrize("one", OPS)
def test_an_op_allocates_the_same_with_gradients_and_when_it_is_new(one):
    def peak():
        target, args, kwargs = materialize(one)
        return run_with_peak(lambda: target(*args, **kwargs), CPU)[1]

    with torch.enable_grad():
        first = peak()
    with torch.no_grad():
        assert peak() == peak() == first


def test_known_workspaces():
    noise = call(aten.native_dropout.default, fake(100, 10), 0.1, True)
    strided = call(aten.mm.default, fake(20, 60)[:, ::2], fake(30, 40))
    plain = call(aten.mm.default, fake(20, 30), fake(30, 40))
    costs = measured.measure_costs(program(noise, strided, plain, None), cache=False)
    # Dropout draws a float for every element before it compares; a matrix without unit stride is copied.
    assert costs.workspace_bytes == (4000, 20 * 30 * 4, 0, 0)
    assert costs.seconds[3] == 0
    assert costs.source.startswith("measured on cpu")


def test_replay_with_more_workspace_counts():
    plain = call(aten.mm.default, fake(20, 30), fake(30, 40))
    strided = call(aten.mm.default, fake(20, 60)[:, ::2], fake(30, 40))
    assert measured.measure_costs(program(plain, replays={0: strided}), cache=False).workspace_bytes == (2400,)


def test_a_huge_matmul_costs_more_than_a_tiny_add():
    huge = call(aten.mm.default, fake(700, 700), fake(700, 700))
    tiny = call(aten.add.Tensor, fake(2), fake(2))
    seconds = measured.measure_costs(program(huge, tiny), cache=False).seconds
    assert seconds[0] > seconds[1] > 0


def test_equal_ops_are_measured_once(monkeypatch):
    seen = []
    monkeypatch.setattr(measured, "_measure", lambda one, *_: seen.append(one) or measured.OpCost(1.0, 0))
    same = [call(aten.relu.default, fake(3, 3)) for _ in range(4)]
    costs = measured.measure_costs(program(*same, call(aten.relu.default, fake(3, 3).t())), cache=False)
    assert len(seen) == 2 * clock.OPS.sweeps
    assert costs.seconds == (1.0,) * 5


def second_sweep(monkeypatch, seconds, *calls, **policy):
    """Return the sizes of the arguments of the ops that are measured again, given what each size takes."""
    monkeypatch.setattr(measured, "OPS", dataclasses.replace(clock.OPS, **policy))
    seen = []

    def measure(one, device, enough, known=None):
        size = one[1][0].shape[0]
        if known is not None:
            seen.append(size)
        return measured.OpCost(seconds[size], 0)

    monkeypatch.setattr(measured, "_measure", measure)
    measured.measure_costs(program(*calls), cache=False)
    return seen


def relu(size):
    return call(aten.relu.default, fake(size))


def test_ops_that_take_most_of_the_step_are_measured_again_first(monkeypatch):
    # The one of size 3 runs four times.
    calls = (relu(2), relu(3), relu(4), relu(3), relu(3), relu(3))
    assert second_sweep(monkeypatch, {2: 1.0, 3: 0.5, 4: 1.5}, *calls) == [3, 4, 2]


def test_ops_that_take_next_to_nothing_are_not_measured_again(monkeypatch):
    assert second_sweep(monkeypatch, {2: 1.0, 3: 1e-9, 4: 1e-3}, relu(2), relu(3), relu(4)) == [2, 4]


def test_measuring_again_ends_when_the_time_is_up(monkeypatch):
    assert second_sweep(monkeypatch, {2: 1.0, 3: 2.0}, relu(2), relu(3), again_seconds=0.0) == []


@pytest.mark.parametrize(("long_seconds", "plain"), [(0.0, 1), (100.0, 2)])
def test_an_op_that_takes_long_runs_twice_in_all(monkeypatch, long_seconds, plain):
    once = clock.Repeats(fewest=1, most=50, seconds=0.0)
    monkeypatch.setattr(measured, "OPS", dataclasses.replace(clock.OPS, long_seconds=long_seconds, repeats=once))
    ran, workspace_bytes = [], measured._workspace_bytes
    monkeypatch.setattr(measured, "seconds_of", lambda run, device: ran.append("plain") or 5.0)
    monkeypatch.setattr(measured, "_workspace_bytes", lambda *args: ran.append("recorded") or workspace_bytes(*args))
    costs = measured.measure_costs(program(relu(3)), cache=False)
    assert ran == ["recorded"] + ["plain"] * plain
    assert (costs.seconds[0] < 5.0) == (plain == 1)


def test_a_time_spoilt_in_one_sweep_does_not_count(monkeypatch):
    times = (
        [9.0] * clock.OPS.repeats.fewest
        + [1.0] * clock.OPS.repeats.fewest
        + [1.1] * clock.OPS.repeats.fewest
        + [8.0] * clock.OPS.repeats.fewest
    )
    monkeypatch.setattr(measured, "seconds_of", lambda run, device: times.pop(0))
    asked = []
    monkeypatch.setattr(measured, "_workspace_bytes", lambda run, inputs, device: asked.append(run) or 4)
    two = program(call(aten.relu.default, fake(3)), call(aten.relu.default, fake(4)))
    costs = measured.measure_costs(two, cache=False)
    assert costs.seconds == (1.1, 1.0)
    assert costs.workspace_bytes == (4, 4)
    assert len(asked) == 2  # bytes are the same every time, so they are measured once


def test_random_numbers_of_the_user_are_untouched():
    before = torch.get_rng_state()
    measured.measure_costs(program(call(aten.native_dropout.default, fake(9), 0.5, True)), cache=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_of_the_user_are_untouched_and_do_not_matter():
    one = call(aten.mm.default, fake(20, 60)[:, ::2], fake(30, 40))
    plain = measured.measure_costs(program(one), cache=False)
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16), FAKE, torch.device("meta"):
        inside = measured.measure_costs(program(one), cache=False)
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert inside.workspace_bytes == plain.workspace_bytes


def test_measuring_works_while_memory_is_being_measured():
    found = []
    one = call(aten.native_dropout.default, fake(100, 10), 0.1, True)
    peak = measure_peak(lambda: found.append(measured.measure_costs(program(one), cache=False)))
    assert found[0].workspace_bytes == (4000,)
    # The saved generator state; the ops themselves run in another thread.
    assert peak < 4000 + 2 * 5056


def test_memory_stays_within_one_op(monkeypatch):
    class Pool:
        def __init__(self, *_):
            self.result = lambda: None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def submit(self, run, *args):
            run(*args)
            return self

    # So that the recorder sees it: it looks at one thread and allows no second recorder in it.
    monkeypatch.setattr(measured, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(measured, "run_with_peak", lambda run, device: (run(), 0))
    large = [call(aten.add.Tensor, fake(MIB // 4, k), fake(MIB // 4, k)) for k in range(1, 9)]
    peak = measure_peak(lambda: measured.measure_costs(program(*large), cache=False))
    assert peak <= 3 * 8 * MIB + MIB
    assert peak >= 3 * 8 * MIB


def test_an_op_that_cannot_run_alone_is_estimated_and_named():
    def broken(x):
        raise RuntimeError("needs its friends")

    good = call(aten.add.Tensor, fake(2), fake(2))
    with pytest.warns(LowtideWarning, match=r"broken \(RuntimeError: needs its friends\)") as caught:
        costs = measured.measure_costs(program(call(broken, fake(5)), good))
    assert len(caught) == 1
    assert costs.seconds[0] > 0
    assert costs.workspace_bytes[0] == 0


def test_interrupting_keeps_what_was_measured(monkeypatch):
    def interrupt(message):
        if "op 2 of 2" in message:
            raise KeyboardInterrupt

    calls = program(call(aten.relu.default, fake(3)), call(aten.relu.default, fake(4)))
    with pytest.raises(KeyboardInterrupt):
        measured.measure_costs(calls, progress=interrupt)
    seen = []
    measured.measure_costs(calls, progress=seen.append)
    assert seen == ["measuring op 1 of 1: aten.relu.default", "measuring op 1 of 1 again: aten.relu.default"]


def test_the_second_time_comes_from_the_cache():
    calls = program(call(aten.relu.default, fake(300)))
    first = measured.measure_costs(calls)
    seen = []
    assert measured.measure_costs(calls, progress=seen.append) == first
    assert seen == []


def test_no_thread_is_left_behind():
    before = threading.active_count()
    measured.measure_costs(program(call(aten.relu.default, fake(3))), cache=False)
    assert threading.active_count() == before


@pytest.mark.timeout(120)
def test_many_quick_ops_take_seconds_only():
    calls = program(*(call(aten.relu.default, fake(k)) for k in range(1, 301)))
    assert min(measured.measure_costs(calls, cache=False).seconds) > 0


def test_materialized_arguments_look_like_the_fakes():
    with FAKE:
        view = fake(4, 6).t()[::2]
        args = (view, view, fake(3, 1).expand(3, 5), mask(2000), index(3), [fake(2, dtype=torch.complex64)], None, 1.5)
    _, real, _ = materialize((aten.add.Tensor, args, {}))
    assert signature((aten.add.Tensor, real, {})) == signature((aten.add.Tensor, args, {}))
    assert real[0] is real[1]
    assert real[2].untyped_storage().nbytes() == 12
    assert real[3].any()
    assert not real[3].all()
    assert not real[4].any()


def test_what_cannot_be_materialized_says_so():
    with pytest.raises(MeasureError, match="strided"):
        materialize((aten.add.Tensor, (torch.eye(2).to_sparse(),), {}))


def test_signatures_tell_shapes_strides_dtypes_and_scalars_apart():
    variants = [
        (fake(2, 3), 1),
        (fake(3, 2), 1),
        (fake(3, 2).t(), 1),
        (fake(2, 3, dtype=torch.bfloat16), 1),
        (fake(2, 3), 2),
        (fake(2, 3), 1.0),
        (fake(2, 3), True),
    ]
    assert len({signature((aten.add.Tensor, args, {})) for args in variants}) == len(variants)
    assert signature((aten.add.Tensor, (fake(2, 3), 1), {})) == "aten.add.Tensor(float32[2,3]{3,1}, 1)"


def test_resolve_knows_every_source():
    calls = program(call(aten.relu.default, fake(3)))
    assert resolve_costs(calls, "measured").source.startswith("measured")
    assert resolve_costs(calls, "analytic").source == "analytic cpu"
    assert resolve_costs(calls, "A100-80GB").source == "analytic a100-80gb"
    ready = Costs((1.0,), (0,))
    assert resolve_costs(calls, ready) is ready
    with pytest.raises(InvalidGraphError):
        resolve_costs(calls, Costs((), ()))
    with pytest.raises(InvalidOptionError, match="a100-80gb"):
        resolve_costs(calls, "a100-8gb")


def test_nothing_to_measure_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured.measure_costs(program(None)).seconds == (0.0,)
