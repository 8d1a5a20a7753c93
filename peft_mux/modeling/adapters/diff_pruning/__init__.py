"""Diff Pruning beside other tasks: the differences of all of them on one frozen layer."""
