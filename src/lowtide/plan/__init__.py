"""The portfolio of planners. No torch."""
