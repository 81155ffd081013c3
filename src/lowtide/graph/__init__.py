"""The shared noun: ops, values, their costs. No torch."""
