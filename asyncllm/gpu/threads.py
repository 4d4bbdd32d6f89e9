"""set_thread_count: the intra-op thread count of the calling thread only."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

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


def available_cpus(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy: those of its affinity mask, and no more than its
    control group has time for. A thread beyond that would be stopped in the middle of an op.

    Args:
        cgroup: where the process sees its control group, of version 2 or 1.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (cgroup / f"cpu/cpu.cfs_{name}_us").read_text(encoding="ascii").strip()
                for name in ("quota", "period")
            )
        limit = int(quota) // int(period)
    except (OSError, ValueError):
        return count
    return count if limit < 0 else max(1, min(count, limit))
