"""ONNX ops of the benchmark's models, and similar ones, as torch functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from torch.nn import functional

from . import Unsupported

Tensor = torch.Tensor
Attributes = dict[str, Any]

NUMBERS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("Reshape", "Expand", "Unsqueeze", "Squeeze", "ReduceMean", "ReduceSum", "ReduceMax", "Split"), (1,)
    ),
    "Clip": (1, 2),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
}
"""Positions of operands that are arrays of the host, not tensors, by op."""


def _spatial(attributes: Attributes) -> tuple[list[int], list[int]]:
    """Strides and symmetric padding of a window; `Unsupported` if the padding differs at both ends."""
    rank = len(attributes["kernel_shape"])
    pads = list(attributes.get("pads", [0] * 2 * rank))
    if attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise Unsupported("auto_pad")
    if pads[:rank] != pads[rank:]:
        raise Unsupported("padding that differs at both ends")
    return list(attributes.get("strides", [1] * rank)), pads[:rank]


def _conv(x: list[Any], a: Attributes) -> Tensor:
    strides, pads = _spatial({"kernel_shape": x[1].shape[2:], **a})
    function = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(strides)]
    dilations = list(a.get("dilations", [1] * len(strides)))
    return function(x[0], x[1], x[2] if len(x) > 2 else None, strides, pads, dilations, a.get("group", 1))


def _conv_transpose(x: list[Any], a: Attributes) -> Tensor:
    strides, pads = _spatial({"kernel_shape": x[1].shape[2:], **a})
    bias = x[2] if len(x) > 2 else None
    return functional.conv_transpose2d(x[0], x[1], bias, strides, pads, groups=a.get("group", 1))


def _padded(x: Tensor, a: Attributes, value: float) -> tuple[Tensor, Attributes]:
    """The operand of a pooling, padded explicitly if the padding differs at both ends."""
    rank = len(a["kernel_shape"])
    pads = list(a.get("pads", [0] * 2 * rank))
    if pads[:rank] == pads[rank:]:
        return x, a
    ends = [pads[side * rank + axis] for axis in reversed(range(rank)) for side in (0, 1)]
    return functional.pad(x, ends, value=value), {**a, "pads": [0] * 2 * rank}


def _max_pool(x: list[Any], a: Attributes) -> Tensor:
    data, a = _padded(x[0], a, float("-inf"))
    strides, pads = _spatial(a)
    return functional.max_pool2d(data, a["kernel_shape"], strides, pads, ceil_mode=bool(a.get("ceil_mode")))


def _average_pool(x: list[Any], a: Attributes) -> Tensor:
    size, strides = list(a["kernel_shape"]), list(a.get("strides", [1, 1]))
    counts_padding = bool(a.get("count_include_pad", 0))
    data, padded = _padded(x[0], a, 0.0)
    _, pads = _spatial(padded)
    mean = functional.avg_pool2d(data, size, strides, pads, bool(a.get("ceil_mode")), counts_padding)
    if data is x[0] or counts_padding:
        return mean
    # The mean without padding: the mean with zeros, divided by the share of the elements that are not padding.
    inside, _ = _padded(torch.ones_like(x[0][:, :1]), a, 0.0)
    return mean / functional.avg_pool2d(inside, size, strides)


def _gemm(x: list[Any], a: Attributes) -> Tensor:
    if a.get("alpha", 1.0) != 1 or a.get("beta", 1.0) != 1 or a.get("transA"):
        raise Unsupported("Gemm with factors")
    return functional.linear(x[0], x[1] if a.get("transB") else x[1].t(), x[2] if len(x) > 2 else None)


def _axes(x: list[Any], a: Attributes) -> list[int]:
    return list(a["axes"]) if "axes" in a else _integers(x[1])


def _integers(values: np.ndarray) -> list[int]:
    return [int(value) for value in values.reshape(-1)]


def _reshape(x: list[Any], a: Attributes) -> Tensor:
    extents = [x[0].shape[axis] if size == 0 else size for axis, size in enumerate(_integers(x[1]))]
    return x[0].reshape(extents)


def _unsqueeze(x: list[Any], a: Attributes) -> Tensor:
    result = x[0]
    for axis in sorted(_axes(x, a)):
        result = result.unsqueeze(axis)
    return result


def _softmax(x: list[Any], a: Attributes) -> Tensor:
    if a["opset"] >= 13:
        return torch.softmax(x[0], a.get("axis", -1))
    axis = a.get("axis", 1) % x[0].ndim
    return torch.softmax(x[0].flatten(axis), -1).reshape(x[0].shape)


def _resize(x: list[Any], a: Attributes) -> Tensor:
    if a.get("mode", b"nearest") not in (b"linear", b"nearest"):
        raise Unsupported("Resize other than nearest or linear")
    scales = [float(value) for value in x[2]][2:]
    mode = {b"linear": "bilinear", b"nearest": "nearest"}[a["mode"]]
    return functional.interpolate(x[0], scale_factor=scales, mode=mode)


def _split(x: list[Any], a: Attributes) -> tuple[Tensor, ...]:
    return torch.split(x[0], list(a["split"]) if "split" in a else _integers(x[1]), a.get("axis", 0))


def _gather(x: list[Any], a: Attributes) -> Tensor:
    axis, index = a.get("axis", 0), x[1]
    if isinstance(index, np.ndarray):
        return x[0].select(axis, int(index))
    if axis == 0 and x[0].ndim == 2:
        return functional.embedding(index, x[0])
    return x[0].index_select(axis, index.reshape(-1)).reshape(*x[0].shape[:axis], *index.shape, *x[0].shape[axis + 1 :])


def _reduced(function: Callable[..., Tensor]) -> Callable[[list[Any], Attributes], Tensor]:
    def reduced(x: list[Any], a: Attributes) -> Tensor:
        axes = _axes(x, a) if "axes" in a or x[1] is not None else list(range(x[0].ndim))
        return function(x[0], dim=axes, keepdim=bool(a.get("keepdims", 1)))

    return reduced


def _layer_norm(x: list[Any], a: Attributes) -> Tensor:
    axis = a.get("axis", -1) % x[0].ndim
    return functional.layer_norm(x[0], x[0].shape[axis:], x[1], x[2] if len(x) > 2 else None, a.get("epsilon", 1e-5))


def _clip(x: list[Any], a: Attributes) -> Tensor:
    low, high = (a.get(name) if x[index] is None else x[index] for index, name in ((1, "min"), (2, "max")))
    return torch.clamp(x[0], None if low is None else float(low), None if high is None else float(high))


def _slice(x: list[Any], a: Attributes) -> Tensor:
    starts, ends = _integers(x[1]), _integers(x[2])
    axes = _integers(x[3]) if x[3] is not None else list(range(len(starts)))
    steps = _integers(x[4]) if x[4] is not None else [1] * len(starts)
    places = [slice(None)] * x[0].ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 1:
            raise Unsupported("Slice backwards")
        places[axis] = slice(start, end, step)
    return x[0][tuple(places)]


def _squeeze(x: list[Any], a: Attributes) -> Tensor:
    return x[0].squeeze(tuple(_axes(x, a))) if "axes" in a or x[1] is not None else x[0].squeeze()


def _cast(x: list[Any], a: Attributes) -> Tensor:
    dtype = getattr(torch, str(onnx.helper.tensor_dtype_to_np_dtype(a["to"])))
    return x[0].to(a["float"] if dtype == torch.float32 else dtype)


OPS: dict[str, Callable[[list[Any], Attributes], Any]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "BatchNormalization": lambda x, a: functional.batch_norm(
        x[0], x[3], x[4], x[1], x[2], False, eps=a.get("epsilon", 1e-5)
    ),
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": lambda x, a: x[0].mean((2, 3), keepdim=True),
    "LRN": lambda x, a: functional.local_response_norm(
        x[0], a["size"], a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("bias", 1.0)
    ),
    "Gemm": _gemm,
    "MatMul": lambda x, a: torch.matmul(x[0], x[1]),
    "Add": lambda x, a: x[0] + x[1],
    "Sub": lambda x, a: x[0] - x[1],
    "Mul": lambda x, a: x[0] * x[1],
    "Div": lambda x, a: x[0] / x[1],
    "Pow": lambda x, a: torch.pow(x[0], x[1]),
    "Sqrt": lambda x, a: torch.sqrt(x[0]),
    "Erf": lambda x, a: torch.erf(x[0]),
    "Tanh": lambda x, a: torch.tanh(x[0]),
    "Sigmoid": lambda x, a: torch.sigmoid(x[0]),
    "Relu": lambda x, a: torch.relu(x[0]),
    "Neg": lambda x, a: -x[0],
    "Abs": lambda x, a: torch.abs(x[0]),
    "Exp": lambda x, a: torch.exp(x[0]),
    "Log": lambda x, a: torch.log(x[0]),
    "Sin": lambda x, a: torch.sin(x[0]),
    "Cos": lambda x, a: torch.cos(x[0]),
    "Identity": lambda x, a: x[0],
    "Clip": _clip,
    "LeakyRelu": lambda x, a: functional.leaky_relu(x[0], a.get("alpha", 0.01)),
    "Softplus": lambda x, a: functional.softplus(x[0]),
    "HardSwish": lambda x, a: functional.hardswish(x[0]),
    "HardSigmoid": lambda x, a: torch.clamp(x[0] * a.get("alpha", 0.2) + a.get("beta", 0.5), 0.0, 1.0),
    "Softmax": _softmax,
    "LayerNormalization": _layer_norm,
    "InstanceNormalization": lambda x, a: functional.instance_norm(
        x[0], weight=x[1], bias=x[2], eps=a.get("epsilon", 1e-5)
    ),
    "Reshape": _reshape,
    "Flatten": lambda x, a: x[0].reshape(int(np.prod(x[0].shape[: a.get("axis", 1)])), -1),
    "Transpose": lambda x, a: x[0].permute(a["perm"]),
    "Concat": lambda x, a: torch.cat(x, a["axis"]),
    "Split": _split,
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": lambda x, a: x[0].expand(_integers(x[1])),
    "Where": lambda x, a: torch.where(x[0], x[1], x[2]),
    "Equal": lambda x, a: x[0] == x[1],
    "Greater": lambda x, a: x[0] > x[1],
    "Less": lambda x, a: x[0] < x[1],
    "And": lambda x, a: x[0] & x[1],
    "Not": lambda x, a: ~x[0],
    "Max": lambda x, a: functools.reduce(torch.maximum, x),
    "Min": lambda x, a: functools.reduce(torch.minimum, x),
    "Cast": _cast,
    "Sum": lambda x, a: sum(x[1:], x[0]),
    "Dropout": lambda x, a: x[0],
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "ReduceMax": _reduced(torch.amax),
    "Resize": _resize,
}
