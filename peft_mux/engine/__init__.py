"""Runs the scheduler's plan: dispatch, multiplexed forward and backward passes, isolation of tasks."""
