"""Rows with a common prefix: the gain that sharing their tokens could bring, and the one that it does."""
