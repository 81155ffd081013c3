"""The graph of a training step: ops, the values between them, and what ops cost. No torch."""
