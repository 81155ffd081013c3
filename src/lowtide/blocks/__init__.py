"""Blocks of a chain: what they are called with and return, how one is run by itself, and what it must leave alone."""

from lowtide.pytorch.required import check_pytorch

check_pytorch()
