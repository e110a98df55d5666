"""The parts of train.py: what it trains, on which devices, what it writes."""
