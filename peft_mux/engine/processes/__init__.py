"""The processes of a run: what they tell one another, and how they end together."""
