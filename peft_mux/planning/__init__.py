"""Gathers the facts of a run for the scheduler, and shows its answers to the user."""
