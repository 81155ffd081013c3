"""Inductor, PyTorch's code generator: how it is asked for code, and how that code is read.

It is imported only when it is used, because it takes seconds.
"""

from lowtide.pytorch.required import check_generator

check_generator()
