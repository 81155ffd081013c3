"""Models and helpers for tests and benchmarks; nothing in the library itself imports them."""
