"""Handle: an object that stands for something that runs, and ends it when it is dropped."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class Handle:
    """Base of what cannot be copied or pickled: dropping the copy would end the original."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"{type(self).__name__} can be neither copied nor pickled")
