"""rh.compile: a module at any stage; constants, signatures, weights, errors."""

import logging

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import BuildError
from relax_hetero.transform import FormDispatches, LowerToVM, RealizeVDevice

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def two_devices():
    return [rh.VDevice(rh.native("llvm"), 0), rh.VDevice({"kind": "llvm", "mcpu": rh.native("llvm").attrs["mcpu"]}, 1)]


def shared_weight(weight):
    """`weight` is used on both devices."""
    bb = relax.BlockBuilder()
    first, second = two_devices()
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 4), "float32", first))
    w = relax.const(weight)
    with bb.function("main", [x]):
        with bb.dataflow():
            a = bb.emit(relax.op.matmul(x, w))
            b = bb.emit(relax.op.to_vdevice(a, second))
            c = bb.emit_output(relax.op.matmul(b, w))
        bb.emit_func_output(c)
    mod = bb.get()
    mod.update_global_info("vdevice", [first, second])
    return mod


def test_a_constant_lives_where_it_is_used():
    """Upstream row 2: stock TVM puts all constants on the first device."""
    weight = np.random.default_rng(0).random((4, 4), "float32")
    exe = rh.compile(shared_weight(weight))
    assert sorted(spec.device for spec in exe.metadata.constants) == [0, 1]
    vm = rh.vm.VirtualMachine(exe)
    for rows in (1, 3):
        x = np.random.default_rng(rows).random((rows, 4), "float32")
        out = vm["main"](x)
        assert out.device == tvm.cpu(1)
        np.testing.assert_allclose(out.numpy(), x @ weight @ weight, rtol=1e-5)


def test_every_stage_compiles_to_the_same_numbers():
    weight = np.random.default_rng(0).random((4, 4), "float32")
    stages = [shared_weight(weight)]
    for step in (RealizeVDevice(), FormDispatches(), LowerToVM()):
        stages.append(step(stages[-1]))
        assert_structural_equal(step(stages[-1]), stages[-1])  # each pass is idempotent
    x = np.random.default_rng(1).random((3, 4), "float32")
    for mod in stages:
        out = rh.vm.VirtualMachine(rh.compile(mod))["main"](x)
        np.testing.assert_allclose(out.numpy(), x @ weight @ weight, rtol=1e-5)


def test_the_input_module_is_not_changed():
    mod = shared_weight(np.ones((4, 4), "float32"))
    before = tvm.ir.load_json(tvm.ir.save_json(mod))
    rh.compile(mod)
    assert_structural_equal(mod, before)


def test_equal_constants_of_one_device_are_stored_once():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    w = relax.const(np.random.default_rng(0).random((4, 4), "float32"))
    with bb.function("main", [x]):
        y = bb.emit(relax.op.matmul(bb.emit(relax.op.matmul(x, w)), w))
        bb.emit_func_output(y)
    exe = rh.compile(bb.get())
    assert len([c for c in exe.metadata.constants if c.addresses is None]) == 1


def test_constants_reach_called_functions():
    weight = np.arange(4, dtype="float32")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    with bb.function("inner", [x], private=True):
        bb.emit_func_output(bb.emit(relax.op.add(x, relax.const(weight))))
    inner = bb.get().get_global_var("inner")
    z = relax.Var("z", relax.TensorType((4,), "float32"))
    with bb.function("main", [z]):
        bb.emit_func_output(bb.emit(relax.Call(inner, [bb.emit(relax.Call(inner, [z]))])))
    exe = rh.compile(bb.get())
    assert list(exe.metadata.signatures) == ["main"]
    out = rh.vm.VirtualMachine(exe)["main"](np.ones(4, "float32"))
    np.testing.assert_array_equal(out.numpy(), 1 + 2 * weight)


def test_a_returned_constant_and_an_if():
    @ir_module()
    def Mod(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((4,), "float32"):
        if c:
            y = R.add(x, R.const([1.0, 2.0, 3.0, 4.0], "float32"))
        else:
            y = R.multiply(x, R.const([4.0, 3.0, 2.0, 1.0], "float32"))
        return y

    vm = rh.vm.VirtualMachine(rh.compile(Mod))
    x = np.random.default_rng(0).random(4, "float32")
    np.testing.assert_allclose(vm["main"](x, np.array(True)).numpy(), x + [1, 2, 3, 4], rtol=1e-6)
    np.testing.assert_allclose(vm["main"](x, np.array(False)).numpy(), x * [4, 3, 2, 1], rtol=1e-6)


def test_params_are_bound_by_name():
    @ir_module()
    def Mod(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 2), "float32")) -> R.Tensor((2, 2), "float32"):
        R.func_attr({"num_input": 1})
        return R.matmul(x, w)

    rng = np.random.default_rng(0)
    x, w = rng.random((2, 3), "float32"), rng.random((3, 2), "float32")
    exe = rh.compile(Mod, params={"w": w})
    assert [spec.name for spec in exe.signature().inputs] == ["x"]
    np.testing.assert_allclose(rh.vm.VirtualMachine(exe)["main"](x).numpy(), x @ w, rtol=1e-6)
    with pytest.raises(BuildError, match=r"\['v'\].*\['x', 'w'\]"):
        rh.compile(Mod, params={"v": w})


def test_an_op_without_kernel_is_named():
    @ir_module()
    def Mod(x: R.Tensor(ndim=2, dtype="float32")) -> R.Tensor(ndim=2, dtype="float32"):
        y = R.exp(x)
        return y

    with pytest.raises(BuildError, match=r"relax.exp.*'y'.*'main'"):
        rh.compile(Mod)


@pytest.mark.parametrize(
    ("target", "mcpu", "cores"),
    [
        ("llvm", "native", "native"),
        ({"kind": "llvm", "num-cores": 1}, "native", 1),
        ({"kind": "llvm", "mcpu": "x86-64"}, "x86-64", None),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mattr": ["+avx"]}, None, None),
    ],
)
def test_a_cpu_that_is_not_described_is_this_one(target, mcpu, cores, caplog):
    """Same target as ``vdevices=["llvm"]``; a warning says that code for the oldest CPU is slow."""
    vdevice = tvm.relax.VDevice(tvm.target.Target(target), 0, "global")
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4,), "float32", vdevice))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.op.exp(x)))
    mod = bb.get()
    mod.update_global_info("vdevice", [vdevice])
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        exe = rh.compile(mod)
    (attributes,) = (tvm.target.Target(device.target).attrs for device in exe.devices)
    own = rh.native("llvm").attrs
    assert attributes.get("mcpu") == (own["mcpu"] if mcpu == "native" else mcpu)
    assert attributes.get("num-cores") == (own["num-cores"] if cores == "native" else cores)
    assert ("rh.native" in caplog.text) == (mcpu is None)
    vm = rh.vm.VirtualMachine(exe, {vdevice: "cpu:0"})
    np.testing.assert_allclose(vm["main"](np.zeros(4, "float32")).numpy(), 1)


def test_tvm_compile_works_on_one_device_and_refuses_two():
    @ir_module(V2)
    def One(x: R.Tensor((4,), "float32", "llvm")) -> R.Tensor((4,), "float32", "llvm"):
        return R.add(x, R.const([1.0, 2.0, 3.0, 4.0], "float32"))

    exe = tvm.compile(One, relax_pipeline=rh.get_pipeline())
    out = relax.VirtualMachine(exe, tvm.cpu())["main"](tvm.runtime.tensor(np.zeros(4, "float32")))
    np.testing.assert_array_equal(out.numpy(), [1, 2, 3, 4])
    two = shared_weight(np.ones((4, 4), "float32"))
    for pipeline in (rh.get_pipeline(), "default", "zero"):
        with pytest.raises(BuildError, match=r"2 vdevices.*relax_hetero.compile"):
            tvm.compile(two, relax_pipeline=pipeline)


def test_creation_ops_stay_on_their_device():
    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor(("n", 4), "float32", "llvm:0")) -> R.Tensor(("n", 4), "float32", "llvm:0"):
        n = T.int64()
        with R.dataflow():
            z: R.Tensor((n, 4), "float32", "llvm:1") = R.full(R.shape([n, 4]), R.const(2, "float32"), "float32")
            z0: R.Tensor((n, 4), "float32", "llvm:0") = R.to_vdevice(z, "llvm:0")
            y = R.add(x, z0)
            R.output(y)
        return y

    dispatches = rh.compile(Mod).metadata.dispatches
    assert {d.device for name, d in dispatches.items() if "full" in name} == {1}


def test_signature_of_symbolic_shapes():
    @ir_module()
    def Mod(x: R.Tensor(("n", 4), "float32"), s: R.Shape(["n", 2])) -> R.Tensor(("n * 2 + 1", 4), "float32"):
        n = T.int64()
        y = R.full(R.shape([n * 2 + 1, 4]), R.const(2, "float32"), "float32")
        return y

    assert str(rh.compile(Mod).signature()) == (
        "main(x: float32[n, 4], s: shape(n, 2)) -> output: float32[((n * 2) + 1), 4]"
    )


def test_signature_of_tuples():
    @ir_module()
    def Mod(t: R.Tuple(R.Tensor((2,), "int8"), R.Tuple(R.Tensor((), "bool")))):
        a = R.add(t[0], t[0])
        return (a, t[1])

    signature = rh.compile(Mod).signature()
    assert str(signature) == "main(t: (int8[2], (bool[]))) -> (output_0: int8[2], output_1: (bool[]))"
    assert signature.output_is_tuple


def test_local_functions_become_closures():
    @ir_module()
    def Mod(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        w = R.multiply(x, R.const([1.0, 2.0, 3.0, 4.0], "float32"))

        @R.function
        def inner(y: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            z = R.add(y, R.const([4.0, 3.0, 2.0, 1.0], "float32"))
            s = R.add(z, w)
            return s

        a = inner(x)
        b = inner(a)
        return b

    exe = rh.compile(Mod)
    assert list(exe.metadata.signatures) == ["main"]
    x = np.random.default_rng(0).random(4, "float32")
    expected = x + 2 * (np.array([4, 3, 2, 1]) + x * [1, 2, 3, 4])
    np.testing.assert_allclose(rh.vm.VirtualMachine(exe)["main"](x).numpy(), expected, rtol=1e-6)


def test_dispatches_say_what_they_compute():
    @ir_module()
    def Mod(x: R.Tensor((64, 4), "float32"), w: R.Tensor((4, 4), "float32")) -> R.Tensor((64, 4), "float32"):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.nn.relu(y)
            s = R.nn.softmax(z)
            R.output(s)
        return s

    exe = rh.compile(Mod)
    assert sorted(d.ops for d in exe.metadata.dispatches.values()) == [("matmul", "relu", "softmax"), ("pack",)]
    assert {d.device for d in exe.metadata.dispatches.values()} == {0}  # also where all operands are intermediate
    profile = rh.vm.VirtualMachine(exe).profile("main", np.ones((64, 4), "float32"), np.ones((4, 4), "float32"))
    assert {row.ops for row in profile.rows} >= {("matmul", "relu", "softmax")}


def test_missing_functions_and_parameters_are_named():
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    bb = relax.BlockBuilder()
    with bb.function("inner", [x], private=True):
        bb.emit_func_output(x)
    inner = bb.get().get_global_var("inner")
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(relax.Call(inner, [x])))
    mod = bb.get()
    del mod[inner]
    with pytest.raises(BuildError, match="'main' refers to 'inner'"):
        rh.compile(mod)
