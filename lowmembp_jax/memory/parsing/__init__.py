"""XLA's compiled program and its buffer assignment, from text to data."""
