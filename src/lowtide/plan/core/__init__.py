"""What every planner shares: the problem, the planner interface, the plan that comes out."""
