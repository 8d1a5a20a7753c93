"""The arithmetic of multiplexing: one folder a kernel, each with a plain reference beside the code that is run.

Nothing here imports the rest of the package: only torch, numpy and, where it is chosen, Triton. In each folder
`device.py` holds the Triton kernels, and no other file needs Triton to be imported. Read `philox.py` first, as dropout
of all kernels draws from it; `availability.py` says whether Triton kernels can run on a device.
"""
