"""Adapter Tuning: a bottleneck of two linear layers behind the output of a frozen one (Houlsby et al., 2019)."""
