"""Which tasks share passes, and in which order (M sections 3.3 and 3.4)."""
