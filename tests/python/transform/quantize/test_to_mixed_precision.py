"""ToMixedPrecision: values that are rounded, and where."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from modules import calls_of, ir_module
from relax_hetero.transform import ToMixedPrecision
from relax_hetero.transform.ir.module_attrs import WITHOUT_TF32
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from relax_hetero.transform.quantize.to_mixed_precision import to_mixed_precision
from seeds import fresh_rng


def check(before, expected, dtype="bfloat16", keep=()):
    after = ToMixedPrecision(dtype, keep)(before)
    assert relax.analysis.check_well_formed(after)
    assert_structural_equal(after, expected, map_free_vars=True)
    assert to_mixed_precision(after, dtype) is after


def dtypes(mod, op):
    return [str(b.value.args[0].ty.dtype) for b in walk_bindings(mod["main"]) if op_name(b.value) == op]


def test_products_and_the_ops_between_them():
    """Bias and activation see unrounded sums; values that products read are rounded, except results of norms."""

    @ir_module()
    def Before(
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

    @ir_module()
    def Expected(
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


def test_ops_that_move_elements_move_rounded_ones():
    @ir_module()
    def Before(x: R.Tensor((4, 8, 16), "float32"), w: R.Tensor((32, 16), "float32")):
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

    @ir_module()
    def Expected(x: R.Tensor((4, 8, 16), "float32"), w: R.Tensor((32, 16), "float32")):
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
    @ir_module()
    def Before(
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

    @ir_module()
    def Expected(
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
    """Also after moves and in tuples; branches end with float32 values, too."""

    @ir_module()
    def Before(p: R.Tensor((), "bool"), x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")) -> R.Tuple(
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

    @ir_module()
    def Expected(p: R.Tensor((), "bool"), x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")) -> R.Tuple(
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
    weight = fresh_rng().standard_normal((16, 16)).astype("float32")

    @ir_module()
    def Model(x: R.Tensor((8, 16), "float32"), w: R.Tensor((16, 16), "float32")):
        with R.dataflow():
            y = R.matmul(R.nn.relu(R.matmul(x, w)), w)
            R.output(y)
        return y

    bound = relax.transform.BindParams("main", {"w": weight})(relax.transform.Normalize()(Model))
    after = ToMixedPrecision("bfloat16")(bound)
    arguments = [arg for b in walk_bindings(after["main"]) for arg in getattr(b.value, "args", [])]
    constants = [arg for arg in arguments if isinstance(arg, tvm.ir.GenericConst)]
    assert len(constants) == 2
    assert constants[0].same_as(constants[1])
    np.testing.assert_array_equal(constants[0].value.numpy(), weight.astype(ml_dtypes.bfloat16))


def test_values_that_stay_in_float32():
    """Outer products, weights beyond the range of float16, dequantized weights, and the symbolic extents around."""

    @ir_module()
    def Model(
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


GPU, CPU = {"kind": "cuda", "arch": "sm_90a"}, {"kind": "llvm", "mcpu": "x86-64-v3"}


# Two products with a norm between them that is also a residual; on the GPU, then on the CPU.
@ir_module(GPU, CPU)
def PostNorm(
    x: R.Tensor((8, 16), "float32", "cuda:0"),
    w0: R.Tensor((16, 16), "float32", "cuda:0"),
    w1: R.Tensor((16, 16), "float32", "cuda:0"),
    w2: R.Tensor((16, 16), "float32", "llvm:0"),
    g: R.Tensor((16,), "float32", "cuda:0"),
):
    with R.dataflow():
        a = R.matmul(x, w0)
        b = R.nn.rms_norm(a, g, axes=[-1])
        c = R.matmul(b, w1)
        d = R.add(c, b)
        e = R.to_vdevice(d, "llvm:0")
        y = R.matmul(e, w2)
        R.output(y)
    return y


def products_of(mod):
    products = [binding for binding in walk_bindings(mod["main"]) if op_name(binding.value) == "relax.matmul"]
    return {binding.var.name: str(binding.value.args[0].ty.dtype) for binding in products}


def test_norms_are_read_rounded_in_float16_on_gpus():
    for dtype, rounded in (("float16", True), ("bfloat16", False)):
        after = ToMixedPrecision(dtype)(rh.transform.RealizeVDevice()(PostNorm))
        (add,) = calls_of("relax.add", after["main"])
        assert (add.args[1].name == "b_float32") == rounded, dtype
        assert products_of(after) == {"a": dtype, "c": dtype, "y": dtype}


def test_each_device_has_its_own_precision():
    low = ToMixedPrecision("float16", devices=["cuda:0"])(PostNorm)
    assert products_of(low) == {"a": "float16", "c": "float16", "y": "float32"}
    both = ToMixedPrecision("bfloat16", devices="llvm:0")(low)
    assert products_of(both) == {"a": "float16", "c": "float16", "y": "bfloat16"}
    # A value that only the CPU reads, rounded, is rounded before it crosses.
    (transfer,) = calls_of("relax.to_vdevice", both["main"])
    assert str(transfer.ty.dtype) == "bfloat16"
    assert to_mixed_precision(both, "bfloat16", devices=["llvm:0"]).same_as(both)


def test_numbers_of_a_module_whose_devices_differ_in_precision():
    rng = fresh_rng()
    x, w0, w1, w2 = (rng.standard_normal(shape).astype("float32") / 4 for shape in ((8, 16), *[(16, 16)] * 3))
    g = np.ones(16, "float32")
    mod = relax.transform.Normalize()(PostNorm)
    low = ToMixedPrecision("bfloat16", devices="llvm:0")(ToMixedPrecision("float16", devices="cuda:0")(mod))
    a = x @ w0
    b = a / np.sqrt((a * a).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(InterpretedModel(low)(x, w0, w1, w2, g), (b @ w1 + b) @ w2, rtol=0, atol=2e-2)


def test_devices_for_tfloat32_keep_the_products_of_others():
    low = ToMixedPrecision("tfloat32", devices=["cuda:0"])(PostNorm)
    assert list(low["main"].attrs[WITHOUT_TF32]) == ["y"]


def test_an_absent_device_is_refused():
    with pytest.raises(rh.VDeviceError, match="cuda:1"):
        ToMixedPrecision("float16", devices=["cuda:1"])(PostNorm)


def test_operands_of_norms_are_stored_rounded_in_float16_on_gpus_if_nothing_else_reads_them():
    @ir_module(GPU, CPU)
    def Norms(
        x: R.Tensor((8, 16), "float32", "cuda:0"),
        w: R.Tensor((16, 16), "float32", "cuda:0"),
        g: R.Tensor((16,), "float32", "cuda:0"),
    ):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.nn.rms_norm(a, g, axes=[-1])
            c = R.matmul(b, w)
            d = R.nn.rms_norm(c, g, axes=[-1])
            e = R.matmul(d, w)
            y = R.add(e, c)
            R.output(y)
        return y

    def norms(dtype):
        mod = ToMixedPrecision(dtype)(Norms)
        return [b.value.args[0].name for b in walk_bindings(mod["main"]) if op_name(b.value) == "relax.nn.rms_norm"]

    assert norms("float16") == ["a_float32", "c"], "c goes on to another layer"
    assert norms("bfloat16") == ["a", "c"]


def test_of_two_products_that_are_added_the_first_is_stored_rounded_in_float16_on_gpus():
    @ir_module(GPU, CPU)
    def Shortcut(x: R.Tensor((8, 16), "float32", "cuda:0"), w: R.Tensor((16, 16), "float32", "cuda:0")):
        with R.dataflow():
            a = R.add(R.matmul(x, w), R.const(1.0))
            b = R.add(R.matmul(x, w), R.const(2.0))
            c = R.nn.relu(R.add(a, b))
            y = R.matmul(c, w)
            R.output(y)
        return y

    def added(dtype):
        mod = ToMixedPrecision(dtype)(relax.transform.Normalize()(Shortcut))
        (product,) = [
            [arg.name for arg in b.value.args]
            for b in walk_bindings(mod["main"])
            if op_name(b.value) == "relax.add" and all(isinstance(arg, relax.Var) for arg in b.value.args)
        ]
        return product

    assert added("float16") == ["a_float32", "b"]
    assert added("bfloat16") == ["a", "b"]


def _on(*targets):
    """A chain of products, one on each device."""

    @ir_module()
    def Chain(x: R.Tensor((16, 32), "float32"), w: R.Tensor((32, 32), "float32")):
        with R.dataflow():
            first = R.matmul(x, w)
            second = R.matmul(first, w)
            R.output(second)
        return second

    mod = relax.transform.Normalize()(Chain)
    mod.update_global_info("vdevice", [rh.VDevice(target) for target in targets])
    return mod


ZEN = {"kind": "llvm", "mcpu": "znver5"}
XEON = {"kind": "llvm", "mcpu": "sapphirerapids"}
XEON_WITHOUT_TILES = {**XEON, "mattr": ["-amx-bf16"]}
PLAIN = {"kind": "llvm", "mcpu": "x86-64-v4"}
ARM = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"}
HOPPER = {"kind": "cuda", "arch": "sm_90a"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [(ZEN, "bfloat16"), (XEON, "bfloat16"), (ARM, "bfloat16"), (XEON_WITHOUT_TILES, "float32"), (PLAIN, "float32")],
    ids=["zen", "xeon", "arm", "xeon without tiles", "plain"],
)
def test_bfloat16_only_where_it_is_no_slower_than_float32(target, expected):
    for dtype in ("bfloat16", "auto"):
        assert dtypes(ToMixedPrecision(dtype)(_on(target)), "relax.matmul") == [expected] * 2


def test_auto_takes_the_fastest_type_whose_error_is_allowed():
    assert dtypes(ToMixedPrecision("auto")(_on(HOPPER)), "relax.matmul") == ["bfloat16"] * 2
    exact = ToMixedPrecision("auto", accuracy=5e-3)(_on(HOPPER))
    assert dtypes(exact, "relax.matmul") == ["float32"] * 2
    assert WITHOUT_TF32 in exact["main"].attrs
    mod = _on(HOPPER)
    assert to_mixed_precision(mod, "auto", accuracy=1e-3) is mod
    assert to_mixed_precision(_on(ZEN), "auto", accuracy=5e-3)["main"].attrs.get(WITHOUT_TF32) is None
    for wrong in (-1, float("nan"), None, "1e-2", True):
        with pytest.raises(rh.BuildError, match=rf"found accuracy {wrong!r}.*not negative"):
            ToMixedPrecision("auto", accuracy=wrong)


def test_devices_of_a_module_that_is_not_placed():
    """It will run on this CPU; an empty list names no device."""
    mod = _on()
    assert to_mixed_precision(mod, "float16", devices=[]) is mod
    assert dtypes(ToMixedPrecision("float16", devices=["llvm"])(mod), "relax.matmul") == ["float16"] * 2
    with pytest.raises(rh.VDeviceError, match="no vdevice of kind 'cuda'"):
        ToMixedPrecision("float16", devices=["cuda"])(mod)


def test_each_device_gets_its_own_type():
    @ir_module(PLAIN, ZEN)
    def Chain(x: R.Tensor((16, 32), "float32"), w: R.Tensor((32, 32), "float32")):
        with R.dataflow():
            first = R.matmul(x, w)
            moved = R.to_vdevice(first, "llvm:1")
            second = R.matmul(moved, R.to_vdevice(w, "llvm:1"))
            R.output(second)
        return second

    for dtype in ("bfloat16", "auto"):
        low = ToMixedPrecision(dtype)(relax.transform.Normalize()(Chain))
        assert relax.analysis.check_well_formed(low)
        assert dtypes(low, "relax.matmul") == ["float32", "bfloat16"]


def test_an_empty_list_of_devices_changes_nothing():
    mod = _on(ZEN)
    for dtype in ("bfloat16", "auto"):
        assert to_mixed_precision(mod, dtype, devices=[]) is mod
