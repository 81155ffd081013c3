"""`auto`: the portfolio of planners, searched further and bounded by a proof."""
