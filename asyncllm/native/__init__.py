"""Native ops for CPUs: a small C++ library behind a plain C interface (``src/interface.h``).

It is called through ctypes, without the GIL, on addresses and strides: it links against
neither Python nor torch, and one build serves every version of both.
"""
