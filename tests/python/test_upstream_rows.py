"""Defects of stock TVM 0.27 with several devices, and the behaviour of this library instead.

One test for each row of the list this library was begun with (12 to 14, 19 and 20: ``vm/test_upstream.py``). Where
stock is shown to fail, a failing test means that TVM was mended and a workaround may go.
"""

import inspect
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import calls_of, ops_of
from relax_hetero.errors import BuildError, PlacementError, VDeviceError
from relax_hetero.target.vdevice import device_name, parse_vdevices, same_object, vdevices_of
from relax_hetero.transform import RealizeVDevice, UpdateVDevice
from relax_hetero.transform.ir.rewriting import tensor_types, walk_bindings

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def module(build, *shapes, devices=None, on=None):
    """`main` over float32 parameters of these shapes; `build(bb, devices, *params)` returns the result."""
    devices = devices or [rh.VDevice(V4, 0), rh.VDevice(V2, 1)]
    bb = relax.BlockBuilder()
    places = on or [None] * len(shapes)
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, "float32", devices[at] if at is not None else None))
        for i, (shape, at) in enumerate(zip(shapes, places, strict=True))
    ]
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb, devices, *params))
        bb.emit_func_output(out)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    return mod


def places(mod, function="main"):
    vdevices = vdevices_of(mod)
    return [
        {device_name(t.vdevice, vdevices) if t.vdevice is not None else None for t in tensor_types(b.var.ty)}
        for b in walk_bindings(mod[function])
    ]


def random(*shape):
    return np.random.default_rng(sum(shape)).random(shape, "float32")


def run(mod, *arguments):
    return rh.vm.VirtualMachine(rh.compile(mod))["main"](*arguments)


def stock_run(mod, *arguments):
    """Stock build and machine, each argument placed by hand on its parameter's device."""
    with ExitStack() as stack:  # importing this library has stock builds of several devices refused
        for name in ("_vmlink", "_vmcodegen"):
            stack.enter_context(mock.patch.object(vm_build, name, inspect.unwrap(getattr(vm_build, name))))
        exe = relax.build(mod, target=None)
    machine = relax.VirtualMachine(exe, [tvm.cpu(0), tvm.cpu(1), tvm.cpu(0)])
    return machine["main"](*(tvm.runtime.tensor(a, tvm.cpu(d)) for a, d in arguments))


def exp_tanh_twice(bb, devices, x):
    b = bb.emit(relax.op.tanh(bb.emit(relax.op.exp(x))))
    c = bb.emit(relax.op.to_vdevice(b, devices[1]))
    return relax.op.tanh(bb.emit(relax.op.exp(c)))


def test_row_1_storage_is_not_shared_across_devices():
    mod = module(exp_tanh_twice, (4,), on=[0])
    x = random(4)
    np.testing.assert_allclose(run(mod, x).numpy(), np.tanh(np.exp(np.tanh(np.exp(x)))), rtol=1e-5)
    with pytest.raises(Exception, match="device_id"):
        stock_run(RealizeVDevice()(mod), (x, 0))


def test_row_2_constants_live_where_they_are_used():
    weight = random(4, 4)
    mod = module(
        lambda bb, d, x: relax.op.matmul(bb.emit(relax.op.to_vdevice(x, d[1])), relax.const(weight)), (3, 4), on=[0]
    )
    x = random(3, 4)
    np.testing.assert_allclose(run(mod, x).numpy(), x @ weight, rtol=1e-5)
    with pytest.raises(Exception, match="device_id"):
        stock_run(RealizeVDevice()(mod), (x, 0))


def test_row_3_and_5_every_kernel_keeps_its_target():
    mod = module(exp_tanh_twice, (64,), on=[0])
    names = {spec.kind for spec in rh.compile(mod).devices}
    assert names == {"llvm"}
    lowered = rh.get_pipeline()(mod)
    targets = sorted(
        f.attrs["target"].attrs["mcpu"] for f in lowered.functions.values() if isinstance(f, tvm.tirx.PrimFunc)
    )
    assert targets == ["x86-64-v2", "x86-64-v4"]


def test_row_4_a_gpu_kernel_is_never_host_code():
    @T.prim_func(s_tir=True)
    def copy(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
        T.func_attr({"global_symbol": "copy", "target": T.target({"kind": "cuda", "arch": "sm_90"})})
        for i in range(64):
            b[i] = a[i]

    from relax_hetero.driver.link.link import build_group

    with pytest.raises(BuildError, match="'copy' for target kind 'cuda' binds no GPU threads"):
        build_group(copy.attrs["target"], tvm.IRModule({"copy": copy}), tvm.target.Target("llvm"))


@pytest.mark.parametrize(
    "build",
    [
        lambda bb, d, x, y: relax.op.add(x, y),
        lambda bb, d, x, y: relax.op.matmul(x, y),
        lambda bb, d, x, y: relax.op.concat([x, y], axis=0),
        lambda bb, d, x, y: relax.op.where(relax.op.greater(x, y), x, y),
        lambda bb, d, x, y: relax.op.nn.layer_norm(x, relax.const(random(4)), relax.const(random(4)), axes=[-1]),
        lambda bb, d, x, y: relax.op.take(x, relax.const([0, 1]), axis=0),
    ],
    ids=["add", "matmul", "concat", "where", "layer_norm", "take"],
)
def test_row_6_every_op_has_the_device_of_its_operands(build):
    mod = module(build, (4, 4), (4, 4), on=[1, 1])
    assert all(place == {"llvm:1"} for place in places(RealizeVDevice()(mod)))


class TestRow7:
    def test_conflicts_are_errors(self):
        mod = module(
            lambda bb, d, x, y: relax.op.add(
                bb.emit(relax.op.hint_on_device(x, tvm.cpu(0))), bb.emit(relax.op.hint_on_device(y, tvm.cpu(1)))
            ),
            (4,),
            (4,),
        )
        with pytest.raises(PlacementError, match=r"relax\.add.*llvm:0|relax\.add.*llvm:1"):
            RealizeVDevice()(mod)

    def test_a_hint_on_a_result_places_what_made_it(self):
        mod = module(
            lambda bb, d, x: relax.op.hint_on_device(bb.emit(relax.op.exp(bb.emit(relax.op.tanh(x)))), tvm.cpu(1)), (4,)
        )
        placed = RealizeVDevice()(mod)
        assert all(place == {"llvm:1"} for place in places(placed))
        assert device_name(placed["main"].params[0].ty.vdevice, vdevices_of(placed)) == "llvm:1"

    def test_return_annotations_hold(self):
        @I.ir_module
        class Mod:
            I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

            @R.function
            def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
                y = R.exp(x)
                return y

        with pytest.raises(PlacementError, match="main"):
            RealizeVDevice()(Mod)

    def test_conditions_and_branches_are_free_of_each_other(self):
        @I.ir_module
        class Mod:
            I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

            @R.function
            def main(c: R.Tensor((), "bool", "llvm:0"), x: R.Tensor((4,), "float32", "llvm:1")):
                if c:
                    y = R.exp(x)
                else:
                    y = R.tanh(x)
                return y

        vm = rh.vm.VirtualMachine(rh.compile(Mod))
        x = random(4)
        assert vm["main"](np.array(True), x).device == tvm.cpu(1)
        np.testing.assert_allclose(vm["main"](np.array(False), x).numpy(), np.tanh(x), rtol=1e-6)

    def test_devices_cross_functions(self):
        @I.ir_module
        class Mod:
            I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

            @R.function(private=True)
            def callee(x: R.Tensor((4,), "float32")):
                r = R.add(x, x)
                return r

            @R.function
            def main(x: R.Tensor((4,), "float32")):
                s1 = Mod.callee(x)
                s2 = R.hint_on_device(s1, tvm.cpu(1))
                s3 = R.add(s2, s2)
                return s3

        placed = RealizeVDevice()(Mod)
        assert places(placed, "callee") == [{"llvm:1"}]


def test_row_8_update_vdevice_reaches_everything_and_changes_no_input():
    mod = RealizeVDevice()(module(exp_tanh_twice, (4,), on=[0]))
    before = tvm.ir.load_json(tvm.ir.save_json(mod))
    new = rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v3"}, 1)
    after = UpdateVDevice(new, 1)(mod)
    tvm.ir.assert_structural_equal(mod, before)
    (transfer,) = calls_of("relax.to_vdevice", after["main"])
    assert same_object(transfer.attrs.dst_vdevice, vdevices_of(after)[1])
    assert "x86-64-v2" not in after.script()


def test_row_9_unknown_devices_are_errors():
    with pytest.raises(VDeviceError, match="metal"):
        module(lambda bb, d, x: rh.op.to_vdevice(x, "metal"), (4,))
    with pytest.raises(VDeviceError, match="llvm:7"):
        module(lambda bb, d, x: rh.op.hint_on_device(x, "llvm:7"), (4,))


def test_row_10_equal_vdevices_become_the_modules_own():
    mod = module(lambda bb, d, x: relax.op.exp(x), (4,))
    twin = rh.VDevice(V2, 1)
    x = relax.Var("x", relax.TensorType((4,), "float32", twin))
    bb = relax.BlockBuilder(mod)
    with bb.function("other", [x]):
        bb.emit_func_output(bb.emit(relax.op.exp(x)))
    placed = RealizeVDevice()(bb.get())
    assert same_object(placed["other"].params[0].ty.vdevice, vdevices_of(placed)[1])
    rh.compile(placed)


def test_row_11_a_transfer_to_where_a_value_is_disappears():
    mod = module(lambda bb, d, x: relax.op.exp(bb.emit(relax.op.to_vdevice(x, d[0]))), (4,), on=[0])
    assert "relax.to_vdevice" not in ops_of(RealizeVDevice()(mod)["main"])


def test_row_15_a_call_tir_result_goes_into_an_annotated_function():
    @I.ir_module
    class Mod:
        I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

        @T.prim_func(private=True, s_tir=True)
        def twice(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("b"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v] * T.float32(2)

        @R.function(private=True)
        def inner(x: R.Tensor((4,), "float32", "llvm:1")) -> R.Tensor((4,), "float32", "llvm:1"):
            y = R.exp(x)
            return y

        @R.function
        def main(x: R.Tensor((4,), "float32")):
            a = R.call_tir(Mod.twice, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            b = Mod.inner(a)
            return b

    x = random(4)
    out = run(Mod, x)
    assert out.device == tvm.cpu(1)
    np.testing.assert_allclose(out.numpy(), np.exp(2 * x), rtol=1e-5)


def test_row_16_cuda_without_arch_is_not_the_oldest():
    (cuda,) = parse_vdevices(["cuda"])
    assert int(str(cuda.target.attrs["arch"]).removeprefix("sm_").rstrip("a")) >= 70


def test_row_17_onnx_nodes_keep_names_and_shape_helpers_their_place():
    from onnx import TensorProto, helper

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], name="the_shape"),
        helper.make_node("Relu", ["x"], ["r"], name="the_relu"),
        helper.make_node("ConstantOfShape", ["s"], ["z"], name="zeros"),
        helper.make_node("Add", ["r", "z"], ["y"], name="the_add"),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    mod = rh.from_onnx(model, vdevices=[V4, V2], placement={"the_relu": "llvm:0", "*": "llvm:1"})
    assert {"the_relu", "the_add"} <= {b.var.name for b in walk_bindings(mod["main"])}
    value = random(3, 4) - 0.5
    out = run(mod, value)
    assert out.device == tvm.cpu(1)
    np.testing.assert_array_equal(out.numpy(), np.maximum(value, 0))


def test_row_18_kernels_that_call_private_kernels_are_compiled_together():
    @I.ir_module
    class Mod:
        I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

        @T.prim_func(private=True, s_tir=True)
        def increment(a: T.handle("float32"), n: T.int32):
            b = T.decl_buffer((4,), "float32", data=a)
            for i in range(n):
                b[i] = b[i] + T.float32(1)

        @T.prim_func(private=True, s_tir=True)
        def outer(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                b[i] = a[i] * T.float32(2)
            Mod.increment(b.data, 4)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:1"):
            with R.dataflow():
                a = R.call_tir(Mod.outer, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                b: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
                c = R.call_tir(Mod.outer, (b,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
                R.output(c)
            return c

    x = random(4)
    np.testing.assert_allclose(run(Mod, x).numpy(), 2 * (2 * x + 1) + 1, rtol=1e-6)
