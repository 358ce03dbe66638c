"""SetEncoding: matrix products in every form get encodings, and stay the same products."""

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import calls_of, ir_module
from relax_hetero.op.encoded import MATMUL
from relax_hetero.transform import SetEncoding, VerifyEncodings
from relax_hetero.transform.encode.set_encoding import set_encoding
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from seeds import fresh_rng
from transform.interpreting import run

F32 = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=2, n=4, k=3>"
BATCH = "<float32 * float32 -> float32; (b0, m, k) * (k, n) -> (b0, m, n); b0=5, m=?, n=4, k=3>"


def encodings(mod: tvm.IRModule) -> list[str]:
    """Encodings of all encoded products, in program order."""
    bindings = walk_bindings(mod["main"])
    return [str(binding.value.attrs.encoding) for binding in bindings if op_name(binding.value) == MATMUL]


def product(lhs, rhs, dtype="float32", out_dtype=None) -> tvm.IRModule:
    """A module that multiplies tensors of two shapes."""
    names = {extent for extent in (*lhs, *rhs) if isinstance(extent, str)}
    symbols = {name: tvm.tirx.Var(name, "int64") for name in names}
    params = [
        relax.Var(name, relax.TensorType([symbols.get(e, e) for e in shape], dtype))
        for name, shape in (("x", lhs), ("w", rhs))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.matmul(*params, out_dtype=out_dtype)))
        builder.emit_func_output(out)
    return builder.get()


def test_one_device():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.add(y, y)
            R.output(z)
        return z

    @ir_module()
    def Expected(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "matmul[0]" + F32)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + F32)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + F32)
            y = R.hetero.unset_encoding(out, "matmul[2]" + F32)
            z = R.add(y, y)
            R.output(z)
        return z

    after = SetEncoding()(Before)
    assert_structural_equal(after, Expected)
    assert set_encoding(after) is after


def test_two_devices():
    @ir_module("llvm", "c")
    def Before(
        x: R.Tensor((5, "s", 3), "float32", "llvm"),
        w: R.Tensor((3, 4), "float32", "llvm"),
        u: R.Tensor((3, 4), "float32", "c"),
    ):
        s = T.int64()
        with R.dataflow():
            y: R.Tensor((5, s, 4), "float32", "llvm") = R.matmul(x, w)
            x1: R.Tensor((5, s, 3), "float32", "c") = R.to_vdevice(x, "c")
            z: R.Tensor((5, s, 4), "float32", "c") = R.matmul(x1, u)
            R.output(y, z)
        return (y, z)

    @ir_module("llvm", "c")
    def Expected(
        x: R.Tensor((5, "s", 3), "float32", "llvm"),
        w: R.Tensor((3, 4), "float32", "llvm"),
        u: R.Tensor((3, 4), "float32", "c"),
    ):
        s = T.int64()
        with R.dataflow():
            lhs: R.Tensor((5, s, 3), "float32", "llvm") = R.hetero.set_encoding(x, "batch_matmul[0]" + BATCH)
            rhs: R.Tensor((3, 4), "float32", "llvm") = R.hetero.set_encoding(w, "batch_matmul[1]" + BATCH)
            out: R.Tensor((5, s, 4), "float32", "llvm") = R.hetero.matmul(lhs, rhs, encoding="batch_matmul[2]" + BATCH)
            y: R.Tensor((5, s, 4), "float32", "llvm") = R.hetero.unset_encoding(out, "batch_matmul[2]" + BATCH)
            x1: R.Tensor((5, s, 3), "float32", "c") = R.to_vdevice(x, "c")
            lhs1: R.Tensor((5, s, 3), "float32", "c") = R.hetero.set_encoding(x1, "batch_matmul[0]" + BATCH)
            rhs1: R.Tensor((3, 4), "float32", "c") = R.hetero.set_encoding(u, "batch_matmul[1]" + BATCH)
            out1: R.Tensor((5, s, 4), "float32", "c") = R.hetero.matmul(lhs1, rhs1, encoding="batch_matmul[2]" + BATCH)
            z: R.Tensor((5, s, 4), "float32", "c") = R.hetero.unset_encoding(out1, "batch_matmul[2]" + BATCH)
            R.output(y, z)
        return (y, z)

    after = SetEncoding()(Before)
    assert_structural_equal(after, Expected)
    VerifyEncodings()(after)
    assert set_encoding(after) is after


def test_the_same_operand_of_products_alike_is_laid_out_once():
    @ir_module()
    def Before(x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32"), v: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.matmul(x, v)
            R.output(y, z)
        return (y, z)

    products = calls_of(MATMUL, SetEncoding()(Before)["main"])
    assert products[0].args[0].same_as(products[1].args[0])
    assert not products[0].args[1].same_as(products[1].args[1])


@pytest.mark.parametrize(
    ("lhs", "rhs", "maps"),
    [
        ((3,), (3, 4), "matmul[2]{}(m, k) * (k, n) -> (m, n); m=1, n=4, k=3>"),
        ((2, 3), (3,), "matmul[2]{}(m, k) * (k, n) -> (m, n); m=2, n=1, k=3>"),
        ((3,), (3,), "matmul[2]{}(m, k) * (k, n) -> (m, n); m=1, n=1, k=3>"),
        ((5, 2, 3), (3,), "batch_matmul[2]{}(b0, m, k) * (k, n) -> (b0, m, n); b0=5, m=2, n=1, k=3>"),
        ((3,), (5, 3, 4), "batch_matmul[2]{}(m, k) * (b0, k, n) -> (b0, m, n); b0=5, m=1, n=4, k=3>"),
        ((5, 2, 3), (5, 3, 4), "batch_matmul[2]{}(b0, m, k) * (b0, k, n) -> (b0, m, n); b0=5, m=2, n=4, k=3>"),
        ((5, 2, 3), (1, 3, 4), "batch_matmul[2]{}(b0, m, k) * (1, k, n) -> (b0, m, n); b0=5, m=2, n=4, k=3>"),
        ((1, 2, 3), (1, 3, 4), "batch_matmul[2]{}(b0, m, k) * (b0, k, n) -> (b0, m, n); b0=1, m=2, n=4, k=3>"),
        (
            (6, 1, 2, 3),
            (5, 3, 4),
            "batch_matmul[2]{}(b0, 1, m, k) * (b1, k, n) -> (b0, b1, m, n); b0=6, b1=5, m=2, n=4, k=3>",
        ),
        (
            ("b", 1, "m", "k"),
            (1, 5, "k", "n"),
            "batch_matmul[2]{}(b0, 1, m, k) * (1, b1, k, n) -> (b0, b1, m, n); b0=?, b1=5, m=?, n=?, k=?>",
        ),
        ((0, 3), (3, 4), "matmul[2]{}(m, k) * (k, n) -> (m, n); m=0, n=4, k=3>"),
        ((2, 0), (0, 4), "matmul[2]{}(m, k) * (k, n) -> (m, n); m=2, n=4, k=0>"),
    ],
)
def test_shapes(lhs, rhs, maps):
    before = product(lhs, rhs)
    after = set_encoding(before)
    assert encodings(after) == [maps.format("<float32 * float32 -> float32; ")]
    assert_structural_equal(after["main"].ret_ty, before["main"].ret_ty, map_free_vars=True)
    assert set_encoding(after) is after
    random = fresh_rng()
    sizes = {"b": 2, "m": 7, "k": 6, "n": 3}
    x, w = (random.normal(size=[sizes.get(e, e) for e in shape]).astype("float32") for shape in (lhs, rhs))
    np.testing.assert_allclose(run(after, x, w), np.matmul(x.astype("float64"), w), rtol=1e-5, atol=1e-6)


@st.composite
def batched_shapes(draw):
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    m, k, n = (draw(st.integers(0, 4)) for _ in range(3))

    def side(*inner):
        own = batch[draw(st.integers(0, len(batch))) :]
        return [*(draw(st.sampled_from([1, extent])) for extent in own), *inner]

    return side(m, k), side(k, n)


@given(batched_shapes(), st.integers(0, 2**32))
def test_random_shapes(shapes, seed):
    random = np.random.default_rng(seed)
    x, w = (random.normal(size=shape).astype("float32") for shape in shapes)
    after = set_encoding(product(*shapes))
    assert len(encodings(after)) == 1
    np.testing.assert_allclose(run(after, x, w), np.matmul(x.astype("float64"), w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "types", "result"),
    [
        ("float32", None, "float32 * float32 -> float32", "float32"),
        ("float64", None, "float64 * float64 -> float64", "float64"),
        ("float32", "float64", "float64 * float64 -> float64", "float64"),
        ("float16", None, "float16 * float16 -> float32", "float16"),
        ("float16", "float32", "float16 * float16 -> float32", "float32"),
        ("bfloat16", None, "bfloat16 * bfloat16 -> float32", "bfloat16"),
        ("float32", "float16", "float32 * float32 -> float32", "float16"),
    ],
)
def test_element_types(dtype, out_dtype, types, result):
    after = set_encoding(product((2, 3), (3, 4), dtype, out_dtype))
    assert encodings(after) == [f"matmul[2]<{types}; (m, k) * (k, n) -> (m, n); m=2, n=4, k=3>"]
    assert str(after["main"].ret_ty.dtype) == result


def test_a_reduced_extent_that_only_one_operand_knows_is_checked_at_run_time():
    @ir_module()
    def Expected(x: R.Tensor((2, "k"), "float32"), w: R.Tensor((3, 4), "float32")):
        with R.dataflow():
            matched = R.match_cast(x, R.Tensor((2, 3), "float32"))
            lhs = R.hetero.set_encoding(matched, "matmul[0]" + F32)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + F32)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + F32)
            y = R.hetero.unset_encoding(out, "matmul[2]" + F32)
            z = y
            R.output(z)
        return z

    after = set_encoding(product((2, "k"), (3, 4)))
    assert_structural_equal(after, Expected)
    assert relax.analysis.check_well_formed(after)
    two_names = set_encoding(product((2, "k"), ("l", 4)))
    assert encodings(two_names) == ["matmul[2]" + F32.replace("k=3", "k=?")]
    machine = rh.vm.VirtualMachine(rh.compile(product((2, "k"), ("l", 4))))
    x, w = (np.ones(shape, "float32") for shape in ((2, 5), (5, 4)))
    np.testing.assert_array_equal(machine["main"](x, w).numpy(), np.full((2, 4), 5, "float32"))
    with pytest.raises(rh.HeteroError):
        machine["main"](x, w[:3])


def test_inside_branches_and_outside_dataflow():
    @ir_module()
    def Before(c: R.Tensor((), "bool"), x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        if c:
            y = R.matmul(x, w)
            z = y
        else:
            z = R.zeros((2, 4), "float32")
        return z

    @ir_module()
    def Expected(c: R.Tensor((), "bool"), x: R.Tensor((2, 3), "float32"), w: R.Tensor((3, 4), "float32")):
        if c:
            lhs = R.hetero.set_encoding(x, "matmul[0]" + F32)
            rhs = R.hetero.set_encoding(w, "matmul[1]" + F32)
            out = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + F32)
            y = R.hetero.unset_encoding(out, "matmul[2]" + F32)
            z = y
        else:
            z = R.zeros((2, 4), "float32")
        return z

    after = SetEncoding()(Before)
    assert_structural_equal(after, Expected)
    assert relax.analysis.check_well_formed(after)
    assert set_encoding(after) is after


def test_ops_that_stay():
    @ir_module()
    def Before(
        a: R.Tensor(ndim=2, dtype="float32"),
        b: R.Tensor(dtype="float32"),
        c: R.Tensor((2, 2), "int32"),
        d: R.Tensor((2, 2), "float32"),
    ):
        with R.dataflow():
            unknown_shape = R.matmul(a, d)
            unknown_rank = R.matmul(b, d)
            integers = R.matmul(c, c)
            R.output(unknown_shape, unknown_rank, integers)
        return (unknown_shape, unknown_rank, integers)

    assert set_encoding(Before) is Before
