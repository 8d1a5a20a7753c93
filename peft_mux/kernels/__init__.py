"""The arithmetic of multiplexing: grouped LoRA, cross-entropy, joint AdamW steps, and dropout.

Nothing here imports the rest of the package: only torch, numpy and, where it is chosen, Triton. Only `device.py` of a
folder, and `launch.py` that starts its kernels, need Triton to be imported. Read `philox.py` first, because dropout of
all kernels draws from it; `availability.py` says whether Triton kernels can run on a device.
"""
