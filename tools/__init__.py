"""Tools for those who work on the sources; run them from the repository root as `python tools/<name>.py`."""
