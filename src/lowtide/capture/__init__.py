"""From a model to a graph: the joint forward and backward graph of aten ops, folded by storage."""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
