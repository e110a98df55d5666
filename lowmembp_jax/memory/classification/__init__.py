"""Decides to which part of training memory an argument or a buffer belongs."""
