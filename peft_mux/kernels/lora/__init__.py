"""Low-rank adapters of many tasks over one packed stream of tokens.

Read in this order:

1. `reference.py`: the arithmetic in torch, written for reading and, task by task, for CPUs.
2. `group.py`: the same for a group of layers that read the same activations, as launches of grouped kernels.
3. `tables.py`, `factors.py`: what the kernels know of segments and adapters, and where the factors lie in memory.
4. `launch.py`: checks and starts the kernels; `tunings.py` holds their tile sizes.
5. `device.py`: the Triton kernels.
6. `function.py`: how autograd and `torch.compile` see a group.
"""
