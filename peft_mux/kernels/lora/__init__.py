"""Low-rank adapters of many tasks over one packed stream of tokens.

Read in this order:

1. `reference.py`: the arithmetic in torch, task by task; CPUs run it.
2. `group.py`: the same for a group of layers that read the same activations, as launches of grouped kernels.
3. `tables.py`: tables of segments, adapters and factor addresses for the kernels, and tile sizes.
4. `launch.py`: checks and starts the kernels.
5. `lora_kernels.py`: the Triton kernels.
6. `function.py`: how autograd sees a group.
"""
