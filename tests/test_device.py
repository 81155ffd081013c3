import pytest
import torch

from lowtide import device
from lowtide.errors import InvalidBudgetError, InvalidInputError


def test_cpu_bytes_are_exact():
    assert [device.round_bytes(n, "cpu") for n in (0, 1, 511, 513)] == [0, 1, 511, 513]


def test_cuda_bytes_come_in_blocks():
    assert [device.round_bytes(n, "cuda") for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]


def test_rows_are_written_over_only_where_that_is_known_to_be_safe():
    assert device.sums_rows_first("cpu")
    assert not device.sums_rows_first("cuda")


def test_auto_budget_needs_an_accelerator():
    with pytest.raises(InvalidBudgetError, match="accelerator"):
        device.free_bytes("cpu")


def test_other_devices_are_refused_by_name():
    with pytest.raises(InvalidInputError, match="'meta'"):
        device.as_device("meta")


def test_default_device_is_the_cpu_where_cuda_is_unused():
    if not torch.cuda.is_initialized():
        assert device.as_device() == torch.device("cpu")


def test_rng_state_round_trip_repeats_the_numbers():
    state = device.get_rng_state("cpu")
    first = torch.rand(5)
    device.set_rng_state(state, "cpu")
    assert torch.equal(torch.rand(5), first)


def test_rng_state_bytes_are_those_of_the_state():
    state = device.get_rng_state("cpu")
    assert device.rng_state_bytes("cpu") == state.untyped_storage().nbytes() == 5056
    assert device.rng_state_bytes("cuda") == 0


def test_description_changes_with_threads_and_determinism():
    threads = torch.get_num_threads()
    plain = device.describe("cpu")
    try:
        torch.set_num_threads(threads + 1)
        more = device.describe("cpu")
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        deterministic = device.describe("cpu")
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert f"torch {torch.__version__}" in plain
    assert len({plain, more, deterministic}) == 3


def test_synchronize_on_the_cpu_does_nothing():
    assert device.synchronize("cpu") is None
