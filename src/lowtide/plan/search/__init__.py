"""What searching planners share: fast prices, edits of a schedule, and the choice of what to drop."""
