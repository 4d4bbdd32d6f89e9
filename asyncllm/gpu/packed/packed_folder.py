"""PackedFolder: a folder of packed files that processes share."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PACKED_FILE_SUFFIX = ".panels"
_TEMPORARY_SUFFIX = ".panels-tmp"

_LOCK_POLL_SECONDS = 0.05

MIN_FREE_DISK_SHARE = 0.05
"""Minimum share of the disk that stays free after a file is written."""


class PackedFolder:
    """A folder with packed files, and with small files that belong to them.

    One process at a time writes, evicts and cleans up, under a lock of the folder itself. The lock
    ends with the process, so a temporary file that a writer finds was left by a dead process.
    Reading takes no lock, because files appear and vanish as a whole.

    Args:
        max_bytes: maximum size of all packed files together; None for a model's own folder, from
            which nothing is evicted.
        mode: mode of new files.
    """

    def __init__(self, path: Path, max_bytes: int | None, mode: int = 0o600) -> None:
        self.path, self.max_bytes, self._mode = path, max_bytes, mode
        self._is_locked = False

    def make(self) -> None:
        """Make the folder, for this user alone, unless it exists.

        Raises:
            PermissionError: the folder belongs to another user, or other users can write to it.
            OSError: the folder cannot be made.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(
                f"{self.path} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}, expected a folder that only user "
                f"{os.geteuid()} can write"
            )

    @contextmanager
    def lock(self, check_stopped: Callable[[], object] | None) -> Iterator[None]:
        """Lock that every writer takes; may be nested.

        Only one thread of a process may use it at a time.

        Args:
            check_stopped: called every 50 ms while another process has the lock; raises an
                exception to end the wait. None does not wait.

        Raises:
            BlockingIOError: another process has the lock, and ``check_stopped`` is None.
        """
        import fcntl  # fcntl exists only on POSIX systems.

        if self._is_locked:
            yield
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if check_stopped is None:
                        raise
                check_stopped()
                time.sleep(_LOCK_POLL_SECONDS)
            self._is_locked = True
            for left in self.path.glob(f"*{_TEMPORARY_SUFFIX}"):
                _unlink(left)
            yield
            os.fsync(fd)
        finally:
            self._is_locked = False
            # Unlock explicitly: a child forked meanwhile keeps the lock's descriptor open.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def write(self, name: str, write: Callable[[int], object], num_bytes: int = 0) -> None:
        """Write a file so that it appears as a whole or not at all. Needs the lock.

        Args:
            write: writes the file's content to a descriptor.
            num_bytes: bytes to reserve.

        Raises:
            OSError: there is no room, or the folder cannot be written.
        """
        temporary = self.path / f"{name}{_TEMPORARY_SUFFIX}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, self._mode)
        try:
            os.fchmod(fd, self._mode)
            if num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
            write(fd)
            os.rename(temporary, self.path / name)
        except BaseException:
            _unlink(temporary)
            raise
        finally:
            os.close(fd)

    def make_room(self, num_bytes: int) -> None:
        """Evict the least recently used files until a new one has room. Needs the lock.

        Raises:
            OSError: the new file exceeds ``max_bytes``, or would fill the disk.
        """
        files = []
        for each in self.path.glob(f"*{PACKED_FILE_SUFFIX}"):
            with suppress(OSError):
                if stat.S_ISREG((status := each.lstat()).st_mode):
                    files.append((each, status))
        if self.max_bytes is not None:
            if num_bytes > self.max_bytes:
                raise OSError(f"{num_bytes} bytes are more than packed_cache_size={self.max_bytes}")
            total = num_bytes + sum(status.st_size for _, status in files)
            for path, status in sorted(files, key=lambda each: each[1].st_atime_ns):
                if total <= self.max_bytes:
                    break
                for each in (path, *self.path.glob(f"{path.stem}.*.json")):
                    _unlink(each)
                total -= status.st_size
        disk = os.statvfs(self.path)
        min_free = int(disk.f_blocks * disk.f_frsize * MIN_FREE_DISK_SHARE)
        if disk.f_bavail * disk.f_frsize < num_bytes + min_free:
            share = f"{MIN_FREE_DISK_SHARE:.0%}"
            raise OSError(f"{num_bytes} bytes would leave less than {share} of the disk free")

    def mark_used(self, name: str) -> None:
        """Update a file's time of last use, by which files are evicted."""
        path = self.path / name
        with suppress(OSError):  # utime fails in a read-only folder, from which nothing is evicted.
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _unlink(path: Path) -> None:
    """Remove a file; an entry that cannot be removed, such as a directory, is skipped."""
    with suppress(OSError):
        path.unlink()
