"""Native ops for CPUs: a small C++ library behind a plain C interface (``src/interface.h``).

It is called through ctypes, without the GIL, with addresses and strides. It links against neither
Python nor torch, so that one build serves every version of both.
"""
