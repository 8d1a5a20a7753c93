"""Rows of each form read into sequences, one file a form, and what they bring beside their tokens."""
