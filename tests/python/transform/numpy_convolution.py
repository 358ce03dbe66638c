"""Convolutions in numpy, accumulated in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def convolve(
    data: np.ndarray,
    weight: np.ndarray,
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> np.ndarray:
    """NCHW data, OIHW weight, NCHW result, any number of spatial dimensions; padding before each, then after each."""
    spatial = len(strides)
    pads = [(0, 0), (0, 0), *((padding[d], padding[spatial + d]) for d in range(spatial))]
    padded = np.pad(data.astype("float64"), pads)
    reach = [(weight.shape[2 + d] - 1) * dilation[d] + 1 for d in range(spatial)]
    places = [(padded.shape[2 + d] - reach[d]) // strides[d] + 1 for d in range(spatial)]
    batch, outputs = data.shape[0], weight.shape[0] // groups
    each = weight.shape[1]
    result = np.zeros((batch, groups, outputs, *places))
    grouped = padded.reshape(batch, groups, each, *padded.shape[2:])
    kernels = weight.astype("float64").reshape(groups, outputs, *weight.shape[1:])
    for window in np.ndindex(*weight.shape[2:]):
        cut = [
            slice(window[d] * dilation[d], window[d] * dilation[d] + (places[d] - 1) * strides[d] + 1, strides[d])
            for d in range(spatial)
        ]
        image = grouped[(slice(None), slice(None), slice(None), *cut)]
        result += np.einsum("bgk...,gnk->bgn...", image, kernels[(..., *window)])
    return result.reshape(batch, groups * outputs, *places)
