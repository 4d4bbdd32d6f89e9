"""Distance of drawn tokens from their probabilities."""

from __future__ import annotations

import math

import numpy as np


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Upper tail of chi-square, by the Wilson-Hilferty approximation."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    z = (statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2 / (9 * degrees)) / math.sqrt(2))
