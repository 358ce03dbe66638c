"""PartitionByMesh: modules before and after, errors, and random shardings of random graphs against the whole graph."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import calls_of, check_pass, ir_module, ops_of
from relax_hetero.target.vdevice import lookup, parse_vdevices, with_vdevices
from relax_hetero.tir.cuda.all_reduce import slots_of
from relax_hetero.transform.ir.remarks import with_remarks
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.shard.inlining import with_inlined_calls
from relax_hetero.transform.shard.partition_by_mesh import SPLIT_PARAMETERS, partition_by_mesh
from relax_hetero.transform.shard.sharding import Sharding
from seeds import fresh_rng
from transform.interpreting import run

W = np.random.default_rng(0).standard_normal((8, 16)).astype("float32")
V = np.random.default_rng(1).standard_normal((16, 8)).astype("float32")
CORE = {"kind": "llvm", "num-cores": 1}
pytestmark = pytest.mark.usefixtures("free_exchanges")


def test_products_split_columns_then_rows():
    """The second product gives a sum over devices; a column of a sum is used by one device only."""

    @ir_module("llvm", "llvm:1")
    def before(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            a = R.matmul(x, R.const(W))
            b = R.nn.relu(a)
            c = R.matmul(b, R.const(V))
            R.output(c)
        return c

    @ir_module("llvm", "llvm:1")
    def expected(x: R.Tensor((4, 8), "float32", "llvm:0")):
        with R.dataflow():
            x1: R.Tensor((4, 8), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
            a: R.Tensor((4, 8), "float32", "llvm:0") = R.matmul(x, R.const(W[:, :8]))
            a1: R.Tensor((4, 8), "float32", "llvm:1") = R.matmul(x1, R.const(W[:, 8:]))
            b: R.Tensor((4, 8), "float32", "llvm:0") = R.nn.relu(a)
            b1: R.Tensor((4, 8), "float32", "llvm:1") = R.nn.relu(a1)
            c: R.Tensor((4, 8), "float32", "llvm:0") = R.matmul(b, R.const(V[:8]))
            c1: R.Tensor((4, 8), "float32", "llvm:1") = R.matmul(b1, R.const(V[8:]))
            sent: R.Tensor((4, 8), "float32", "llvm:0") = R.to_vdevice(c1, "llvm:0")
            total: R.Tensor((4, 8), "float32", "llvm:0") = R.add(c, sent)
            R.output(total)
        return total

    check_pass(lambda mod: with_remarks(partition_by_mesh(mod), shardings=None), before, expected)


def test_all_reduce_all_gather_and_reduce_scatter():
    @ir_module("llvm", "llvm:1")
    def before(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            s = R.hetero.shard(x, "S[1]")
            a = R.matmul(s, R.const(V[:8]))
            r = R.hetero.shard(a, "S[0]")
            b = R.nn.relu(r)
            R.output(b)
        return b

    @ir_module("llvm", "llvm:1")
    def expected(x: R.Tensor((4, 8), "float32", "llvm:0")):
        with R.dataflow():
            x1: R.Tensor((4, 8), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
            s: R.Tensor((4, 4), "float32", "llvm:0") = R.strided_slice(x, [1], [0], [4])
            s1: R.Tensor((4, 4), "float32", "llvm:1") = R.strided_slice(x1, [1], [4], [8])
            a: R.Tensor((4, 8), "float32", "llvm:0") = R.matmul(s, R.const(V[:4]))
            a1: R.Tensor((4, 8), "float32", "llvm:1") = R.matmul(s1, R.const(V[4:8]))
            p00: R.Tensor((2, 8), "float32", "llvm:0") = R.strided_slice(a, [0], [0], [2])
            p10: R.Tensor((2, 8), "float32", "llvm:1") = R.strided_slice(a1, [0], [0], [2])
            p01: R.Tensor((2, 8), "float32", "llvm:0") = R.strided_slice(a, [0], [2], [4])
            p11: R.Tensor((2, 8), "float32", "llvm:1") = R.strided_slice(a1, [0], [2], [4])
            t10: R.Tensor((2, 8), "float32", "llvm:0") = R.to_vdevice(p10, "llvm:0")
            t01: R.Tensor((2, 8), "float32", "llvm:1") = R.to_vdevice(p01, "llvm:1")
            r0: R.Tensor((2, 8), "float32", "llvm:0") = R.add(p00, t10)
            r1: R.Tensor((2, 8), "float32", "llvm:1") = R.add(t01, p11)
            b0: R.Tensor((2, 8), "float32", "llvm:0") = R.nn.relu(r0)
            b1: R.Tensor((2, 8), "float32", "llvm:1") = R.nn.relu(r1)
            sent: R.Tensor((2, 8), "float32", "llvm:0") = R.to_vdevice(b1, "llvm:0")
            whole: R.Tensor((4, 8), "float32", "llvm:0") = R.concat((b0, sent), axis=0)
            R.output(whole)
        return whole

    check_pass(partition_by_mesh, before, expected)


def test_a_module_without_meshes_stays():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm:1")):
        with R.dataflow():
            a = R.nn.relu(x)
            R.output(a)
        return a

    assert partition_by_mesh(module).same_as(module)


def test_a_residual_joins_the_sum_on_one_device():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.nn.softmax(x)
            a = R.matmul(R.nn.relu(R.matmul(y, R.const(W))), R.const(V))
            b = R.add(a, y)
            c = R.nn.softmax(b)
            d = R.matmul(c, R.const(W))
            R.output(d)
        return d

    adds = calls_of("relax.add", partition_by_mesh(module))
    # One for the residual, one on each device for the sum.
    assert sorted(int(call.ty.vdevice.vdevice_id) for call in adds) == [0, 0, 1]
    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    np.testing.assert_allclose(run(partition_by_mesh(module), x), run(module, x), rtol=1e-5, atol=1e-6)


def test_sums_of_single_devices_on_a_larger_mesh():
    """The third device adds nothing: zeros, but there is no constant of an unknown number of them."""
    rows, devices, bindings = tvm.tirx.Var("rows", "int64"), parse_vdevices([CORE] * 3), []
    mesh = lookup("llvm[0:3]", devices)

    def bound(device, call):
        var = relax.DataflowVar(f"value{len(bindings)}", relax.TensorType([rows, 8], "float32", device))
        relax.expr._update_type(call, var.ty)
        bindings.append(relax.VarBinding(var, call))
        return var

    x = relax.Var("x", relax.TensorType([rows, 8], "float32", mesh))
    a, b = bound(devices[0], relax.op.nn.relu(x)), bound(devices[1], relax.op.exp(x))
    total = bound(mesh, relax.op.nn.softmax(bound(mesh, relax.op.add(a, b))))
    result = relax.Var("result", total.ty)
    body = relax.SeqExpr([relax.DataflowBlock([*bindings, relax.VarBinding(result, total)])], result)
    relax.expr._update_type(body, result.ty)
    module = with_vdevices(tvm.IRModule({"main": relax.Function([x], body, result.ty)}), devices)
    values = fresh_rng().standard_normal((4, 8)).astype("float32")
    np.testing.assert_allclose(run(partition_by_mesh(module), values), run(module, values), rtol=1e-5, atol=1e-6)


def test_gpus_sum_by_kernels_in_one_order():
    @ir_module({"kind": "cuda", "arch": "sm_90a"}, ({"kind": "cuda", "arch": "sm_90a"}, 1))
    def module(x: R.Tensor((4, 8), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.nn.softmax(R.matmul(R.nn.relu(R.matmul(x, R.const(W))), R.const(V)))
            b = R.nn.softmax(R.matmul(R.nn.relu(R.matmul(a, R.const(W))), R.const(V)))
            c = R.matmul(b, R.const(W))
            R.output(c)
        return c

    after = partition_by_mesh(module)
    kernels = [call for call in calls_of("relax.call_tir", after) if "all_reduce" in call.args[0].name_hint]
    assert [call.args[0].name_hint[:12] for call in kernels] == ["all_reduce_0", "all_reduce_1"] * 2
    for rank in range(2):  # the second one reads the result of the first, which orders them
        first, second = kernels[rank::2]
        variables = [b.var for b in after["main"].body.blocks[0].bindings if b.value.same_as(first)]
        assert second.args[1].fields[2].same_as(variables[0])
    assert ops_of(after).count("relax.to_vdevice") == 2  # the argument, and the part of the result
    exe = rh.compile(module)
    assert [region.device for region in exe.metadata.regions] == [0, 1]
    assert not exe.metadata.schedules


def test_slots_of_neighbours_differ_between_calls_too():
    for count in range(2, 9):
        slots = slots_of(count)
        assert len(slots) == count
        assert all(a != b for a, b in zip(slots, [*slots[1:], slots[0]], strict=True)), slots


def test_parameters_in_parts():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32"), state: R.Tensor((4, 16), "float32")):
        with R.dataflow():
            a: R.Tensor((4, 16), "float32", "llvm[0:2]") = R.matmul(x, R.const(W))
            b: R.Tensor((4, 16), "float32", "llvm[0:2]") = R.add(a, state)
            c: R.Tensor((4, 8), "float32", "llvm[0:2]") = R.matmul(b, R.const(V))
            R.output(b, c)
        return (c, b)

    split = {"state": {"placement": "S[1]", "names": ["s0", "s1"], "mesh": [0, 1]}}
    func = module["main"].with_attrs(
        {SPLIT_PARAMETERS: json.dumps(split), "input_names": ["x", "state"], "output_names": ["c", "state"]}
    )
    module.update_func(module.get_global_var("main"), func)
    main = partition_by_mesh(module)["main"]
    assert [str(param.name) for param in main.params] == ["x", "s0", "s1"]
    assert list(main.attrs["output_names"]) == ["c", "s0", "s1"]
    assert [[int(extent) for extent in field.shape.values] for field in main.ret_ty.fields] == [[4, 8], [4, 8], [4, 8]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llvm[0:3]", "no vdevice 'llvm:2'"),
        ("llvm[1:0]", "expected a range"),
        ("llvm[0-2]", "a mesh 'kind"),
        ("vdevice[0:3]", "equal targets"),
        ("llvm[0:2](2, 2)", "2 devices and the shape .* which has 4"),
        ("llvm[0:2](2 2)", "a mesh 'kind"),
    ],
)
def test_names_of_meshes(name, message):
    devices = parse_vdevices(["llvm", "llvm", {"kind": "llvm", "mcpu": "x86-64-v2"}][: 3 if "vdevice" in name else 2])
    with pytest.raises(rh.VDeviceError, match=message):
        rh.target.vdevice.lookup(name, devices)


def test_meshes_are_on_one_host():
    with pytest.raises(rh.VDeviceError, match=r"hosts \['a', 'b'\]; expected devices of one host"):
        lookup("vdevice[0:2]", parse_vdevices(["a/llvm", "b/llvm"]))


def test_lists_have_the_devices_of_a_mesh():
    with pytest.raises(rh.VDeviceError, match=r"a mesh is named in rules .* as in \['llvm', 'llvm'\]"):
        parse_vdevices("llvm[0:2]")


@pytest.mark.parametrize("name", ["llvm[1:3]", "llvm[0:4](2, 2)"])
def test_printed_meshes_are_read_again(name):
    @ir_module("llvm", "llvm:1", "llvm:2", "llvm:3")
    def module(x: R.Tensor((4, 8), "float32", name)):
        y = R.nn.relu(x)
        return y

    tvm.ir.assert_structural_equal(tvm.script.from_source(module.script(show_meta=True)), module)


def test_shardings_that_cannot_be():
    @ir_module("llvm", "llvm:1")
    def uneven(x: R.Tensor((3, 8), "float32", "llvm[0:2]")):
        y = R.hetero.shard(x, "S[0]")
        return y

    with pytest.raises(rh.PlacementError, match=r"shape \(3, 8\), .* 2 devices cannot have in equal parts"):
        partition_by_mesh(uneven)

    @ir_module("llvm", "llvm:1")
    def single(x: R.Tensor((4, 8), "float32", "llvm[0:2]"), y: R.Tensor((4, 8), "float32", "llvm:0")):
        z: R.Tensor((4, 8), "float32", "llvm:0") = R.hetero.shard(y, "S[0]")
        return (x, z)

    with pytest.raises(rh.PlacementError, match="on llvm:0, which is not a mesh; expected the annotation of a mesh"):
        partition_by_mesh(single)

    @ir_module("llvm")
    def without_mesh(x: R.Tensor((4, 8), "float32")):
        y = R.hetero.shard(x, "S[0]")
        return y

    with pytest.raises(rh.PlacementError, match="which is not a mesh"):
        rh.compile(without_mesh)

    @ir_module("llvm", "llvm:1")
    def unknown(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        y = R.hetero.shard(R.nonzero(x), "S[1]")
        return y

    with pytest.raises(rh.PlacementError, match="sizes are not known; expected a shape"):
        partition_by_mesh(unknown)


def test_a_mesh_of_one_device_takes_any_sharding():
    @ir_module("llvm")
    def module(x: R.Tensor((3, 8), "float32", "llvm[0:1]")):
        y = R.nn.relu(R.hetero.shard(R.hetero.shard(x, "S[0]"), "S[1]"))
        return y

    assert ops_of(partition_by_mesh(module)) == ["relax.nn.relu"]


def test_weights_that_cannot_be_cut_are_computed_whole():
    """Columns of a reshaped row are not one part of the row."""

    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            w: R.Tensor((4, 4), "float32", "llvm[0:2]") = R.reshape(R.const(W[0]), (4, 4))
            s: R.Tensor((4, 4), "float32", "llvm[0:2]") = R.hetero.shard(w, "S[1]")
            y = R.matmul(s, x)
            R.output(y)
        return y

    x = np.random.default_rng(2).standard_normal((4, 8)).astype("float32")
    after = partition_by_mesh(module)
    np.testing.assert_allclose(run(after, x), W[0].reshape(4, 4) @ x, rtol=1e-5)
    assert [[int(n) for n in call.args[0].ty.shape.values] for call in calls_of("relax.matmul", after)] == [[4, 2]] * 2


def test_values_of_a_mesh_combine_wherever_it_is_named():
    """TVM compares the devices of operands by identity."""

    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]"), y: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        z: R.Tensor((4, 8), "float32", "llvm[0:2]") = R.add(x, y)
        return z

    for each in (module, tvm.ir.load_json(tvm.ir.save_json(module))):
        assert ops_of(partition_by_mesh(each)) == ["relax.add"]


def test_hints_name_meshes():
    """A hint moves what is computed from it, although TVM's inference copies the operand's device to its type."""

    @ir_module("llvm", "llvm:1")
    def before(x: R.Tensor((4, 8), "float32", "llvm:0")):
        with R.dataflow():
            a = R.exp(x)
            b = rh.op.hint_on_device(a, "llvm[0:2]")
            c = R.hetero.shard(R.matmul(b, R.const(W)), "S[1]")
            d = R.to_vdevice(c, "llvm:1")
            R.output(d)
        return d

    @ir_module("llvm", "llvm:1")
    def expected(x: R.Tensor((4, 8), "float32", "llvm:0")):
        with R.dataflow():
            a = R.exp(x)
            a_sent = R.to_vdevice(a, "llvm:1")
            lv: R.Tensor((4, 8), "float32", "llvm:0") = R.matmul(a, R.const(W[:, :8]))
            lv_1: R.Tensor((4, 8), "float32", "llvm:1") = R.matmul(a_sent, R.const(W[:, 8:]))
            lv_sent = R.to_vdevice(lv, "llvm:1")
            whole: R.Tensor((4, 16), "float32", "llvm:1") = R.concat((lv_sent, lv_1), axis=1)
            R.output(whole)
        return whole

    check_pass(rh.transform.PartitionByMesh(), before, expected)


def test_modules_of_r_dist_are_refused():
    mesh = relax.distributed.device_mesh((2,), tvm.ir.Range(0, 2))
    builder, x = relax.BlockBuilder(), relax.Var("x", R.Tensor((4, 8), "float32"))
    with builder.function("main", [x]):
        placement = relax.distributed.Placement.from_text("S[0]")
        builder.emit_func_output(builder.emit(relax.op.distributed.annotate_sharding(x, mesh, placement), "part"))
    with pytest.raises(
        rh.PlacementError, match="'part' in function 'main' .* R.dist.*; expected annotations of a mesh"
    ):
        rh.compile(builder.get())


def test_placements_are_checked():
    for text in ("P", "S[-1]", "S", 1):
        with pytest.raises(rh.PlacementError, match=r"expected 'R' or 'S\[a\]'"):
            rh.op.shard(relax.Var("x", R.Tensor((4,), "float32")), text)


def test_functions_over_meshes_are_inlined():
    @I.ir_module
    class Calls:
        I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

        @R.function(private=True)
        def layer(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
            with R.dataflow():
                h: R.Tensor((4, 16), "float32", "llvm[0:2]") = R.matmul(x, R.const(W))
                y: R.Tensor((4, 8), "float32", "llvm[0:2]") = R.matmul(h, R.const(V))
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
            cls = Calls
            with R.dataflow():
                y: R.Tensor((4, 8), "float32", "llvm[0:2]") = cls.layer(x)
                z: R.Tensor((4, 8), "float32", "llvm[0:2]") = cls.layer(y)
                R.output(z)
            return z

    @ir_module("llvm", "llvm:1")
    def inlined(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            h = R.matmul(x, R.const(W))
            y = R.matmul(h, R.const(V))
            first = y
            h1 = R.matmul(first, R.const(W))
            y1 = R.matmul(h1, R.const(V))
            second = y1
            R.output(second)
        return second

    check_pass(with_inlined_calls, Calls, inlined)
    after = partition_by_mesh(Calls)
    assert [gv.name_hint for gv in after.functions] == ["main"]
    assert ops_of(after).count("relax.matmul") == 8  # two products in two calls on two devices
    x = np.random.default_rng(2).standard_normal((4, 8)).astype("float32")
    np.testing.assert_allclose(run(after, x), x @ W @ V @ W @ V, rtol=1e-3, atol=1e-3)


def test_inlined_functions_keep_devices_and_take_sizes_of_arguments():
    """Types of the callee are on devices, sizes are those of the caller; one function calls another one."""

    @I.ir_module
    class Calls:
        I.module_global_infos({"vdevice": [I.vdevice(CORE, 0), I.vdevice(CORE, 1)]})

        @R.function(private=True)
        def inner(x: R.Tensor(("n", 8), "float32")) -> R.Tensor(("n", 16), "float32", "llvm[0:2]"):
            n = T.int64()
            with R.dataflow():
                h: R.Tensor((n, 16), "float32", "llvm[0:2]") = R.matmul(x, R.const(W))
                R.output(h)
            return h

        @R.function(private=True)
        def layer(x: R.Tensor(("n", 8), "float32")) -> R.Tensor(("n", 8), "float32", "llvm[0:2]"):
            n = T.int64()
            cls = Calls
            with R.dataflow():
                h: R.Tensor((n, 16), "float32", "llvm[0:2]") = cls.inner(x)
                y: R.Tensor((n, 8), "float32", "llvm[0:2]") = R.matmul(h, R.const(V))
                R.output(y)
            return y

        @R.function
        def main(x: R.Tensor((4, 8), "float32"), z: R.Tensor(("m", 8), "float32")):
            m = T.int64()
            cls = Calls
            with R.dataflow():
                y: R.Tensor((4, 8), "float32", "llvm[0:2]") = cls.layer(x)
                w: R.Tensor((m, 8), "float32", "llvm[0:2]") = cls.layer(z)
                R.output(y, w)
            return y, w

    after = partition_by_mesh(Calls)
    assert [gv.name_hint for gv in after.functions] == ["main"]
    assert ops_of(after).count("relax.matmul") == 8
    x, z = (np.random.default_rng(2).standard_normal((rows, 8)).astype("float32") for rows in (4, 3))
    for actual, given in zip(rh.vm.VirtualMachine(rh.compile(Calls))["main"](x, z), (x, z), strict=True):
        np.testing.assert_allclose(actual.numpy(), given @ W @ V, rtol=1e-4, atol=1e-4)


def test_inlined_functions_take_sizes_from_tuples_and_shapes():
    @I.ir_module
    class Calls:
        I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

        @R.function(private=True)
        def layer(pair: R.Tuple(R.Tensor(("n", 8), "float32"), R.Tensor(("n", 8), "float32")), size: R.Shape(["k"])):
            n, k = T.int64(), T.int64()
            with R.dataflow():
                x = pair[1]
                y: R.Tensor((n, 8), "float32", "llvm[0:2]") = R.nn.relu(x)
                z: R.Tensor((n, k), "float32", "llvm[0:2]") = R.reshape(y, R.shape([n, k]))
                R.output(z)
            return z

        @R.function
        def main(x: R.Tensor(("m", 8), "float32")):
            cls = Calls
            with R.dataflow():
                y = cls.layer((x, x), R.shape([8]))
                R.output(y)
            return y

    after = partition_by_mesh(Calls)["main"]
    (rows,) = (extent for extent in after.params[0].ty.shape.values if isinstance(extent, T.Var))
    assert after.ret_ty.shape.values[0].same_as(rows) and int(after.ret_ty.shape.values[1]) == 8
    x = fresh_rng().standard_normal((3, 8)).astype("float32")
    np.testing.assert_array_equal(run(partition_by_mesh(Calls), x), np.maximum(x, 0))


def test_a_sum_is_sent_before_it_is_added():
    """A later reader on one device has transfers of the same parts, which the sum on all devices does not wait for."""

    @ir_module("llvm", "llvm:1")
    def before(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            a = R.matmul(R.nn.relu(R.matmul(x, R.const(W))), R.const(V))
            b = R.nn.softmax(a)
            c: R.Tensor((4, 8), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
            d: R.Tensor((4, 8), "float32", "llvm:1") = R.negative(c)
            e = R.matmul(b, R.const(W))
            R.output(d, e)
        return d, e

    after = partition_by_mesh(before)
    assert relax.analysis.check_well_formed(after)
    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    for actual, expected in zip(run(after, x), run(before, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_branches_begin_and_end_with_whole_values():
    @ir_module("llvm", "llvm:1")
    def before(x: R.Tensor((4, 8), "float32", "llvm[0:2]"), c: R.Tensor((), "bool", "llvm:0")):
        s = R.hetero.shard(R.nn.relu(x), "S[1]")
        if c:
            y = R.matmul(s, R.const(W))
            z = R.matmul(y, R.const(V))
        else:
            z = R.negative(x)
        return z

    @ir_module("llvm", "llvm:1")
    def expected(x: R.Tensor((4, 8), "float32", "llvm:0"), c: R.Tensor((), "bool", "llvm:0")):
        x1 = R.to_vdevice(x, "llvm:1")
        a = R.nn.relu(x)
        a1 = R.nn.relu(x1)
        s = R.strided_slice(a, [1], [0], [4])
        s1 = R.strided_slice(a1, [1], [4], [8])
        s1_sent = R.to_vdevice(s1, "llvm:0")
        whole: R.Tensor((4, 8), "float32", "llvm:0") = R.concat((s, s1_sent), axis=1)
        s_sent = R.to_vdevice(s, "llvm:1")
        whole1: R.Tensor((4, 8), "float32", "llvm:1") = R.concat((s_sent, s1), axis=1)
        if c:
            y: R.Tensor((4, 8), "float32", "llvm:0") = R.matmul(whole, R.const(W[:, :8]))
            y1: R.Tensor((4, 8), "float32", "llvm:1") = R.matmul(whole1, R.const(W[:, 8:]))
            p: R.Tensor((4, 8), "float32", "llvm:0") = R.matmul(y, R.const(V[:8]))
            p1: R.Tensor((4, 8), "float32", "llvm:1") = R.matmul(y1, R.const(V[8:]))
            p1_sent = R.to_vdevice(p1, "llvm:0")
            z = R.add(p, p1_sent)
        else:
            z = R.negative(x)
        return z

    check_pass(lambda mod: with_remarks(partition_by_mesh(mod), shardings=None), before, expected)


def test_loops_and_calls_in_branches():
    """A function that calls itself stays, with products on both devices; others are inlined, also in branches."""

    @I.ir_module
    class Loop:
        I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

        @R.function(private=True)
        def layer(x: R.Tensor((4, 8), "float32", "llvm[0:2]")) -> R.Tensor((4, 8), "float32", "llvm[0:2]"):
            h = R.hetero.shard(R.nn.relu(R.matmul(x, R.const(W))), "S[1]")
            y = R.tanh(R.matmul(h, R.const(V)))
            return y

        @R.function(private=True)
        def loop(i: R.Tensor((), "int64"), x: R.Tensor((4, 8), "float32", "llvm[0:2]")) -> R.Tuple(
            R.Tensor((), "int64"), R.Tensor((4, 8), "float32", "llvm[0:2]")
        ):
            cls = Loop
            if R.less(i, R.const(3, "int64")):
                y = cls.layer(x)
                j = R.add(i, R.const(1, "int64"))
                z = cls.loop(j, y)
            else:
                z = (i, x)
            return z

        @R.function
        def main(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
            cls = Loop
            result = cls.loop(R.const(0, "int64"), x)
            y = R.add(result[1], x)
            return y

    after = partition_by_mesh(Loop)
    assert sorted(gv.name_hint for gv in after.functions) == ["loop", "main"]
    products = [each.var for each in walk_bindings(after["loop"].body) if op_name(each.value) == "relax.matmul"]
    devices = [var.ty.vdevice.vdevice_id for var in products]
    assert devices == [0, 1, 0, 1]
    x = np.random.default_rng(2).standard_normal((4, 8)).astype("float32")
    expected = x
    for _ in range(3):
        expected = np.tanh(np.maximum(expected @ W, 0) @ V)
    actual = rh.vm.VirtualMachine(rh.compile(Loop))["main"](x)
    np.testing.assert_allclose(np.asarray(actual), expected + x, rtol=1e-4, atol=1e-4)


def test_impure_ops_run_once():
    @ir_module("llvm", "llvm:1", pure=False)
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        h = R.hetero.shard(R.matmul(x, R.const(W)), "S[1]")
        R.print(h, format="{}")
        y = R.matmul(h, R.const(V))
        return y

    assert ops_of(partition_by_mesh(module)).count("relax.print") == 1


def test_types_of_kernels_name_meshes():
    """A kernel without a rule computes its whole result on each device, wherever the annotation stands."""

    @ir_module("llvm", "llvm:1")
    class module:
        @T.prim_func(s_tir=True)
        def twice(a: T.Buffer((4, 8), "float32"), b: T.Buffer((4, 8), "float32")):
            for i, j in T.grid(4, 8):
                with T.sblock("twice"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = a[vi, vj] + a[vi, vj]

        @R.function
        def main(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
            y = R.hetero.shard(R.nn.relu(x), "S[1]")
            z = R.call_tir(module.twice, (y,), out_ty=R.Tensor((4, 8), "float32", "llvm[0:2]"))
            return z

    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    np.testing.assert_array_equal(rh.vm.VirtualMachine(rh.compile(module))["main"](x).numpy(), 2 * np.maximum(x, 0))


@pytest.mark.parametrize("kind", ["branch", "loop"])
def test_control_flow_is_refused_on_gpus(kind):
    @I.ir_module
    class Recursive:
        I.module_global_infos({"vdevice": [I.vdevice("cuda", 0), I.vdevice("cuda", 1)]})

        @R.function
        def main(x: R.Tensor((4,), "float32", "cuda[0:2]")) -> R.Tensor((4,), "float32", "cuda[0:2]"):
            cls = Recursive
            y: R.Tensor((4,), "float32", "cuda[0:2]") = cls.main(x)
            return y

    @ir_module("cuda", "cuda:1")
    def branches(x: R.Tensor((4,), "float32", "cuda[0:2]"), c: R.Tensor((), "bool")):
        if c:
            y = R.nn.relu(x)
        else:
            y = R.negative(x)
        return y

    with pytest.raises(rh.PlacementError, match="over a mesh of GPUs.*; expected no .* besides meshes of GPUs"):
        partition_by_mesh(Recursive if kind == "loop" else branches)


def test_sizes_of_match_casts_are_known_on_each_device():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor(("m", 8), "float32", "llvm[0:2]"), mask: R.Tensor((8,), "bool")):
        n = T.int64()
        s = R.hetero.shard(x, "S[1]")
        y = R.match_cast(s, R.Tensor((n, 8), "float32", "llvm[0:2]"))
        k = T.int64()
        weight = R.match_cast(R.const(W), R.Tensor((8, k), "float32"))
        z: R.Tensor((n, 8), "float32", "llvm[0:2]") = R.nn.relu(y)
        w = R.matmul(z, weight)
        return w

    after = partition_by_mesh(module)
    casts = [binding for block in after["main"].body.blocks for binding in block.bindings]
    casts = [binding for binding in casts if isinstance(binding, relax.MatchCast)]
    assert [int(cast.ty.shape.values[1]) for cast in casts[:2]] == [4, 4]
    vm = rh.vm.VirtualMachine(rh.compile(module))
    x = np.random.default_rng(2).standard_normal((3, 8)).astype("float32")
    np.testing.assert_allclose(np.asarray(vm["main"](x, np.ones(8, bool))), np.maximum(x, 0) @ W, rtol=1e-4, atol=1e-4)


def test_casts_take_fields_of_tuples():
    """As the ONNX op Unique is imported."""

    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((8,), "int64", "llvm[0:2]")):
        n = T.int64()
        found = R.unique(x, True, True, False, True)
        numbers = R.match_cast(found[0], R.Tensor((n,), "int64"))
        indices = R.match_cast(found[1], R.Tensor((n,), "int64"))
        y: R.Tensor((n,), "int64", "llvm[0:2]") = R.add(numbers, indices)
        return y

    vm = rh.vm.VirtualMachine(rh.compile(module))
    np.testing.assert_array_equal(vm["main"](np.array([5, 3, 5, 1, 1, 3, 9, 9])).numpy(), [4, 4, 5, 15])


def test_casts_of_tuples_are_refused():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        n = T.int64()
        pair = (x, x)
        cast = R.match_cast(pair, R.Tuple(R.Tensor((n, 8), "float32"), R.Tensor((n, 8), "float32")))
        return cast

    with pytest.raises(rh.PlacementError, match="match_cast of a tuple at 'cast'; expected one of each"):
        partition_by_mesh(module)


class RandomGraph:
    """A random function over a mesh, whose values have random shardings."""

    def __init__(
        self, generator: np.random.Generator, mesh_shape: tuple[int, ...], ops: int, target: Any = None
    ) -> None:
        self.generator, self.mesh_shape = generator, mesh_shape
        self.vdevices = parse_vdevices([target or CORE] * math.prod(mesh_shape))
        kind, shape = self.vdevices[0].target.kind.name, ", ".join(map(str, mesh_shape))
        self.mesh = lookup(f"{kind}[0:{len(self.vdevices)}]({shape})", self.vdevices)
        self.bindings: list[relax.Binding] = []
        self.builder = relax.BlockBuilder()
        self.params = [relax.Var(f"x{i}", relax.TensorType([4, 8, 12], "float32")) for i in range(2)]
        self.values: list[relax.Expr] = list(self.params)
        for _ in range(ops):
            self.add()

    def emit(self, value: relax.Expr) -> relax.Var:
        var = relax.DataflowVar(f"v{len(self.bindings)}", self.builder.normalize(value).ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def weight(self, *shape: int) -> relax.Expr:
        return relax.const(self.generator.standard_normal(shape).astype("float32"))

    def add(self) -> None:
        pick = self.generator
        x = self.values[pick.integers(max(0, len(self.values) - 4), len(self.values))]
        shape = [int(extent) for extent in x.ty.shape.values]
        last, op = shape[-1], relax.op
        choices = [
            lambda: op.matmul(x, self.weight(last, int(pick.choice([8, 12, 6])))),
            lambda: op.nn.relu(x),
            lambda: op.multiply(x, self.weight(last)),
            lambda: op.add(x, self.weight(*shape)),
            lambda: op.nn.softmax(x, axis=int(pick.integers(len(shape)))),
            lambda: op.nn.layer_norm(x, self.weight(last), self.weight(last), axes=[-1]),
            lambda: op.permute_dims(x, [int(axis) for axis in pick.permutation(len(shape))]),
            lambda: op.sum(x, [int(pick.integers(len(shape)))], keepdims=True) if max(shape) > 1 else op.nn.relu(x),
            lambda: op.mean(x, [int(pick.integers(len(shape)))], keepdims=True),
            lambda: op.max(x, [int(pick.integers(len(shape)))], keepdims=True),
            lambda: op.concat([x, x], axis=int(pick.integers(len(shape)))) if np.prod(shape) < 4000 else op.nn.relu(x),
            lambda: op.strided_slice(x, [len(shape) - 1], [last // 4], [last]) if last > 3 else op.nn.relu(x),
            lambda: (
                op.take(x, relax.const(np.array([0, shape[1] - 1, 0])), axis=1) if len(shape) > 1 else op.nn.relu(x)
            ),
            lambda: op.reshape(x, [shape[0] * shape[1], *shape[2:]] if len(shape) == 3 else [1, *shape]),
            lambda: op.broadcast_to(x, [3, *shape]) if len(shape) == 2 else op.nn.relu(x),
        ]
        y = self.emit(choices[pick.integers(len(choices))]())
        if pick.random() < 0.3:  # two halves of an axis
            axis = int(pick.integers(len(shape)))
            extent = int(y.ty.shape.values[axis]) if axis < y.ty.ndim else 1
            if extent > 1:
                parts = self.emit(op.split(y, [extent // 2], axis))
                y = self.emit(relax.TupleGetItem(parts, int(pick.integers(2))))
        if pick.random() < 0.5:
            left, placements = [int(extent) for extent in y.ty.shape.values], []
            for count in self.mesh_shape:
                axes = [axis for axis, extent in enumerate(left) if extent % count == 0]
                is_split = bool(axes) and pick.random() < 0.8
                axis = int(pick.choice(axes)) if is_split else 0
                placements.append(f"S[{axis}]" if is_split else "R")
                left[axis] //= count if is_split else 1
            y = self.emit(rh.op.shard(y, ", ".join(placements)))
        self.values.append(y)

    def module(self):
        """The module, with all values on the mesh."""
        names: dict[relax.Var, relax.Var] = {}
        bindings = []
        kept = self.values[-3:]
        for binding in self.bindings:
            ty = binding.var.ty
            if isinstance(ty, relax.TensorType):
                ty = relax.TensorType(ty.shape, ty.dtype, self.mesh)
            is_output = any(binding.var.same_as(value) for value in kept)
            var = (relax.Var if is_output else relax.DataflowVar)(binding.var.name, ty)
            names[binding.var] = var
            value = _with_variables(binding.value, names)
            if isinstance(value, relax.Call):
                relax.expr._update_type(value, ty)
            bindings.append(relax.VarBinding(var, value))
        result = relax.Tuple([names.get(value, value) for value in kept])
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], result)
        func = relax.Function(self.params, body, result.ty).with_attr("global_symbol", "main")
        mod = relax.BlockBuilder().get()
        mod = with_vdevices(mod, self.vdevices)
        mod["main"] = func
        return mod


def _with_variables(expr, names):
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([_with_variables(field, names) for field in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(_with_variables(expr.tuple_value, names), expr.index)
    if isinstance(expr, relax.Call):
        return relax.Call(expr.op, [_with_variables(arg, names) for arg in expr.args], expr.attrs, expr.ty_args)
    return names.get(expr, expr) if isinstance(expr, relax.Var) else expr


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (2, 3), (2, 1, 2)])
def test_any_sharding_of_a_random_graph_gives_the_same_numbers(mesh_shape):
    generator = fresh_rng()
    partitioned = 0
    for _ in range(12):
        mod = RandomGraph(generator, mesh_shape, 8).module()
        after = partition_by_mesh(mod)
        assert relax.analysis.check_well_formed(after)
        arguments = [generator.standard_normal((4, 8, 12)).astype("float32") for _ in range(2)]
        for actual, expected in zip(run(after, *arguments), run(mod, *arguments), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4 * max(1, np.abs(expected).max()))
        local = {str(var.name) for block in after["main"].body.blocks for var in (b.var for b in block.bindings)}
        partitioned += any("@1" in name for name in local)
    assert partitioned > 6, "most graphs have work for the second device"


def test_any_sharding_becomes_any_other_one():
    """Between all pairs of placements on a mesh of two axes, among them splits within splits."""
    placements = [f"{first}, {second}" for first in ("R", "S[0]", "S[1]") for second in ("R", "S[0]", "S[1]")]
    graph = RandomGraph(np.random.default_rng(0), (2, 2), 0)
    for before in placements:
        for after in placements:
            split = graph.emit(rh.op.shard(graph.params[0], before))
            graph.values.append(graph.emit(relax.op.nn.relu(graph.emit(rh.op.shard(split, after)))))
    graph.values = [graph.emit(relax.op.concat(graph.values[2:], 2))]
    mod = graph.module()
    x = fresh_rng().standard_normal((2, 4, 8, 12)).astype("float32")
    np.testing.assert_array_equal(run(partition_by_mesh(mod), *x)[0], run(mod, *x)[0])


def test_compiled_graphs_run_on_all_devices():
    mod = RandomGraph(np.random.default_rng(5), (2,), 12).module()
    exe = rh.compile(mod)
    x = np.random.default_rng(6).standard_normal((2, 4, 8, 12)).astype("float32")
    for actual, expected in zip(rh.vm.VirtualMachine(exe)["main"](*x), run(mod, *x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=2e-4 * max(1, np.abs(expected).max()))
    assert {region.device for region in exe.metadata.regions} == {0, 1}


def test_an_axis_that_one_axis_of_a_mesh_used_up_is_not_split_again():
    @ir_module("llvm", "llvm:1", "llvm:2", "llvm:3")
    def module(x: R.Tensor((2, 2), "float32", "llvm[0:4](2, 2)")):
        with R.dataflow():
            a = R.hetero.shard(R.nn.relu(x), "R, S[1]")
            b = R.hetero.shard(R.negative(x), "S[1], S[0]")
            c = R.reshape(R.add(a, b), (2, 2, 1))
            R.output(c)
        return c

    x = fresh_rng().standard_normal((2, 2)).astype("float32")
    np.testing.assert_array_equal(run(partition_by_mesh(module), x), run(module, x))


def test_parts_of_segments():
    array = np.arange(12)
    sharding = Sharding(0, (8, 4))
    assert sharding.part(array, 0, 2).tolist() == [0, 1, 2, 3, 8, 9]
    assert sharding.part(array, 1, 2).tolist() == [4, 5, 6, 7, 10, 11]
    assert not Sharding(0, (8, 3)).divides([11], 2)
    assert not Sharding(0, (8, 4)).divides([13], 2)


def test_slices_of_a_product_split_its_segments():
    """Queries, keys and values of one product, as ONNX's Split is imported: each device has heads of all three."""
    weight = np.random.default_rng(3).standard_normal((8, 24)).astype("float32")

    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            joined = R.nn.relu(R.matmul(x, R.const(weight)))
            q = R.strided_slice(joined, [1], [0], [8])
            k = R.strided_slice(joined, [1], [8], [16])
            v = R.strided_slice(joined, [1], [16], [24])
            y = R.matmul(R.add(R.multiply(q, k), v), R.const(V[:8]))
            R.output(y)
        return y

    after = partition_by_mesh(module)
    assert "relax.concat" not in ops_of(after)
    assert {int(call.ty.shape.values[1]) for call in calls_of("relax.strided_slice", after)} == {4}
    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    np.testing.assert_allclose(run(after, x), run(module, x), rtol=1e-4, atol=1e-4)


def gpus_of_a_mesh():
    """A module over 2 x 2 GPUs, batches along the first axis, and its partition."""
    gpu = {"kind": "cuda", "arch": "sm_90a"}

    @ir_module(gpu, (gpu, 1), (gpu, 2), (gpu, 3))
    def module(x: R.Tensor((4, 8), "float32", "cuda[0:4](2, 2)")):
        with R.dataflow():
            rows = R.hetero.shard(x, "S[0], R")
            a = R.nn.softmax(R.matmul(R.nn.relu(R.matmul(rows, R.const(W))), R.const(V)))
            b = R.nn.softmax(R.matmul(R.nn.relu(R.matmul(a, R.const(W))), R.const(V)))
            c = R.matmul(b, R.const(W))
            R.output(c)
        return c

    return partition_by_mesh(module)


def test_sums_are_within_groups_of_an_axis():
    """Pairs of GPUs add their products; the batch crosses between pairs only at the ends."""
    after = gpus_of_a_mesh()
    kernels = [call for call in calls_of("relax.call_tir", after) if "all_reduce" in call.args[0].name_hint]
    assert len(kernels) == 2 * 4
    assert {tuple(map(int, call.ty.shape.values)) for call in kernels} == {(2, 8)}
    memories = [[int(arg) for arg in call.args[1:]] for call in calls_of("relax.call_pure_packed", after)]
    assert [(device, *group) for device, _, *group in memories] == [(0, 0, 1), (1, 0, 1), (2, 2, 3), (3, 2, 3)]
    assert ops_of(after).count("relax.to_vdevice") == 3 + 3  # the argument; parts of the result


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("S[0]", "found 1 placement for .* expected one for each of its axes, 2 in all"),
        ("S[0], S[0], R", "3 placements .* expected one for each of its axes, 2 in all"),
        ("S[1], S[1]", "2 x 2 devices cannot have in equal parts"),
    ],
)
def test_placements_of_a_mesh_of_two_axes(placement, message):
    @ir_module("llvm", "llvm:1", "llvm:2", "llvm:3")
    def module(x: R.Tensor((4, 6), "float32", "llvm[0:4](2, 2)")):
        y = R.hetero.shard(x, placement)
        return y

    with pytest.raises(rh.PlacementError, match=message):
        partition_by_mesh(module)


def test_tuples_numbers_and_merged_axes():
    """A result that is a split tuple, an index that is a number, and channels of two values merged with others."""

    @ir_module("llvm", "llvm")
    def module(x: R.Tensor((4, 6), "float32", "llvm[0:2]"), z: R.Tensor((2, 4, 3), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.hetero.shard(x, "S[0]")
            halves = R.split(y, 2, axis=1)
            column = R.take(y, R.prim_value(3), axis=1)
            w = R.hetero.shard(z, "S[1]")
            rows = R.reshape(R.concat((w, w), axis=1), (2, 24))
            R.output(halves, column, rows)
        return (halves, column, rows)

    x, z = (np.random.default_rng(3).random(shape, "float32") for shape in ((4, 6), (2, 4, 3)))
    halves, column, rows = rh.vm.VirtualMachine(rh.compile(module))["main"](x, z)
    for half, expected in zip(halves, np.split(x, 2, 1), strict=True):
        np.testing.assert_array_equal(half.numpy(), expected)
    np.testing.assert_array_equal(column.numpy(), x[:, 3])
    np.testing.assert_array_equal(rows.numpy(), np.concatenate([z, z], 1).reshape(2, 24))


@pytest.mark.parametrize("layers", [1, 2])
def test_sums_on_gpus_of_any_shapes(layers):
    """Kernels use at least two slots in turn: the only sum of a function is computed twice."""
    ones = [np.ones(shape, "float32") for shape in ((8, 16), (16, 8), (8, 32), (32, 16), (16, 8))]

    @ir_module("cuda", "cuda:1")
    def one(x: R.Tensor((4, 8), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.matmul(R.matmul(x, R.const(ones[0])), R.const(ones[1]))
            b = R.matmul(a, R.const(ones[2]))
            R.output(b)
        return b

    @ir_module("cuda", "cuda:1")
    def two(x: R.Tensor((4, 8), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.matmul(R.matmul(x, R.const(ones[0])), R.const(ones[1]))
            b = R.matmul(R.matmul(a, R.const(ones[2])), R.const(ones[3]))
            c = R.matmul(b, R.const(ones[4]))
            R.output(c)
        return c

    module = [one, two][layers - 1]
    kernels = [gv for gv in partition_by_mesh(module).functions if gv.name_hint.startswith("all_reduce")]
    assert len(kernels) == 4  # two of each GPU, whose code differs by slots
    assert [region.device for region in rh.compile(module).metadata.regions][:2] == [0, 1]


def test_reshapes_and_reductions_of_what_was_gathered_are_not_gathered():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            a = R.matmul(x, R.const(W))
            b = R.reshape(a, (4, 4, 4))
            c = R.max(b, axis=[-1], keepdims=True)
            d = R.nn.softmax(R.to_vdevice(b, "llvm:0"), axis=1)
            e = R.multiply(d, R.to_vdevice(c, "llvm:0"))
            R.output(a, e)
        return a, e

    after = partition_by_mesh(module)
    assert ops_of(after).count("relax.to_vdevice") == 2  # of the argument and `a`
    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    for actual, expected in zip(run(after, x), run(module, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_reshape_is_gathered_on_a_device_of_another_mesh():
    """The operand of the reshape is whole on the mesh, but not there."""

    @ir_module("llvm", "llvm:1", "llvm:2")
    def before(x: R.Tensor((4, 8), "float32", "llvm[0:2]")):
        with R.dataflow():
            a = R.nn.relu(R.hetero.shard(x, "S[1]"))
            b = R.reshape(a, (1, 4, 8))
            c = R.nn.softmax(a)
            d: R.Tensor((1, 4, 8), "float32", "llvm:2") = R.to_vdevice(b, "llvm:2")
            e = R.negative(d)
            R.output(c, e)
        return c, e

    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    for actual, expected in zip(run(partition_by_mesh(before), x), run(before, x), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_few_elements_of_a_sum_are_taken_before_it_is_added():
    @ir_module("llvm", "llvm:1")
    def module(x: R.Tensor((4, 8), "float32", "llvm[0:2]"), index: R.Tensor((1,), "int32", "llvm[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.nn.relu(R.matmul(x, R.const(W))), R.const(V)))
            b = R.nn.softmax(R.strided_slice(R.take(a, index, axis=0, mode="clip"), [1], [0], [4]))
            R.output(b)
        return b

    after = partition_by_mesh(module)
    adds = [[int(extent) for extent in call.ty.shape.values] for call in calls_of("relax.add", after)]
    assert adds == [[4, 8], [1, 4]]  # the residual; the sum, on the device that returns it
    x = fresh_rng().standard_normal((4, 8)).astype("float32")
    arguments = x, np.array([2], "int32")
    np.testing.assert_allclose(run(after, *arguments), run(module, *arguments), rtol=1e-5, atol=1e-6)
