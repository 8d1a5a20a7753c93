"""Adapter Tuning beside other tasks: the bottlenecks of all of them behind one frozen layer."""
