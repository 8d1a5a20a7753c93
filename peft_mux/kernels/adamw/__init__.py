"""AdamW steps of many parameters of many tasks at once.

Read in this order:

1. `pages.py`: what one update needs to know of one page of parameters.
2. `update.py`: the reference in torch's multi-tensor operations, and the choice between it and the kernel.
3. `device.py`: the Triton kernel, and the table of pages that it reads.
"""
