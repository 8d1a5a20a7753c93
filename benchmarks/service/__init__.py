"""Calls of many models in shared passes, without and behind HTTP."""
