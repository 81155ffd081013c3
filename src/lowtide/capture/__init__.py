"""From a model to a graph: the joint forward and backward graph of aten ops, folded by storage."""
