"""Which sequences of a step go to which replica (L section 4.3)."""
