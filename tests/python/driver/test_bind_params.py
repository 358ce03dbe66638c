"""Weights by name: on the device of their parameter, of its type, symbolic extents settled."""

import numpy as np
import onnx.parser
import pytest
from tvm.relax.frontend import nn
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.driver.bind_params import bind_params
from relax_hetero.errors import BuildError
from relax_hetero.transform import FormDispatches, RealizeVDevice
from relax_hetero.transform.record.donated import DONATED

X = np.zeros((2, 3), "float32")
V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


@ir_module(V4, (V2, 1))
class Placed:
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


def test_attributes_that_count_parameters_follow():
    func = Placed["main"].with_attr({"num_input": 1, DONATED: [1, 0]})
    mod = Placed.clone()
    mod["main"] = func
    x = np.zeros((4, 4), "float32")
    left = bind_params(mod, {"x": x})["main"].attrs
    assert (int(left["num_input"]), list(left[DONATED])) == (0, [0])
    left = bind_params(mod, {"w": x})["main"].attrs
    assert (int(left["num_input"]), list(left[DONATED])) == (1, [0])


@ir_module()
def Symbolic(
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


class Language(nn.Module):
    """Three functions over the same weights; one reads only some of them."""

    def __init__(self):
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.second(nn.op.relu(self.first(x)))

    def prefill(self, x):
        return self.first(x)

    def decode(self, x):
        return self.forward(x)


def language():
    rows = {"forward": "n", "prefill": "n", "decode": 1}
    spec = {name: {"x": nn.spec.Tensor([extent, 256], "float32")} for name, extent in rows.items()}
    mod, named = Language().export_tvm(spec)
    random = np.random.default_rng(0)
    return mod, named, {name: random.random(list(map(int, p.shape)), "float32") - 0.5 for name, p in named}


def check_language(vm, weights):
    x = np.linspace(-1, 1, 3 * 256, dtype="float32").reshape(3, 256)
    hidden = x @ weights["first.weight"].T + weights["first.bias"]
    expected = np.maximum(hidden, 0) @ weights["second.weight"].T + weights["second.bias"]
    np.testing.assert_allclose(vm["prefill"](x), hidden, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(vm["forward"](x), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(vm["decode"](x[1:2]), expected[1:2], rtol=1e-3, atol=1e-3)


def test_every_function_gets_its_weights_and_shares_them():
    mod, named, weights = language()
    exe = rh.compile(mod, weights)
    check_language(rh.vm.VirtualMachine(exe), weights)
    weight_bytes = sum(array.nbytes for array in weights.values())
    assert sum(tensor.numel() * 4 for tensor in exe.constants) < 1.2 * weight_bytes


@pytest.mark.slow
def test_some_weights_now_and_some_later():
    mod, _, weights = language()
    half = rh.vm.VirtualMachine(rh.compile(mod, {k: v for k, v in weights.items() if k.startswith("first")}))
    half.set_params({k: v for k, v in weights.items() if k.startswith("second")})
    check_language(half, weights)


def test_parameters_are_given_once_for_all_functions():
    mod, named, weights = language()
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    vm.set_params(weights)
    check_language(vm, weights)
    other = {name: array[::-1].copy() for name, array in weights.items()}
    for wrong in ({**other, "third": X}, {**other, "second.bias": X}, {**other, float("nan"): X}, named, dict(named)):
        with pytest.raises(rh.BindingError):
            vm.set_params(wrong)
        check_language(vm, weights)  # nothing was changed
    vm.set_params(list(other.values()))
    check_language(vm, other)
    vm.set_params({"first.bias": weights["first.bias"]}, "prefill")
    np.testing.assert_allclose(vm["prefill"](np.zeros((1, 256), "f4"))[0], weights["first.bias"], rtol=1e-5)
    result = vm["forward"](np.zeros((1, 256), "f4"))
    expected = np.maximum(other["first.bias"], 0) @ other["second.weight"].T + other["second.bias"]
    np.testing.assert_allclose(result[0], expected, rtol=1e-3, atol=1e-3)


class Torch:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda named, weights: [1], "params= is a list, expected a mapping"),
        (lambda named, weights: named, r"such as \{name: array for name, parameter in params\}"),
        (lambda named, weights: Torch(), r"params= is a Torch, .* such as its state_dict\(\)"),
        (lambda named, weights: dict(named), "'first.weight' a Parameter, expected a tensor: it describes"),
        (lambda named, weights: {float("nan"): X}, r"names \[nan\], which no function has"),
        (lambda named, weights: {**weights, "third": X}, r"names \['third'\], which no function has"),
        (lambda named, weights: {"first.bias": X}, r"'first.bias' a tensor of shape \(2, 3\)"),
        (lambda named, weights: {"first.bias": np.zeros(512)}, "dtype float64"),
        (lambda named, weights: {"first.bias": None}, "'first.bias' a NoneType"),
        (lambda named, weights: {"first.bias": "abc"}, "'first.bias' a str"),
        (lambda named, weights: {"first.bias": object()}, "'first.bias' a object"),
    ],
)
def test_other_kinds_are_refused_by_name(wrong, message):
    mod, named, weights = language()
    with pytest.raises(BuildError, match=message):
        rh.compile(mod, wrong(named, weights))
