"""set_thread_count, available_cpus, cpu_model: compute threads, and the cores for them."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path

import torch


def set_thread_count(count: int) -> bool:
    """Sets the calling thread's OpenMP thread count to ``count``; other threads keep theirs.

    OpenMP keeps a count per thread, and MKL and oneDNN follow it. ``torch.set_num_threads`` would
    also change two counts that belong to the application: the initial count of every thread that
    starts later, and MKL's count for the whole process.

    Returns:
        Whether ``count`` took effect; False if torch has no OpenMP or hides it.
    """
    if sys.platform != "linux":
        return False
    function = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if function is None:
        return False
    # A thread's first use of torch resets the thread to the process's thread count. Trigger the
    # reset now, so that it cannot overwrite ``count`` later.
    torch.get_num_threads()
    function(ctypes.c_int(count))
    return True


def available_cpus(
    cgroup_root: Path = Path("/sys/fs/cgroup"), membership_file: Path = Path("/proc/self/cgroup")
) -> int:
    """Number of cores that this process may keep busy.

    It is the number of cores in the affinity mask, limited by the CPU quota of the control groups:
    with more threads than the quota allows, threads would be throttled in the middle of an op.

    Args:
        cgroup_root: mount point of the control groups, of version 2 or 1.
        membership_file: file that names the process's control groups. In a container these names
            may be the host's; the process's group is then the mount point itself.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        lines = membership_file.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    limits = [_cpu_quota(cgroup_root), _cpu_quota(cgroup_root / "cpu")]
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, group = cgroup_root / "cpu" if controllers else cgroup_root, Path(path.lstrip("/"))
        limits += [_cpu_quota(mount / each) for each in (group, *group.parents)]
    return max(1, min([count, *(limit for limit in limits if limit is not None)]))


def cpu_model(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """Description of the CPU's first core; without /proc/cpuinfo only the architecture's name."""
    try:
        first = cpu_info.read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.machine()
    # Leave out the core's frequency, which changes from one moment to the next.
    named = re.findall(r"(?m)^(?:model name|cpu family|model|stepping|CPU \w+)\s*: *(.*)$", first)
    return " ".join([platform.machine(), *named])


def cpu_wait_seconds(schedstat_file: Path = Path("/proc/thread-self/schedstat")) -> float:
    """Seconds that the calling thread was runnable without a CPU; 0 if unknown."""
    try:
        return int(schedstat_file.read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def _cpu_quota(group_folder: Path) -> int | None:
    """Whole cores of a control group's CPU quota; None if the group is missing or has no quota."""
    try:
        if (group_folder / "cpu.max").exists():
            quota, period = (group_folder / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = (
                (group_folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii").strip()
                for name in ("quota", "period")
            )
        limit = int(quota) // int(period)
    except (OSError, ValueError):
        return None
    return None if limit < 0 else limit
