"""The cross-entropy of a frozen output head, without the logits of the whole batch.

Read in this order:

1. `linear.py`: the head, the reference in torch, and the autograd function that goes through blocks of rows.
2. `device.py`: the Triton kernel, which makes losses and gradients of one block of logits.
3. `vocab_parallel.py`: the same for a head whose vocabulary is cut over several processes.
4. `spreads.py`: what label smoothing reads beside.
"""
