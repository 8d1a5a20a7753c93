"""Diff Pruning: a sparse difference to the frozen weights, learned under an L0 penalty (Guo et al., 2021)."""
