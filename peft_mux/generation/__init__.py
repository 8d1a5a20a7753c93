"""Completions of many tasks in shared passes, and the prompts held out for evaluations."""
