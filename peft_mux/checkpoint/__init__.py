"""The run folder: the files that a run writes, and how it resumes from them."""
