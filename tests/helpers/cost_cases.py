"""A stand-in for a captured program, fake arguments, and a table of ops."""

from dataclasses import dataclass, field

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.graph.ir import Graph, Op

aten = torch.ops.aten
CPU = torch.device("cpu")
FAKE = FakeTensorMode()


@dataclass(frozen=True)
class Calls:
    """The least that the cost layer needs of a program."""

    calls: tuple
    replays: dict = field(default_factory=dict)
    device: torch.device = CPU

    @property
    def graph(self):
        ops = (Op(f"op{k}", "none" if call is None else str(call[0]), (), ()) for k, call in enumerate(self.calls))
        return Graph(tuple(ops), ())

    def call(self, op):
        return self.calls[op]

    def replay_call(self, op):
        return self.replays.get(op, self.calls[op])


def fake(*sizes, dtype=torch.float32):
    with FAKE:
        return torch.empty(sizes, dtype=dtype)


def index(*sizes):
    return fake(*sizes, dtype=torch.int64)


def mask(*sizes):
    return fake(*sizes, dtype=torch.bool)


def call(target, *args, **kwargs):
    return target, args, kwargs


def program(*calls, **kwargs):
    return Calls(calls, **kwargs)


def picture(dtype=torch.float32):
    return fake(2, 8, 16, 16, dtype=dtype)


def heads(dtype=torch.float32):
    # As a transformer makes them: one projection, split and transposed, so that strides are not the plain ones.
    with FAKE:
        return [part.view(2, 20, 4, 8).transpose(1, 2) for part in fake(2, 20, 96, dtype=dtype).chunk(3, -1)]


def ops(dtype):
    """Return one call of each kind of op that training graphs contain."""

    def one(*sizes):
        return fake(*sizes, dtype=dtype)

    x, channels, plane = picture(dtype), one(8), [1, 1]
    query, key, value = heads(dtype)
    with FAKE:
        attended, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(query, key, value, 0.0, True)
        last = x.to(memory_format=torch.channels_last)
        transposed, strided, expanded = one(30, 20).t(), one(20, 60)[:, ::2], one(1, 1).expand(20, 30)
    wide, square = one(30, 40), one(50, 50)
    return [
        # As many numbers as a mask has places: not all masks will do.
        call(aten.masked_scatter.default, wide, mask(30, 40), one(100)),
        call(aten.masked_scatter.default, wide, mask(30, 1).expand(30, 40), one(3, 40)),
        call(aten.masked_scatter.default, wide, mask(30, 1), one(3, 40)),
        call(aten.masked_scatter.default, wide, mask(40), one(3, 40)),
        call(aten.masked_scatter_backward.default, wide, mask(30, 40), [20, 5]),
        call(aten.masked_scatter_backward.default, wide, mask(30, 1), [3, 40]),
        call(aten.convolution.default, x, one(4, 8, 3, 3), None, plane, plane, plane, False, [0, 0], 1),
        call(aten.convolution.default, last, one(4, 8, 3, 3), one(4), plane, plane, plane, False, [0, 0], 1),
        call(aten.convolution.default, x, one(8, 1, 3, 3), None, plane, plane, plane, False, [0, 0], 8),
        call(aten.convolution.default, x, one(8, 4, 2, 2), None, [2, 2], [0, 0], plane, True, [0, 0], 1),
        call(
            aten.convolution_backward.default,
            *(one(2, 4, 16, 16), x, one(4, 8, 3, 3), [4], plane, plane, plane, False, [0, 0], 1, [True] * 3),
        ),
        call(aten.mm.default, one(20, 30), wide),
        call(aten.mm.default, transposed, wide),
        call(aten.mm.default, strided, wide),
        call(aten.mm.default, expanded, wide),
        call(aten.addmm.default, one(40), one(20, 30), wide),
        call(aten.bmm.default, one(4, 20, 30), one(4, 30, 10)),
        call(aten._scaled_dot_product_flash_attention_for_cpu.default, query, key, value, 0.0, True),
        call(
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            *(attended, query, key, value, attended, logsumexp, 0.0, True),
        ),
        call(aten.native_layer_norm.default, square, [50], one(50), one(50), 1e-5),
        call(
            aten.native_layer_norm_backward.default,
            *(square, square, [50], one(50, 1), one(50, 1), one(50), one(50), [True] * 3),
        ),
        call(aten.native_group_norm.default, x, channels, channels, 2, 8, 256, 2, 1e-5),
        call(aten.native_group_norm_backward.default, x, x, one(2, 2), one(2, 2), channels, 2, 8, 256, 2, [True] * 3),
        call(aten._native_batch_norm_legit.no_stats, x, channels, channels, True, 0.1, 1e-5),
        call(aten._native_batch_norm_legit_functional.default, x, *[channels] * 4, True, 0.1, 1e-5),
        call(
            aten.native_batch_norm_backward.default,
            *(x, x, channels, None, None, channels, channels, True, 1e-5, [True] * 3),
        ),
        call(aten.embedding.default, square, index(7, 3)),
        call(aten.embedding_dense_backward.default, one(7, 3, 50), index(7, 3), 50, -1, False),
        call(aten.index.Tensor, square, [index(7), None]),
        call(aten.index_put.default, square, [index(7)], one(7, 50), True),
        call(aten.gather.default, square, 0, index(7, 50)),
        call(aten.scatter_add.default, square, 0, index(7, 50), one(7, 50)),
        call(aten.cumsum.default, square, 0),
        call(aten.sort.default, square, 0),
        call(aten.topk.default, square, 5),
        call(aten._softmax.default, square, -1, False),
        call(aten._log_softmax.default, square, 1, False),
        call(aten.nll_loss_forward.default, square, index(50), None, 1, -100),
        call(aten.nll_loss_backward.default, one(), square, index(50), None, 1, -100, one()),
        call(aten.max_pool2d_with_indices.default, x, [2, 2]),
        call(
            aten.max_pool2d_with_indices_backward.default,
            *(one(2, 8, 8, 8), x, [2, 2], [2, 2], [0, 0], plane, False, index(2, 8, 8, 8)),
        ),
        call(aten._adaptive_avg_pool2d_backward.default, one(2, 8, 4, 4), x),
        call(aten.upsample_bilinear2d.vec, x, [32, 32], False, None),
        call(aten.upsample_nearest2d_backward.default, one(2, 8, 32, 32), [32, 32], [2, 8, 16, 16], None, None),
        call(aten.constant_pad_nd.default, x, [1, 1, 1, 1], 0.0),
        call(aten.cat.default, [square, square, one(3, 50)]),
        call(aten._to_copy.default, square, dtype=torch.float64),
        call(aten.clone.default, x, memory_format=torch.channels_last),
        call(aten.native_dropout.default, square, 0.1, True),
        call(aten.bernoulli.p, square, 0.5),
        call(aten.rand_like.default, square),
        call(aten.multinomial.default, square, 3),
        call(aten.add.Tensor, square, 1.0),
        call(aten.where.self, mask(50, 50), square, one()),
        call(aten.masked_fill.Scalar, square, mask(50, 50), 0.0),
        call(aten.pow.Tensor_Scalar, square, 2),
        call(aten.sum.dim_IntList, square, [0], True),
        call(aten.var_mean.correction, x, [0, 2, 3], correction=0),
        call(aten.logsumexp.default, square, [1]),
        call(aten.threshold_backward.default, square, square, 0),
        call(aten.binary_cross_entropy.default, square, square),
        call(aten.slice_backward.default, one(10, 50), [50, 50], 0, 0, 10, 1),
        call(aten.copy_.default, square, one(50, 50)),
        call(aten.full.default, [10, 10], 1.0),
    ]


def mixed_ops():
    """Return calls as the fake kernels describe them for half-precision inputs and full-precision weights."""
    half = torch.bfloat16
    x, rows, channels, width = picture(half), fake(6, 50, dtype=half), fake(8), fake(50)
    saved = [fake(8, dtype=half)] * 2
    return [
        call(aten.native_batch_norm_backward.default, x, x, channels, None, None, *saved, True, 1e-5, [True] * 3),
        call(
            aten.native_layer_norm_backward.default,
            *(rows, rows, [50], *[fake(6, 1, dtype=half)] * 2, width, width, [True] * 3),
        ),
        call(
            aten.native_group_norm_backward.default,
            *(x, x, *[fake(2, 2, dtype=half)] * 2, channels, 2, 8, 256, 2, [True] * 3),
        ),
    ]
