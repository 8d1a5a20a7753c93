"""Attention of short rows on GPUs; flash attention computes longer ones."""

MAX_TOKENS = 64
"""Tokens of the longest row that the kernels compute."""

MAX_HEAD_DIM = 128
"""Most channels of a head: with more, the gradients of keys and values do not fit into registers."""
