"""Algorithm 1: passes of a bucket take turns on a compute and a communication stream (M §3.4.2)."""
