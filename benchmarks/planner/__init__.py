"""MuxTune's planner: its times, its choices, and the figures of the paper."""
