"""The run folder: what is written while a run goes on, and how a run goes on from it."""
