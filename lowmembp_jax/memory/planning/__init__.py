"""The parts of `lm.memory.plan` and `lm.memory.compare`."""
