"""SpecializeEncodings: layouts by device, cancellation, transfers between layouts, kernel variants."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import check_pass, ir_module
from relax_hetero.encoding import PackedLayout, register_resolver
from relax_hetero.errors import EncodingError
from relax_hetero.op.encoded import MATMUL, encoded_op
from relax_hetero.transform import RealizeVDevice, SpecializeEncodings, collect_encodings
from relax_hetero.transform.ir.rewriting import walk_bindings
from transform.toy_resolvers import Toy, toy_resolvers

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}

_SIZES = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=5, n=7, k=3>"
LHS, RHS, OUT = (f"matmul[{i}]{_SIZES}" for i in range(3))
_TRANSPOSED = "<float32 * float32 -> float32; (m, k) * (n, k) -> (m, n); m=5, n=7, k=3>"
T_LHS, T_RHS, T_OUT = (f"matmul[{i}]{_TRANSPOSED}" for i in range(3))
ROWS = "identity<2>"
PANELS = "pack<outer=[1, 0] inner=[1:4]>"
C_LHS, C_RHS, C_OUT = (
    "pack<outer=[0, 1] inner=[0:2]>",
    "pack<outer=[1, 0] inner=[1:2]>",
    "pack<outer=[0, 1] inner=[0:2, 1:2]>",
)


@pytest.fixture(autouse=True)
def toys():
    with toy_resolvers() as resolvers:
        yield resolvers


check = partial(check_pass, SpecializeEncodings())


def kernels_of(mod):
    return {
        binding.var.name: binding.value.attrs.kernel
        for binding in walk_bindings(mod["main"])
        if encoded_op(binding.value) == MATMUL
    }


def test_one_device():
    @ir_module(V4)
    def Before(
        x: R.Tensor((5, 3), "float32", "llvm:0"),
        w: R.Tensor((3, 7), "float32", "llvm:0"),
        b: R.Tensor((7,), "float32", "llvm:0"),
    ) -> R.Tensor((5, 7), "float32", "llvm:0"):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x1, w1, encoding=OUT)
            d = R.hetero.elementwise(c, b, expression="relu(add(x0, x1))", encoding=OUT)
            y = R.hetero.unset_encoding(d, OUT)
            R.output(y)
        return y

    @ir_module(V4)
    def Expected(
        x: R.Tensor((5, 3), "float32", "llvm:0"),
        w: R.Tensor((3, 7), "float32", "llvm:0"),
        b: R.Tensor((7,), "float32", "llvm:0"),
    ) -> R.Tensor((5, 7), "float32", "llvm:0"):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.set_encoding(w, RHS, layout=PANELS)
            c = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="matmul_5x7x3_llvm_0")
            d = R.hetero.elementwise(c, b, expression="relu(add(x0, x1))", encoding=OUT, layout=ROWS)
            y = R.hetero.unset_encoding(d, OUT, layout=ROWS)
            R.output(y)
        return y

    check(Before, Expected)


def test_variants_are_shared_where_equal_and_only_there():
    """One name per distinct problem and target: of two equal targets one, of two different ones two."""

    @ir_module(V4, (V4, 1), (V2, 2))
    def Mod(
        a: R.Tensor((5, 3), "float32", "llvm:0"),
        b: R.Tensor((5, 3), "float32", "llvm:1"),
        c: R.Tensor((5, 3), "float32", "llvm:2"),
        v: R.Tensor((3, 7), "float32", "llvm:0"),
        w: R.Tensor((3, 7), "float32", "llvm:1"),
        z: R.Tensor((3, 7), "float32", "llvm:2"),
    ):
        with R.dataflow():
            a1 = R.hetero.set_encoding(a, LHS)
            b1 = R.hetero.set_encoding(b, LHS)
            c1 = R.hetero.set_encoding(c, LHS)
            v1 = R.hetero.set_encoding(v, RHS)
            w1 = R.hetero.set_encoding(w, RHS)
            z1 = R.hetero.set_encoding(z, RHS)
            p = R.hetero.matmul(a1, v1, encoding=OUT)
            q = R.hetero.matmul(b1, w1, encoding=OUT)
            r = R.hetero.matmul(c1, z1, encoding=OUT)
            s = R.hetero.matmul(a1, v1, p, encoding=OUT)
            s1 = R.hetero.unset_encoding(s, OUT)
            q1 = R.hetero.unset_encoding(q, OUT)
            r1 = R.hetero.unset_encoding(r, OUT)
            R.output(s1, q1, r1)
        return (s1, q1, r1)

    kernels = kernels_of(SpecializeEncodings()(Mod))
    assert kernels == {
        "p": "matmul_5x7x3_llvm_0",
        "q": "matmul_5x7x3_llvm_0",
        "r": "matmul_5x7x3_llvm_2",
        "s": "matmul_5x7x3_llvm_0_v1",  # with an initial accumulator: another problem
    }


def test_an_encoded_tensor_is_laid_out_again_on_the_cheaper_side():
    """llvm has vectors, c has none: the llvm side lays out, before the transfer one way and after it the other way."""

    @ir_module(V4, "c:1")
    def Before(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "c:0")) -> R.Tensor(
        (5, 7), "float32", "llvm:0"
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            x2 = R.to_vdevice(x1, "c:0")
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x2, w1, encoding=OUT)
            d = R.to_vdevice(c, "llvm:0")
            y = R.hetero.unset_encoding(d, OUT)
            R.output(y)
        return y

    @ir_module(V4, "c:1")
    def Expected(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "c:0")) -> R.Tensor(
        (5, 7), "float32", "llvm:0"
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            x2_laid_out = R.hetero.relayout(x1, LHS, layout=C_LHS, from_layout=ROWS)
            x2 = R.to_vdevice(x2_laid_out, "c:0")
            w1 = R.hetero.set_encoding(w, RHS, layout=C_RHS)
            c = R.hetero.matmul(x2, w1, encoding=OUT, layout=C_OUT, kernel="matmul_5x7x3_c_0")
            d_there = R.to_vdevice(c, "llvm:0")
            d = R.hetero.relayout(d_there, OUT, layout=ROWS, from_layout=C_OUT)
            y = R.hetero.unset_encoding(d, OUT, layout=ROWS)
            R.output(y)
        return y

    check(Before, Expected)


def test_equal_layouts_travel_as_they_are():
    @ir_module(V4, (V2, 1))
    def Before(w: R.Tensor((3, 7), "float32", "llvm:0"), x: R.Tensor((5, 3), "float32", "llvm:1")):
        with R.dataflow():
            w1 = R.hetero.set_encoding(w, RHS)
            w2 = R.to_vdevice(w1, "llvm:1")
            x1 = R.hetero.set_encoding(x, LHS)
            c = R.hetero.matmul(x1, w2, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            R.output(y)
        return y

    @ir_module(V4, (V2, 1))
    def Expected(w: R.Tensor((3, 7), "float32", "llvm:0"), x: R.Tensor((5, 3), "float32", "llvm:1")):
        with R.dataflow():
            w1 = R.hetero.set_encoding(w, RHS, layout=PANELS)
            w2 = R.to_vdevice(w1, "llvm:1")
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            c = R.hetero.matmul(x1, w2, encoding=OUT, layout=ROWS, kernel="matmul_5x7x3_llvm_1")
            y = R.hetero.unset_encoding(c, OUT, layout=ROWS)
            R.output(y)
        return y

    check(Before, Expected)


def test_without_a_resolver_ops_are_stock_again():
    """Vulkan lacks layouts: permuted operands, initial accumulator and elementwise work are stock ops again."""

    @ir_module("vulkan")
    def Before(
        x: R.Tensor((5, 3), "float32", "vulkan:0"),
        w: R.Tensor((7, 3), "float32", "vulkan:0"),
        b: R.Tensor((7,), "float32", "vulkan:0"),
        r: R.Tensor((5, 7), "float32", "vulkan:0"),
    ) -> R.Tensor((5, 7), "float32", "vulkan:0"):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, T_LHS)
            w1 = R.hetero.set_encoding(w, T_RHS)
            r1 = R.hetero.set_encoding(r, T_OUT)
            c = R.hetero.matmul(x1, w1, b, encoding=T_OUT)
            d = R.hetero.elementwise(c, r1, expression="relu(add(multiply(x0, 0.5), x1))", encoding=T_OUT)
            y = R.hetero.unset_encoding(d, T_OUT)
            R.output(y)
        return y

    @ir_module("vulkan")
    def Expected(
        x: R.Tensor((5, 3), "float32", "vulkan:0"),
        w: R.Tensor((7, 3), "float32", "vulkan:0"),
        b: R.Tensor((7,), "float32", "vulkan:0"),
        r: R.Tensor((5, 7), "float32", "vulkan:0"),
    ) -> R.Tensor((5, 7), "float32", "vulkan:0"):
        with R.dataflow():
            t: R.Tensor((3, 7), "float32", "vulkan:0") = R.permute_dims(w, [1, 0])
            p: R.Tensor((5, 7), "float32", "vulkan:0") = R.matmul(x, t)
            c: R.Tensor((5, 7), "float32", "vulkan:0") = R.add(b, p)
            h: R.Tensor((5, 7), "float32", "vulkan:0") = R.multiply(c, R.const(0.5, "float32"))
            s: R.Tensor((5, 7), "float32", "vulkan:0") = R.add(h, r)
            y: R.Tensor((5, 7), "float32", "vulkan:0") = R.nn.relu(s)
            R.output(y)
        return y

    with collect_encodings() as reports:
        after = SpecializeEncodings()(Before)
    Expected = RealizeVDevice()(Expected)  # places the constant
    assert_structural_equal(after, Expected)
    assert_structural_equal(SpecializeEncodings()(after), Expected)
    (entry,) = reports[0].cancelled
    assert (entry.variable, entry.device) == ("c", "vulkan:0")
    assert "no resolver for target kind" in entry.reason


def test_one_side_without_layouts_gets_plain_tensors():
    """Into the other device goes what was encoded, as it was before; out of it comes a plain tensor, encoded there."""

    @ir_module("c", "vulkan")
    def Before(
        x: R.Tensor((5, 3), "float32", "c:0"),
        w: R.Tensor((3, 7), "float32", "c:0"),
        v: R.Tensor((3, 7), "float32", "vulkan:0"),
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x1, w1, encoding=OUT)
            x2 = R.to_vdevice(x1, "vulkan:0")
            v2 = R.hetero.set_encoding(v, RHS)
            d = R.hetero.matmul(x2, v2, encoding=OUT)
            e = R.to_vdevice(c, "vulkan:0")
            f = R.hetero.elementwise(d, e, expression="add(x0, x1)", encoding=OUT)
            g = R.to_vdevice(f, "c:0")
            h = R.hetero.elementwise(g, c, expression="add(x0, x1)", encoding=OUT)
            y = R.hetero.unset_encoding(h, OUT)
            R.output(y)
        return y

    @ir_module("c", "vulkan")
    def Expected(
        x: R.Tensor((5, 3), "float32", "c:0"),
        w: R.Tensor((3, 7), "float32", "c:0"),
        v: R.Tensor((3, 7), "float32", "vulkan:0"),
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=C_LHS)
            w1 = R.hetero.set_encoding(w, RHS, layout=C_RHS)
            c = R.hetero.matmul(x1, w1, encoding=OUT, layout=C_OUT, kernel="matmul_5x7x3_c_0")
            x2 = R.to_vdevice(x, "vulkan:0")
            d: R.Tensor((5, 7), "float32", "vulkan:0") = R.matmul(x2, v)
            e_plain = R.hetero.unset_encoding(c, OUT, layout=C_OUT)
            e = R.to_vdevice(e_plain, "vulkan:0")
            f: R.Tensor((5, 7), "float32", "vulkan:0") = R.add(d, e)
            g_there = R.to_vdevice(f, "c:0")
            g = R.hetero.set_encoding(g_there, OUT, layout=C_OUT)
            h = R.hetero.elementwise(g, c, expression="add(x0, x1)", encoding=OUT, layout=C_OUT)
            y = R.hetero.unset_encoding(h, OUT, layout=C_OUT)
            R.output(y)
        return y

    check(Before, Expected)


def test_nothing_is_laid_out_for_nobody():
    @ir_module("c", "vulkan")
    def Before(x: R.Tensor((5, 3), "float32", "c:0"), w: R.Tensor((3, 7), "float32", "vulkan:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            x2 = R.to_vdevice(x1, "vulkan:0")
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x2, w1, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            R.output(y)
        return y

    @ir_module("c", "vulkan")
    def Expected(x: R.Tensor((5, 3), "float32", "c:0"), w: R.Tensor((3, 7), "float32", "vulkan:0")):
        with R.dataflow():
            x2 = R.to_vdevice(x, "vulkan:0")
            y: R.Tensor((5, 7), "float32", "vulkan:0") = R.matmul(x2, w)
            R.output(y)
        return y

    check(Before, Expected)


def test_inside_branches():
    """A branch reads what was encoded outside of it, and is cancelled or specialized like the rest."""

    @ir_module("vulkan")
    def Before(
        x: R.Tensor((5, 3), "float32", "vulkan:0"),
        w: R.Tensor((3, 7), "float32", "vulkan:0"),
        p: R.Tensor((), "bool", "vulkan:0"),
    ) -> R.Tensor((5, 7), "float32", "vulkan:0"):
        x1 = R.hetero.set_encoding(x, LHS)
        w1 = R.hetero.set_encoding(w, RHS)
        if p:
            c = R.hetero.matmul(x1, w1, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
        else:
            d = R.hetero.matmul(x1, w1, encoding=OUT)
            d1 = R.hetero.unset_encoding(d, OUT)
            y: R.Tensor((5, 7), "float32", "vulkan:0") = R.exp(d1)
        return y

    @ir_module("vulkan")
    def Expected(
        x: R.Tensor((5, 3), "float32", "vulkan:0"),
        w: R.Tensor((3, 7), "float32", "vulkan:0"),
        p: R.Tensor((), "bool", "vulkan:0"),
    ) -> R.Tensor((5, 7), "float32", "vulkan:0"):
        if p:
            y: R.Tensor((5, 7), "float32", "vulkan:0") = R.matmul(x, w)
        else:
            d: R.Tensor((5, 7), "float32", "vulkan:0") = R.matmul(x, w)
            y: R.Tensor((5, 7), "float32", "vulkan:0") = R.exp(d)
        return y

    after = SpecializeEncodings()(Before)
    assert_structural_equal(after, Expected)


def product_on_llvm():
    @ir_module(V4)
    def Mod(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "llvm:0")):
        with R.dataflow():
            weight = R.hetero.set_encoding(w, RHS)
            x1 = R.hetero.set_encoding(x, LHS)
            c = R.hetero.matmul(x1, weight, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            R.output(y)
        return y

    return Mod


@pytest.mark.parametrize("answer", [PackedLayout.identity(3), "identity<2>", 7])
def test_an_answer_that_is_not_a_layout_is_refused(answer):
    undo = register_resolver(
        Toy("other", (PackedLayout.identity(2), answer, PackedLayout.identity(2))), "llvm", [], 200
    )
    try:
        with pytest.raises(EncodingError) as error:
            SpecializeEncodings()(product_on_llvm())
    finally:
        undo()
    for part in ("'other'", "x86-64-v4", "'weight' in function 'main'", "matmul[1]", "expected a PackedLayout of 2"):
        assert part in str(error.value)


def test_compensation_is_for_right_operands_of_8_bits():
    answer = PackedLayout((1, 0), (1, 0), (16, 4), compensation=True)
    undo = register_resolver(
        Toy("other", (PackedLayout.identity(2), answer, PackedLayout.identity(2))), "llvm", [], 200
    )
    try:
        with pytest.raises(EncodingError, match=r"'other'.*'weight' in function 'main'.*right operands of 8 bits"):
            SpecializeEncodings()(product_on_llvm())
    finally:
        undo()


def test_a_resolver_that_raises_is_named():
    class Broken(Toy):
        def resolve(self, encoding, target):
            raise KeyError("tile of k")

    undo = register_resolver(Broken("broken", ()), "llvm", [], 200)
    try:
        with pytest.raises(EncodingError, match=r"'broken'.*KeyError: 'tile of k'"):
            SpecializeEncodings()(product_on_llvm())
    finally:
        undo()


def test_unknown_shapes_are_refused():
    @ir_module(V4)
    def Mod(x: R.Tensor("float32", ndim=2, vdevice="llvm:0"), w: R.Tensor((3, 7), "float32", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x1, w1, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            R.output(y)
        return y

    with pytest.raises(EncodingError, match=r"variable 'c' in function 'main'.*found no shape, expected extents"):
        SpecializeEncodings()(Mod)


def test_a_module_without_encodings_stays():
    @ir_module(V4)
    def Mod(x: R.Tensor((5, 3), "float32", "llvm:0")) -> R.Tensor((5, 3), "float32", "llvm:0"):
        with R.dataflow():
            y: R.Tensor((5, 3), "float32", "llvm:0") = R.exp(x)
            R.output(y)
        return y

    assert SpecializeEncodings()(Mod).same_as(Mod)


def test_a_resolver_may_store_activations_differently(toys):
    """It is asked for values that are not constants, also after ops that HoistEncodings computes."""
    toys["llvm"].resolve_activation = lambda encoding, target: PackedLayout.identity(2)

    @ir_module(V4)
    def Mod(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "llvm:0")) -> R.Tensor(
        (5, 7), "float32", "llvm:0"
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            w1 = R.hetero.set_encoding(w, RHS)
            c = R.hetero.matmul(x1, w1, encoding=OUT)
            y = R.hetero.unset_encoding(c, OUT)
            zeros = R.reshape(R.const(np.zeros(21, "float32"), "float32"), (3, 7))
            z1 = R.hetero.set_encoding(zeros, RHS)
            d = R.hetero.matmul(x1, z1, encoding=OUT)
            e = R.hetero.unset_encoding(d, OUT)
            out = R.add(y, e)
            R.output(out)
        return out

    after = SpecializeEncodings()(RealizeVDevice()(Mod))
    layouts = {b.var.name: b.value.attrs.layout for b in walk_bindings(after["main"]) if encoded_op(b.value)}
    assert layouts["w1"] == ROWS
    assert layouts["z1"] == PANELS
    kernels = kernels_of(after)
    assert kernels["c"] != kernels["d"]

    toys["llvm"].resolve_activation = lambda encoding, target: PackedLayout.identity(3)
    with pytest.raises(EncodingError, match="expected a PackedLayout of 2 dimensions"):
        SpecializeEncodings()(RealizeVDevice()(Mod))


def test_each_question_is_asked_once(toys, monkeypatch):
    """A resolver answers once for each encoding and target, however many products have that encoding."""
    counts, answer = Counter(), toys["llvm"].resolve

    def counting(name):
        def ask(encoding, target):
            counts[name, str(encoding), str(target)] += 1
            return answer(encoding, target)

        return ask

    for name in ("resolve", "resolve_activation"):
        monkeypatch.setattr(toys["llvm"], name, counting(name), raising=False)

    @ir_module(V4, (V4, 1), (V2, 2))
    def Mod(
        a: R.Tensor((5, 3), "float32", "llvm:0"),
        b: R.Tensor((5, 3), "float32", "llvm:1"),
        c: R.Tensor((5, 3), "float32", "llvm:2"),
        v: R.Tensor((3, 7), "float32", "llvm:0"),
        w: R.Tensor((3, 7), "float32", "llvm:1"),
        z: R.Tensor((3, 7), "float32", "llvm:2"),
    ):
        with R.dataflow():
            p = R.hetero.matmul(R.hetero.set_encoding(a, LHS), R.hetero.set_encoding(v, RHS), encoding=OUT)
            q = R.hetero.matmul(R.hetero.set_encoding(b, LHS), R.hetero.set_encoding(w, RHS), encoding=OUT)
            r = R.hetero.matmul(R.hetero.set_encoding(c, LHS), R.hetero.set_encoding(z, RHS), encoding=OUT)
            p1 = R.hetero.unset_encoding(p, OUT)
            q1 = R.hetero.unset_encoding(q, OUT)
            r1 = R.hetero.unset_encoding(r, OUT)
            R.output(p1, q1, r1)
        return (p1, q1, r1)

    SpecializeEncodings()(Mod)
    targets = {target for _, _, target in counts}
    assert len(targets) == 2
    assert set(counts) == {("resolve", encoding, target) for encoding in (LHS, RHS, OUT) for target in targets} | {
        ("resolve_activation", encoding, target) for encoding in (LHS, RHS) for target in targets
    }
    assert set(counts.values()) == {1}


def test_a_storage_size_that_does_not_hold_the_layout_is_refused(toys):
    toys["llvm"].storage_size = lambda encoding, shape, target: 8

    @ir_module(V4)
    def Mod(x: R.Tensor((5, 3), "float32", "llvm:0")) -> R.Tensor((5, 3), "float32", "llvm:0"):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            y = R.hetero.unset_encoding(x1, LHS)
            R.output(y)
        return y

    with pytest.raises(EncodingError, match="'toy' says that .* takes 8 bytes .* expected at least 60"):
        SpecializeEncodings()(RealizeVDevice()(Mod))
