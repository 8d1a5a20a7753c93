"""The last layer of a backbone where its results are read, and nowhere else (`docs/prefixes.md`)."""
