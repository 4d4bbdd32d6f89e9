"""Reference"""

from __future__ import annotations


class Reference:
    pass
