"""Benchmarks of the methods and their alternatives: memory, time, and gradient errors."""
