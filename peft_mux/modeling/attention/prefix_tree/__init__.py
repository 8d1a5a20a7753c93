"""Attention over a stream whose sequences begin alike: each node of its prefix tree sees the keys from the root on."""
