"""Data sets of labelled text, images and plain text, from files or without any download."""
