"""Traces a training step and compiles it for GPUs that this machine does not have."""
