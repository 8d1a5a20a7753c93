"""Rows that begin alike: the gain that sharing their tokens could bring, and the one that it does."""
