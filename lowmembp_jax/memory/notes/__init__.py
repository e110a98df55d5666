"""Notes of a plan: what costs memory without need, what helps, and where a plan may be wrong."""
