"""The op set in Triton, for NVIDIA GPUs of compute capability 8.0 and later.

Nothing is imported here, so that a machine without Triton can import this package. Modules with
kernels are imported when this backend is chosen.
"""
