"""Networks in 8 bits, as ONNX Runtime's quantizer writes them: each requantization is within one unit of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import onnxruntime
import pytest

import relax_hetero as rh
from marks import slow_but_for
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

pytestmark = pytest.mark.sampled(4)

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
NETWORKS = {make.__name__: make for make in (residual_network, gated_network, encoder_layer)}
COMMON = "u8 by s8 per channel"


def pairs(firsts: Iterable[str], quick: Collection[tuple[str, str]]) -> list[Any]:
    """Each of the first with each network; all but those kept are slow."""
    return [
        pytest.param(first, name, marks=() if (first, name) in quick else pytest.mark.slow)
        for first in firsts
        for name in NETWORKS
    ]


# Every network in the common form, every form on the smallest network.
@pytest.mark.parametrize(
    ("form", "name"),
    pairs(STATIC, {(COMMON, name) for name in NETWORKS} | {(form, "gated_network") for form in STATIC}),
)
def test_each_requantization_is_within_one_unit(form: str, name: str) -> None:
    model = quantized(NETWORKS[name], **STATIC[form])
    difference = differences(model, inputs_of(model, 5))
    assert difference.tensors > 5 and difference.largest <= 1
    # Where a number lies just between two integers; a wrong rounding mode or scale would hit far more.
    assert difference.off_by_one <= max(2, difference.elements // 1000)


@pytest.mark.parametrize(
    ("mcpu", "name"),
    pairs(["x86-64-v3", "x86-64"], {("x86-64-v3", "residual_network"), ("x86-64", "gated_network")}),
)
def test_cpus_without_such_instructions_compute_the_same(mcpu: str, name: str) -> None:
    model = quantized(NETWORKS[name], **STATIC[COMMON])
    assert differences(model, inputs_of(model, 6), {"kind": "llvm", "mcpu": mcpu}).largest <= 1


@pytest.mark.parametrize("weight_type", [pytest.param(S8, id="s8"), pytest.param(U8, id="u8", marks=pytest.mark.slow)])
def test_dynamically_quantized_products_are_those_of_onnx_runtime(weight_type: Any) -> None:
    model = quantized(encoder_layer, dynamic=True, weight_type=weight_type)
    assert any(node.op_type == "MatMulInteger" for node in model.graph.node)
    inputs = inputs_of(model, 7)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    executable = rh.compile(rh.from_onnx(model))
    actual = rh.vm.VirtualMachine(executable)["main"](**inputs).numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-2 * float(np.abs(expected).max()))
    assert {"uint8 * int8"} == {kind_of(entry) for entry in executable.metadata.encodings["ops"]} - {
        "float32 * float32"
    }


@pytest.mark.parametrize("name", slow_but_for(NETWORKS, ["residual_network", "gated_network"]))
def test_products_of_bytes_have_kernels_of_bytes(name: str) -> None:
    model = quantized(NETWORKS[name], **STATIC[COMMON])
    metadata = rh.compile(rh.from_onnx(model)).metadata
    assert metadata.encodings["cancelled"] == []
    products = sum(node.op_type in ("Conv", "MatMul", "Gemm") for node in model.graph.node)
    assert [kind_of(entry) for entry in metadata.encodings["ops"]] == ["uint8 * int8"] * products


def test_a_model_is_cut_at_quantized_tensors() -> None:
    model = quantized(residual_network, **STATIC[COMMON])
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
