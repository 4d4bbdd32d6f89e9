"""UncopyableHandle: base of objects that own a running request or engine, and end it when they are
dropped."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class UncopyableHandle:
    """Object that cannot be copied or pickled: dropping the copy would end the original's run."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can be neither copied nor pickled")
