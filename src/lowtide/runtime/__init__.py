"""Running a model planned: PyTorch's compiler calls lowtide with a graph, which is captured, planned and lowered."""
