"""Nested recomputation of a chain: pieces of forward and backward, what they cost, and operations on them."""
