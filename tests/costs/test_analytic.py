import pytest
import torch

from helpers.cost_cases import CPU, aten, call, fake, heads, index, program
from lowtide.costs.analytic import analytic_costs, estimate
from lowtide.costs.device_table import DEVICES, device_figures, nearest, recognise
from lowtide.errors import InvalidOptionError

T4 = DEVICES["t4"]


def test_a_large_matmul_is_bound_by_arithmetic():
    cost = estimate(call(aten.mm.default, fake(4096, 4096), fake(4096, 4096)), T4)
    assert cost.seconds == pytest.approx(T4.overhead_seconds + 2 * 4096**3 / (0.6 * 8.1e12))
    assert cost.workspace_bytes == 0


def test_an_addition_is_bound_by_memory():
    cost = estimate(call(aten.add.Tensor, fake(1000, 1000), fake(1000, 1000)), T4)
    assert cost.seconds == pytest.approx(T4.overhead_seconds + 12e6 / (0.8 * 320e9))


def test_an_op_without_tensors_is_bound_by_what_it_writes():
    cost = estimate(call(aten.full.default, [1000, 1000], 1.0), T4)
    assert cost.seconds == pytest.approx(T4.overhead_seconds + 4e6 / (0.8 * 320e9))


def test_half_precision_uses_the_matrix_units():
    full, half = (fake(4096, 4096, dtype=dtype) for dtype in (torch.float32, torch.float16))
    ratio = (estimate(call(aten.mm.default, x, x), T4).seconds - T4.overhead_seconds for x in (full, half))
    slow, fast = ratio
    assert slow / fast == pytest.approx(65 / 8.1)


def test_convolution_counts_its_operations_and_workspace():
    x, weight = fake(4, 64, 56, 56), fake(64, 64, 3, 3)
    cost = estimate(call(aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), T4)
    flops = 2 * 4 * 64 * 56 * 56 * 64 * 9
    assert cost.seconds == pytest.approx(T4.overhead_seconds + flops / (0.6 * 8.1e12))
    assert cost.workspace_bytes == 4 * 64 * 56 * 56 * 4


def test_convolution_backward_needs_both_inputs_again():
    x, weight = fake(4, 8, 10, 10), fake(16, 8, 3, 3)
    layout = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    one = call(aten.convolution_backward.default, fake(4, 16, 10, 10), x, weight, [16], *layout, [True] * 3)
    assert estimate(one, T4).workspace_bytes == 4 * (16 + 8) * 100 * 4


def test_attention_on_the_cpu_counts_like_attention_elsewhere():
    query, key, value = heads()
    one = call(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, 0.0, True)
    slow = DEVICES["cpu"]
    flops = 2 * 2 * 2 * 4 * 20 * 20 * 8
    assert estimate(one, slow).seconds >= slow.overhead_seconds + flops / (0.6 * 0.096e12)


def test_dropout_and_logsumexp_have_a_temporary():
    assert estimate(call(aten.native_dropout.default, fake(10, 10), 0.1, True), T4).workspace_bytes == 400
    assert estimate(call(aten.logsumexp.default, fake(10, 10), [1]), T4).workspace_bytes == 400


def test_an_op_without_fake_implementation_still_costs_its_inputs():
    def unknown(x):
        raise NotImplementedError

    assert estimate(call(unknown, fake(10**6)), T4).seconds > T4.overhead_seconds


def test_pseudo_ops_cost_nothing():
    costs = analytic_costs(program(None, call(aten.embedding.default, fake(5, 5), index(3))), "h100-80gb")
    assert costs.seconds[0] == 0
    assert costs.seconds[1] > 0
    assert costs.source == "analytic h100-80gb"


def test_unknown_devices_list_the_known_ones():
    with pytest.raises(InvalidOptionError, match=r"cpu, a100-40gb.*mi300x"):
        analytic_costs(program(), "a100")


@pytest.mark.parametrize("figures", DEVICES.values(), ids=DEVICES.keys())
def test_figures_are_plausible(figures):
    assert device_figures(figures.name.upper()) is figures
    assert figures.flops["float64"] <= figures.flops["float32"] <= figures.flops["float16"]
    assert figures.flops_of(torch.int8) == figures.flops["float32"]
    assert 10e9 < figures.bandwidth < 1e13
    assert 8 * 2**30 <= figures.memory_bytes <= 192 * 2**30
    assert 0 < figures.overhead_seconds < 1e-4


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("NVIDIA GeForce GTX TITAN X", "titanx"),
        ("NVIDIA TITAN X (Pascal)", None),
        ("Tesla K40c", "k40c"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", None),
    ],
)
def test_devices_are_recognised_by_the_drivers_name(driver, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: driver)
    found = recognise(torch.device("cuda"))
    assert (None if found is None else found.name) == name
    assert nearest(torch.device("cuda")).name == (name or "a100-40gb")


def test_the_cpu_is_the_cpu():
    assert recognise(CPU) is DEVICES["cpu"]
