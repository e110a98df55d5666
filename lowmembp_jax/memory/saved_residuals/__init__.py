"""Lists the residuals of a function: `lm.memory.residuals`."""
