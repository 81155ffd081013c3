"""What every distinct block costs, and the graph of the chain that planners see."""
