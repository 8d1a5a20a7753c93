"""The cross-entropy of an output head, without the logits of the whole batch.

`linear.py` has the head and the losses in torch, block by block, for a whole vocabulary and for one that is sharded
over several processes. `logits_kernel.py` has the Triton kernel, which computes losses and gradients of a block of
logits.
"""

import torch

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of logits that the kernel supports; it always computes in fp32."""
