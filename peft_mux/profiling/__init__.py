"""Measuring what the scheduler cannot know: how long the parts of a backbone and messages take here, what a pass keeps.

Read `backbone.py` first, which makes a `Profile` of `parts.py` (what is run) over a `subject.py` (layers with random
weights), timed by `stopwatch.py`. `link.py` measures messages between processes, `memory.py` counts activations.
"""
