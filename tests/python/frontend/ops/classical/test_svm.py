"""Support vector machines against ONNX Runtime: all kernels, two classes and more, probabilities, linear forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES

CLASSICAL = "ai.onnx.ml"
RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> list[float]:
    return [float(number) for number in RANDOM.uniform(-1, 1, shape).reshape(-1)]


def classifier(counts: list[int], kernel: str, has_probabilities: bool = False, **attributes: Any) -> dict[str, Any]:
    total, classes = sum(counts), len(counts)
    pairs = classes * (classes - 1) // 2
    fields = {
        "vectors_per_class": counts, "support_vectors": numbers(total, 4), "coefficients": numbers(classes - 1, total),
        "rho": numbers(pairs), "kernel_type": kernel, "kernel_params": [0.5, 0.25, 3.0],
        "classlabels_ints": [7, 3, 5, 1][:classes], **attributes,
    }  # fmt: skip
    if has_probabilities:
        fields |= {"prob_a": [-3.0 - at for at in range(pairs)], "prob_b": numbers(pairs)}
    return fields


def regressor(kernel: str, count: int = 6, **attributes: Any) -> dict[str, Any]:
    fields = {"coefficients": numbers(count or 4), "rho": numbers(1), "n_supports": count, "kernel_type": kernel}
    return {**fields, "support_vectors": numbers(count, 4), "kernel_params": [0.5, 0.25, 2.5], **attributes}


def model(nodes: list[tuple[str, dict[str, Any]]]) -> onnx.ModelProto:
    protos, outputs = [], []
    for index, (op, attributes) in enumerate(nodes):
        present = {name: value for name, value in attributes.items() if value != []}
        names = [f"y{index}"] if op == "SVMRegressor" else [f"label{index}", f"y{index}"]
        protos.append(helper.make_node(op, ["x"], names, f"node{index}", domain=CLASSICAL, **present))
        outputs += [helper.make_tensor_value_info(name, 7 if name[0] == "l" else 1, None) for name in names]
    graph = helper.make_graph(protos, "g", [helper.make_tensor_value_info("x", 1, ["rows", 4])], outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CLASSICAL, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def check(nodes: list[tuple[str, dict[str, Any]]], **options: Any) -> None:
    proto = model(nodes)
    x = RANDOM.uniform(-2, 2, (9, 4)).astype("float32")
    expected = pytest.importorskip("onnxruntime").InferenceSession(proto.SerializeToString()).run(None, {"x": x})
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(proto, **options)))["main"](x)
    for info, result, value in zip(proto.graph.output, actual, expected, strict=True):
        assert result.numpy().dtype == value.dtype
        np.testing.assert_allclose(result.numpy(), value, 1e-4, 1e-5, err_msg=info.name)


def test_three_classes_and_one_class():
    nodes = [
        ("SVMClassifier", classifier([3, 2, 4], "RBF", True)),
        ("SVMRegressor", regressor("POLY", kernel_params=[0.5, 2.5, 2.0])),
    ]
    check(nodes, vdevices=TWO_DEVICES, placement={"node1": "vdevice:1"})


@pytest.mark.slow
def test_all_forms():
    kinds = ("LINEAR", "POLY", "RBF", "SIGMOID")
    nodes = [("SVMClassifier", classifier([3, 2, 4, 1], kind)) for kind in kinds]
    nodes += [("SVMClassifier", classifier([3, 2], kind)) for kind in kinds]
    nodes += [("SVMClassifier", classifier([3, 2], kind, True)) for kind in kinds]
    nodes += [
        ("SVMClassifier", classifier(counts, "RBF", post_transform=name))
        for counts in ([3, 2], [3, 2, 4])
        for name in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    ]
    for classes in (2, 3):
        linear = {"coefficients": numbers(classes, 4), "rho": numbers(1), "kernel_type": "RBF"}
        linear |= {"kernel_params": [0.5, 0.25, 3.0], "classlabels_ints": [4, 9, 2][:classes]}
        nodes.append(("SVMClassifier", linear))
    nodes += [("SVMRegressor", regressor(kind)) for kind in ("LINEAR", "RBF", "SIGMOID")]
    nodes += [("SVMRegressor", regressor("LINEAR", 0)), ("SVMRegressor", regressor("RBF", one_class=1))]
    check(nodes)


def test_numbers_that_do_not_fit_are_refused():
    for attributes, match in (
        (classifier([3, 2], "RBF", rho=[]), "5 coefficients and 0 rho, expected 5 and 1"),
        (classifier([3, 2], "RBF", kernel_params=[0.5]), "kernel_params has 1 entries, expected 3"),
        (classifier([3, 2], "SPLINE"), "kernel_type 'SPLINE' is unknown"),
        (classifier([3, 2], "RBF", vectors_per_class=[3, 2, 1]), "vectors_per_class has 3 entries, expected 2"),
    ):
        with pytest.raises(rh.FrontendError, match=match):
            rh.from_onnx(model([("SVMClassifier", attributes)]))
