"""Labelled text: the user's own files, and one data set that every Python brings along."""
