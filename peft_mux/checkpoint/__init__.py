"""The run folder: what a run writes, and how a run resumes from it."""
