"""Sweeps: one task with many settings, trained together; losers end early, and the best is kept."""
