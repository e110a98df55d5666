"""The parts of train.py: arguments, models, shardings, the training step, logs and checkpoints."""
