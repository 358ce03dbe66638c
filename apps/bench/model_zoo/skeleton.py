"""Models without weights, small enough to copy; expanded, they have random weights with the same statistics.

A large float initializer keeps its name, type and shape, and four numbers instead of its data: mean, deviation, minimum
and maximum. Everything else is unchanged, so that the graph is compiled like the model's own.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

SUFFIX = ".skeleton.xz"
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_MIN_SIZE = 64
"""Initializers with fewer numbers are kept: axes, scales, constants of formulas."""


def write_skeleton(model: onnx.ModelProto, file: Path) -> None:
    """Write a model without the numbers of its large float initializers."""
    skeleton = onnx.ModelProto()
    skeleton.CopyFrom(model)
    for weight in skeleton.graph.initializer:
        if weight.data_type in _FLOATS and np.prod(weight.dims) >= _MIN_SIZE:
            numbers = numpy_helper.to_array(weight).astype("float32")
            about = [float(value) for value in (numbers.mean(), numbers.std(), numbers.min(), numbers.max())]
            bare = onnx.TensorProto(name=weight.name, data_type=weight.data_type, dims=weight.dims)
            bare.doc_string = json.dumps(about)
            weight.CopyFrom(bare)
    file.write_bytes(lzma.compress(skeleton.SerializeToString(), preset=9))


def expanded(file: Path, seed: int = 0) -> onnx.ModelProto:
    """The model of a skeleton, with normal weights within the bounds of the original ones.

    Parameters
    ----------
    file : Path
        A file of `write_skeleton`.
    seed : int
    """
    model = onnx.ModelProto.FromString(lzma.decompress(file.read_bytes()))
    generator = np.random.default_rng(seed)
    for weight in model.graph.initializer:
        if weight.doc_string:
            mean, deviation, low, high = json.loads(weight.doc_string)
            numbers = generator.standard_normal(tuple(weight.dims), "float32") * np.float32(deviation)
            numbers = np.clip(numbers + np.float32(mean), low, high)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(weight.data_type)
            weight.CopyFrom(numpy_helper.from_array(numbers.astype(dtype), weight.name))
    return model
