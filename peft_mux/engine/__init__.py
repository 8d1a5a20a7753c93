"""Runs what the scheduler planned: dispatch, multiplexed forward and backward, isolation of tasks."""
