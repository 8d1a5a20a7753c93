"""The evaluations of both papers on a machine without GPUs: one command, one table."""
