"""Measures what the scheduler cannot know: times of a backbone, links between processes, bytes that a pass keeps."""
