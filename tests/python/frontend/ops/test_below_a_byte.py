"""Integers of 4 and 2 bits, float4 and powers of two: all codes, through casts, moves and quantization."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES

FLOAT = onnx.TensorProto.FLOAT
TYPES = {
    "int4": (onnx.TensorProto.INT4, 4),
    "uint4": (onnx.TensorProto.UINT4, 4),
    "int2": (onnx.TensorProto.INT2, 2),
    "uint2": (onnx.TensorProto.UINT2, 2),
    "float4_e2m1fn": (onnx.TensorProto.FLOAT4E2M1, 4),
    "float8_e8m0fnu": (onnx.TensorProto.FLOAT8E8M0, 8),
    "float8_e5m2": (onnx.TensorProto.FLOAT8E5M2, 8),
}


def _main(nodes, inputs, outputs, constants=()):
    graph = helper.make_graph(
        nodes,
        "narrow",
        [helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in inputs],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs],
        list(constants),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=13)
    placement = {node.name: f"vdevice:{index % 2}" for index, node in enumerate(nodes)}
    mod = rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement)
    return rh.vm.VirtualMachine(rh.compile(mod))["main"]


def _codes(name):
    bits = TYPES[name][1]
    codes = np.arange(1 << bits).astype("uint8")
    if name.startswith("int"):
        codes = np.arange(-(1 << (bits - 1)), 1 << (bits - 1)).astype("int8")
    return codes.view(getattr(ml_dtypes, name))


@pytest.mark.parametrize(
    "types",
    [
        ("int4", "uint2", "float4_e2m1fn"),
        pytest.param(("uint4", "int2", "float8_e8m0fnu", "float8_e5m2"), marks=pytest.mark.slow),
    ],
)
def test_every_code_is_read_moved_and_given_back(types):
    nodes, inputs, outputs = [], [], []
    for name, (kind, _) in ((name, TYPES[name]) for name in types):
        nodes += [
            helper.make_node("Unsqueeze", [name, "one"], [f"column_{name}"], name=f"u_{name}"),
            helper.make_node("Cast", [f"column_{name}"], [f"number_{name}"], name=f"n_{name}", to=FLOAT),
            helper.make_node("Cast", [f"number_{name}"], [f"again_{name}"], name=f"a_{name}", to=kind),
        ]
        inputs.append((name, kind, [f"size_{name}"]))
        outputs += [(f"column_{name}", kind), (f"number_{name}", FLOAT), (f"again_{name}", kind)]
    main = _main(nodes, inputs, outputs, [onnx.numpy_helper.from_array(np.array([1]), "one")])
    values = [np.concatenate([_codes(name), _codes(name)[1:4]]) for name in types]  # an odd number of them
    actual = main(*values)
    for index, (name, value) in enumerate(zip(types, values, strict=True)):
        column, number, again = actual[3 * index : 3 * index + 3]
        assert str(column.dtype) == str(again.dtype) == name
        np.testing.assert_array_equal(column.numpy().reshape(-1).astype("float32"), value.astype("float32"))
        np.testing.assert_array_equal(number.numpy().reshape(-1), value.astype("float32"))
        expected = value
        if name == "float8_e8m0fnu":  # the least number is not a normal one, and ONNX's reference rounds it up
            expected = onnx.numpy_helper.to_float8e8m0(value.astype("float32"))
        if name == "float8_e5m2":  # a cast saturates unless told otherwise: infinities become the largest number
            largest = ml_dtypes.finfo(value.dtype).max
            expected = np.clip(value.astype("float32"), -float(largest), float(largest))
        np.testing.assert_array_equal(again.numpy().reshape(-1).astype("float32"), expected.astype("float32"))
    outs = [np.empty((len(value), 1), value.dtype) for value in values]
    numbers = [np.empty((len(value), 1), "float32") for value in values]
    filled = [part for out, number in zip(outs, numbers, strict=True) for part in (out, number, out.copy())]
    main(*values, out=tuple(filled))
    for out, value in zip(outs, values, strict=True):
        np.testing.assert_array_equal(out.reshape(-1).astype("float32"), value.astype("float32"))


def test_numbers_become_the_nearest_or_their_last_bits():
    x = np.array([-7.9, -1.5, -0.2, 0, 0.25, 0.3, 0.75, 1.25, 1.5, 2.5, 3.5, 5, 6.9, 7, np.nan, np.inf], "float32")
    integers = np.array([-200, -9, -1, 0, 3, 7, 8, 15, 16, 100, 300], "int32")
    kinds = {name: kind for name, (kind, bits) in TYPES.items() if bits < 8}
    nodes = [helper.make_node("Cast", ["i"], [name], name=name, to=kind) for name, kind in kinds.items()]
    nodes[-1] = helper.make_node("Cast", ["x"], ["float4_e2m1fn"], name="float4_e2m1fn", to=kinds["float4_e2m1fn"])
    actual = _main(nodes, [("x", FLOAT, [16]), ("i", onnx.TensorProto.INT32, [11])], list(kinds.items()))(x, integers)
    for name, result in zip(kinds, actual, strict=True):
        expected = (x if name.startswith("float") else integers).astype(getattr(ml_dtypes, name))
        np.testing.assert_array_equal(result.numpy().view("uint8"), expected.view("uint8"))


def test_powers_of_two_are_rounded_as_asked():
    kind = TYPES["float8_e8m0fnu"][0]
    x = np.array([0, 1e-45, 5e-39, 1e-38, 1, 1.5, 1.4999, 3, -6, 3.3e38, np.inf, np.nan], "float32")
    modes = [(mode, saturates) for mode in ("up", "down", "nearest") for saturates in (0, 1)]
    nodes = [
        helper.make_node("Cast", ["x"], [f"{mode}{saturates}"], name=mode, to=kind, round_mode=mode, saturate=saturates)
        for mode, saturates in modes
    ]
    for (mode, saturates), actual in zip(
        modes, _main(nodes, [("x", FLOAT, [12])], [(node.output[0], kind) for node in nodes])(x), strict=True
    ):
        expected = onnx.numpy_helper.to_float8e8m0(x, bool(saturates), mode)
        np.testing.assert_array_equal(actual.numpy().view("uint8"), expected.view("uint8"))


def test_weights_and_results_of_quantization():
    weight = np.arange(-8, 8).astype("int8").reshape(4, 4)
    scales, x = np.array([0.5, 1, 2, 0.25], "float32"), np.linspace(-9, 9, 16).astype("float32").reshape(4, 4)
    kind = onnx.TensorProto.INT4
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["y"], name="d", axis=0),
        helper.make_node("Add", ["y", "x"], ["sum"], name="add"),
        helper.make_node("QuantizeLinear", ["sum", "s", "z"], ["q"], name="q", axis=0),
    ]
    zeros = np.array([1, -2, 0, 7])
    constants = [
        helper.make_tensor("w", kind, [4, 4], weight.reshape(-1).tolist()),
        helper.make_tensor("z", kind, [4], zeros.tolist()),
        onnx.numpy_helper.from_array(scales, "s"),
    ]
    y, quantized = _main(nodes, [("x", FLOAT, [4, 4])], [("y", FLOAT), ("q", kind)], constants)(x)
    expected = (weight - zeros[:, None]) * scales[:, None]
    np.testing.assert_array_equal(y.numpy(), expected)
    want = np.clip(np.round((expected + x) / scales[:, None]) + zeros[:, None], -8, 7)
    np.testing.assert_array_equal(quantized.numpy().astype("float32"), want)


def test_unsupported_types_are_refused_by_name():
    kind = TYPES["int4"][0]
    with pytest.raises(rh.FrontendError, match=r"'relu' \(Relu\).*elements of type int4; cast them before"):
        _main([helper.make_node("Relu", ["x"], ["y"], name="relu")], [("x", kind, [3])], [("y", kind)])


def test_inputs_may_be_outputs():
    kind, value = TYPES["int4"][0], _codes("int4")[:5]
    main = _main([helper.make_node("Identity", ["x"], ["y"], name="same")], [("x", kind, ["n"])], [("y", kind)])
    np.testing.assert_array_equal(main(value).numpy(), value)
    with pytest.raises(rh.BindingError, match="dtype int8, expected int4"):
        main(value.astype("int8"))
