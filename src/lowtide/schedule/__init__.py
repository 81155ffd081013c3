"""The shared answer: schedules, their price and their legality. No torch."""
