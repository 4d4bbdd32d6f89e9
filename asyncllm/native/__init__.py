"""Native ops for CPUs: a C++ library with a plain C interface (``src/interface.h``).

ctypes calls the library without the GIL, with addresses and strides as arguments. The library links
against neither Python nor torch, so that one build works with every version of both.
"""
