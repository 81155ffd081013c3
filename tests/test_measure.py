import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lowtide.errors import MeasureError
from lowtide.measure import Allocation, levels, measure_peak, memory_timeline, record, run_phases, run_with_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [1, 63, 4096, 10_000_001])
def test_one_allocation_is_its_bytes(number):
    assert measure_peak(lambda: torch.empty(number, dtype=torch.uint8)) == number


def test_nothing_allocated_is_zero():
    assert measure_peak(lambda: None) == 0


def test_blocks_freed_in_between_do_not_add_up():
    def step():
        for _ in range(5):
            torch.empty(1000)

    assert measure_peak(step) == 4000


def test_blocks_alive_together_add_up():
    def step():
        small, large = torch.empty(1000), torch.empty(5000)
        del large
        return small, torch.empty(2000)

    assert measure_peak(step) == 24_000


def test_temporaries_inside_an_op_count():
    values = torch.randn(50, 40)
    # Sorting along the first dimension works on transposed copies besides its two results.
    results = 2000 * (4 + 8)
    assert measure_peak(lambda: values.sort(dim=0)) > results


def test_backward_is_seen():
    layer = nn.Linear(300, 200, bias=False)
    batch = torch.randn(100, 300)
    # After warm-up: output, its gradient (an expanded scalar), then the weight's gradient.
    layer(batch).sum().backward()
    layer.weight.grad = None
    with_backward = measure_peak(lambda: layer(batch).sum().backward())
    layer.weight.grad = None
    without = measure_peak(lambda: layer(batch).sum())
    assert without == 100 * 200 * 4 + 4
    assert with_backward >= 300 * 200 * 4


def test_repeated_measuring_gives_the_same():
    layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    batch = torch.randn(2, 3, 20, 20)

    def step():
        layer.zero_grad()
        layer(batch).square().mean().backward()

    step()
    assert len({measure_peak(step) for _ in range(4)}) == 1


def test_fn_has_its_effect():
    seen = []
    measure_peak(lambda: seen.append(torch.ones(3)))
    assert seen[0].tolist() == [1, 1, 1]


def test_exceptions_pass_and_the_next_measurement_works():
    def broken():
        torch.empty(10)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_peak(broken)
    assert measure_peak(lambda: torch.empty(10)) == 40


def test_measuring_inside_a_profiler_is_refused():
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(MeasureError, match="profiler is active"):
        measure_peak(lambda: torch.empty(10))
    assert measure_peak(lambda: torch.empty(10)) == 40


def test_measuring_inside_measuring_is_refused():
    with pytest.raises(MeasureError):
        measure_peak(lambda: measure_peak(lambda: None))


def test_blocks_from_before_do_not_lower_the_level():
    old = [torch.empty(10_000)]

    def step():
        old.clear()
        torch.empty(1000)

    assert measure_peak(step) == 4000


def test_blocks_of_an_earlier_recording_do_not_lower_the_level():
    kept = []
    measure_peak(lambda: kept.append(torch.empty(10_000)))

    def step():
        kept.clear()
        torch.empty(1000)

    assert measure_peak(step) == 4000


def test_frees_are_matched_by_address():
    events = (Allocation(1, 7, 100), Allocation(2, 9, -50), Allocation(3, 8, 30), Allocation(4, 7, -100))
    assert [level for _, level in levels(events)] == [100, 100, 130, 30]


def test_an_address_handed_out_again_was_freed_unseen():
    assert [level for _, level in levels((Allocation(1, 7, 100), Allocation(2, 7, 40)))] == [100, 40]


def test_other_python_threads_are_not_seen():
    def elsewhere():
        thread = threading.Thread(target=lambda: torch.empty(1000))
        thread.start()
        thread.join()

    # A limit of the profiler, stated in the module's docstring; this notices if it is lifted.
    assert measure_peak(elsewhere) == 0


def test_timeline_rises_and_falls():
    def step():
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        del second

    timeline = memory_timeline(step)
    assert [level for _, level in timeline] == [4000, 6000, 2000, 0]
    seconds = [when for when, _ in timeline]
    assert seconds[0] == 0
    assert seconds == sorted(seconds)


def test_timeline_of_nothing_is_empty():
    assert memory_timeline(lambda: None) == []


def test_recording_lists_every_call_of_the_allocator():
    def step():
        kept = torch.empty(10)
        torch.empty(1000)
        return kept

    assert [event.bytes for event in record(step, CPU)] == [40, 4000, -4000, -40]


@pytest.mark.parametrize("fn", [lambda: torch.empty(1000), lambda: torch.randn(50, 40).sort(dim=0), lambda: None])
def test_the_quick_way_agrees(fn):
    _, peak = run_with_peak(fn, CPU)
    assert peak == measure_peak(fn)


def test_the_quick_way_returns_the_result_and_passes_exceptions():
    assert run_with_peak(lambda: torch.ones(3), CPU)[0].tolist() == [1, 1, 1]
    with pytest.raises(ZeroDivisionError):
        run_with_peak(lambda: 1 / 0, CPU)
    assert run_with_peak(lambda: torch.empty(10), CPU)[1] == 40


def test_the_quick_way_works_in_a_thread_beside_a_recording():
    def beside():
        kept = torch.empty(10)
        thread = threading.Thread(target=lambda: peaks.append(run_with_peak(lambda: torch.empty(1000), CPU)[1]))
        thread.start()
        thread.join()
        return kept

    peaks = []
    assert measure_peak(beside) == 40
    assert peaks == [4000]


@pytest.mark.parametrize("measure", [lambda fn: run_with_peak(fn, CPU), lambda fn: run_phases([fn], CPU)])
@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_meanwhile(measure: Callable[[Callable[[], object]], object], enabled: bool) -> None:
    """Tensors in garbage from before would seem to be freed by what is measured."""
    seen = []

    def step() -> None:
        seen.append(gc.isenabled())

    def failing_step() -> None:
        step()
        raise KeyError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        measure(step)
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError):
            measure(failing_step)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, False]
