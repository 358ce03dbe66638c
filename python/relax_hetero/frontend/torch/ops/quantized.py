"""Quantization ops: conversion to and from integers by a scale and a zero point."""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import relax

from ...ops.node import const
from ..torch_node import TorchNode, converts, dtype_name

_RANGES = {"int8": (-128, 127), "uint8": (0, 255)}


def _parameters(node: TorchNode, scale: Any, zero: Any, dtype: str) -> tuple[relax.Expr, relax.Expr]:
    """Scale as float32 and zero point as `dtype`."""
    scale = node.tensor(scale, "float32")
    return scale, node.tensor(0 if zero is None else zero, dtype)


@converts("quantize_per_tensor", "quantize_per_channel")
def quantize(node: TorchNode, x: relax.Expr, scale: Any, zero: Any, *options: Any) -> relax.Expr:
    """Compute round-half-even(x / scale) + zero, clamped to a range."""
    axis, low, high = (*options[:1], *options[1:3]) if "channel" in node.op else (0, *options[:2])
    type_range = _RANGES.get(node.dtype)
    scale, zero = _parameters(node, _scalar(node, scale), _scalar(node, zero), node.dtype if type_range else "int32")
    x = node.cast(x, "float32")
    if type_range is not None:
        quantized = node.onnx("QuantizeLinear", x, scale, zero, axis=axis)
        if (int(low), int(high)) == type_range:
            return quantized
        clamped = node.onnx("Max", node.cast(quantized, "int32"), const(int(low), "int32"))
        return node.cast(node.onnx("Min", clamped, const(int(high), "int32")), node.dtype)
    rank = len(node.shape)
    scale, zero = (_broadcast_along(node, value, axis, rank) for value in (scale, zero))
    rounded = relax.op.round(x / scale) + node.cast(zero, "float32")
    clamped = relax.op.maximum(rounded, const(float(low), "float32"))
    return node.cast(node.emit(relax.op.minimum(clamped, const(float(high), "float32"))), node.dtype)


@converts("dequantize_per_tensor", "dequantize_per_channel")
def dequantize(node: TorchNode, x: relax.Expr, scale: Any, zero: Any, *options: Any) -> relax.Expr:
    """Compute (x - zero) * scale."""
    dtype = str(x.ty.dtype)
    axis = options[0] if "channel" in node.op else 0
    if dtype not in _RANGES:
        x, dtype = node.cast(x, "int32"), "int32"
    scale, zero = _parameters(node, _scalar(node, scale), _scalar(node, zero), dtype)
    return node.cast(node.onnx("DequantizeLinear", x, scale, zero, axis=axis), node.dtype)


def _scalar(node: TorchNode, value: Any) -> Any:
    """Reshape a vector of one element to a scalar; other values are unchanged."""
    if isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType) and node.dims(value) == [1]:
        return node.reshape(value, [])
    return value


def _broadcast_along(node: TorchNode, value: relax.Expr, axis: int, rank: int) -> relax.Expr:
    dims = node.dims(value)
    return node.reshape(value, [*dims, *[1] * (rank - axis - 1)]) if dims else value


@converts("choose_qparams")
def choose_qparams(node: TorchNode, x: relax.Expr, low: int, high: int, eps: float, dtype: Any) -> list[relax.Expr]:
    """Scale and zero point that map the range of a tensor, extended to contain 0, to a range of integers."""
    dtype_name(dtype)
    x = node.cast(x, "float32")
    zero = const(0.0, "float32")
    minimum = node.emit(relax.op.minimum(relax.op.min(x), zero))
    maximum = node.emit(relax.op.maximum(relax.op.max(x), zero))
    step = (maximum - minimum) / const(float(high - low), "float32")
    scale = node.emit(relax.op.maximum(step, const(np.float32(eps), "float32")))
    point = const(float(low), "float32") - relax.op.round(minimum / scale)
    clamped = relax.op.minimum(relax.op.maximum(point, const(float(low), "float32")), const(float(high), "float32"))
    kinds = [dtype_name(fake.dtype) for fake in node.value]
    dims = [node.sizes.shape(fake.shape) for fake in node.value]
    values = (scale, node.emit(clamped))
    return [node.reshape(node.cast(value, kind), shape) for value, kind, shape in zip(values, kinds, dims, strict=True)]
