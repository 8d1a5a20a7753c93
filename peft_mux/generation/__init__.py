"""Completions for the prompts of many tasks in one batch of mixed adapters, and how text answers are judged."""
