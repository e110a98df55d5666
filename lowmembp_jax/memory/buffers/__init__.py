"""XLA's buffer assignment: what is in memory, from when to when, and what it is for."""
