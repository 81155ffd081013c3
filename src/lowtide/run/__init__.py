"""The whole road at run time: PyTorch's compiler calls us with a graph, we plan it and return what runs."""
