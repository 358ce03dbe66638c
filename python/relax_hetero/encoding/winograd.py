"""Winograd's minimal filtering F(m x m, 3 x 3): the matrices that transform windows, data and sums.

A tile of m x m results of a convolution with windows of 3 x 3 elements and stride 1 is computed from a tile of
(m + 2) x (m + 2) elements of data. Both the window and the data are transformed to (m + 2) x (m + 2) positions; at each
position they are multiplied, and summed over channels; sums are transformed back. That is (m + 2)^2 multiplications
for m^2 results instead of 9 m^2: 4 instead of 9 for each result with m = 2, 2.25 with m = 4.

The matrices follow from m + 1 points; the last position stands for infinity. The points are 0 and pairs of a number
and its negative, so that the transforms of a pair share their even and their odd terms. (Source: Lavin and Gray, "Fast
algorithms for convolutional neural networks"; the points of m = 4 as in Barabasz et al., "Error analysis and improving
the accuracy of Winograd convolution for deep neural networks": whole numbers 1 and 2 have twice the error.)
"""

from __future__ import annotations

from math import prod

import numpy as np

WINDOW = 3  # elements of a window along each of its two dimensions
POINTS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.5**0.5, 2**0.5)}  # the positive points, by m


def positions(m: int) -> int:
    """Positions along one dimension of a transformed window, and elements of data that a tile reads."""
    return m + WINDOW - 1


def _signed(m: int) -> list[float]:
    return [0.0, *(sign * point for point in POINTS[m] for sign in (1, -1))]


def _scale(m: int, point: float) -> float:
    """Divisor of the window's polynomial at a point."""
    return prod(point - root for root in _signed(m) if root != point)


def window_matrix(m: int) -> np.ndarray:
    """Matrix G of shape [m + 2, 3], which transforms a window along one dimension."""
    rows = [[point**power / _scale(m, point) for power in range(WINDOW)] for point in _signed(m)]
    return np.array([*rows, [0.0, 0.0, 1.0]])


def transform_windows(windows: np.ndarray, m: int) -> np.ndarray:
    """Windows [..., 3, 3] transformed to [..., m + 2, m + 2], in their own type; computed in float64."""
    matrix = window_matrix(m)
    both = np.kron(matrix, matrix)
    flat = windows.astype("float64").reshape(-1, WINDOW * WINDOW)
    return (flat @ both.T).astype(windows.dtype).reshape(*windows.shape[:-2], len(matrix), len(matrix))


def restore_windows(values: np.ndarray, m: int) -> np.ndarray:
    """The inverse of `transform_windows`, up to rounding."""
    inverse = np.linalg.pinv(window_matrix(m))
    both = np.kron(inverse, inverse)
    flat = values.astype("float64").reshape(-1, positions(m) ** 2)
    return (flat @ both.T).astype(values.dtype).reshape(*values.shape[:-2], WINDOW, WINDOW)
