"""ONNX Runtime: one MatMul, MatMulInteger or MatMulNBits, input and output bound once."""

from __future__ import annotations

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from .four_bits import onnx_model
from .product import Contestant, Product, empty
from .shape import Unsupported

_ELEMENTS = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
_ELEMENTS["int32"] = TensorProto.INT32


def matmul(product: Product, threads: int) -> Contestant:
    """Make a session, which packs the weights: they are initializers."""
    if product.kind == "bf16":
        raise Unsupported("the CPU provider has no bfloat16 MatMul")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    model = onnx_model(product.shape, product.blocks) if product.kind == "q4" else _model(product)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = {"x": product.lhs} if product.weight else {"x": product.lhs, "w": product.rhs}
    inputs = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in values.items()}
    output = ort.OrtValue.ortvalue_from_numpy(empty(product.result_shape, product.result_dtype))
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("y", output)
    return Contestant(lambda: session.run_with_iobinding(binding), output.numpy)


def _model(product: Product) -> onnx.ModelProto:
    def info(name: str, dtype: str, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, _ELEMENTS[dtype], shape)

    inputs = [info("x", product.lhs.dtype.name, product.lhs.shape)]
    weights = []
    if product.weight:
        weights.append(numpy_helper.from_array(product.rhs, "w"))
    else:
        inputs.append(info("w", product.rhs.dtype.name, product.rhs.shape))
    op = "MatMul" if product.kind == "f32" else "MatMulInteger"
    output = info("y", product.result_dtype.name, product.result_shape)
    graph = helper.make_graph([helper.make_node(op, ["x", "w"], ["y"])], "product", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
