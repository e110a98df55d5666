"""Bytes, FLOPs and estimated time of a compiled program's kernels."""
