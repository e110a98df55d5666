"""The notes of a plan: wasted memory, what saves it, and where the plan may be wrong."""
