"""The parts of finetune.py: a run of steps, the memory of one, and what is reported."""
