"""Attention over a packed stream: every sequence as if it were alone."""
