"""OwnerLines: a line of waiting items for each owner; the owners take turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class OwnerLines(Generic[T]):
    """Waiting items in a line for each owner, ordered by rank and then by arrival.

    The owner with the fewest running items is next; of several such owners, the one that has waited
    longest since its line began or its last turn. WaitingQueue of the scheduler has the same turns,
    and ranks that come before them; it may keep discarded items, with all that they hold, for a
    while.

    ``push`` and ``discard`` search a line by bisection and move a part of its list. ``peek`` looks
    at the owners that have running items and at one more.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str | None, list[tuple[float, int, T]]] = OrderedDict()
        self._entries: dict[T, tuple[float, int, T]] = {}
        self._num_running: Counter[str | None] = Counter()
        self._serials = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        for line in self._lines.values():
            yield from (item for *_, item in line)

    @property
    def num_owners(self) -> int:
        """Number of owners of waiting items."""
        return len(self._lines)

    def push(self, owner: str | None, item: T, rank: float = 0.0) -> None:
        """Add an item to its owner's line, behind all items of the same or a smaller rank."""
        entry = self._entries[item] = (rank, next(self._serials), item)
        insort(self._lines.setdefault(owner, []), entry)

    def peek(self) -> T | None:
        """The next item; None if none waits."""
        if not self._lines:
            return None
        running = self._num_running
        idle_owners = (line for owner, line in self._lines.items() if owner not in running)
        line = next(idle_owners, None)
        if line is None:
            line = self._lines[min(self._lines, key=running.__getitem__)]
        return line[0][-1]

    def discard(self, owner: str | None, item: T) -> None:
        """Remove an item; does nothing if it does not wait."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            line = self._lines[owner]
            del line[bisect_left(line, entry)]
            if not line:
                del self._lines[owner]

    def begin(self, owner: str | None, item: T) -> None:
        """Remove an item that runs from now on; its owner's next turn follows those of others."""
        self.discard(owner, item)
        self.end_turn(owner)
        self._num_running[owner] += 1

    def end_turn(self, owner: str | None) -> None:
        """Put an owner behind the others, because it had its turn."""
        if owner in self._lines:
            self._lines.move_to_end(owner)

    def end(self, owner: str | None) -> None:
        """Record that an item of an owner does not run any more."""
        self._num_running[owner] -= 1
        if not self._num_running[owner]:
            del self._num_running[owner]
