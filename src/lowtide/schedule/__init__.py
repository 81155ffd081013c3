"""Schedules: the order in which ops run, what it costs, and whether it is legal. No torch."""
