"""Runs the passes of a step: multiplexed forward and backward, gradients and optimizer steps of each task."""
