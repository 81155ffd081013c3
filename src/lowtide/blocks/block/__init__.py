"""One block by itself: its tensors, its piece of the autograd graph, how it runs without side effects."""
