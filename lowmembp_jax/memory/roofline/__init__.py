"""Counts the bytes and FLOPs of a compiled program's kernels and estimates their time."""
