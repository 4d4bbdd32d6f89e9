"""OwnerLines: a line of waiting items for each owner; the owners take turns."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class OwnerLines(Generic[T]):
    """Waiting items in a line for each owner, in order of arrival.

    The owner with the fewest running items is next; of several such owners, the one that has waited
    longest since its line began or its last turn. WaitingQueue of the scheduler has the same turns,
    and ranks beside them; it may keep discarded items, with all that they hold, for a while.

    ``push``, ``discard``, ``begin`` and ``end`` take O(1). ``peek`` looks at the owners that have
    running items and at one more.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str | None, OrderedDict[T, None]] = OrderedDict()
        self._num_running: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        for line in self._lines.values():
            yield from line

    def push(self, owner: str | None, item: T) -> None:
        self._lines.setdefault(owner, OrderedDict())[item] = None

    def peek(self) -> T | None:
        """The next item; None if none waits."""
        if not self._lines:
            return None
        running = self._num_running
        idle_owners = (line for owner, line in self._lines.items() if owner not in running)
        line = next(idle_owners, None)
        if line is None:
            line = self._lines[min(self._lines, key=running.__getitem__)]
        return next(iter(line))

    def discard(self, owner: str | None, item: T) -> None:
        """Remove an item; does nothing if it does not wait."""
        line = self._lines.get(owner)
        if line is not None and item in line:
            del line[item]
            if not line:
                del self._lines[owner]

    def begin(self, owner: str | None, item: T) -> None:
        """Remove an item that runs from now on; its owner's next turn follows those of others."""
        self.discard(owner, item)
        if owner in self._lines:
            self._lines.move_to_end(owner)
        self._num_running[owner] += 1

    def end(self, owner: str | None) -> None:
        """Record that an item of an owner does not run any more."""
        self._num_running[owner] -= 1
        if not self._num_running[owner]:
            del self._num_running[owner]
