"""Weights of 4 and 8 bits: MatMulNBits and DequantizeLinear of blocks, against onnxruntime and ONNX's reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh
from frontend.ops.checking import expected
from gpu_interpreter.models import InterpretedModel
from marks import in_turns
from modules import calls_of
from relax_hetero.op.quantized_matmul import DEQUANTIZE_BLOCKS
from seeds import fresh_rng

COLUMNS = 37


def model_of(
    nodes: Sequence[onnx.NodeProto], rows: Sequence[int | str], depth: int, weights: dict[str, Any], dtype: str
) -> onnx.ModelProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "four_bits",
        [helper.make_tensor_value_info("x", element, [*rows, depth])],
        [helper.make_tensor_value_info("y", element, [*rows, COLUMNS])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def matmul_nbits(
    depth: int = 96, block: int = 32, rows: Sequence[int | str] = (3,), dtype: str = "float32", **more: Any
) -> onnx.ModelProto:
    """`more`: zeros ("packed" or "float"), bias, and attributes; None for an attribute that is left out."""
    blocks, bits = -(-depth // block), more.get("bits", 4)
    weights = {
        "b": fresh_rng().integers(0, 256, (COLUMNS, blocks, block * bits // 8), dtype=np.uint8),
        "scales": fresh_rng().uniform(0.1, 1, COLUMNS * blocks).astype(dtype),
    }
    zeros, bias = more.pop("zeros", None), more.pop("bias", False)
    if zeros == "packed":
        weights["zeros"] = fresh_rng().integers(0, 256, COLUMNS * -(-blocks * bits // 8), dtype=np.uint8)
    elif zeros == "float":
        weights["zeros"] = fresh_rng().uniform(0, 2**bits - 1, COLUMNS * blocks).astype(dtype)
    if bias:
        weights["bias"] = fresh_rng().standard_normal(COLUMNS).astype(dtype)
    weights.update(more.pop("weights", {}))
    inputs = ["x", *(name if name in weights else "" for name in ("b", "scales", "zeros", "order", "bias"))]
    while not inputs[-1]:
        inputs.pop()
    attributes = {"K": depth, "N": COLUMNS, "bits": 4, "block_size": block, **more}
    node = helper.make_node("MatMulNBits", inputs, ["y"], name="the_node", domain="com.microsoft", **attributes)
    return model_of([node], rows, depth, weights, dtype)


def check(
    model: onnx.ModelProto,
    *shape: int,
    dtype: str = "float32",
    tolerance: float = 3e-5,  # CPUs with dot products of bytes multiply numbers of 16 bits
    reference: str = "onnxruntime",
    exact: onnx.ModelProto | None = None,
    op: str = "block_matmul",
) -> None:
    """The numbers are those of the reference (of `exact`, if given), and one of the kernels does `op`."""
    x = fresh_rng().standard_normal(shape).astype(dtype)
    executable = rh.compile(rh.from_onnx(model))
    got = rh.vm.VirtualMachine(executable)["main"](x).numpy()
    (want,) = expected(exact or model, {"x": x}, reference)
    assert got.dtype == want.dtype
    near = tolerance * max(10, float(np.abs(want).max()))
    np.testing.assert_allclose(got.astype("float64"), want.astype("float64"), rtol=tolerance, atol=near)
    assert any(op in call["ops"] for call in executable.metadata.fusions["dispatches"])


@pytest.mark.parametrize(("block", "zeros"), in_turns([16, 32, 128], [None, "packed", "float"]))
def test_blocks_and_zero_points(block, zeros):
    check(matmul_nbits(3 * block, block, zeros=zeros, bias=True), 3, 3 * block)


@pytest.mark.parametrize("zeros", [None, "packed"])
def test_weights_of_8_bits(zeros):
    check(matmul_nbits(100, 32, bits=8, zeros=zeros, bias=True), 3, 100)


@pytest.mark.parametrize("zeros", [None, "packed", "float"])
def test_weights_of_2_bits(zeros):
    check(matmul_nbits(100, 32, bits=2, zeros=zeros, bias=True), 3, 100)


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_rows_in_another_order(bits):
    order = fresh_rng().permutation(np.arange(100) // 32).astype("int32")
    model = matmul_nbits(100, 32, bits=bits, zeros="packed", weights={"order": order})
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    codes, zeros = (
        np.stack([weights[name].reshape(COLUMNS, -1) >> shift & (2**bits - 1) for shift in range(0, 8, bits)], -1)
        for name in ("b", "zeros")
    )
    codes, zeros = codes.reshape(COLUMNS, -1)[:, :100].astype("float64"), zeros.reshape(COLUMNS, -1)[:, order]
    numbers = (codes - zeros) * weights["scales"].reshape(COLUMNS, -1)[:, order].astype("float64")
    x = fresh_rng().standard_normal((3, 100)).astype("float32")
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](x).numpy()
    want = x @ numbers.T
    np.testing.assert_allclose(actual, want, 1e-4, 1e-4 * np.abs(want).max())


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_stay_as_they_are_on_a_gpu(bits):
    gpu = {"kind": "cuda", "arch": "sm_90a"}
    model = matmul_nbits(100, 32, bits=bits, zeros="packed", bias=True)
    interpreted = InterpretedModel(rh.from_onnx(model, [gpu]))
    x = fresh_rng().standard_normal((3, 100)).astype("float32")
    (want,) = expected(model, {"x": x}, "onnxruntime")
    np.testing.assert_allclose(interpreted(x), want, rtol=1e-4, atol=1e-3)
    (kernel,) = interpreted.launched
    assert kernel.startswith("block_matmul")


def test_two_half_precision_products_in_a_row_on_a_gpu():
    first = matmul_nbits(64, dtype="float16")
    second = matmul_nbits(COLUMNS, 16, dtype="float16")
    nodes = []
    for number, model in enumerate((first, second)):
        (node,) = model.graph.node
        node.name, node.output[0] = f"product{number}", f"y{number}"
        for place, name in enumerate(node.input):
            node.input[place] = f"{name}{number}"
        nodes.append(node)
    nodes.insert(1, helper.make_node("Sigmoid", ["y0"], ["x1"], "sigmoid"))
    weights = {
        f"{tensor.name}{number}": numpy_helper.to_array(tensor)
        for number, model in enumerate((first, second))
        for tensor in model.graph.initializer
    }
    nodes[0].input[0], nodes[2].output[0] = "x", "y"
    model = model_of(nodes, (3,), 64, weights, "float16")
    x = fresh_rng().standard_normal((3, 64)).astype("float16")
    interpreted = InterpretedModel(rh.from_onnx(model, [{"kind": "cuda", "arch": "sm_90a"}]))
    (want,) = expected(model, {"x": x}, "onnxruntime")
    np.testing.assert_allclose(interpreted(x), want, rtol=1e-2, atol=0.1)
    assert sum(kernel.startswith("block_matmul") for kernel in interpreted.launched) == 2


@pytest.mark.parametrize(("level", "block", "tolerance"), [(0, 32, 3e-5), (1, 32, 3e-5), (4, 32, 1e-2), (4, 128, 1e-2)])
def test_accuracy_level_4_alone_rounds_data_to_bytes(level, block, tolerance):
    model = matmul_nbits(256, block, accuracy_level=level)
    exact = onnx.ModelProto()  # at level 4 ONNX Runtime rounds data to bytes
    exact.CopyFrom(model)
    for attribute in exact.graph.node[0].attribute:
        attribute.i = 0 if attribute.name == "accuracy_level" else attribute.i
    check(model, 3, 256, exact=exact, tolerance=tolerance)
    (weights,) = calls_of(DEQUANTIZE_BLOCKS, rh.from_onnx(model))
    assert weights.attrs.activation_bits == (8 if level == 4 else 16)


def test_ragged_depth_batches_symbols_and_half_precision():
    check(matmul_nbits(100, zeros="packed"), 3, 100)
    check(matmul_nbits(rows=(2, "m"), zeros="packed"), 2, 5, 96)
    check(matmul_nbits(dtype="float16", zeros="packed", bias=True), 3, 96, dtype="float16", tolerance=4e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "weights of 3 bits, expected 2, 4 or 8"),
        ({"weights": {"order": np.zeros(96, "int32")}}, "blocks of other sizes than 32 in g_idx"),
        ({"weight_prepacked": 1}, "weight_prepacked"),
        ({"N": COLUMNS + 1}, "found B of shape"),
        ({"block_size": 24}, "blocks of 24, expected a power of two"),
        ({"weights": {"scales": np.ones(5, "float32")}}, r"found scales of shape \[5\]"),
    ],
)
def test_unsupported_problems_are_refused(options, message):
    with pytest.raises(rh.FrontendError, match=f"MatMulNBits node 'the_node'.*{message}"):
        rh.from_onnx(matmul_nbits(**options))


def test_weights_that_are_inputs_are_refused():
    model = matmul_nbits()
    graph = model.graph
    (data,) = [tensor for tensor in graph.initializer if tensor.name == "b"]
    graph.input.append(helper.make_tensor_value_info("b", data.data_type, data.dims))
    graph.initializer.remove(data)
    with pytest.raises(rh.FrontendError, match="B is not a constant"):
        rh.from_onnx(model)


def dequantized(kind: str, axis: int, zeros: bool, depth: int = 80, block: int = 16) -> onnx.ModelProto:
    """A product whose right operand is dequantized, along its rows (axis 0) or transposed (axis 1)."""
    dtype = np.dtype(getattr(ml_dtypes, kind))
    low = -8 if kind == "int4" else 0
    blocks = -(-depth // block)
    shape, scales = ((depth, COLUMNS), (blocks, COLUMNS)) if axis == 0 else ((COLUMNS, depth), (COLUMNS, blocks))
    weights = {
        "codes": fresh_rng().integers(low, low + 16, shape).astype(dtype),
        "scales": fresh_rng().uniform(0.1, 1, scales).astype("float32"),
    }
    if zeros:
        weights["zeros"] = fresh_rng().integers(low, low + 16, scales).astype(dtype)
    nodes = [helper.make_node("DequantizeLinear", list(weights), ["w"], "dequantize", axis=axis, block_size=block)]
    if axis == 1:
        nodes.append(helper.make_node("Transpose", ["w"], ["turned"], "turn", perm=[1, 0]))
    nodes.append(helper.make_node("MatMul", ["x", "turned" if axis == 1 else "w"], ["y"], "product"))
    return model_of(nodes, (3,), depth, weights, "float32")


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("kind", ["int4", "uint4"])
def test_dequantized_blocks(kind, axis, zeros):
    # onnxruntime rounds the left operand of these to 8 bits.
    check(dequantized(kind, axis, zeros), 3, 80, reference="onnx")


def test_scales_of_whole_columns_are_right_too():
    weights = {
        "codes": fresh_rng().integers(-8, 8, (24, COLUMNS)).astype(ml_dtypes.int4),
        "scales": fresh_rng().uniform(0.1, 1, COLUMNS).astype("float32"),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scales"], ["w"], "dequantize", axis=1),
        helper.make_node("MatMul", ["x", "w"], ["y"], "product"),
    ]
    model, x = model_of(nodes, (3,), 24, weights, "float32"), fresh_rng().standard_normal((3, 24)).astype("float32")
    got = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](x).numpy()
    np.testing.assert_allclose(got, expected(model, {"x": x}, "onnx")[0], rtol=1e-5, atol=1e-5)


def test_weights_count_as_the_four_bits_that_they_stay():
    rh.from_onnx(matmul_nbits(depth=4096), limits=rh.ImportLimits(computed_bytes=0))
