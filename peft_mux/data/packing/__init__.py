"""Assigns the rows of a step to replicas and passes, and finds their shared prefixes.

The planner uses this code for a typical step and the engine for every real step, so that plans describe what runs.
`passes.py` divides rows among replicas and packs them into passes; `prefixes.py` finds their shared prefixes.
"""
