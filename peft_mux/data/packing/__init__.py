"""Which rows of a step go to which replica and into which pass, and which prefixes they share.

The planner cuts a typical step with this code, and the engine every real one, so that plans describe what runs. Rows
are divided among replicas and packed into passes in `passes.py`; their shared prefixes are found in `prefixes.py`.
"""
