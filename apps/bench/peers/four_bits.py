"""Weights of 4 bits: blocks of 32 along k share a scale, codes 0 to 15 mean -8 to 7 times the scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .shape import Shape, Unsupported

BLOCK = 32


@dataclass(frozen=True)
class Weights:
    """A block-quantized weight (k, n).

    Attributes
    ----------
    codes : numpy.ndarray
        uint8 (n, k), 0 to 15.
    scales : numpy.ndarray
        float32 (n, blocks of k).
    """

    codes: np.ndarray
    scales: np.ndarray

    def packed(self) -> np.ndarray:
        """Two codes per byte, the first in the low half: uint8 (n, k / 2)."""
        return self.codes[:, 0::2] | self.codes[:, 1::2] << 4


def weights_of(shape: Shape, weight: bool, seed: int) -> Weights:
    """Random codes and scales of the right operand of a product.

    Raises
    ------
    Unsupported
        If it is a batch or an activation, or if `k` is not a multiple of `BLOCK`.
    """
    if shape.batch or not weight or shape.k % BLOCK:
        raise Unsupported(f"4 bits are for weights whose k is a multiple of {BLOCK}")
    generator = np.random.default_rng((seed, 2))
    codes = generator.integers(0, 16, (shape.n, shape.k), dtype="uint8")
    return Weights(codes, generator.uniform(0.1, 0.3, (shape.n, shape.k // BLOCK)).astype("float32"))


def numbers_of(weights: Weights) -> np.ndarray:
    """The weight in float32, (k, n)."""
    scales = np.repeat(weights.scales, BLOCK, axis=1)
    return np.ascontiguousarray(((weights.codes.astype("float32") - 8) * scales).T)


def onnx_model(shape: Shape, weights: Weights) -> onnx.ModelProto:
    """``com.microsoft.MatMulNBits`` of ``x``, in float32 (no accuracy level)."""
    packed = weights.packed().reshape(shape.n, shape.k // BLOCK, BLOCK // 2)
    constants = [numpy_helper.from_array(packed, "w"), numpy_helper.from_array(weights.scales.reshape(-1), "scales")]
    sizes = {"K": shape.k, "N": shape.n, "bits": 4, "block_size": BLOCK}
    node = helper.make_node("MatMulNBits", ["x", "w", "scales"], ["y"], domain="com.microsoft", **sizes)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape.tensor(shape.m, shape.k))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape.tensor(shape.m, shape.n))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "product", [x], [y], constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
