"""Legalizing keeps every variable's device, whatever stock legalization makes of its type."""

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
from relax_hetero.target.vdevice import device_name, vdevices_of
from relax_hetero.transform import FormDispatches, RealizeVDevice
from relax_hetero.transform.dispatch.legalize import legalize
from relax_hetero.transform.ir.rewriting import tensor_types, walk_bindings

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def devices_of(mod):
    """Devices of the tensors of each binding of main."""
    vdevices = vdevices_of(mod)
    return {
        binding.var.name: {device_name(tensor.vdevice, vdevices) for tensor in tensor_types(binding.var.ty)}
        for binding in walk_bindings(mod["main"])
    }


def batch_norm_module():
    bb = relax.BlockBuilder()
    devices = [rh.VDevice(V4, 0), rh.VDevice(V2, 1)]
    x = relax.Var("x", relax.TensorType((1, 3, 4, 4), "float32", devices[1]))
    parameters = [relax.const(np.full(3, value, "float32")) for value in (2.0, 0.5, 0.25, 4.0)]
    with bb.function("main", [x]):
        with bb.dataflow():
            normal = bb.emit(relax.op.nn.batch_norm(x, *parameters, axis=1, training=False), "normal")
            first = bb.emit(relax.TupleGetItem(relax.Tuple([bb.emit(relax.TupleGetItem(normal, 0))]), 0), "first")
            y = bb.emit_output(relax.op.nn.relu(first), "y")
        bb.emit_func_output(y)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    return mod


def test_each_op_becomes_a_kernel_of_its_device():
    @ir_module(V4, (V2, 1))
    def Before(x: R.Tensor((2, 4), "float32", "llvm:0")):
        with R.dataflow():
            a: R.Tensor((2, 4), "float32", "llvm:0") = R.exp(x)
            b: R.Tensor((2, 4), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
            y: R.Tensor((2, 4), "float32", "llvm:1") = R.add(b, b)
            R.output(y)
        return y

    @ir_module(V4, (V2, 1))
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def tir_exp_llvm(
            A: T.Buffer((T.int64(2), T.int64(4)), "float32"), B: T.Buffer((T.int64(2), T.int64(4)), "float32")
        ):
            T.func_attr({"target": T.target(V4), "tirx.noalias": True})
            for i, j in T.grid(T.int64(2), T.int64(4)):
                with T.sblock("compute"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    B[vi, vj] = T.exp(A[vi, vj])

        @T.prim_func(private=True, s_tir=True)
        def add_llvm(
            A: T.Buffer((T.int64(2), T.int64(4)), "float32"),
            B: T.Buffer((T.int64(2), T.int64(4)), "float32"),
            C: T.Buffer((T.int64(2), T.int64(4)), "float32"),
        ):
            T.func_attr({"target": T.target(V2), "tirx.noalias": True})
            for i, j in T.grid(T.int64(2), T.int64(4)):
                with T.sblock("T_add"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj] + B[vi, vj]

        @R.function
        def main(x: R.Tensor((2, 4), "float32", "llvm:0")) -> R.Tensor((2, 4), "float32", "llvm:1"):
            cls = Expected
            with R.dataflow():
                a = R.call_tir(cls.tir_exp_llvm, (x,), out_ty=R.Tensor((2, 4), "float32", "llvm:0"))
                b: R.Tensor((2, 4), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
                y = R.call_tir(cls.add_llvm, (b, b), out_ty=R.Tensor((2, 4), "float32", "llvm:1"))
                R.output(y)
            return y

    assert_structural_equal(legalize(Before), Expected)


def test_results_of_tuple_ops_stay_where_they_were():
    """Stock LegalizeOps drops the device of batch_norm's results, and of everything after it."""
    placed = RealizeVDevice()(batch_norm_module())
    assert all(devices == {"llvm:1"} for devices in devices_of(placed).values())
    stock = relax.transform.LegalizeOps()(placed)
    types = {b.var.name: b.var.ty for b in walk_bindings(stock["main"])}
    assert any(tensor.vdevice is None for tensor in tensor_types(types["y"]))
    legal = legalize(placed)
    assert all(devices == {"llvm:1"} for devices in devices_of(legal).values())
    formed = FormDispatches()(placed)
    targets = {f.attrs["target"].attrs["mcpu"] for gv, f in formed.functions.items() if gv.name_hint != "main"}
    assert targets == {"x86-64-v2"}


def test_a_projection_of_a_written_tuple_runs():
    """FuseOps loses the fields of `(a, b)[0]`."""
    vm = rh.vm.VirtualMachine(rh.compile(batch_norm_module()))
    x = np.random.default_rng(0).standard_normal((1, 3, 4, 4)).astype("float32")
    out = vm["main"](x)
    assert out.device == tvm.cpu(1)
    np.testing.assert_allclose(
        out.numpy(), np.maximum((x - 0.25) / np.sqrt(4.0 + 1e-5) * 2 + 0.5, 0), rtol=1e-4, atol=1e-5
    )


def test_variables_of_one_name_keep_their_own_devices():
    bb = relax.BlockBuilder()
    devices = [rh.VDevice(V4, 0), rh.VDevice(V2, 1)]
    x = relax.Var("x", relax.TensorType((4,), "float32", devices[0]))
    first = relax.Var("same", relax.TensorType((4,), "float32", devices[0]))
    moved = relax.Var("same", relax.TensorType((4,), "float32", devices[1]))
    last = relax.Var("same", relax.TensorType((4,), "float32", devices[1]))
    with bb.function("main", [x]):
        bb.emit_normalized(relax.VarBinding(first, bb.normalize(relax.op.exp(x))))
        bb.emit_normalized(relax.VarBinding(moved, bb.normalize(relax.op.to_vdevice(first, devices[1]))))
        bb.emit_normalized(relax.VarBinding(last, bb.normalize(relax.op.exp(moved))))
        bb.emit_func_output(last)
    mod = bb.get()
    mod.update_global_info("vdevice", devices)
    legal = legalize(RealizeVDevice()(mod))
    assert list(devices_of(legal).values()) == [{"llvm:0"}, {"llvm:1"}, {"llvm:1"}]


def test_an_op_without_kernel_is_named():
    @ir_module(V4)
    def Mod(x: R.Tensor(ndim=2, dtype="float32")) -> R.Tensor(ndim=2, dtype="float32"):
        y = R.exp(x)
        return y

    with pytest.raises(BuildError, match=r"relax.exp of variable 'y' in function 'main'.*x: float32 of 2 dimensions"):
        legalize(RealizeVDevice()(Mod))


def test_shapes_in_variables_are_known():
    """Stock legalization of reshape and zeros asserts that a shape is written out."""

    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor(("n", "m"), "float32", "llvm:0"), t: R.Tensor((2,), "int64", "llvm:1")) -> R.Tensor(
        ndim=2, dtype="float32", vdevice="llvm:0"
    ):
        a, b = T.int64(), T.int64()
        shape = R.match_cast(R.tensor_to_shape(t), R.Shape([a, b]))
        y = R.exp(R.reshape(x, shape))
        z: R.Tensor((a, b), "float32", "llvm:0") = R.ones(shape, "float32")
        return R.add(y, z)

    vm = rh.vm.VirtualMachine(rh.compile(Mod))
    x = np.random.default_rng(0).random((3, 4), "float32")
    np.testing.assert_allclose(vm["main"](x, np.array([2, 6])).numpy(), np.exp(x).reshape(2, 6) + 1, rtol=1e-6)


@pytest.mark.parametrize("op", [relax.op.sort, lambda x: relax.op.mean(x, axis=[0])])
def test_an_op_whose_legalization_fails_is_named(op):
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(ndim=-1, dtype="float32"))
    with bb.function("main", [x]):
        bb.emit_func_output(bb.emit(op(x), "y"))
    with pytest.raises(BuildError, match=r"op relax\.\w+ of variable 'y' in function 'main'"):
        rh.compile(bb.get())


def test_ops_before_the_one_that_fails_are_not_blamed():
    bb = relax.BlockBuilder()
    x, z = relax.Var("x", relax.TensorType((2, 3), "float32")), relax.Var("z", relax.TensorType(ndim=-1, dtype="int32"))
    with bb.function("main", [x, z]):
        with bb.dataflow():
            wide = bb.emit(relax.op.expand_dims(x, [1]), "wide")
            y = bb.emit_output(relax.Tuple([wide, bb.emit(relax.op.sort(z), "sorted")]))
        bb.emit_func_output(y)
    with pytest.raises(BuildError, match=r"op relax\.sort of variable 'sorted' in function 'main'"):
        rh.compile(bb.get())


def test_kernels_of_several_stages_and_one_symbolic_size_on_cpus_of_two_targets():
    """ConvertSSA, which LegalizeOps runs after its copies, would leave uses of the buffer between them undefined."""

    @ir_module(V4, (V2, 1))
    def Mod(
        x: R.Tensor(("b", "s"), "float32", "llvm:0"),
        i: R.Tensor(("n", 2), "int64", "llvm:0"),
        y: R.Tensor(("b", "s"), "float32", "llvm:1"),
        j: R.Tensor(("m", 2), "int64", "llvm:1"),
    ):
        with R.dataflow():
            result = (R.gather_nd(x, i), R.gather_nd(y, j))
            R.output(result)
        return result

    x, i, j = np.random.default_rng(0).random((2, 3), "float32"), np.array([[0, 2], [1, 1], [1, 0]]), np.array([[1, 2]])
    first, second = rh.vm.VirtualMachine(rh.compile(Mod))["main"](x, i, x, j)
    np.testing.assert_array_equal(first.numpy(), x[tuple(i.T)])
    np.testing.assert_array_equal(second.numpy(), x[tuple(j.T)])


def test_scans_and_top_k_of_one_shape_on_cpus_of_two_targets():
    @ir_module(V4, (V2, 1))
    def Mod(x: R.Tensor((2, "n"), "float32", "llvm:0"), y: R.Tensor((2, "n"), "float32", "llvm:1")):
        with R.dataflow():
            sums = (R.cumsum(x, axis=1), R.cumsum(y, axis=1))
            products = (R.cumprod(x, axis=1), R.cumprod(y, axis=1))
            most = (R.topk(x, k=2, dtype="int64"), R.topk(y, k=2, dtype="int64"))
            result = (sums, products, most)
            R.output(result)
        return result

    x = np.random.default_rng(0).random((2, 5), "float32")
    on_both = list(zip(*rh.vm.VirtualMachine(rh.compile(Mod))["main"](x, x), strict=True))
    for sums, products, (values, _) in on_both:
        np.testing.assert_allclose(sums.numpy(), x.cumsum(1), rtol=1e-6)
        np.testing.assert_allclose(products.numpy(), x.cumprod(1), rtol=1e-6)
        np.testing.assert_array_equal(values.numpy(), -np.sort(-x)[:, :2])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_relu_and_clip_keep_what_is_not_a_number(dtype):
    x = relax.Var("x", relax.TensorType([6], dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        results = [builder.emit(relax.op.nn.relu(x)), builder.emit(relax.op.clip(x, -1, 2))]
        builder.emit_func_output(relax.Tuple(results))
    values = np.array([0, 1, -1, -3, 5, 7], dtype)
    if dtype != "int32":
        values[[0, 5]] = np.nan, np.inf
    relu, clipped = rh.vm.VirtualMachine(rh.compile(builder.get()))["main"](values)
    np.testing.assert_array_equal(relu.numpy(), np.maximum(values, 0))
    np.testing.assert_array_equal(clipped.numpy(), np.clip(values, -1, 2))
