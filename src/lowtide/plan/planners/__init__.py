"""One algorithm per file; siblings do not import each other."""
