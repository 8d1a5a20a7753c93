"""The arithmetic of multiplexing: grouped LoRA, cross-entropy, joint AdamW steps, and dropout.

This package imports only torch, numpy and, if kernels are used, Triton; it imports nothing else of peft_mux. Only the
files of kernels (`lora_kernels.py`, `logits_kernel.py`, `short_rows.py`, `adamw_device.py`) and `lora/launch.py` import
Triton. Read `philox.py` first, because all kernels use it for dropout; `availability.py` checks whether Triton kernels
can run on a device.
"""
