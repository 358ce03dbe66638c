"""Inputs with defaults: initializers that are listed as inputs, which a call may leave out or give."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from relax_hetero.transform.ir.module_attrs import DEFAULTS

ONES, DEFAULT, OTHER = (np.array(values, "float32") for values in ([1, 1], [1, 2], [5, 6]))


def model(nodes, weights, order="xw", dims=(2,), ir_version=8):
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in order}
    for name, array in weights.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        infos[name] = helper.make_tensor_value_info(name, kind, dims if name == "w" else array.shape)
    graph = helper.make_graph(
        nodes, "g", list(infos.values()), [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=ir_version)


def added(**options):
    return model([helper.make_node("Add", ["x", "w"], ["y"])], {"w": DEFAULT}, **options)


@pytest.mark.parametrize("devices", [None, TWO_DEVICES])
def test_a_call_may_leave_a_default_out(tmp_path, devices):
    placement = None if devices is None else {"*": "vdevice:1"}
    exe = rh.compile(rh.from_onnx(added(order="wx", dims=("n",)), vdevices=devices, placement=placement))
    assert "x: float32[2], w: float32[n] = default" in str(exe.signature())
    exe.export_library(tmp_path / "model.so")
    for each in (exe, rh.load(tmp_path / "model.so")):
        vm = rh.vm.VirtualMachine(each)
        main = vm["main"]
        for _ in range(2):  # the second time, calls are known
            for actual in (main(x=ONES), main(ONES), vm.submit("main", ONES).result()):
                np.testing.assert_array_equal(actual.numpy(), ONES + DEFAULT)
            for actual in (main(x=ONES, w=OTHER), main(ONES, OTHER), vm.submit("main", ONES, w=OTHER).result()):
                np.testing.assert_array_equal(actual.numpy(), ONES + OTHER)
        np.testing.assert_array_equal(main(ONES, OTHER[:1]).numpy(), ONES + 5)
        with pytest.raises(rh.HeteroError, match="n = 3"):
            main(ONES, w=np.ones(3, "float32"))
        vm.set_params({"w": OTHER})
        np.testing.assert_array_equal(main(ONES).numpy(), ONES + OTHER)


def test_defaults_that_are_bound_are_constants():
    mod = rh.from_onnx(added())
    assert mod["main"].attrs[DEFAULTS]["w"].numpy().tolist() == [1, 2]
    exe = rh.compile(mod, params=mod["main"].attrs[DEFAULTS])
    assert exe.signature().input_names == ("x",)
    np.testing.assert_array_equal(rh.vm.VirtualMachine(exe)["main"](ONES).numpy(), ONES + DEFAULT)


def test_defaults_that_a_pass_of_tvm_binds():
    mod = rh.from_onnx(added())
    bound = relax.transform.BindParams("main", dict(mod["main"].attrs["defaults"].items()))(mod)
    actual = rh.vm.VirtualMachine(rh.compile(bound, cache=False))["main"](ONES)
    np.testing.assert_array_equal(actual.numpy(), ONES + DEFAULT)


def test_weights_that_stay_constants(caplog):
    """Weights before IR version 4, sizes, and numbers that a converter has to know."""
    reshaped = [helper.make_node("Add", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "t"], ["y"])]
    transformed = [helper.make_node("Reshape", ["x", "t"], ["h"]), helper.make_node("DFT", ["h", "length"], ["y"])]
    sizes = {"t": np.array([1, 2, 1]), "length": np.array(2)}
    for source, names in (
        (added(ir_version=3), ["x"]),
        (model(reshaped, {"w": DEFAULT, "t": np.array([2, 1])}), ["x", "w"]),
        (model(transformed, sizes, order="x"), ["x"]),
    ):
        with caplog.at_level(logging.WARNING, "relax_hetero"):
            assert [param.name for param in rh.from_onnx(source)["main"].params] == names
        assert rh.onnx_report(source)
    assert "inputs with defaults stay constants, as they have to be known: DFT node" in caplog.text


def test_a_default_of_another_shape_is_refused():
    with pytest.raises(rh.FrontendError, match="input 'w' is .*but its default has the shape"):
        rh.from_onnx(added(dims=(3,)))
