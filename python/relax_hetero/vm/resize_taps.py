"""Filter taps of ONNX Resize along one axis: the input elements that each output element sums, and their weights.

For static sizes the importer computes taps as constants. For dynamic sizes bytecode calls the packed functions below,
so both cases have the same numbers. The definitions are those of ONNX's Resize up to opset 19.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import tvm_ffi
from tvm import runtime

from ..errors import HeteroError, MemoryLimitError
from .device.host_memory import host_memory
from .device.tensors import from_numpy

INDICES, WEIGHTS = "relax_hetero.resize_places", "relax_hetero.resize_weights"
SIZES, SCALES = "relax_hetero.resize_sizes", "relax_hetero.resize_scales"

AMBIGUOUS_TRANSFORMATIONS = ("align_corners", "pytorch_half_pixel", "tf_crop_and_resize")
"""Transformations that implementations define differently if scale * size is not an integer."""

OUTSIDE = -1  # tap index of an output element outside of the input, which is extrapolated


BELOW_OR_ABOVE = "below_or_above"
"""Nearest mode of Resize in opset 10: the element below, or the one above if the axis shrinks."""


@dataclass(frozen=True)
class ResizeForm:
    """Attributes of a Resize node, by ONNX's names, and whether it gives scales rather than sizes."""

    mode: str
    transformation: str
    nearest_mode: str
    cubic_coeff_a: float
    antialias: bool
    exclude_outside: bool
    has_scales: bool

    def text(self) -> str:
        """JSON text, as bytecode passes it."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class ResizedAxis:
    """Sizes and scale of a resized axis."""

    # Its size in the input and in the output.
    before: int
    after: int
    scale: float  # the node's scale, or after / before; the two may differ, because sizes are rounded
    region: tuple[float, float] = (0.0, 1.0)  # range of the axis, from 0 to 1, that `tf_crop_and_resize` enlarges


@dataclass(frozen=True)
class ResizeTaps:
    """Input elements and their weights, a row per output element; `outside` marks outputs that are extrapolated."""

    indices: np.ndarray
    weights: np.ndarray
    outside: np.ndarray | None


def source_coordinates(axis: ResizedAxis, transformation: str) -> np.ndarray:
    """Position of every output element in the input, in elements.

    Single precision, as in other implementations: the last bit can decide which of two neighbours is nearest.
    """
    position = np.arange(axis.after, dtype=np.float32)
    scale, half = np.float32(axis.scale), np.float32(0.5)
    width = scale * np.float32(axis.before)
    low, high = (np.float32(end) for end in axis.region)
    if transformation == "align_corners":
        return np.zeros_like(position) if width == 1 else position * (axis.before - 1) / (width - 1)
    if transformation == "asymmetric":
        return position / scale
    if transformation == "half_pixel":
        return (position + half) / scale - half
    if transformation == "pytorch_half_pixel":
        return np.zeros_like(position) if axis.after == 1 else (position + half) / scale - half
    if transformation == "half_pixel_symmetric":
        offset = np.float32(axis.before / 2) * (1 - np.float32(axis.after) / width)
        return offset + (position + half) / scale - half
    if transformation == "tf_half_pixel_for_nn":
        return (position + half) / scale
    if transformation == "tf_crop_and_resize":
        start = low * (axis.before - 1)
        if width == 1:
            return start + np.full_like(position, (high - low) * (axis.before - 1) / 2)
        return start + position * (high - low) * (axis.before - 1) / (width - 1)
    raise ValueError(transformation)


def _nearest(distance: np.ndarray, mode: str, scale: float) -> np.ndarray:
    """Take the right neighbour? `distance` from the left one is in (0, 1], and 1 for whole coordinates."""
    is_whole = distance == 1.0
    if mode == BELOW_OR_ABOVE:
        mode = "ceil" if scale < 1 else "floor"
    right = {
        "round_prefer_floor": distance > 0.5,
        "round_prefer_ceil": distance >= 0.5,
        "floor": np.zeros_like(is_whole),
        "ceil": np.ones_like(is_whole),
    }[mode]
    return right | is_whole


def _linear_kernel(distance: np.ndarray) -> np.ndarray:
    return np.clip(1 - np.abs(distance), 0, 1)


def _cubic_kernel(distance: np.ndarray, a: float) -> np.ndarray:
    x = np.abs(distance)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _shrink(axis: ResizedAxis, form: ResizeForm) -> float:
    """Factor by which antialiasing scales distances when the axis shrinks, which widens the filter."""
    return min(axis.scale, 1.0) if form.antialias else 1.0


def tap_count(axis: ResizedAxis, form: ResizeForm) -> int:
    """Number of input elements that an output element sums."""
    return 1 if form.mode == "nearest" else 2 - 2 * _first_offset(axis, form)


def _first_offset(axis: ResizedAxis, form: ResizeForm) -> int:
    return math.floor(-(1 if form.mode == "linear" else 2) / _shrink(axis, form)) + 1


def taps(axis: ResizedAxis, form: ResizeForm) -> ResizeTaps:
    """The input elements of every output element along one axis, and their weights."""
    shrink = _shrink(axis, form)
    source = source_coordinates(axis, form.transformation).astype(np.float64)
    left = np.ceil(source).astype(np.int64) - 1  # the element before, also for a whole coordinate
    distance = source - left
    outside = (source < 0) | (source > axis.before - 1) if form.transformation == "tf_crop_and_resize" else None
    if form.mode == "nearest":
        nearest = left + _nearest(distance, form.nearest_mode, axis.scale)
        indices = np.clip(nearest, 0, axis.before - 1)[:, None]
        return ResizeTaps(indices, np.ones(indices.shape), outside)
    first = _first_offset(axis, form)
    offsets = np.arange(first, 2 - first)
    distances = (offsets[None, :] - distance[:, None]) * shrink
    weights = _linear_kernel(distances) if form.mode == "linear" else _cubic_kernel(distances, form.cubic_coeff_a)
    if form.antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    indices = left[:, None] + offsets[None, :]
    if form.exclude_outside:
        weights = np.where((indices >= 0) & (indices < axis.before), weights, 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return ResizeTaps(np.clip(indices, 0, axis.before - 1), weights, outside)


def fractional_size_error(axis: ResizedAxis, form: ResizeForm) -> str | None:
    """Error text if a scale gives a fractional size, on which implementations differ; else None."""
    if (
        not form.has_scales
        or form.transformation not in AMBIGUOUS_TRANSFORMATIONS
        or axis.scale * axis.before == axis.after
    ):
        return None
    return (
        f"{form.transformation} with scale {axis.scale:g} of {axis.before} elements makes no whole number of them, "
        "and implementations differ on what that means; give sizes instead of scales"
    )


def sizes_by_policy(dims: Sequence[int], sizes: Sequence[int], policy: str) -> tuple[list[int], list[float]]:
    """Sizes and scales of axes under `keep_aspect_ratio_policy`; sizes of the input must be positive."""
    scales = [size / dim for size, dim in zip(sizes, dims, strict=True)]
    if policy == "stretch":
        return list(sizes), scales
    common = min(scales) if policy == "not_larger" else max(scales)
    return [int(common * dim + 0.5) for dim in dims], [common] * len(dims)


def check_numbers(dims: Sequence[int], numbers: Sequence[float], name: str) -> str | None:
    """Error text for invalid scales or sizes of axes (`name` is "scale" or "size"); else None."""
    for dim, number in zip(dims, numbers, strict=True):
        if not math.isfinite(number) or number < 0 or (name == "scale" and number == 0):
            return f"has a {name} of {number:g}, expected a positive number"
        if name == "size" and dim == 0 and number > 0:
            return f"resizes an axis of 0 elements to {number:g}"
    return None


@functools.lru_cache(maxsize=64)
def _cached_taps(axis: ResizedAxis, form: ResizeForm) -> ResizeTaps:
    return taps(axis, form)


def _axis_taps(sizes: Sequence[int], settings: runtime.Tensor, number: int, text: str, title: str) -> ResizeTaps:
    """The taps of the node's `number`-th resized axis, from the arguments that bytecode passes."""
    before, after = (int(size) for size in sizes)
    form = ResizeForm(**json.loads(text))
    scale, low, high = (float(value) for value in settings.numpy().reshape(3, -1)[:, number])
    if after == 0 or before == 0:
        # The kernel that reads the taps expects its own number of them, even of zero rows.
        columns = tap_count(ResizedAxis(1, 1, 1.0), form)
        return ResizeTaps(np.zeros((after, columns), "int64"), np.zeros((after, columns)), None)
    if math.isnan(scale):
        scale = after / before
    axis = ResizedAxis(before, after, scale, (low, high))
    problem = fractional_size_error(axis, form)
    if problem is not None:
        raise HeteroError(f"{title}: {problem}")
    available, nbytes = host_memory(), 48 * after * tap_count(axis, form)
    if nbytes > available:
        raise MemoryLimitError(f"{title}: its tables take {nbytes:,} bytes, found {available:,} bytes of memory")
    return _cached_taps(axis, form)


@tvm_ffi.register_global_func(INDICES, override=True)
def resize_indices(
    sizes: Sequence[int],  # extents of the axis before and after
    # Float64 vector for all axes: scales (NaN for the quotient of the sizes), region begins, region ends.
    settings: runtime.Tensor,
    number: int,  # index into these axes
    # text, title: the node's attributes, and its name in errors.
    text: str,
    title: str,
) -> runtime.Tensor:
    """The input elements along an axis: ``int64[after, taps]``, OUTSIDE in extrapolated rows."""
    axis = _axis_taps(sizes, settings, number, text, title)
    indices = axis.indices if axis.outside is None else np.where(axis.outside[:, None], OUTSIDE, axis.indices)
    return from_numpy(np.array(indices, "int64"), settings.device)


@tvm_ffi.register_global_func(WEIGHTS, override=True)
def resize_weights(
    sizes: Sequence[int], settings: runtime.Tensor, number: int, text: str, title: str, dtype: str
) -> runtime.Tensor:
    """The weights of `resize_indices`: ``[after, taps]``."""
    weights = _axis_taps(sizes, settings, number, text, title).weights
    return from_numpy(np.array(weights, dtype), settings.device)


def _resized(dims: Sequence[int], numbers: runtime.Tensor, policy: str, title: str) -> tuple[list[int], list[float]]:
    sizes, values = [int(dim) for dim in dims], numbers.numpy().reshape(-1).tolist()
    name = "scale" if policy == "scales" else "size"
    problem = check_numbers(sizes, values, name)
    if problem is None and policy != "scales" and 0 in sizes:
        problem = "resizes an axis of 0 elements"
    if problem is not None:
        raise HeteroError(f"{title}: {problem}")
    if policy == "scales":
        return [int(dim * scale) for dim, scale in zip(sizes, values, strict=True)], values
    return sizes_by_policy(sizes, [int(size) for size in values], policy)


@tvm_ffi.register_global_func(SIZES, override=True)
def resize_sizes(dims: Sequence[int], numbers: runtime.Tensor, policy: str, title: str) -> runtime.Tensor:
    """Sizes of axes after Resize, an int64 vector, from their sizes before it.

    `numbers`: scales if `policy` is "scales"; otherwise target sizes, and `policy` is a `keep_aspect_ratio_policy`.
    """
    return from_numpy(np.array(_resized(dims, numbers, policy, title)[0], "int64"), numbers.device)


@tvm_ffi.register_global_func(SCALES, override=True)
def resize_scales(dims: Sequence[int], numbers: runtime.Tensor, policy: str, title: str) -> runtime.Tensor:
    """Scales that go with `resize_sizes`, a float64 vector."""
    return from_numpy(np.array(_resized(dims, numbers, policy, title)[1], "float64"), numbers.device)
