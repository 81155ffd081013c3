"""What the backward of one eager node takes at most, by the kind of its op: its gradients, and temporaries.

Derivatives are formulas such as `grad * -self.sin()`, and every part of one is a tensor. How many are alive at the same
time is known by kind; the widest tensor that the node sees stands for each. The figures are upper bounds that tests
hold against measured peaks, for steps that were not measured yet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

# Nodes are named after their ops: `MulBackward0`, `NativeLayerNormBackward0`.
_NAME = re.compile(r"(\w+?)Backward\d*")
# What arrives goes on, in another shape.
_VIEWS = ["T", "Transpose", "Permute", "Squeeze", "Unsqueeze", "Alias"]
# Each gradient is made in the layout of its operand.
_PRODUCTS = ["Addmm", "Mm", "Bmm", "Baddbmm"]
# Each gradient is made in its own size, by one kernel.
_SIMPLE = [
    "Mv",
    "Dot",
    "Softmax",
    "LogSoftmax",
    "NllLoss",
    "NllLoss2D",
    "MseLoss",
    "BinaryCrossEntropyWithLogits",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Expand",
    "Slice",
    "Select",
    "Split",
    "SplitWithSizes",
    "Unbind",
    "Cat",
    "Stack",
    "Clone",
    "ToCopy",
    "Repeat",
    "Index",
    "Gather",
    "Embedding",
    "MaskedFill",
    "MaxPool2DWithIndices",
    "AvgPool2D",
    "Mean",
    "Sum",
]
# One kernel makes each gradient too; that of an operand that was broadcast is made in full and then summed up.
_ELEMENTWISE = [
    "Add",
    "Sub",
    "Neg",
    "Mul",
    "Exp",
    "Tanh",
    "Sigmoid",
    "Relu",
    "Gelu",
    "Silu",
    "Elu",
    "Softplus",
    "LeakyRelu",
    "Hardswish",
    "Hardtanh",
    "NativeDropout",
]


@dataclass(frozen=True)
class TemporariesPolicy:
    """How many of its widest tensors a node holds at most beside the gradients that it makes.

    Attributes:
        direct: Kinds that make each gradient in its own size.
        elementwise: Other kinds, or single nodes of a kind, whose operands may be broadcast, each counted in its
            formula: those that are used most, and those above the default.
        small_bytes: Scalars and the like that code between two blocks makes in its backward, and that backward begins
            with: a measured step must not show more than its estimate, by however little.
        other: Everything else. Nearly all formulas, those of linear algebra among them, hold no more.
    """

    direct: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType(
            dict.fromkeys((*_VIEWS, *_PRODUCTS, *_SIMPLE), 0)
            | {
                # Sums for the weights are made in parts.
                "NativeLayerNorm": 0.25,
                "NativeGroupNorm": 0.25,
                "NativeBatchNorm": 1,
                # Some convolutions unfold what they read, to as many columns as their filters have taps.
                "Convolution": 8,
            }
        )
    )
    elementwise: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType(
            dict.fromkeys(_ELEMENTWISE, 0)
            | {
                "Sin": 1,
                "Cos": 2,
                "PowBackward0": 2,
                "Div": 2,
                "Abs": 1,
                "Sqrt": 1,
                "Log": 1,
                "Rsqrt": 2,
                "Where": 1,
                "Clamp": 2,
                "Var": 2,
                "Logsumexp": 2,
                "Sinc": 8,
                "Logcumsumexp": 8,
            }
        )
    )
    small_bytes: int = 1024
    other: float = 5


POLICY = TemporariesPolicy()


def is_view(name: str) -> bool:
    """Return True if the gradient that a node makes is a view of the one that arrives."""
    return _kind(name) in _VIEWS


def is_product(name: str) -> bool:
    """Return True if a node makes gradients in the layouts of its operands, transposed ones among them."""
    return _kind(name) in _PRODUCTS


def most_bytes(name: str, arriving: int, leaving: Sequence[int], saved: Sequence[int]) -> int:
    """Return the bytes that a node takes in its backward at most, beside the gradients that arrive.

    Args:
        name: The node's name.
        arriving: Bytes of the gradients that arrive.
        leaving: Bytes of each gradient that it makes.
        saved: Bytes of each tensor that it has saved.
    """
    kind = _kind(name)
    widest = max((arriving, *leaving, *saved))
    if kind in POLICY.direct:
        return sum(leaving) + int(POLICY.direct[kind] * widest)
    # A gradient in full size is there while it is summed up.
    made = sum(size if size >= arriving else arriving + size for size in leaving)
    temporaries = POLICY.elementwise.get(name, POLICY.elementwise.get(kind, POLICY.other))
    return made + int(temporaries * widest)


def _kind(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match[1] if match else name
