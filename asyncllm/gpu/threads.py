"""set_thread_count: the intra-op thread count of the calling thread only."""

from __future__ import annotations

import ctypes
import sys

import torch


def set_thread_count(count: int) -> bool:
    """Limits the OpenMP team of the calling thread, and of no other, to ``count``.

    In OpenMP that number belongs to the calling thread, and MKL and oneDNN follow it.
    ``torch.set_num_threads`` would set it as well, but also the number that every thread
    started later begins with, and MKL's for the whole process: that is the host's to say.

    Returns:
        Whether it took effect. It does not where torch has no OpenMP or hides it.
    """
    if sys.platform != "linux":
        return False
    function = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if function is None:
        return False
    # Torch gives a thread the process's number on its first use, and would overwrite ours.
    torch.get_num_threads()
    function(ctypes.c_int(count))
    return True
