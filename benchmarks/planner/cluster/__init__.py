"""Replay of a trace of tasks on a cluster (M section 5.4). It reproduces figures of the paper; no run depends on it.

`python -m benchmarks.planner.cluster` runs it.
"""
