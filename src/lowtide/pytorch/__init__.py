"""What lowtide touches of PyTorch's insides: the names, the check that they are there, and doors to them.

PyTorch promises nothing about private names between versions, so each one stands in one table and is looked up before
it is used.
"""
