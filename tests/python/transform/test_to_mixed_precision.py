"""ToMixedPrecision: what is rounded, where, what is kept, and what the result computes."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.errors import BuildError
from relax_hetero.transform import ToMixedPrecision
from relax_hetero.transform.rewriting import op_name, walk_bindings
from relax_hetero.transform.to_mixed_precision import to_mixed_precision
from transform.interpreting import run as interpreted


def check(before, expected, dtype="bfloat16", keep=()):
    after = ToMixedPrecision(dtype, keep)(before)
    assert relax.analysis.check_well_formed(after)
    assert_structural_equal(after, expected, map_free_vars=True)
    assert to_mixed_precision(after, dtype) is after


def ops(mod, name="main"):
    return [op_name(binding.value) for binding in walk_bindings(mod[name])]


def dtypes(mod, op):
    return [str(b.value.args[0].ty.dtype) for b in walk_bindings(mod["main"]) if op_name(b.value) == op]


def test_products_and_what_is_between():
    """Bias and activation see unrounded sums; what products read too is read rounded, but for results of norms."""

    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((8, 16), "float32"),
            w0: R.Tensor((16, 32), "float32"),
            b0: R.Tensor((32,), "float32"),
            w1: R.Tensor((32, 16), "float32"),
            g: R.Tensor((16,), "float32"),
        ):
            with R.dataflow():
                a = R.matmul(x, w0)
                b = R.add(a, b0)
                c = R.nn.gelu(b)
                d = R.matmul(c, w1)
                e = R.add(d, x)
                f = R.nn.rms_norm(e, g, axes=[-1])
                h = R.matmul(f, w0)
                i = R.tanh(h)
                j = R.matmul(i, w1)
                k = R.add(j, f)
                y = R.add(k, R.sum(i))
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((8, 16), "float32"),
            w0: R.Tensor((16, 32), "float32"),
            b0: R.Tensor((32,), "float32"),
            w1: R.Tensor((32, 16), "float32"),
            g: R.Tensor((16,), "float32"),
        ):
            with R.dataflow():
                x_low = R.astype(x, "bfloat16")
                w0_low = R.astype(w0, "bfloat16")
                a = R.matmul(x_low, w0_low, out_dtype="float32")
                b = R.add(a, b0)
                c = R.nn.gelu(b)
                c_low = R.astype(c, "bfloat16")
                w1_low = R.astype(w1, "bfloat16")
                d = R.matmul(c_low, w1_low, out_dtype="float32")
                e = R.add(d, x)
                f = R.nn.rms_norm(e, g, axes=[-1])
                f_low = R.astype(f, "bfloat16")
                h = R.matmul(f_low, w0_low, out_dtype="float32")
                i = R.tanh(h)
                i_low = R.astype(i, "bfloat16")
                j = R.matmul(i_low, w1_low, out_dtype="float32")
                k = R.add(j, f)
                i_wide = R.astype(i_low, "float32")
                s = R.sum(i_wide)
                y = R.add(k, s)
                R.output(y)
            return y

    check(relax.transform.Normalize()(Before), Expected)


def test_what_only_moves_elements_moves_rounded_ones():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((4, 8, 16), "float32"), w: R.Tensor((32, 16), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                parts = R.split(a, 2, axis=1)
                b = R.concat((parts[1], parts[0]), axis=1)
                c = R.reshape(b, R.shape([32, 16]))
                wt = R.permute_dims(w)
                d = R.matmul(c, wt)
                y = R.add(d, R.sum(b))
                R.output(y)
            return y

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((4, 8, 16), "float32"), w: R.Tensor((32, 16), "float32")):
            with R.dataflow():
                a = R.nn.relu(x)
                a_low = R.astype(a, "bfloat16")
                parts = R.split(a_low, 2, axis=1)
                second = parts[1]
                first = parts[0]
                b = R.concat((second, first), axis=1)
                c = R.reshape(b, R.shape([32, 16]))
                w_low = R.astype(w, "bfloat16")
                wt = R.permute_dims(w_low)
                d = R.matmul(c, wt, out_dtype="float32")
                b_wide = R.astype(b, "float32")
                s = R.sum(b_wide)
                y = R.add(d, s)
                R.output(y)
            return y

    check(relax.transform.Normalize()(Before), Expected)


def test_convolutions_and_pooling():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 3, 8, 8), "float32"),
            w0: R.Tensor((8, 3, 3, 3), "float32"),
            w1: R.Tensor((8, 8, 1, 1), "float32"),
        ):
            with R.dataflow():
                a = R.nn.conv2d(x, w0, padding=(1, 1), strides=(2, 2))
                b = R.nn.relu(a)
                c = R.nn.max_pool2d(b, pool_size=(2, 2), strides=(2, 2))
                d = R.nn.conv2d(c, w1)
                e = R.add(d, c)
                R.output(e)
            return e

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((1, 3, 8, 8), "float32"),
            w0: R.Tensor((8, 3, 3, 3), "float32"),
            w1: R.Tensor((8, 8, 1, 1), "float32"),
        ):
            with R.dataflow():
                x_low = R.astype(x, "float16")
                w0_low = R.astype(w0, "float16")
                a = R.nn.conv2d(x_low, w0_low, padding=(1, 1), strides=(2, 2), out_dtype="float32")
                b = R.nn.relu(a)
                b_low = R.astype(b, "float16")
                c = R.nn.max_pool2d(b_low, pool_size=(2, 2), strides=(2, 2))
                w1_low = R.astype(w1, "float16")
                d = R.nn.conv2d(c, w1_low, out_dtype="float32")
                c_wide = R.astype(c, "float32")
                e = R.add(d, c_wide)
                R.output(e)
            return e

    check(Before, Expected, "float16")


def test_returned_values_keep_their_type_and_number():
    """Also of what is moved, and of tuples; branches end with values of float32 too."""

    @I.ir_module
    class Before:
        @R.function
        def main(p: R.Tensor((), "bool"), x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")) -> R.Tuple(
            R.Tensor((16, 8), "float32"), R.Tensor((8, 16), "float32")
        ):
            a = R.exp(x)
            t = R.permute_dims(a)
            if p:
                u = R.matmul(a, w)
                v = u
            else:
                v = R.matmul(R.permute_dims(t), w)
            return (t, v)

    @I.ir_module
    class Expected:
        @R.function
        def main(p: R.Tensor((), "bool"), x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")) -> R.Tuple(
            R.Tensor((16, 8), "float32"), R.Tensor((8, 16), "float32")
        ):
            a = R.exp(x)
            a_low = R.astype(a, "bfloat16")
            t_low = R.permute_dims(a_low)
            t = R.astype(t_low, "float32")
            if p:
                w_low = R.astype(w, "bfloat16")
                u = R.matmul(a_low, w_low, out_dtype="float32")
                v = u
            else:
                b_low = R.permute_dims(t_low)
                w_also = R.astype(w, "bfloat16")
                v = R.matmul(b_low, w_also, out_dtype="float32")
            return (t, v)

    check(relax.transform.Normalize()(Before), relax.transform.Normalize()(Expected))


def test_constants_are_rounded_once():
    weight = np.random.default_rng().standard_normal((16, 16)).astype("float32")

    @I.ir_module
    class Model:
        @R.function
        def main(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")):
            with R.dataflow():
                y = R.matmul(R.nn.relu(R.matmul(x, w)), w)
                R.output(y)
            return y

    bound = relax.transform.BindParams("main", {"w": weight})(relax.transform.Normalize()(Model))
    after = ToMixedPrecision("bfloat16")(bound)
    found = [arg for b in walk_bindings(after["main"]) for arg in getattr(b.value, "args", [])]
    constants = [arg for arg in found if isinstance(arg, tvm.ir.GenericConst)]
    assert len(constants) == 2
    assert constants[0].same_as(constants[1])
    np.testing.assert_array_equal(constants[0].value.numpy(), weight.astype(ml_dtypes.bfloat16))


def test_what_stays_in_float32():
    """Outer products, weights beyond the range of float16, dequantized weights, and the symbolic extents around."""

    @I.ir_module
    class Model:
        @R.function
        def main(
            x: R.Tensor(("n", 1), "float32"),
            w: R.Tensor((1, 64), "float32"),
            z: R.Tensor(("n", 64), "float32"),
            q: R.Tensor((64, 16), "int8"),
        ):
            n = T.int64()
            with R.dataflow():
                a = R.matmul(x, w)
                b = R.matmul(z, R.multiply(R.astype(R.astype(q, "int32"), "float32"), R.const(0.5)))
                c = R.matmul(z, R.const(np.full((64, 8), 7e4, "float32")))
                R.output(a, b, c)
            return (a, b, c)

    mod = relax.transform.Normalize()(Model)
    assert to_mixed_precision(mod, "float16") is mod
    assert dtypes(to_mixed_precision(mod, "bfloat16"), "relax.matmul") == ["float32", "float32", "bfloat16"]


@I.ir_module
class Chain:
    @R.function
    def main(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")):
        with R.dataflow():
            first = R.matmul(x, w)
            second = R.matmul(first, w)
            third = R.matmul(second, w)
            y = R.add(third, second)
            R.output(y)
        return y

    @R.function(private=True)
    def other(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")):
        y = R.matmul(x, w)
        return y


def test_a_kept_variable_is_computed_in_float32_and_rounded_for_products_alone():
    after = ToMixedPrecision("bfloat16", keep=["second"])(Chain)
    assert dtypes(after, "relax.matmul") == ["bfloat16", "float32", "bfloat16"]
    (add,) = (b.value for b in walk_bindings(after["main"]) if op_name(b.value) == "relax.add")
    assert [arg.name for arg in add.args] == ["third", "second"]


@pytest.mark.parametrize("keep", [["relax.matmul"], ["matmul"], "matmul", ["main", "other"], ["m*n", "o*r"]])
def test_kept_ops_and_functions(keep):
    assert to_mixed_precision(Chain, "bfloat16", keep) is Chain


def test_a_kept_function():
    after = ToMixedPrecision("bfloat16", keep=("main",))(Chain)
    assert after["main"].same_as(Chain["main"])
    assert "relax.astype" in ops(after, "other")


@pytest.mark.parametrize(
    ("keep", "text"), [("sofmax", "'nn.softmax'"), (["thrid"], "'third'"), (["zz*"], "no name is near"), ([3], "3")]
)
def test_wrong_names_are_refused_with_near_ones(keep, text):
    with pytest.raises(BuildError, match=text):
        ToMixedPrecision("bfloat16", keep)(Chain)


def test_other_types_are_refused():
    with pytest.raises(BuildError, match="'int8', expected one of"):
        ToMixedPrecision("int8")


def run(mod, *inputs):
    out = rh.vm.VirtualMachine(rh.compile(mod))["main"](*inputs)
    return out.numpy()


@I.ir_module
class Encoder:
    """Attention with scaled queries, a residual, a norm, a feed-forward network."""

    @R.function
    def main(
        x: R.Tensor((2, 19, 32), "float32"),
        mask: R.Tensor((2, 1, 1, 19), "float32"),
        wq: R.Tensor((32, 32), "float32"),
        wk: R.Tensor((32, 32), "float32"),
        wv: R.Tensor((32, 32), "float32"),
        wo: R.Tensor((32, 32), "float32"),
        gamma: R.Tensor((32,), "float32"),
        up: R.Tensor((32, 64), "float32"),
        down: R.Tensor((64, 32), "float32"),
    ):
        with R.dataflow():
            q = R.permute_dims(R.reshape(R.matmul(x, wq), R.shape([2, 19, 4, 8])), axes=[0, 2, 1, 3])
            k = R.permute_dims(R.reshape(R.matmul(x, wk), R.shape([2, 19, 4, 8])), axes=[0, 2, 3, 1])
            v = R.permute_dims(R.reshape(R.matmul(x, wv), R.shape([2, 19, 4, 8])), axes=[0, 2, 1, 3])
            scores = R.add(R.matmul(R.multiply(q, R.const(0.353553)), k), mask)
            heads = R.matmul(R.nn.softmax(scores, axis=-1), v)
            merged = R.reshape(R.permute_dims(heads, axes=[0, 2, 1, 3]), R.shape([2, 19, 32]))
            attended = R.nn.rms_norm(R.add(R.matmul(merged, wo), x), gamma, axes=[-1])
            y = R.nn.rms_norm(R.add(R.matmul(R.nn.gelu(R.matmul(attended, up)), down), attended), gamma, axes=[-1])
            R.output(y)
        return y


def inputs_of(mod, rng):
    arrays = []
    for param in mod["main"].params:
        shape = [int(extent) for extent in param.ty.shape.values]
        arrays.append((rng.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) == 2 else 1)).astype("float32"))
    return arrays


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_an_encoder_computes_nearly_the_same(dtype, tolerance):
    mod = relax.transform.Normalize()(Encoder)
    inputs = inputs_of(mod, np.random.default_rng())
    wanted = run(mod, *inputs)
    low = ToMixedPrecision(dtype)(mod)
    exe = rh.compile(low)
    found = rh.vm.VirtualMachine(exe)["main"](*inputs).numpy()
    assert np.linalg.norm(found - wanted) < tolerance * np.linalg.norm(wanted)
    assert not np.array_equal(found, wanted)
    dispatches = [call["ops"] for call in exe.metadata.fusions["dispatches"]]
    assert any(call.count("softmax") and call.count("matmul") == 2 for call in dispatches), dispatches


def test_weights_that_are_bound_later():
    mod = relax.transform.Normalize()(Encoder)
    names = [param.name for param in mod["main"].params]
    values = dict(zip(names, inputs_of(mod, np.random.default_rng()), strict=True))
    weights = {name: value for name, value in values.items() if name not in ("x", "mask")}
    rest = [values["x"], values["mask"]]
    low = ToMixedPrecision("bfloat16")
    later = rh.compile(low(mod), params=weights)
    before = rh.compile(low(relax.transform.BindParams("main", weights)(mod)))
    found, wanted = (rh.vm.VirtualMachine(exe)["main"](*rest).numpy() for exe in (later, before))
    np.testing.assert_array_equal(found, wanted)
    assert [call["ops"] for call in later.metadata.fusions["dispatches"]] == [
        call["ops"] for call in before.metadata.fusions["dispatches"]
    ]


_STEPS = ("relu", "exp", "reshape", "permute", "matmul", "add", "softmax")


def _grown(steps):
    """A function of one square matrix that goes through steps, and the same in numpy."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([16, 16], "float32"))
    w = relax.Var("w", relax.TensorType([16, 16], "float32"))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            values = [bb.emit(relax.op.multiply(x, relax.const(0.5)))]
            for step, back in steps:
                last = values[-1 - back % len(values)]
                values.append(_STEP[step](bb, last, values[-1], w))
            out = bb.emit_output(relax.op.add(values[-1], values[len(values) // 2]))
        bb.emit_func_output(out)
    return bb.get()


_STEP = {
    "relu": lambda bb, last, _other, _w: bb.emit(relax.op.nn.relu(last)),
    "exp": lambda bb, last, _other, _w: bb.emit(relax.op.tanh(last)),
    "reshape": lambda bb, last, _other, _w: bb.emit(relax.op.reshape(relax.op.reshape(last, (4, 64)), (16, 16))),
    "permute": lambda bb, last, _other, _w: bb.emit(relax.op.permute_dims(last)),
    "matmul": lambda bb, last, _other, w: bb.emit(relax.op.matmul(last, w)),
    "add": lambda bb, last, other, _w: bb.emit(relax.op.add(last, other)),
    "softmax": lambda bb, last, _other, _w: bb.emit(relax.op.nn.softmax(last)),
}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.tuples(st.sampled_from(_STEPS), st.integers(0, 3)), min_size=2, max_size=9),
    seed=st.integers(0, 1 << 30),
)
def test_any_graph_keeps_its_signature_and_its_numbers(steps, seed):
    mod = _grown(steps)
    low = ToMixedPrecision("bfloat16")(mod)
    assert relax.analysis.check_well_formed(low)
    assert_structural_equal(low["main"].ret_ty, mod["main"].ret_ty)
    assert to_mixed_precision(low, "bfloat16") is low
    rng = np.random.default_rng(seed)
    inputs = [rng.standard_normal((16, 16)).astype("float32") / 2 for _ in range(2)]
    wanted, found = interpreted(mod, *inputs), interpreted(low, *inputs)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.1 * np.abs(wanted).max() + 1e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("target", [{"kind": "llvm", "mcpu": "znver5"}, "llvm"], ids=["kernel", "stock"])
def test_attention_as_an_op(target, biased):
    shape = (2, 9, 4, 16)
    q, k, v = (relax.Var(name, relax.TensorType(shape, "float32")) for name in "qkv")
    bias = relax.Var("bias", relax.TensorType((2, 4, 9, 9), "float32"))
    params = [q, k, v, bias] if biased else [q, k, v]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.attention(q, k, v, bias if biased else None))
        builder.emit_func_output(out)
    mod = builder.get()
    mod.update_global_info("vdevice", [rh.VDevice(target)])
    low = ToMixedPrecision("bfloat16")(mod)
    assert "relax.astype" in ops(low)
    inputs = [
        np.random.default_rng().standard_normal([int(e) for e in p.ty.shape.values]).astype("float32") for p in params
    ]
    wanted, found = run(mod, *inputs), run(low, *inputs)
    assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)


def test_rounded_values_cross_devices():
    @I.ir_module
    class Model:
        I.module_global_infos({"vdevice": [I.vdevice("llvm", 0), I.vdevice("llvm", 1)]})

        @R.function
        def main(x: R.Tensor((8, 16), "float32", "llvm:0"), w: R.Tensor((16, 16), "float32", "llvm:1")):
            with R.dataflow():
                a: R.Tensor((8, 16), "float32", "llvm:0") = R.nn.relu(x)
                b: R.Tensor((8, 16), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
                y: R.Tensor((8, 16), "float32", "llvm:1") = R.matmul(b, w)
                R.output(y)
            return y

    low = ToMixedPrecision("bfloat16")(Model)
    (moved,) = (b.var.ty for b in walk_bindings(low["main"]) if op_name(b.value) == "relax.to_vdevice")
    assert (str(moved.dtype), int(moved.vdevice.vdevice_id)) == ("bfloat16", 1)
    inputs = inputs_of(Model, np.random.default_rng())
    wanted, found = run(Model, *inputs), run(low, *inputs)
    assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)
