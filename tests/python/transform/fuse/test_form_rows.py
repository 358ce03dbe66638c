"""FormRows: which plain ops become work on rows, and which stay."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from gpu_interpreter import run
from modules import ir_module, ops_of
from relax_hetero.op.rows import ROWS
from relax_hetero.target.vdevice import same_object
from relax_hetero.transform import MaterializeEncodings, RealizeVDevice, collect_fusions
from relax_hetero.transform.fuse.form_rows import FormRows
from relax_hetero.transform.ir.rewriting import op_name, relax_functions, walk_bindings

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}


def formed(mod):
    after = FormRows()(RealizeVDevice()(mod))
    assert FormRows()(after).same_as(after)
    return after


def programs(mod):
    """Programs of every `rows`, in order, with the names of its operands' variables or their shapes."""
    texts = []
    for _, func in relax_functions(mod):
        for binding in walk_bindings(func):
            if op_name(binding.value) == ROWS:
                texts.append(str(binding.value.attrs.program))
    return texts


def test_a_decomposed_layer_norm():
    """Prologue, moments and epilogue are one op; a value that something else reads stays outside."""

    @ir_module(V4)
    def Before(
        x: R.Tensor((2, "m", 64), "float32"), y: R.Tensor((2, "m", 64), "float32"), g: R.Tensor((64,), "float32")
    ):
        with R.dataflow():
            s = R.add(x, y)
            m = R.mean(s, axis=[-1], keepdims=True)
            c = R.subtract(s, m)
            q = R.power(c, R.const(2.0, "float32"))
            v = R.mean(q, axis=[2], keepdims=True)
            e = R.add(v, R.const(0.5, "float32"))
            d = R.sqrt(e)
            n = R.divide(c, d)
            k = R.multiply(n, g)
            r = R.nn.gelu(k)
            R.output(r)
        return r

    @ir_module(V4)
    def Expected(
        x: R.Tensor((2, "m", 64), "float32"), y: R.Tensor((2, "m", 64), "float32"), g: R.Tensor((64,), "float32")
    ):
        with R.dataflow():
            r = R.hetero.rows(
                g,
                x,
                y,
                program="r0 = mean(add(x1, x2)); r1 = mean(multiply(subtract(add(x1, x2), r0), "
                "subtract(add(x1, x2), r0))); gelu(multiply(divide(subtract(add(x1, x2), r0), "
                "sqrt(add(r1, 0.5))), x0))",
                ops="add,mean,subtract,power,sqrt,divide,multiply,gelu",
            )
            R.output(r)
        return r

    assert_structural_equal(formed(Before), RealizeVDevice()(Expected))


def test_composite_ops_and_two_devices():
    """Softmax on one device, a norm on the other; nothing crosses."""

    @ir_module(V4, (V4, 1))
    def Before(x: R.Tensor((4, 64), "float32", "llvm:0"), g: R.Tensor((64,), "float32", "llvm:1")):
        with R.dataflow():
            a = R.nn.softmax(x, axis=-1)
            b = R.to_vdevice(a, "llvm:1")
            c = R.nn.rms_norm(b, g, axes=[-1], epsilon=1e-5)
            R.output(c)
        return c

    after = formed(Before)
    assert ops_of(after) == [ROWS, "relax.to_vdevice", ROWS]
    softmax, norm = programs(after)
    assert softmax.startswith("r0 = max(x0); r1 = sum(exp(subtract(x0, r0)));")
    assert norm == "r0 = mean(multiply(x0, x0)); multiply(multiply(x0, rsqrt(add(r0, 1e-05))), x1)"
    devices = [binding.var.ty.vdevice for binding in walk_bindings(after["main"])]
    vdevices = after.global_infos["vdevice"]
    assert [same_object(v, vdevices[i]) for v, i in zip(devices, (0, 1, 1), strict=True)] == [True] * 3


def test_reductions_without_kept_dimensions_are_reshaped():
    @ir_module(V4)
    def Before(x: R.Tensor((3, 5, 64), "float32"), bias: R.Tensor((5,), "float32")):
        with R.dataflow():
            s = R.sum(R.multiply(x, x), axis=[-1])
            t = R.add(R.sqrt(s), bias)
            R.output(t)
        return t

    @ir_module(V4)
    def Expected(x: R.Tensor((3, 5, 64), "float32"), bias: R.Tensor((5,), "float32")) -> R.Tensor((3, 5), "float32"):
        with R.dataflow():
            t_x0 = R.reshape(bias, (5, 1))
            t_rows = R.hetero.rows(
                t_x0,
                x,
                program="r0 = sum(multiply(x1, x1)); add(sqrt(r0), x0)",
                ops="multiply,sum,sqrt,add",
            )
            t = R.reshape(t_rows, (3, 5))
            R.output(t)
        return t

    assert_structural_equal(formed(Before), RealizeVDevice()(Expected))


def test_norms_over_several_axes_merge_them():
    """Groups of channels: one value a group for scale; the mean of an image alone stays as it is."""

    @ir_module(V4)
    def Before(x: R.Tensor((2, 4, 3, 8, 8), "float32"), scale: R.Tensor((1, 4, 1, 1, 1), "float32")):
        with R.dataflow():
            m = R.mean(x, axis=[2, 3, 4], keepdims=True)
            c = R.subtract(x, m)
            v = R.mean(R.multiply(c, c), axis=[2, 3, 4], keepdims=True)
            y = R.multiply(R.multiply(c, R.rsqrt(v)), scale)
            p = R.mean(y, axis=[2, 3, 4])
            R.output(y, p)
        return (y, p)

    after = formed(Before)
    assert programs(after) == [
        "r0 = mean(x0); r1 = mean(multiply(subtract(x0, r0), subtract(x0, r0))); "
        "multiply(multiply(subtract(x0, r0), rsqrt(r1)), x1)"
    ]
    assert ops_of(after).count("relax.mean") == 1
    rows = next(b for b in walk_bindings(after["main"]) if op_name(b.value) == ROWS)
    assert [[int(e) for e in arg.ty.shape.values] for arg in rows.value.args] == [[2, 4, 192], [1, 4, 1]]


def test_masks_and_choices_join():
    @ir_module(V4)
    def Before(x: R.Tensor((2, 8, 64), "float32"), keep: R.Tensor((8, 64), "bool"), low: R.Tensor((), "float32")):
        with R.dataflow():
            a = R.where(keep, x, low)
            b = R.nn.softmax(a, axis=2)
            R.output(b)
        return b

    (program,) = programs(formed(Before))
    assert program.startswith("r0 = max(where(x")


def test_ops_that_stay(request):
    """Other axes, short rows, other types, values used twice, and devices without a kernel."""

    def module(build, shape=(4, 64), dtype="float32", target=V4):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType(shape, dtype))
        with builder.function("main", [x]):
            with builder.dataflow():
                out = builder.emit_output(build(builder, x))
            builder.emit_func_output(out)
        mod = builder.get()
        mod.update_global_info("vdevice", [relax.VDevice(tvm.target.Target(target))])
        return mod

    softmax = relax.op.nn.softmax
    cases = [
        (module(lambda _, x: softmax(x, axis=0)), "its axes are not the last ones"),
        (module(lambda _, x: softmax(x, axis=-1), shape=(4, 3)), "its rows have 3 elements"),
        (module(lambda _, x: softmax(x, axis=-1), dtype="float64"), "its type lacks a kernel"),
        (module(lambda _, x: relax.op.mean(x, axis=[0, 1])), "reduces 2 axes"),
        (module(lambda _, x: softmax(x, axis=-1), target="c"), None),
        (module(lambda _, x: relax.op.nn.relu(x)), None),
    ]
    for mod, reason in cases:
        with collect_fusions() as report:
            after = formed(mod)
        assert programs(after) == []
        reasons = [entry.reason for entry in report.missed]
        assert [reason in text for text in reasons] == ([True] if reason else []), reasons


def test_a_value_used_elsewhere_ends_a_region():
    @ir_module(V4)
    def Before(x: R.Tensor((4, 64), "float32"), y: R.Tensor((4, 64), "float32")):
        with R.dataflow():
            s = R.add(x, y)
            a = R.nn.softmax(s, axis=-1)
            b = R.multiply(a, y)
            c = R.add(s, a)
            R.output(b, c)
        return (b, c)

    after = formed(Before)
    assert ops_of(after) == ["relax.add", ROWS, "relax.multiply", "relax.add"]


@pytest.mark.parametrize("axis", [None, [0]])
def test_all_of_a_vector(axis):
    """A vector is one row."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            total = builder.emit(relax.op.sum(relax.op.exp(x), axis=axis))
            out = builder.emit_output(relax.op.divide(x, total))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [relax.VDevice(tvm.target.Target(V4))])
    assert programs(formed(mod)) == ["r0 = sum(exp(x0)); divide(x0, r0)"]


def test_half_precision_is_cast_where_an_op_rounds():
    """Not the greatest of a row, a choice, a view or a cast; a softmax as a whole; the end by being stored."""

    @ir_module(V4)
    def Before(x: R.Tensor((3, 64), "float16"), s: R.Tensor((), "float16"), keep: R.Tensor((3, 64), "bool")):
        with R.dataflow():
            y = R.where(keep, R.multiply(x, s), s)
            top = R.max(y, axis=[1])
            low = R.nn.relu(R.subtract(y, R.reshape(top, (3, 1))))
            e = R.nn.softmax(low, axis=-1)
            total = R.astype(R.sum(R.astype(e, "float32"), axis=[-1], keepdims=True), "float16")
            q = R.add(R.divide(e, total), R.mean(e, axis=[-1], keepdims=True))
            R.output(q)
        return q

    y = "where(x0, cast(multiply(x2, x1), 'float16'), x1)"
    low = f"relu(cast(subtract({y}, r0), 'float16'))"
    e = f"cast(multiply(exp(subtract({low}, r1)), divide(1.0, r2)), 'float16')"
    assert programs(formed(Before)) == [
        f"r0 = max({y}); r1 = max({low}); r2 = sum(exp(subtract({low}, r1))); "
        f"r3 = sum(cast({e}, 'float32')); r4 = mean({e}); "
        f"add(cast(divide({e}, cast(r3, 'float16')), 'float16'), cast(r4, 'float16'))"
    ]


def test_gpus_have_kernels_of_rows():
    """The op is formed, and its kernel computes as numpy does."""

    @ir_module({"kind": "cuda", "arch": "sm_90a"})
    def Before(x: R.Tensor((3, "n"), "float16"), y: R.Tensor((3, "n"), "float16")):
        with R.dataflow():
            s = R.nn.softmax(R.add(x, y), axis=-1)
            R.output(s)
        return s

    after = formed(Before)
    assert ops_of(after) == [ROWS]
    kernels = MaterializeEncodings()(after)
    (kernel,) = (func for func in kernels.functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    x, y = np.random.default_rng(0).standard_normal((2, 3, 70)).astype("float16")
    out = np.full(x.shape, np.nan, "float16")
    run(kernel, x, y, out)
    e = np.exp((x + y).astype("float64"))
    np.testing.assert_allclose(out, e / e.sum(-1, keepdims=True), rtol=2e-3)
