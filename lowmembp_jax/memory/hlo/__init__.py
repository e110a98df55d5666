"""What a compiled program says: its HLO, and the bytes, FLOPs and time of its kernels."""
