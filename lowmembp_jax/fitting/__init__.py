"""Step tables for any activation."""
