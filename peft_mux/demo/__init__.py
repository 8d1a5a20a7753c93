"""The embedded default: a small backbone, a tokenizer and six tasks that the package makes itself."""
