"""Planning in pure Python: what runs together, when, and in how much memory."""
