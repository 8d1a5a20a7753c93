"""The arithmetic of multiplexing: grouped LoRA, cross-entropy, joint AdamW steps, and dropout.

This package imports only torch, numpy and, if kernels are used, Triton; it imports nothing else of peft_mux. Only the
`device.py` files and `launch.py`, which starts the kernels, import Triton. Read `philox.py` first, because all kernels
use it for dropout; `availability.py` checks whether Triton kernels can run on a device.
"""
