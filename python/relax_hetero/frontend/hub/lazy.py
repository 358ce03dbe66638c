"""Tensors that are made from others when they are read: reordered, stacked, or converted to float32.

Rows of a tensor are arrays of numbers or of bytes, so that quantized weights are reordered and stacked as others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from ...encoding.block_formats import block_format
from ...errors import FrontendError
from ..gguf.file import FileTensor, LazyTensor
from ..gguf.weights import split_integer_rows
from .stored_tensors import StoredTensor

_PLAIN_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}


def file_tensor(stored: StoredTensor) -> FileTensor:
    """A tensor of floats, without a copy if GGUF files have its type."""
    if stored.type == "F64":
        return lazy(stored.name, stored.shape, "F32", lambda: stored.data.astype("float32"))
    if stored.type not in _PLAIN_TYPES:
        raise stored.error(f"is of type {stored.type}, expected F16, BF16 or F32, or a known quantization")
    if not all(stored.shape):
        raise stored.error(f"has shape {stored.shape}, expected extents above 0")
    data = stored.data.view("uint8") if stored.type == "BF16" and stored.shape else stored.data
    return FileTensor(stored.name, stored.shape, stored.type, data)


def lazy(
    name: str, shape: Sequence[int], kind: str, read: Callable[[], np.ndarray], nbytes: int | None = None
) -> LazyTensor:
    """A tensor of floats, or of bytes whose number is given."""
    size = prod(shape) * (4 if kind == "F32" else 2) if nbytes is None else nbytes
    return LazyTensor(name, tuple(shape), kind, size, read)


def as_float32(tensor: FileTensor, offset: float = 0.0, shape: Sequence[int] | None = None) -> FileTensor:
    """Numbers plus an offset as float32, in another shape if one is given."""
    extents = tuple(tensor.shape if shape is None else shape)
    if tensor.type == "F32" and not offset and extents == tensor.shape:
        return tensor
    if tensor.type not in _PLAIN_TYPES:
        raise FrontendError(f"tensor {tensor.name!r} is of type {tensor.type}, expected unquantized numbers")

    return lazy(tensor.name, extents, "F32", lambda: (floats(tensor) + np.float32(offset)).reshape(extents))


def as_float16(tensor: FileTensor) -> FileTensor:
    """Numbers of a matrix of integers with scales and perhaps zero points (`integer_rows`), as float16."""
    form, depth = block_format(tensor.type.lower()), tensor.shape[-1]

    def read() -> np.ndarray:
        quants, scales, *zeros = split_integer_rows(tensor.data, form, depth)
        if form.bits == 4:
            quants = np.stack([quants & np.uint8(15), quants >> np.uint8(4)], -1).reshape(tensor.shape)
        points = np.repeat(zeros[0], form.block, 1).astype("float32") if zeros else np.float32(-form.min_code)
        return ((quants.astype("float32") - points) * np.repeat(scales, form.block, 1)).astype("float16")

    return lazy(tensor.name, tensor.shape, "F16", read)


def floats(tensor: FileTensor) -> np.ndarray:
    """Unquantized numbers as float32."""
    data = np.ascontiguousarray(tensor.data)
    if tensor.type == "BF16":
        data = (data.view("<u2").astype("uint32") << 16).view("float32")
    return data.reshape(tensor.shape).astype("float32")


def select_rows(
    tensor: FileTensor, name: str, rows: Callable[[np.ndarray], np.ndarray], shape: Sequence[int]
) -> FileTensor:
    """A selection of rows, in the order that a function of the data gives."""
    nbytes = tensor.nbytes * prod(shape) // prod(tensor.shape)
    return lazy(name, shape, tensor.type, lambda: rows(tensor.data), nbytes)


def stack(name: str, tensors: Sequence[FileTensor]) -> FileTensor:
    """Tensors of one shape and type along a new first axis. Raises FrontendError if shapes or types differ."""
    first = tensors[0]
    for tensor in tensors:
        if (tensor.shape, tensor.type) != (first.shape, first.type):
            raise FrontendError(
                f"tensor {tensor.name!r} has shape {tensor.shape} and type {tensor.type}, expected those of "
                f"{first.name!r}, {first.shape} and {first.type}"
            )
    nbytes = sum(tensor.nbytes for tensor in tensors)
    shape = (len(tensors), *first.shape)
    return lazy(name, shape, first.type, lambda: np.stack([tensor.data for tensor in tensors]), nbytes)
