"""From a training step to a program that is compiled for GPUs that are not there."""
