"""Models in plain Flax linen, one readable file for each."""
