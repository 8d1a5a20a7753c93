"""The record of a run: its log, the numbers of each step, and the observers that callbacks are."""
