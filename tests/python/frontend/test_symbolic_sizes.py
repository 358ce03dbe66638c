"""Sizes computed by nodes from symbolic dimensions become expressions of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser
from onnx.reference import ReferenceEvaluator
from tvm import relax, sym, tirx

import relax_hetero as rh

HEAD = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[N, M, 6] x) => (float[A, B] y)
    <int64 i0 = {0}, int64 i2 = {2}, int64[1] v0 = {0}, int64[1] v1 = {1}, int64[1] v2 = {2}, int64[1] v3 = {3},
     int64[1] last = {-1}, int64[1] four = {4}, int64[2] v01 = {0, 1}, int64[2] v21 = {-1, 0},
     int64[1] least = {-9999}> {
        s = Shape(x)
"""
TAIL = """
        y = ConstantOfShape(dims)
    }"""

BODIES = {
    "gather a vector": "dims = Gather(s, v21)",
    "gather scalars": """
        a = Gather(s, i0) ua = Unsqueeze(a, v0)
        c = Gather(s, i2) uc = Unsqueeze(c, v0)
        dims = Concat<axis = 0>(ua, uc)""",
    "slice": "dims = Slice(s, v1, v3)",
    "slice to the end": "a = Slice(s, v1, v3, v0, v1) dims = Identity(a)",
    "slice backwards": "a = Slice(s, last, least, v0, last) dims = Gather(a, v01)",
    "arithmetic": """
        a = Slice(s, v0, v1) b = Slice(s, v1, v2)
        p = Mul(a, four) q = Add(p, b) r = Sub(q, b) t = Div(r, v2)
        dims = Concat<axis = 0>(q, t)""",
    "division that does not come out even": """
        a = Slice(s, v0, v1) b = Slice(s, v1, v2)
        p = Div(a, four) q = Div(v3, b)
        dims = Concat<axis = 0>(p, q)""",
    "product of all": "p = ReduceProd(s) dims = Concat<axis = 0>(p, v1)",
    "product to a scalar": "p = ReduceProd<keepdims = 0>(s) q = Reshape(p, last) dims = Concat<axis = 0>(q, v1)",
    "least and greatest": """
        a = Slice(s, v0, v1) b = Slice(s, v1, v2)
        p = Min(a, b, four) q = Max(a, v1)
        dims = Concat<axis = 0>(p, q)""",
    "squeezed": "a = Slice(s, v0, v1) p = Squeeze(a, v0) q = Unsqueeze(p, v0) dims = Concat<axis = 0>(q, q)",
    "cast": "a = Gather(s, v01) dims = Cast<to = 7>(a)",
    "where a dimension is left out": """
        a = Gather(s, v01) minus = Constant<value = int64[2] {-1, -1}>()
        e = Equal(a, minus) one = Constant<value = int64[2] {1, 1}>()
        dims = Where(e, one, a)""",
    "compared with itself": "a = Gather(s, v01) e = Equal(a, a) dims = Where(e, a, four)",
}


def ops_of(func):
    return [b.value.op.name for block in func.body.blocks for b in block.bindings if isinstance(b.value, relax.Call)]


@pytest.mark.parametrize("name", BODIES)
@given(sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
@settings(max_examples=5)
def test_sizes_are_those_of_the_reference(name, sizes):
    model = parser.parse_model(HEAD + BODIES[name] + TAIL)
    func = rh.from_onnx(model)["main"]
    # Nothing but the fill is left to run; where a size may be negative, that is checked.
    assert set(ops_of(func)) <= {"relax.broadcast_to", "relax.full", "relax.hetero.requirement"}
    analyzer = sym.Analyzer()
    for dim, value in zip(func.params[0].ty.shape, sizes, strict=False):
        analyzer.bind(dim, tirx.IntImm("int64", value))
    actual = [int(analyzer.simplify(dim)) for dim in func.ret_ty.shape]
    (expected,) = ReferenceEvaluator(model).run(None, {"x": np.zeros((*sizes, 6), "float32")})
    assert actual == list(expected.shape)


def test_numbers_that_are_not_sizes_are_computed_at_run_time():
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[N, M] x) => (float[2] y) { s = Shape(x) f = Cast<to = 1>(s) y = Sqrt(f) }""")
    ops = ops_of(rh.from_onnx(model)["main"])
    assert ops[-1] == "relax.sqrt" and "relax.shape_to_tensor" in ops


def test_a_table_cut_by_a_symbolic_size_bounds_it():
    # As exporters write position embeddings: more rows than the table has do not broadcast.
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[batch, tokens, 2] x) => (float[batch, tokens, 2] y)
        <float[5, 2] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[1] zero = {0}, int64[1] one = {1}> {
            s = Shape(x) n = Gather(s, one) positions = Slice(table, zero, n, zero) y = Add(x, positions) }""")
    func = rh.from_onnx(model)["main"]
    assert [str(dim) for dim in list(func.ret_ty.shape)[:2]] == ["batch", "tokens"]
    assert {str(name): int(bound) for name, bound in func.attrs["tir_var_upper_bound"].items()} == {"tokens": 5}
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    for tokens in (1, 4, 5):
        x = np.random.default_rng(tokens).standard_normal((3, tokens, 2)).astype("float32")
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
        np.testing.assert_array_equal(machine["main"](x).numpy(), expected)
    with pytest.raises(rh.BindingError, match="tokens is 6 by argument 'x' of 'main' dimension 1, expected at most 5"):
        machine["main"](np.zeros((3, 6, 2), "float32"))


def test_a_size_that_may_broadcast_is_not_bounded():
    # One row broadcasts with any number of rows.
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[tokens, 2] x) => (float[A, 2] y)
        <float[1, 2] table = {0, 1}, int64[1] zero = {0}> {
            s = Shape(x) n = Gather(s, zero) row = Slice(table, zero, n) y = Add(x, row) }""")
    assert "tir_var_upper_bound" not in rh.from_onnx(model)["main"].attrs


@pytest.mark.parametrize(
    ("numbers", "is_computed"),
    [
        ("start = Identity(zero) end = Identity(n)", False),
        ("start = Sub(n, two) end = Identity(most)", True),
        ("start = Add(n, two) end = Identity(most)", False),
        ("start = Sub(n, n) end = Add(n, n)", False),
        ("minus = Sub(zero, n) start = Sub(minus, two) end = Identity(most)", False),
    ],
)
def test_slices_by_symbolic_numbers(numbers, is_computed):
    # Numbers whose sign is known only when the model runs are read then.
    model = parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n_, 1] x, float[9, 2] data) => (float[A, 2] y)
        <int64[1] zero = {{0}}, int64[1] two = {{2}}, int64[1] most = {{9223372036854775807}}> {{
            s = Shape(x) n = Gather(s, zero) {numbers} y = Slice(data, start, end) }}""")
    func = rh.from_onnx(model)["main"]
    assert ("relax.tensor_to_shape" in ops_of(func)) == is_computed
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    data = np.random.default_rng(0).standard_normal((9, 2)).astype("float32")
    for size in (1, 2, 5, 12):
        feeds = {"x": np.zeros((size, 1), "float32"), "data": data}
        (expected,) = ReferenceEvaluator(model).run(None, feeds)
        np.testing.assert_array_equal(machine["main"](*feeds.values()).numpy(), expected)


def test_a_size_that_is_halved_is_that_of_a_convolution():
    # Exported U-Nets: a map resized to a size computed by Div joins one that a convolution halved.
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 1, height, 4] x) => (float[1, 1, h, 2] y)
        <float[1, 1, 3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[1] axis = {2}, int64[1] one = {1}, int64[1] two = {2},
         int64[2] ends = {1, 1}, int64[1] columns = {2}> {
            half = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w)
            s = Shape(x) n = Gather(s, axis) less = Sub(n, one) d = Div(less, two) rows = Add(d, one)
            dims = Concat<axis = 0>(ends, rows, columns) ones = ConstantOfShape(dims)
            y = Add(half, ones) }""")
    mod = rh.from_onnx(model)
    assert "min" not in str(mod["main"].ret_ty)  # no size that may be one or the other
    main = rh.vm.VirtualMachine(rh.compile(mod))["main"]
    for height in (1, 5, 6):
        x = np.random.default_rng(height).standard_normal((1, 1, height, 4)).astype("float32")
        (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
        np.testing.assert_allclose(main(x).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_halves_of_a_size_that_is_less_than_nothing_are_refused():
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x) => (float[m] y) <int64[1] one = {1}, int64[1] two = {2}> {
            s = Shape(x) less = Sub(s, one) half = Div(less, two) rows = Add(half, two) y = ConstantOfShape(rows) }""")
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    assert main(np.zeros(6, "float32")).shape == (4,)
    with pytest.raises(rh.HeteroError, match="Div node 'Div_2': divides a negative size .n = 0"):
        main(np.zeros(0, "float32"))
