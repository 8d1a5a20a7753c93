"""Losses of preferences: which of two answers is the better one, or whether one answer is good."""
