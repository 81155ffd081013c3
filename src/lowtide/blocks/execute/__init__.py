"""Running a planned chain in eager mode, inside one node of the autograd graph."""
