"""Layouts of gradients: those that are traced alike are one, and what was traced needs no second trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide.capture.arrived_gradients import AS_TRACED, Arrived, TracedGradients, meaning_of
from lowtide.errors import UnsupportedBackwardError

TRACED = torch.empty(4, 6, 5)
SAME = {
    "parts of two larger tensors": (torch.empty(4, 9, 5)[:, 1:7], torch.empty(4, 20, 5)[:, 3:9]),
    "transposed parts": (torch.empty(4, 5, 9)[..., :6].mT, torch.empty(4, 5, 7)[..., :6].mT),
    "every second and every third": (torch.empty(4, 6, 10)[..., ::2], torch.empty(4, 6, 15)[..., ::3]),
    "expanded rows": (torch.empty(4, 1, 5).expand(4, 6, 5), torch.empty(4, 1, 5).expand(4, 6, 5)),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_what_is_traced_alike_has_one_layout(pair: tuple[Tensor, Tensor]) -> None:
    one, other = (meaning_of(each, TRACED.stride()) for each in pair)
    assert one == other != TRACED.stride()


def test_dense_layouts_stay_as_they_are() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0)):
        dense = torch.empty([TRACED.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(3)])
        assert dense.shape == TRACED.shape
        assert meaning_of(dense, TRACED.stride()) == dense.stride()


def test_overlapping_layouts_stay_as_they_are() -> None:
    overlapping = torch.empty(100).as_strided((4, 6, 5), (3, 2, 1))
    assert meaning_of(overlapping, TRACED.stride()) == (3, 2, 1)


def test_strides_along_a_size_of_one_say_nothing() -> None:
    traced = TracedGradients.of([torch.empty(4, 1, 5)])
    assert traced.read([torch.empty(4, 1, 5).as_strided((4, 1, 5), (5, 99, 1))]) == AS_TRACED


def test_bytes_are_those_of_the_elements_that_are_there() -> None:
    traced = TracedGradients.of([TRACED, TRACED, TRACED])
    arrived = traced.read([torch.empty(()).expand(4, 6, 5), None, torch.empty(4, 6, 5)])
    assert arrived.missing == {1}
    assert arrived.strides == {0: (0, 0, 0)}
    assert arrived.bytes_of([480, 480, 480]) == [4, 480]
    assert Arrived().bytes_of([480, 240]) == [480, 240]


def test_sparse_gradients_are_refused() -> None:
    with pytest.raises(UnsupportedBackwardError, match="sparse"):
        TracedGradients.of([torch.empty(3, 3)]).read([torch.eye(3).to_sparse()])
