"""MuxTune's planner: its accuracy, its fusion, and the figures of the paper."""
