"""Configurations of replicas, and how long one takes for its share of a step (L section 2.2, Eq. 10 to 12)."""
