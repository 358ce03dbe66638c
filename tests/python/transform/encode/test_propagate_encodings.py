"""PropagateEncodings: ops that move onto encoded values, pairs that cancel, and where it stops."""

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import calls_of, ir_module, ops_of
from relax_hetero.op.encoded import ELEMENTWISE, MATMUL, SET, UNSET
from relax_hetero.transform import PropagateEncodings, SetEncoding, VerifyEncodings
from relax_hetero.transform.encode.propagate_encodings import propagate_encodings
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from seeds import fresh_rng
from transform.interpreting import run

ENC = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=2, n=4, k=3>"
ENC_NK = "<float32 * float32 -> float32; (m, k) * (n, k) -> (m, n); m=2, n=4, k=3>"


def propagated(mod):
    """SetEncoding and PropagateEncodings, which change nothing more when they run again."""
    after = PropagateEncodings()(SetEncoding()(mod))
    VerifyEncodings()(after)
    assert relax.analysis.check_well_formed(after)
    assert propagate_encodings(after) is after
    return after


def expressions(mod):
    return [b.value.attrs.expression for b in walk_bindings(mod["main"]) if op_name(b.value) == ELEMENTWISE]


def random_inputs(mod):
    """One array per parameter, symbolic extents 7."""
    random = fresh_rng()
    shapes = [[int(e) if isinstance(e, T.IntImm) else 7 for e in param.ty.shape.values] for param in mod["main"].params]
    return [
        random.normal(size=shape).astype(str(param.ty.dtype))
        for shape, param in zip(shapes, mod["main"].params, strict=True)
    ]


def check_numbers(before, after):
    inputs = random_inputs(before)
    expected, got = run(before, *inputs), run(after, *inputs)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_bias_and_activation():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC)
            y = R.hetero.unset_encoding(out, "matmul[2]" + ENC)
            a = R.add(y, bias)
            z = R.nn.relu(a)
            R.output(z)
        return z

    @ir_module()
    def Expected(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC)
            e = R.hetero.elementwise(out, bias, expression="relu(add(x0, x1))", encoding="matmul[2]" + ENC)
            z = R.hetero.unset_encoding(e, "matmul[2]" + ENC)
            R.output(z)
        return z

    after = PropagateEncodings()(Before)
    assert_structural_equal(after, Expected)
    assert propagate_encodings(after) is after
    assert [b.var.name for b in walk_bindings(after["main"])][-1] == "z"


def test_linear_and_residual_on_two_devices():
    @ir_module("llvm", "llvm:1")
    def Before(
        x: R.Tensor((2, 3), "float32", "llvm:1"),
        w: R.Tensor((4, 3), "float32", "llvm:1"),
        r: R.Tensor((2, 4), "float32", "llvm:1"),
    ):
        with R.dataflow():
            wt: R.Tensor((3, 4), "float32", "llvm:1") = R.permute_dims(w)
            y: R.Tensor((2, 4), "float32", "llvm:1") = R.matmul(x, wt)
            z: R.Tensor((2, 4), "float32", "llvm:1") = R.add(r, y)
            z0: R.Tensor((2, 4), "float32", "llvm:0") = R.to_vdevice(z, "llvm:0")
            u: R.Tensor((2, 4), "float32", "llvm:0") = R.nn.relu(z0)
            R.output(u)
        return u

    @ir_module("llvm", "llvm:1")
    def Expected(
        x: R.Tensor((2, 3), "float32", "llvm:1"),
        w: R.Tensor((4, 3), "float32", "llvm:1"),
        r: R.Tensor((2, 4), "float32", "llvm:1"),
    ):
        with R.dataflow():
            lhs: R.Tensor((2, 3), "float32", "llvm:1") = R.hetero.set_encoding(x, "matmul[0]" + ENC_NK)
            rhs: R.Tensor((4, 3), "float32", "llvm:1") = R.hetero.set_encoding(w, "matmul[1]" + ENC_NK)
            out: R.Tensor((2, 4), "float32", "llvm:1") = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC_NK)
            x1: R.Tensor((2, 4), "float32", "llvm:1") = R.hetero.set_encoding(r, "matmul[2]" + ENC_NK)
            e: R.Tensor((2, 4), "float32", "llvm:1") = R.hetero.elementwise(
                out, x1, expression="add(x1, x0)", encoding="matmul[2]" + ENC_NK
            )
            z: R.Tensor((2, 4), "float32", "llvm:1") = R.hetero.unset_encoding(e, "matmul[2]" + ENC_NK)
            z0: R.Tensor((2, 4), "float32", "llvm:0") = R.to_vdevice(z, "llvm:0")
            u: R.Tensor((2, 4), "float32", "llvm:0") = R.nn.relu(z0)
            R.output(u)
        return u

    assert_structural_equal(propagated(Before), Expected)


def test_a_result_crosses_devices_encoded_if_it_is_encoded_there():
    @ir_module("llvm", "c")
    def Before(
        x: R.Tensor((2, 3), "float32", "llvm"),
        w: R.Tensor((3, 4), "float32", "llvm"),
        v: R.Tensor((3, 4), "float32", "c"),
    ):
        with R.dataflow():
            a: R.Tensor((2, 4), "float32", "llvm") = R.matmul(x, w)
            xc: R.Tensor((2, 3), "float32", "c") = R.to_vdevice(x, "c")
            ac: R.Tensor((2, 4), "float32", "c") = R.to_vdevice(a, "c")
            b: R.Tensor((2, 4), "float32", "c") = R.matmul(xc, v)
            s: R.Tensor((2, 4), "float32", "c") = R.add(ac, b)
            R.output(s)
        return s

    @ir_module("llvm", "c")
    def Expected(
        x: R.Tensor((2, 3), "float32", "llvm"),
        w: R.Tensor((3, 4), "float32", "llvm"),
        v: R.Tensor((3, 4), "float32", "c"),
    ):
        with R.dataflow():
            lhs: R.Tensor((2, 3), "float32", "llvm") = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            rhs: R.Tensor((3, 4), "float32", "llvm") = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            a: R.Tensor((2, 4), "float32", "llvm") = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC)
            xc: R.Tensor((2, 3), "float32", "c") = R.to_vdevice(x, "c")
            ac: R.Tensor((2, 4), "float32", "c") = R.to_vdevice(a, "c")
            lhs1: R.Tensor((2, 3), "float32", "c") = R.hetero.set_encoding(xc, "matmul[0]" + ENC)
            rhs1: R.Tensor((3, 4), "float32", "c") = R.hetero.set_encoding(v, "matmul[1]" + ENC)
            b: R.Tensor((2, 4), "float32", "c") = R.hetero.matmul(lhs1, rhs1, encoding="matmul[2]" + ENC)
            e: R.Tensor((2, 4), "float32", "c") = R.hetero.elementwise(
                b, ac, expression="add(x1, x0)", encoding="matmul[2]" + ENC
            )
            s: R.Tensor((2, 4), "float32", "c") = R.hetero.unset_encoding(e, "matmul[2]" + ENC)
            R.output(s)
        return s

    assert_structural_equal(propagated(Before), Expected)


def test_a_transfer_that_others_read_stays_plain():
    @ir_module("llvm", "c")
    def Before(
        x: R.Tensor((2, 3), "float32", "llvm"),
        w: R.Tensor((3, 4), "float32", "llvm"),
        v: R.Tensor((4, 4), "float32", "c"),
    ):
        with R.dataflow():
            a: R.Tensor((2, 4), "float32", "llvm") = R.matmul(x, w)
            ac: R.Tensor((2, 4), "float32", "c") = R.to_vdevice(a, "c")
            b: R.Tensor((2, 4), "float32", "c") = R.matmul(ac, v)
            s: R.Tensor((2, 4), "float32", "c") = R.nn.softmax(ac)
            R.output(b, s)
        return (b, s)

    after = propagated(Before)
    sources = [b.value.args[0].name for b in walk_bindings(after["main"]) if op_name(b.value) == "relax.to_vdevice"]
    assert sources == ["a"]


def test_gelu_as_exporters_write_it_is_one_expression():
    @ir_module()
    def Before(x: R.Tensor(("s", 3), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            a = R.add(bias, y)
            b = R.divide(a, R.const(2.0, "float32"))
            c = R.erf(b)
            d = R.add(c, R.const([1.0], "float32"))
            e = R.multiply(a, d)
            f = R.multiply(e, R.const(0.5, "float32"))
            R.output(f)
        return f

    after = propagated(Before)
    assert ops_of(after["main"]) == [SET, SET, MATMUL, ELEMENTWISE, UNSET]
    assert expressions(after) == ["multiply(multiply(add(x1, x0), add(erf(divide(add(x1, x0), 2.0)), 1.0)), 0.5)"]
    check_numbers(Before, after)


@pytest.mark.parametrize(
    ("activation", "expression"),
    [
        (R.nn.relu, "relu(x0)"),
        (R.nn.gelu, "gelu(x0)"),
        (R.nn.gelu_tanh, "gelu_tanh(x0)"),
        (R.nn.silu, "silu(x0)"),
        (R.sigmoid, "sigmoid(x0)"),
        (R.tanh, "tanh(x0)"),
        (lambda x: R.nn.leakyrelu(x, 0.25), "leaky_relu(x0, 0.25)"),
        (lambda x: R.clip(x, -1, 6), "clip(x0, -1.0, 6.0)"),
        (lambda x: R.maximum(x, R.const(0.0, "float32")), "maximum(x0, 0.0)"),
        (lambda x: R.astype(x, "float16"), "cast(x0, 'float16')"),
        (lambda x: R.power(x, R.const(3.0, "float32")), "multiply(multiply(x0, x0), x0)"),
        (lambda x: R.multiply(x, x), "multiply(x0, x0)"),
    ],
)
def test_activations(activation, expression):
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = activation(y)
            R.output(z)
        return z

    after = propagated(Before)
    assert expressions(after) == [expression]
    assert ops_of(after["main"])[-1] == UNSET
    assert str(after["main"].ret_ty.dtype) == str(Before["main"].ret_ty.dtype)
    check_numbers(Before, after)


def test_leaky_relu_as_onnx_means_it():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.add(R.matmul(x, w), bias)
            scaled = R.multiply(y, R.const(0.25, "float32"))
            negative = R.less(y, R.const(0.0, "float32"))
            z = R.where(negative, scaled, y)
            R.output(z)
        return z

    after = propagated(Before)
    assert expressions(after) == ["leaky_relu(add(x0, x1), 0.25)"]
    assert ops_of(after["main"]) == [SET, SET, MATMUL, ELEMENTWISE, UNSET]
    check_numbers(Before, after)


@pytest.mark.parametrize(
    "choose",
    [
        lambda y, other: R.where(R.less(y, R.const(1.0, "float32")), R.multiply(y, R.const(0.25, "float32")), y),
        lambda y, other: R.where(R.less(y, R.const(0.0, "float32")), R.multiply(other, R.const(0.25, "float32")), y),
        lambda y, other: R.where(R.less(y, R.const(0.0, "float32")), R.multiply(y, other), y),
        lambda y, other: R.where(R.less(other, R.const(0.0, "float32")), R.multiply(y, R.const(0.25, "float32")), y),
    ],
)
def test_other_choices_stay(choose):
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), other: R.Tensor((2, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = choose(y, other)
            R.output(z)
        return z

    after = propagated(Before)
    assert ops_of(after["main"])[:4] == [SET, SET, MATMUL, UNSET]
    assert ops_of(after["main"])[-1] == "relax.where"
    check_numbers(Before, after)


def test_half_precision_is_rounded_once():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float16"), w: R.Tensor((3, 4), "float16"), bias: R.Tensor((4,), "float16")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.add(y, bias)
            R.output(z)
        return z

    assert expressions(propagated(Before)) == ["add(cast(x0, 'float16'), x1)"]


def test_a_value_that_others_read_ends_the_work():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            a = R.add(y, bias)
            mean = R.mean(a, axis=[1], keepdims=True)
            d = R.subtract(a, mean)
            R.output(d)
        return d

    after = propagated(Before)
    assert expressions(after) == ["add(x0, x1)"]
    assert ops_of(after["main"]) == [SET, SET, MATMUL, ELEMENTWISE, UNSET, "relax.mean", "relax.subtract"]


def test_nothing_moves_from_a_product_with_other_readers():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            a = R.nn.relu(y)
            b = R.nn.softmax(y)
            R.output(a, b)
        return (a, b)

    assert ops_of(propagated(Before)["main"]) == [SET, SET, MATMUL, UNSET, "relax.nn.relu", "relax.nn.softmax"]


def test_results_that_leave_stay():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            a = R.nn.relu(y)
            R.output(y, a)
        return (y, a)

    assert ops_of(propagated(Before)["main"]) == [SET, SET, MATMUL, UNSET, "relax.nn.relu"]


def test_two_products_meet_in_the_later_one():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), v: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            gate = R.matmul(x, w)
            gated = R.nn.silu(gate)
            up = R.matmul(x, v)
            z = R.multiply(gated, up)
            R.output(z)
        return z

    after = propagated(Before)
    assert ops_of(after["main"]) == [SET, SET, MATMUL, ELEMENTWISE, SET, MATMUL, ELEMENTWISE, UNSET]
    assert expressions(after) == ["silu(x0)", "multiply(x1, x0)"]
    check_numbers(Before, after)


def test_a_value_before_a_cast_that_a_later_product_reads_stays():
    """The sum reads the float16 value instead of the widened one, so the first product's work ends there."""

    @ir_module()
    def Before(x: R.Tensor((2, 3), "float16"), w: R.Tensor((3, 4), "float16"), v: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            narrow = R.matmul(x, w)
            wide = R.astype(narrow, "float32")
            z = R.add(R.matmul(R.nn.softmax(wide), v), wide)
            R.output(z)
        return z

    after = propagated(Before)
    assert expressions(after) == ["cast(x0, 'float16')", "add(x0, cast(x1, 'float32'))"]
    check_numbers(Before, after)


def test_broadcasts_that_would_grow_the_result_stay():
    @ir_module()
    def Before(x: R.Tensor((1, 3), "float32"), w: R.Tensor((3, 4), "float32"), big: R.Tensor((5, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.add(y, big)
            R.output(z)
        return z

    assert ops_of(propagated(Before)["main"])[-1] == "relax.add"


def test_attention():
    @ir_module()
    def Before(
        x: R.Tensor((2, "s", 12), "float32"),
        wq: R.Tensor((12, 12), "float32"),
        bq: R.Tensor((12,), "float32"),
        wk: R.Tensor((12, 12), "float32"),
        mask: R.Tensor((2, 1, 1, "s"), "float32"),
    ):
        s = T.int64()
        with R.dataflow():
            q = R.reshape(R.add(R.matmul(x, wq), bq), (2, s, 3, 4))
            k = R.reshape(R.matmul(x, wk), (2, s, 3, 4))
            qh = R.permute_dims(q, (0, 2, 1, 3))
            kh = R.permute_dims(k, (0, 2, 3, 1))
            vh = R.permute_dims(k, (0, 2, 1, 3))
            scores = R.add(R.multiply(R.matmul(qh, kh), R.const(0.5, "float32")), mask)
            weights = R.nn.softmax(scores)
            context = R.matmul(weights, vh)
            joined = R.reshape(R.permute_dims(context, (0, 2, 1, 3)), (2, s, 12))
            z = R.add(R.matmul(joined, wq), x)
            R.output(z)
        return z

    after = propagated(Before)
    assert "relax.permute_dims" not in ops_of(after["main"])
    assert expressions(after) == ["add(x0, x1)", "add(multiply(x0, 0.5), x1)", "add(x0, x1)"]
    maps = [b.value.attrs.encoding.split("; ")[1] for b in walk_bindings(after["main"]) if op_name(b.value) == MATMUL]
    assert maps[2:4] == [
        "(b0, m, b1, k) * (b0, n, b1, k) -> (b0, b1, m, n)",
        "(b0, b1, m, k) * (b0, k, b1, n) -> (b0, m, b1, n)",
    ]
    check_numbers(Before, after)


def test_a_permuted_result_with_bias():
    @ir_module()
    def Before(x: R.Tensor((5, 2, 3), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.add(R.matmul(x, w), bias)
            z = R.permute_dims(y, (1, 0, 2))
            t = R.permute_dims(z, (2, 1, 0))
            R.output(t)
        return t

    after = propagated(Before)
    assert ops_of(after["main"]) == [SET, SET, MATMUL, ELEMENTWISE, UNSET, "relax.permute_dims"]
    check_numbers(Before, after)


def test_work_after_a_reshape():
    @ir_module()
    def Before(
        x: R.Tensor((5, "s", 3), "float32"),
        w: R.Tensor((3, 4), "float32"),
        bias: R.Tensor((1, 1, 4), "float32"),
        r: R.Tensor((5, "s", 4), "float32"),
    ):
        s = T.int64()
        with R.dataflow():
            flat = R.reshape(x, (5 * s, 3))
            y = R.matmul(flat, w)
            y3 = R.reshape(y, (5, s, 4))
            z = R.add(R.nn.relu(R.add(y3, bias)), r)
            R.output(z)
        return z

    after = propagated(Before)
    assert expressions(after) == ["add(relu(add(x0, x1)), x2)"]
    assert ops_of(after["main"])[-3:] == [ELEMENTWISE, UNSET, "relax.reshape"]
    check_numbers(Before, after)


def test_vector_with_bias():
    @ir_module()
    def Before(x: R.Tensor((3,), "float32"), w: R.Tensor((3, 4), "float32"), bias: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.nn.relu(R.add(y, bias))
            R.output(z)
        return z

    after = propagated(Before)
    assert expressions(after) == ["relu(add(x0, x1))"]
    check_numbers(Before, after)


def test_pairs_cancel():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), init: R.Tensor((2, 4), "float32")):
        with R.dataflow():
            x0 = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            x1 = R.hetero.unset_encoding(x0, "matmul[0]" + ENC)
            lhs = R.hetero.set_encoding(x1, "matmul[0]" + ENC)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            first = R.hetero.matmul(lhs, rhs, init, encoding="matmul[2]" + ENC)
            plain = R.hetero.unset_encoding(first, "matmul[2]" + ENC)
            again = R.hetero.set_encoding(plain, "matmul[2]" + ENC)
            second = R.hetero.matmul(lhs, rhs, again, encoding="matmul[2]" + ENC)
            z = R.hetero.unset_encoding(second, "matmul[2]" + ENC)
            R.output(z)
        return z

    @ir_module()
    def Expected(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), init: R.Tensor((2, 4), "float32")):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + ENC)
            first = R.hetero.matmul(lhs, rhs, init, encoding="matmul[2]" + ENC)
            second = R.hetero.matmul(lhs, rhs, first, encoding="matmul[2]" + ENC)
            z = R.hetero.unset_encoding(second, "matmul[2]" + ENC)
            R.output(z)
        return z

    after = PropagateEncodings()(Before)
    assert_structural_equal(after, Expected)
    assert propagate_encodings(after) is after
    check_numbers(Before, after)


def test_modules_without_products_are_the_very_same():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32")):
        with R.dataflow():
            y = R.permute_dims(R.nn.relu(x))
            R.output(y)
        return y

    assert propagate_encodings(Before) is Before


def test_a_permutation_between_products_is_absorbed_once():
    """The first product absorbs it, since the second one is not the only reader of its result."""

    @ir_module()
    def Before(x: R.Tensor((3, 2, 4), "float32"), w: R.Tensor((4, 5), "float32"), v: R.Tensor((5, 6), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            p = R.permute_dims(y, [1, 0, 2])
            z = R.matmul(p, v)
            r = R.nn.relu(p)
            R.output(z, r)
        return z, r

    after = propagated(Before)
    products = calls_of(MATMUL, after["main"])
    maps = [call.attrs.encoding.split("; ")[1] for call in products]
    assert maps == ["(b0, m, k) * (k, n) -> (m, b0, n)", "(b0, m, k) * (k, n) -> (b0, m, n)"]
    check_numbers(Before, after)


def test_long_chains_stay_short_texts():
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType([4, 4], "float32")) for name in "xw")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, w))
            for _ in range(40):
                y = builder.emit(relax.op.multiply(relax.const(0.5), relax.op.add(y, y)))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    before = builder.get()
    after = propagated(before)
    assert max(map(len, expressions(after))) < 4000
    check_numbers(before, after)


def test_work_after_a_permutation_that_cancels():
    """Blocks of ConvNeXt: rows of channels go back to channels first, where the residual is, which was permuted so."""

    @ir_module()
    def Before(x: R.Tensor((2, 3, 5, 4), "float32"), w: R.Tensor((4, 4), "float32"), s: R.Tensor((4, 1, 1), "float32")):
        with R.dataflow():
            r = R.permute_dims(x, [0, 3, 1, 2])
            y = R.matmul(x, w)
            p = R.permute_dims(y, [0, 3, 1, 2])
            a = R.add(R.multiply(p, s), r)
            y2 = R.matmul(x, w)
            p2 = R.permute_dims(y2, [0, 3, 1, 2])
            b = R.nn.relu(R.add(a, p2))
            R.output(b)
        return b

    after = propagated(Before)
    calls = calls_of("relax.hetero.elementwise", after["main"])
    assert [call.attrs.expression for call in calls] == ["add(multiply(x0, x1), x2)", "relu(add(x1, x0))"]
    assert not any(op_name(b.value) in ("relax.add", "relax.multiply") for b in walk_bindings(after["main"]))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in ((2, 3, 5, 4), (4, 4), (4, 1, 1))]
    np.testing.assert_allclose(run(after, *arrays), run(Before, *arrays), rtol=1e-5, atol=1e-5)


def test_work_after_a_permutation_that_would_stay():
    @ir_module()
    def Before(x: R.Tensor((3, 4), "float32"), w: R.Tensor((4, 3), "float32"), r: R.Tensor((3, 3), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            p = R.permute_dims(y)
            a = R.add(p, r)
            R.output(a)
        return a

    mod = SetEncoding()(Before)
    assert PropagateEncodings()(mod).same_as(mod)
