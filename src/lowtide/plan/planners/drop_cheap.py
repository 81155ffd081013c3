"""`drop_cheap`: recompute what is cheap for its size; keep the results of the expensive ops.

Paper: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, section 3: normalisation,
activations and pooling are recomputed, convolutions are kept. Here matrix products, attention and every op that is not
known to be cheap are kept too. Memory model: none; it looks neither at the budget nor at costs. Not optimal. Cost:
linear.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.graph.ir import Graph, ValueId
from lowtide.plan.core.planner import AbstractPlanner, Proposal
from lowtide.plan.core.problem import Problem
from lowtide.progress import Progress, silent
from lowtide.schedule.expand import expand

_NORMALISATION = (
    "_fused_rms_norm _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training "
    "batch_norm_with_update cudnn_batch_norm layer_norm miopen_batch_norm native_batch_norm native_group_norm "
    "native_layer_norm rms_norm"
)
_ACTIVATION = (
    "_log_softmax _softmax celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid_forward mish prelu "
    "_prelu_kernel relu relu6 rrelu_with_noise_functional sigmoid silu softplus softshrink tanh threshold"
)
_POOLING = (
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d "
    "max_pool2d_with_indices max_pool3d_with_indices upsample_bicubic2d upsample_bilinear2d upsample_linear1d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d"
)
_ELEMENTWISE = (
    "_to_copy abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_max clamp_min clone "
    "constant_pad_nd copy cos div eq erf exp exp2 expand expm1 fill floor full full_like ge gt le log log1p "
    "logical_and logical_not logical_or lt masked_fill maximum minimum mul native_dropout ne neg new_zeros ones_like "
    "permute pow reciprocal remainder repeat roll round rsqrt rsub scalar_tensor select sign sin slice split "
    "sqrt square stack sub to transpose tril triu view where zeros zeros_like"
)
_OWN = "dropout_noise"
_CHEAP = frozenset(" ".join((_NORMALISATION, _ACTIVATION, _POOLING, _ELEMENTWISE, _OWN)).split())


def is_cheap(target: str) -> bool:
    """Whether `target`, such as "aten.relu.default", is known to be cheap for the size of its result.

    Of several calls in one op, "aten.mm.default+aten.relu.default", all must be.
    """
    return all(map(_is_one_cheap, target.split("+")))


def _is_one_cheap(target: str) -> bool:
    namespace, _, name = target.partition(".")
    return namespace in ("aten", "prims", "lowtide") and name.split(".")[0] in _CHEAP


@dataclass(frozen=True, kw_only=True)
class DropCheap(AbstractPlanner):
    """Keep what expensive ops make, recompute the rest."""

    def supports(self, problem: Problem) -> str | None:
        """Return why there is nothing to keep for, or None."""
        return None if problem.graph.boundary is not None else "it needs a graph with a forward and a backward phase"

    def propose(self, problem: Problem, progress: Progress = silent) -> Proposal:
        """Return the schedule that keeps every value of an op that is not known to be cheap."""
        del progress
        return Proposal(expand(problem.graph, _kept(problem.graph)))


def _kept(graph: Graph) -> set[ValueId]:
    """Return the values to keep; small cheap ops that draw random numbers are cheap like any other."""
    return {value for op in graph.forward if not is_cheap(graph.ops[op].target) for value in graph.ops[op].outputs}
