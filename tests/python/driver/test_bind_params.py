"""Weights by name: on the device of their parameter, of its type, symbolic extents settled."""

import numpy as np
import onnx.parser
import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.driver.bind_params import bind_params
from relax_hetero.errors import BuildError
from relax_hetero.transform import FormDispatches, RealizeVDevice
from relax_hetero.transform.record.donated import DONATED

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@I.ir_module
class Placed:
    I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

    @R.function(private=True)
    def inner(x: R.Tensor((4, 4), "float32", "llvm:1"), w: R.Tensor((4, 4), "float32", "llvm:1")) -> R.Tensor(
        (4, 4), "float32", "llvm:1"
    ):
        return R.add(x, w)

    @R.function
    def main(x: R.Tensor((4, 4), "float32", "llvm:0"), w: R.Tensor((4, 4), "float32", "llvm:1")) -> R.Tensor(
        (4, 4), "float32", "llvm:1"
    ):
        x1 = R.to_vdevice(x, "llvm:1")
        a = R.matmul(x1, w)
        y = Placed.inner(a, w)
        return y


def test_weights_of_an_imported_model_leave_the_names_of_the_others():
    """The importer notes what ONNX calls its inputs, in order."""
    model = onnx.parser.parse_model("""
        <ir_version: 9, opset_import: ["" : 17]>
        layer (float[4, 4] weight, float[4, 4] rows) => (float[4, 4] y) { y = MatMul(rows, weight) }
    """)
    rng = np.random.default_rng(0)
    x, w = rng.random((4, 4), "float32"), rng.random((4, 4), "float32")
    exe = rh.compile(rh.from_onnx(model), params={"weight": w}, donate=["rows"])
    (signature,) = exe.metadata.signatures.values()
    assert (signature.input_names, signature.donated) == (("rows",), ("rows",))
    np.testing.assert_allclose(rh.vm.VirtualMachine(exe)["main"](rows=x).numpy(), x @ w, rtol=1e-5)


def test_what_counts_parameters_counts_those_that_are_left():
    func = Placed["main"].with_attr({"num_input": 1, DONATED: [1, 0]})
    mod = Placed.clone()
    mod["main"] = func
    x = np.zeros((4, 4), "float32")
    left = bind_params(mod, {"x": x})["main"].attrs
    assert (int(left["num_input"]), list(left[DONATED])) == (0, [0])
    left = bind_params(mod, {"w": x})["main"].attrs
    assert (int(left["num_input"]), list(left[DONATED])) == (1, [0])


@I.ir_module
class Symbolic:
    @R.function
    def main(
        x: R.Tensor(("b", "n"), "float32"), w: R.Tensor(("n", "m"), "float32"), v: R.Tensor(("m",), "float32")
    ) -> R.Tensor(("b", "m"), "float32"):
        b, n, m = T.int64(), T.int64(), T.int64()
        flat = R.reshape(R.add(R.matmul(x, w), v), R.shape([b * m]))
        return R.reshape(flat, R.shape([b, m]))


@pytest.mark.parametrize("stages", [[], [RealizeVDevice], [RealizeVDevice, FormDispatches]])
def test_weights_live_where_their_parameters_did(stages):
    """Stock BindParams drops the device, and refuses the call of `inner`."""
    mod = Placed
    for stage in stages:
        mod = stage()(mod)
    rng = np.random.default_rng(0)
    x, w = rng.random((4, 4), "float32"), rng.random((4, 4), "float32")
    exe = rh.compile(mod, params={"w": w})
    assert {spec.device for spec in exe.metadata.constants} == {1}  # packed for the product, plain for `inner`
    np.testing.assert_allclose(rh.vm.VirtualMachine(exe)["main"](x).numpy(), x @ w + w, rtol=1e-5)


def test_symbolic_extents_become_numbers():
    rng = np.random.default_rng(0)
    w, v = rng.random((3, 2), "float32"), rng.random(2, "float32")
    exe = rh.compile(Symbolic, params={"w": w, "v": v})
    assert [spec.shape for spec in exe.signature().inputs] == [("b", 3)]
    vm = rh.vm.VirtualMachine(exe)
    for rows in (1, 4):
        x = rng.random((rows, 3), "float32")
        np.testing.assert_allclose(vm["main"](x).numpy(), x @ w + v, rtol=1e-5)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"w": np.ones((4, 3), "float32")}, r"'w' a tensor of shape \(4, 3\)"),
        ({"w": np.ones(4, "float32")}, r"'w' a tensor of shape \(4,\)"),
        ({"w": np.ones((4, 4), "float64")}, "dtype float64, expected .*float32"),
        ({"w": object()}, "'w' a object, expected a tensor"),
    ],
)
def test_weights_of_another_type_are_refused(params, message):
    with pytest.raises(BuildError, match=message):
        bind_params(Placed, params)


def test_weights_that_contradict_each_other_are_refused():
    with pytest.raises(BuildError, match=r"'v' a tensor of shape \(3,\)"):
        bind_params(Symbolic, {"w": np.ones((3, 2), "float32"), "v": np.ones(3, "float32")})


def test_a_main_that_is_called_keeps_its_parameters():
    @I.ir_module
    class Called:
        @R.function
        def main(x: R.Tensor((4,), "float32"), w: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            return R.add(x, w)

        @R.function
        def other(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            return Called.main(x, x)

    with pytest.raises(BuildError, match=r"\['other'\] call"):
        bind_params(Called, {"w": np.ones(4, "float32")})
