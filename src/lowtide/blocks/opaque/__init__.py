"""Modules that the compiler cannot capture as one graph, as blocks of a step: they run in eager mode, kept or again."""
