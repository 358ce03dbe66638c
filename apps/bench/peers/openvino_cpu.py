"""OpenVINO: one MatMul on the CPU plugin, tensors shared with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from .four_bits import BLOCK
from .product import BF16, Contestant, Product, aligned, empty


def matmul(product: Product, threads: int) -> Contestant:
    """``InferRequest.infer`` with tensors set once; integers as a quantized graph with a float32 result.

    The plugin makes an int8 product of two FakeQuantize with steps of 1, as its own quantizer writes them; a
    MatMul of integers would be computed in float32.
    """
    model, weight_memory = _model(product)
    settings: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if product.kind == "bf16" else "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # otherwise activations are rounded to 8 bits for weights of 4 bits
    }
    core = ov.Core()
    compiled = core.compile_model(model, "CPU", settings)
    request = compiled.create_infer_request()
    operands = [_tensor(product.lhs)] + ([] if product.weight else [_tensor(product.rhs)])
    for index, operand in enumerate(operands):
        request.set_input_tensor(index, operand)
    dtype = BF16 if product.kind == "bf16" else np.dtype("float32")
    y = empty(product.result_shape, dtype)
    output = _tensor(y)
    request.set_output_tensor(0, output)
    note = "FakeQuantize graph, float32 result" if product.kind in ("u8s8", "s8s8") else ""
    # The request does not keep these alive, and would write to freed memory.
    alive = (core, model, compiled, weight_memory, operands, output, y)
    return Contestant(lambda alive=alive: request.infer(share_outputs=True), lambda: y, note)


def _model(product: Product) -> tuple[ov.Model, object]:
    x = op.parameter(product.lhs.shape, _element(product.lhs.dtype))
    if product.kind == "q4":
        weight, memory = _dequantized(product)
        return ov.Model([op.matmul(x, weight, False, True)], [x]), memory
    parameters, memory = [x], None
    if product.weight:
        memory = aligned(product.rhs)
        w = op.constant(_tensor(memory), shared_memory=True)
    else:
        w = op.parameter(product.rhs.shape, _element(product.rhs.dtype))
        parameters.append(w)
    left, right = x, w
    if product.kind in ("u8s8", "s8s8"):
        left, right = _quantized(x, product.lhs.dtype), _quantized(w, product.rhs.dtype)
    return ov.Model([op.matmul(left, right, False, False)], parameters), memory


def _dequantized(product: Product) -> tuple[Any, object]:
    """The weight (n, k) from codes of 4 bits, as OpenVINO compresses weights, and an object to keep alive."""
    weights, shape = product.blocks, product.shape
    blocks = [shape.n, shape.k // BLOCK, BLOCK]
    packed = weights.packed().reshape(-1)
    codes = op.constant(ov.Tensor(packed, ov.Shape(blocks), ov.Type.u4))
    shifted = op.subtract(op.convert(codes, "f32"), op.constant(np.full((1, 1, 1), 8, "float32")))
    scaled = op.multiply(shifted, op.constant(weights.scales[:, :, None]))
    return op.reshape(scaled, np.array([shape.n, shape.k]), False), packed


def _quantized(value: Any, dtype: np.dtype[Any]) -> Any:
    limits = np.iinfo(dtype)
    low, high = np.float32(limits.min), np.float32(limits.max)
    return op.fake_quantize(op.convert(value, "f32"), low, high, low, high, 256)


def _element(dtype: np.dtype[Any]) -> ov.Type:
    return ov.Type.bf16 if dtype == BF16 else ov.Type(dtype)


def _tensor(array: np.ndarray) -> ov.Tensor:
    if array.dtype == BF16:
        return ov.Tensor(array.view("uint16"), ov.Shape(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)
