"""Resize: the input elements that every output element is a sum of, and their weights, along one axis.

The import computes them for sizes it knows and makes constants of them. For other sizes bytecode calls the packed
functions below, so that both have the same numbers. The definitions are those of ONNX's Resize (opset 19 and before).
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

WHOLE = ("align_corners", "pytorch_half_pixel", "tf_crop_and_resize")
"""Transformations that mean different things to implementations where a scale makes no whole number of elements."""

OUTSIDE = -1
"""The place of an output element that no input element is near: it is extrapolated."""


BELOW_OR_ABOVE = "below_or_above"
"""How Resize of opset 10 takes the nearest element: the one below, or the one above where the axis shrinks."""


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
        """As bytecode holds it."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class ResizedAxis:
    """How one axis is resized.

    Attributes
    ----------
    before, after : int
        Its size in the input and in the output.
    scale : float
        As given, or after / before; the two need not agree, as sizes are rounded.
    region : (float, float)
        The part of the axis, from 0 to 1, that `tf_crop_and_resize` enlarges.
    """

    before: int
    after: int
    scale: float
    region: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class ResizeTaps:
    """Input elements and their weights, a row per output element; `outside` marks outputs that are extrapolated."""

    indices: np.ndarray
    weights: np.ndarray
    outside: np.ndarray | None


def source_coordinates(axis: ResizedAxis, transformation: str) -> np.ndarray:
    """Where in the input, in elements, every output element lies.

    In single precision, as implementations compute it: which of two neighbours is nearest can hang on the last bit.
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
    """True if the right neighbour is taken; `distance` from the left one is in (0, 1], whole coordinates having 1."""
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
    """The antialiasing filter widens the kernel by this where the axis shrinks."""
    return min(axis.scale, 1.0) if form.antialias else 1.0


def tap_count(axis: ResizedAxis, form: ResizeForm) -> int:
    """How many input elements an output element is a sum of."""
    return 1 if form.mode == "nearest" else 2 - 2 * _first(axis, form)


def _first(axis: ResizedAxis, form: ResizeForm) -> int:
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
        places = np.clip(nearest, 0, axis.before - 1)[:, None]
        return ResizeTaps(places, np.ones(places.shape), outside)
    first = _first(axis, form)
    offsets = np.arange(first, 2 - first)
    away = (offsets[None, :] - distance[:, None]) * shrink
    weights = _linear_kernel(away) if form.mode == "linear" else _cubic_kernel(away, form.cubic_coeff_a)
    if form.antialias:
        weights = weights / weights.sum(axis=1, keepdims=True)
    places = left[:, None] + offsets[None, :]
    if form.exclude_outside:
        weights = np.where((places >= 0) & (places < axis.before), weights, 0.0)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return ResizeTaps(np.clip(places, 0, axis.before - 1), weights, outside)


def not_whole(axis: ResizedAxis, form: ResizeForm) -> str | None:
    """Message where a scale makes no whole number of elements and implementations differ on what that means."""
    if not form.has_scales or form.transformation not in WHOLE or axis.scale * axis.before == axis.after:
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
    """Fault of scales or sizes ("scale", "size") of axes, if any."""
    for dim, number in zip(dims, numbers, strict=True):
        if not math.isfinite(number) or number < 0 or (name == "scale" and number == 0):
            return f"has a {name} of {number:g}, expected a positive number"
        if name == "size" and dim == 0 and number > 0:
            return f"resizes an axis of 0 elements to {number:g}"
    return None


@functools.lru_cache(maxsize=64)
def _taps(axis: ResizedAxis, form: ResizeForm) -> ResizeTaps:
    return taps(axis, form)


def _found(sizes: Sequence[int], settings: runtime.Tensor, number: int, text: str, title: str) -> ResizeTaps:
    """The taps of axis `number` of those that a node resizes, from what bytecode passes."""
    before, after = (int(size) for size in sizes)
    form = ResizeForm(**json.loads(text))
    scale, low, high = (float(value) for value in settings.numpy().reshape(3, -1)[:, number])
    if after == 0 or before == 0:
        # The number of taps is that of the kernel that reads them, be there rows or not.
        columns = tap_count(ResizedAxis(1, 1, 1.0), form)
        return ResizeTaps(np.zeros((after, columns), "int64"), np.zeros((after, columns)), None)
    if math.isnan(scale):
        scale = after / before
    axis = ResizedAxis(before, after, scale, (low, high))
    problem = not_whole(axis, form)
    if problem is not None:
        raise HeteroError(f"{title}: {problem}")
    available, nbytes = host_memory(), 48 * after * tap_count(axis, form)
    if nbytes > available:
        raise MemoryLimitError(f"{title}: its tables take {nbytes:,} bytes, found {available:,} bytes of memory")
    return _taps(axis, form)


@tvm_ffi.register_global_func(INDICES, override=True)
def resize_indices(
    sizes: Sequence[int], settings: runtime.Tensor, number: int, text: str, title: str
) -> runtime.Tensor:
    """The input elements along an axis: ``int64[after, taps]``, OUTSIDE in the rows that are extrapolated.

    Parameters
    ----------
    sizes : sequence of int
        Extent of the axis, before and after.
    settings : runtime.Tensor
        float64, of all axes: scales (NaN for the quotient of the sizes), then begins of regions, then ends.
    number : int
        Which of these axes.
    text, title : str
        The node's attributes, and its name in errors.
    """
    found = _found(sizes, settings, number, text, title)
    places = found.indices if found.outside is None else np.where(found.outside[:, None], OUTSIDE, found.indices)
    return from_numpy(np.array(places, "int64"), settings.device)


@tvm_ffi.register_global_func(WEIGHTS, override=True)
def resize_weights(
    sizes: Sequence[int], settings: runtime.Tensor, number: int, text: str, title: str, dtype: str
) -> runtime.Tensor:
    """The weights of `resize_indices`: ``[after, taps]``."""
    found = _found(sizes, settings, number, text, title)
    return from_numpy(np.array(found.weights, dtype), settings.device)


def _by_policy(dims: Sequence[int], numbers: runtime.Tensor, policy: str, title: str) -> tuple[list[int], list[float]]:
    sizes, given = [int(dim) for dim in dims], numbers.numpy().reshape(-1).tolist()
    name = "scale" if policy == "scales" else "size"
    problem = check_numbers(sizes, given, name)
    if problem is None and policy != "scales" and 0 in sizes:
        problem = "resizes an axis of 0 elements"
    if problem is not None:
        raise HeteroError(f"{title}: {problem}")
    if policy == "scales":
        return [int(dim * scale) for dim, scale in zip(sizes, given, strict=True)], given
    return sizes_by_policy(sizes, [int(size) for size in given], policy)


@tvm_ffi.register_global_func(SIZES, override=True)
def resize_sizes(dims: Sequence[int], numbers: runtime.Tensor, policy: str, title: str) -> runtime.Tensor:
    """Sizes of axes after Resize, an int64 vector, from their sizes before it.

    Parameters
    ----------
    numbers : runtime.Tensor
        Scales, where `policy` is "scales"; else wanted sizes, and it is a `keep_aspect_ratio_policy`.
    """
    return from_numpy(np.array(_by_policy(dims, numbers, policy, title)[0], "int64"), numbers.device)


@tvm_ffi.register_global_func(SCALES, override=True)
def resize_scales(dims: Sequence[int], numbers: runtime.Tensor, policy: str, title: str) -> runtime.Tensor:
    """Scales that go with `resize_sizes`, a float64 vector."""
    return from_numpy(np.array(_by_policy(dims, numbers, policy, title)[1], "float64"), numbers.device)
