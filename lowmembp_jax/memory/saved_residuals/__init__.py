"""The parts of `lm.memory.residuals`."""
