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
    started later begins with, and MKL's for the whole process: those are the application's.

    Returns:
        Whether it took effect. It does not where torch has no OpenMP or hides it.
    """
    if sys.platform != "linux":
        return False
    function = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if function is None:
        return False
    # A thread's first use of torch sets the process's number, which would overwrite ours.
    torch.get_num_threads()
    function(ctypes.c_int(count))
    return True


def available_cpus(
    cgroup: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int:
    """Cores that this process may keep busy.

    These are the cores of its affinity mask, but no more than its control groups' CPU quota: a
    thread beyond that would be stopped in the middle of an op.

    Args:
        cgroup: mount point of the control groups, of version 2 or 1.
        membership: file that names the process's control groups. In a container the names may be
            the host's, and the mount itself is the group.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    limits = [_quota(cgroup), _quota(cgroup / "cpu")]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, group = cgroup / "cpu" if controllers else cgroup, Path(path.lstrip("/"))
        limits += [_quota(mount / each) for each in (group, *group.parents)]
    return max(1, min([count, *(limit for limit in limits if limit is not None)]))


def _quota(folder: Path) -> int | None:
    """Whole cores of a control group's CPU quota; None without a limit or without the group."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip()
                for name in ("quota", "period")
            )
        limit = int(quota) // int(period)
    except (OSError, ValueError):
        return None
    return None if limit < 0 else limit
