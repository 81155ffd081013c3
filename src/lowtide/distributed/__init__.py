"""Training in several processes: what engines do with parameters and gradients, and what ranks have in common."""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
