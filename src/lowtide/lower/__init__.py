"""From a program and a schedule to the forward and backward graphs that run."""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
