"""Labelled text and images, plain text: the user's files, and data that need no download."""
