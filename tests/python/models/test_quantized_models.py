"""Networks in 8 bits, as ONNX Runtime's quantizer writes them: each requantization is within one unit of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import relax_hetero as rh
from models.quantized_graphs import (
    QDQ,
    QOPERATOR,
    S8,
    U8,
    cut_model,
    differences,
    encoder_layer,
    gated_network,
    inputs_of,
    quantized,
    reference,
    residual_network,
)

STATIC: dict[str, dict[str, Any]] = {
    "u8 by s8 per channel": {"quant_format": QDQ, "per_channel": True, "activation_type": U8, "weight_type": S8},
    "s8 by s8 per tensor": {"quant_format": QDQ, "activation_type": S8, "weight_type": S8},
    "u8 by u8": {"quant_format": QDQ, "activation_type": U8, "weight_type": U8},
    "QLinear ops": {"quant_format": QOPERATOR, "per_channel": True, "activation_type": U8, "weight_type": S8},
    "symmetric": {
        "quant_format": QDQ,
        "per_channel": True,
        "activation_type": S8,
        "weight_type": S8,
        "extra_options": {"ActivationSymmetric": True, "WeightSymmetric": False},
    },
}
NETWORKS = (residual_network, gated_network, encoder_layer)


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("options", STATIC.values(), ids=STATIC)
def test_each_requantization_is_within_one_unit(
    make: Callable[[], onnx.ModelProto], options: dict[str, Any], seed: int = 5
) -> None:
    model = quantized(make, **options)
    found = differences(model, inputs_of(model, seed))
    assert found.tensors > 5 and found.largest <= 1
    # Where a number lies just between two integers; a wrong rounding mode or scale would hit far more.
    assert found.off_by_one <= max(2, found.elements // 1000)


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("mcpu", ["x86-64-v3", "x86-64"])
def test_cpus_without_such_instructions_compute_the_same(make: Callable[[], onnx.ModelProto], mcpu: str) -> None:
    model = quantized(make, **STATIC["u8 by s8 per channel"])
    assert differences(model, inputs_of(model, 6), {"kind": "llvm", "mcpu": mcpu}).largest <= 1


@pytest.mark.parametrize("weight_type", [S8, U8], ids=["s8", "u8"])
def test_dynamically_quantized_products_are_those_of_onnx_runtime(weight_type: Any) -> None:
    model = quantized(encoder_layer, dynamic=True, weight_type=weight_type)
    assert any(node.op_type == "MatMulInteger" for node in model.graph.node)
    inputs = inputs_of(model, 7)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    executable = rh.compile(rh.from_onnx(model))
    found = rh.vm.VirtualMachine(executable)["main"](**inputs).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-2 * float(np.abs(expected).max()))
    assert {"uint8 * int8"} == {kind_of(entry) for entry in executable.metadata.encodings["ops"]} - {
        "float32 * float32"
    }


@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_products_of_bytes_have_kernels_of_bytes(make: Callable[[], onnx.ModelProto]) -> None:
    model = quantized(make, **STATIC["u8 by s8 per channel"])
    metadata = rh.compile(rh.from_onnx(model)).metadata
    assert metadata.encodings["cancelled"] == []
    products = sum(node.op_type in ("Conv", "MatMul", "Gemm") for node in model.graph.node)
    assert [kind_of(entry) for entry in metadata.encodings["ops"]] == ["uint8 * int8"] * products


def test_a_model_is_cut_at_what_is_quantized_in_it() -> None:
    model = quantized(residual_network, **STATIC["u8 by s8 per channel"])
    values = reference(model, inputs_of(model, 8))
    cut = cut_model(model, values)
    outputs = [value.name for value in cut.graph.output]
    assert set(values) <= set(outputs)
    read = {name for node in cut.graph.node for name in node.input}
    assert not read & set(values) and {f"{name}_cut" for name in values} <= {value.name for value in cut.graph.input}


def kind_of(entry: dict[str, Any]) -> str:
    """Element types of a product's operands."""
    left, right = (operand["encoding"].split("<")[1] for operand in entry["operands"][:2])
    assert left.split(";")[0] == right.split(";")[0]
    return left.split(" ->")[0]
