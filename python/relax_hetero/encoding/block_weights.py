"""Weights of 4 bits, in blocks that share a scale: as models have them, and as kernels read them.

A model's are rows of bytes, a row for each column of the product, two weights a byte, the first in the low half:
``(n, k / 2)`` with ``(n, blocks)`` scales and zero points. Kernels read panels of columns: a lane of 32 bits is eight
weights of one column that follow each other along k, and a vector of lanes is as many columns.
"""

from __future__ import annotations

import numpy as np

from ..target.cpu_target import CpuTarget
from ..target.tiles import tile_columns

GROUP = 8
"""Weights in a lane of 32 bits."""


def panel_columns(cpu: CpuTarget) -> int:
    """Columns of a panel on a CPU."""
    return tile_columns(cpu, "float32")


def pack_weights(data: np.ndarray, depth: int, panel: int) -> np.ndarray:
    """Rows of bytes as panels of lanes.

    Parameters
    ----------
    data : array of uint8, (n, bytes)
        At least ``depth / 2`` bytes a row.
    depth : int
        Weights of a row.
    panel : int
        Columns of a panel.

    Returns
    -------
    array of int32, (panels, groups, panel)
        Zeros where columns and weights are not there.
    """
    rows, groups = data.shape[0], -(-depth // GROUP)
    padded = np.zeros((-(-rows // panel) * panel, groups * GROUP // 2), np.uint8)
    kept = min(padded.shape[1], data.shape[1])
    padded[:rows, :kept] = data[:, :kept]
    lanes = padded.view("<i4").astype(np.int32, copy=False).reshape(-1, panel, groups)
    return np.ascontiguousarray(lanes.transpose(0, 2, 1))


def pack_blocks(values: np.ndarray, panel: int) -> np.ndarray:
    """Scales or zero points, ``(n, blocks)``, as ``(panels, blocks, panel)``; zeros where columns are not there."""
    rows, blocks = values.shape
    padded = np.zeros((-(-rows // panel) * panel, blocks), values.dtype)
    padded[:rows] = values
    return np.ascontiguousarray(padded.reshape(-1, panel, blocks).transpose(0, 2, 1))
