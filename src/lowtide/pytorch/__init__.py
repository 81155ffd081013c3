"""Everything private of PyTorch that lowtide uses, one file for each reason.

PyTorch promises nothing about private names between versions. So only this package uses them, and importing it checks
that PyTorch has every name in the table of `required`.
"""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
