"""Replicas of the backbone, alike or not, and the rows that each trains (L section 4)."""
