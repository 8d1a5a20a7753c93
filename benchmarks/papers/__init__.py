"""The evaluations of both papers as far as a machine without GPUs bears them: one command, one table."""
