"""Losses and metrics of held-out rows, task by task."""
