"""Casts from and to floats of 8 bits, for all of their numbers and the places where rounding decides."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES

TYPES = {
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
    "float8_e5m2": onnx.TensorProto.FLOAT8E5M2,
    "float8_e4m3fnuz": onnx.TensorProto.FLOAT8E4M3FNUZ,
    "float8_e5m2fnuz": onnx.TensorProto.FLOAT8E5M2FNUZ,
}


def _machine(nodes, inputs, outputs):
    graph = helper.make_graph(
        nodes,
        "casts",
        [helper.make_tensor_value_info(name, kind, ["n" + name]) for name, kind in inputs],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    mod = rh.from_onnx(model, vdevices=TWO_DEVICES)
    return rh.vm.VirtualMachine(rh.compile(mod))["main"]


def _same(actual, expected):
    actual, expected = (np.asarray(value).astype("float32") for value in (actual, expected))
    np.testing.assert_array_equal(actual, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[finite]), np.signbit(expected[finite]))


def test_every_code_is_the_number_that_it_is():
    kinds = list(TYPES.items())
    nodes = [helper.make_node("Cast", [name], [f"y_{name}"], to=onnx.TensorProto.FLOAT) for name in TYPES]
    main = _machine(nodes, kinds, [(f"y_{name}", onnx.TensorProto.FLOAT) for name in TYPES])
    codes = [np.arange(256).astype("uint8").view(getattr(ml_dtypes, name)) for name in TYPES]
    for actual, code in zip(main(*codes), codes, strict=True):
        _same(actual, code)


@pytest.mark.parametrize("saturates", [1, 0])
def test_numbers_are_rounded_to_the_nearest(saturates):
    nodes = [helper.make_node("Cast", ["x"], [name], to=kind, saturate=saturates) for name, kind in TYPES.items()]
    main = _machine(nodes, [("x", onnx.TensorProto.FLOAT)], list(TYPES.items()))
    every = np.concatenate(
        [np.arange(256).astype("uint8").view(getattr(ml_dtypes, n)).astype("float32") for n in TYPES]
    )
    places = np.unique(every[np.isfinite(every)])
    middles = (places[1:] + places[:-1]) / 2
    x = np.concatenate([places, middles, np.nextafter(middles, np.float32(np.inf))])
    x = np.concatenate([x, np.nextafter(middles, np.float32(-np.inf)), [np.nan, np.inf, -np.inf, -0.0, 464, 480, 1e38]])
    x = np.concatenate([x, [1e-45, -1e-45, 61440, 65536, 248, -248]]).astype("float32")
    with np.errstate(all="ignore"):
        for actual, name in zip(main(x), TYPES, strict=True):
            limit = ml_dtypes.finfo(getattr(ml_dtypes, name))
            clipped = np.clip(x, np.float32(limit.min), np.float32(limit.max)) if saturates else x
            _same(actual.numpy(), clipped.astype(getattr(ml_dtypes, name)))
            assert str(actual.dtype) == name
