"""The whole road at run time: PyTorch's compiler calls us with a graph, we plan it and return what runs."""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
