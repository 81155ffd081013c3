"""One block by itself: what it is made of, its own autograd graph, and how it runs at its place in the chain."""
