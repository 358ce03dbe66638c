"""Strings in ONNX models: inputs, labels, tables and constants, against ONNX Runtime; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES

CLASSICAL = "ai.onnx.ml"
COLORS = np.array([["red", "blue"], ["pink", "red"], ["no such", "blue"]], object)


def _model(nodes: list[onnx.NodeProto], inputs: dict[str, int], outputs: dict[str, int]) -> onnx.ModelProto:
    infos = [
        helper.make_tensor_value_info(name, kind, ["rows" if name != "place" else None, None])
        for name, kind in inputs.items()
    ]
    ends = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    weights = [numpy_helper.from_array(np.array(["red", "green"], object), "known")]
    graph = helper.make_graph(nodes, "g", infos, ends, weights)
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid(CLASSICAL, 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def _node(op: str, inputs: list[str], outputs: list[str], domain: str = CLASSICAL, **attributes: Any):
    return helper.make_node(op, inputs, outputs, f"{op}_{outputs[0]}", domain=domain, **attributes)


def _main(model: onnx.ModelProto, **options: Any) -> Any:
    return rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, **options)))["main"]


@pytest.fixture(scope="module")
def everything() -> onnx.ModelProto:
    texts, numbers, floats = TensorProto.STRING, TensorProto.INT64, TensorProto.FLOAT
    weights = [0.5, -1.0, 1.0, 0.25, -0.5, 2.0]
    nodes = [
        _node("Concat", ["color", "color"], ["twice"], "", axis=1),
        _node("Equal", ["twice", "red"], ["is_red"], ""),
        helper.make_node("Constant", [], ["red"], value_strings=["red"]),
        _node("LabelEncoder", ["color"], ["number"], keys_strings=["red", "blue"], values_int64s=[7, 9]),
        _node("LabelEncoder", ["number"], ["name"], keys_int64s=[7, 9], values_strings=["rot", "blau"]),
        _node("LabelEncoder", ["color"], ["word"], keys_strings=["red"], values_strings=["rot"], default_string="?"),
        _node("OneHotEncoder", ["color"], ["hot"], cats_strings=["blue", "red", "pink"]),
        _node("CategoryMapper", ["color"], ["mapped"], cats_strings=["red", "pink"], cats_int64s=[4, 5]),
        _node(
            "LinearClassifier", ["x"], ["label", "scores"], coefficients=weights, intercepts=[0.0, 0.1, 0.2],
            classlabels_strings=["low", "mid", "high"],
        ),
        _node("Cast", ["label"], ["last"], "", to=TensorProto.STRING),
        _node("Gather", ["known", "place"], ["picked"], "", axis=0),
    ]  # fmt: skip
    nodes = [nodes[2], *nodes[:2], *nodes[3:]]
    ends = {"twice": texts, "is_red": TensorProto.BOOL, "number": numbers, "name": texts, "word": texts, "hot": floats}
    ends |= {"mapped": numbers, "last": texts, "scores": floats, "picked": texts}
    return _model(nodes, {"color": texts, "x": floats, "place": numbers}, ends)


def test_strings_are_moved_compared_and_looked_up(everything, tmp_path):
    feeds = {"color": COLORS, "x": np.array([[1, 0], [0, 1], [-1, 0.5]], "float32"), "place": np.array([[1], [0]])}
    expected = pytest.importorskip("onnxruntime").InferenceSession(everything.SerializeToString()).run(None, feeds)
    exe = rh.compile(rh.from_onnx(everything, vdevices=TWO_DEVICES, placement={"LabelEncoder": "vdevice:1"}))
    assert "color: string[rows, color_d1]" in str(exe.signature())
    exe.export_library(tmp_path / "strings.so")
    main = rh.vm.VirtualMachine(rh.load(tmp_path / "strings.so"))["main"]
    for result, value in zip(main(**feeds), expected, strict=True):
        assert result.shape == value.shape
        np.testing.assert_array_equal(result.numpy(), value)
    results = main(COLORS[:1].astype("U").tolist(), feeds["x"][:1], feeds["place"])
    assert results[0].numpy().tolist() == [["red", "blue", "red", "blue"]]
    with pytest.raises(rh.BindingError, match="input 'color' takes strings, found 3 of int"):
        main([[3]], feeds["x"], feeds["place"])
    with pytest.raises(rh.BindingError, match="only plain calls"):
        main.submit(**feeds)


def test_other_uses_of_strings_are_refused_by_name():
    texts = TensorProto.STRING
    for node, message in (
        (_node("StringNormalizer", ["color"], ["y"], "", case_change_action="LOWER"), "StringNormalizer"),
        (_node("Cast", ["color"], ["y"], "", to=TensorProto.FLOAT), "Cast"),
    ):
        model = _model([node], {"color": texts}, {"y": texts if "Str" in message else TensorProto.FLOAT})
        with pytest.raises(rh.FrontendError, match=f"computes with strings.*{message}"):
            rh.from_onnx(model)
        assert not rh.onnx_report(model)
