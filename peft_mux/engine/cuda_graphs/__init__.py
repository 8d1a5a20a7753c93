"""Passes that are captured once as CUDA graphs and replayed."""
