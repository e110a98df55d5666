"""What the methods cost and save, beside what else users have."""
