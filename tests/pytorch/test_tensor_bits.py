"""Tensors compared bit for bit."""

from __future__ import annotations

import pytest
import torch

from lowtide.pytorch.storages import same_bits

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.complex64),
    *(torch.complex128, torch.bool, torch.uint8, torch.int16, torch.int64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)], ids=str)
def test_every_kind_of_tensor_has_the_bits_of_its_copy(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    ones = torch.ones(shape).to(dtype)
    assert same_bits(ones, ones.clone())
    assert same_bits(ones, torch.zeros(shape).to(dtype)) == (ones.numel() == 0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (float("nan"), 0.0),
        (float("inf"), torch.finfo(torch.float32).max),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
    ],
)
def test_values_that_compare_as_equal_have_other_bits(one: complex, other: complex) -> None:
    assert not same_bits(torch.tensor([one]), torch.tensor([other]))


def test_nan_has_the_bits_of_itself_alone() -> None:
    one, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)
    assert one.isnan().all()
    assert other.isnan().all()
    assert same_bits(one, one.clone())
    assert not same_bits(one, other)


def test_layout_does_not_matter() -> None:
    tensor = torch.randn(4, 6)
    assert same_bits(tensor.t(), tensor.t().contiguous())
    assert same_bits(tensor[:, ::2], tensor[:, ::2].clone())
    assert same_bits(torch.ones(1).expand(5), torch.ones(5))
    assert same_bits(tensor.requires_grad_(), tensor.detach())
    number = torch.randn(3, dtype=torch.complex64)
    assert same_bits(number.conj(), number.conj().resolve_conj())
    assert same_bits(number.conj().imag, -number.imag)


def test_sparse_tensors() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        assert same_bits(sparse, sparse.clone())
        assert not same_bits(sparse, sparse * 2)
        assert not same_bits(sparse, dense)


def test_tensors_of_another_kind_are_not_the_same() -> None:
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, device="meta"))
