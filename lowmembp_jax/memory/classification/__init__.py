"""Which part of training memory an argument or a buffer belongs to."""
