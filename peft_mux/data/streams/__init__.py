"""Streams of rows: read ahead in threads, with a time limit, in batches of a task."""
