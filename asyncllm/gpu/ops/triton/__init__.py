"""The op set in Triton, for NVIDIA GPUs of compute capability 8.0 and later.

This file imports nothing, so that the package can be imported without Triton. The modules with
kernels are imported when the Triton backend or op set is made.
"""
