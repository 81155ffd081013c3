"""Questions about plans: comparison of planners, what is alive at the peak, the largest batch."""
