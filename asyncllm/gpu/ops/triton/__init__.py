"""The op set in Triton, for NVIDIA GPUs of compute capability 8.0 and later.

Nothing is imported here: a machine without Triton can import this package, and the modules
with kernels are imported when this backend is chosen.
"""
