"""Parses XLA's compiled program and its buffer assignment."""
