"""`If`: branches of different sizes, values from outside, known conditions."""

import numpy as np
import onnx
import pytest
from tvm import relax

import relax_hetero as rh
from frontend.onnx.control_flow.against_onnxruntime import check, compare, parsed


def test_branches_of_different_sizes():
    """A size in which the branches differ is known to the call only; one branch computes it, another has a constant."""
    model = parsed("""
        g (bool p, bool[1] q, float[n, 3] x) => (float[k, 3] y, float[n, 3] z, float[j] v)
        <float[4] numbers = {1.0, 2.0, 3.0, 4.0}, int64[1] flat = {-1}> {
            wide, z = If(p) <then_branch = t () => (float[a, 3] t0, float[n, 3] t1) {
                                 t0 = Concat<axis = 0>(x, x) t1 = Identity(x) },
                             else_branch = e () => (float[n, 3] e0, float[n, 3] e1) { e0 = Neg(x) e1 = Abs(x) }>
            y = Relu(wide)
            v = If(q) <then_branch = t2 () => (float[b] u0) { u0 = Reshape(x, flat) },
                       else_branch = e2 () => (float[4] u1) { u1 = Identity(numbers) }>
        }""")
    rng = np.random.default_rng(0)
    check(model, *([p, np.array([not p]), rng.standard_normal((2, 3), "float32")] for p in (False, True)))


def test_inner_branches_and_rows_that_one_finds():
    model = parsed("""
        g (bool p, bool q, float[n] x) => (float[k] y) <float zero = {0.0}> {
            y = If(p) <
                then_branch = t () => (float[a] t0) {
                    t0 = If(q) <then_branch = tt () => (float[b] s0) { mask = Greater(x, zero) s0 = Compress(x, mask) },
                                else_branch = te () => (float[n] s1) { s1 = Neg(x) }> },
                else_branch = e () => (float[c] e0) { e0 = Concat<axis = 0>(x, x, x) }>
        }""")
    x = np.array([1, -2, 3, -4], "float32")
    check(model, *([p, q, x] for p in (False, True) for q in (False, True)))


def test_a_known_condition_leaves_one_branch():
    """Also one that follows from shapes: branches that do not fit are not even converted."""
    mod = rh.from_onnx(
        parsed("""
        g (float[2, 3] x) => (float[2, 3] y) <int64 two = {2}> {
            shape = Shape(x)
            rank = Size(shape)
            flat = Equal(rank, two)
            y = If(flat) <then_branch = t () => (float[2, 3] t0) { t0 = Relu(x) },
                          else_branch = e () => (float[2, 3] e0) { e0 = MatMul(x, x) }>
        }""")
    )
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    assert [value.op.name for value in values] == ["relax.nn.relu"]


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("t0 = Cast<to = 7>(x)", "is of int64 in one branch and of float32 in the other"),
        ("t0 = ReduceSum<keepdims = 0>(x)", "has 0 dimensions in one branch and 1 in the other"),
        ("t0 = SequenceConstruct(x)", "in one branch and"),
    ],
)
def test_branches_that_do_not_give_one_value_are_refused(then, message):
    model = parsed(f"""
        g (bool p, float[n] x) => (float[n] y) {{
            [choice] y = If(p) <then_branch = t () => (float[n] t0) {{ {then} }},
                                else_branch = e () => (float[n] e0) {{ e0 = Relu(x) }}>
        }}""")
    with pytest.raises(rh.FrontendError, match="'choice'") as error:
        rh.from_onnx(model)
    assert message in str(error.value)


TWO_RATES = parsed("""
    g (bool p, float[n, k] x) => (float[n, m] y) <float[6, 2] a = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
                                                  float[3, 2] b = {1, -1, 2, -2, 3, -3}> {
        [rate] y = If(p) <then_branch = t () => (float[n, 2] t0) { t0 = MatMul(x, a) },
                          else_branch = e () => (float[n, 2] e0) { e0 = MatMul(x, b) }>
    }""")


@pytest.mark.parametrize(("width", "fits", "other"), [(6, True, "else_branch"), (3, False, "then_branch")])
def test_a_branch_that_fits_no_static_shape_is_refused_by_the_call(width, fits, other):
    x = np.arange(2 * width, dtype="float32").reshape(2, width)
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(TWO_RATES, shapes={"x": [2, width]})))
    compare(vm["main"](np.array(fits), x), [x @ onnx.numpy_helper.to_array(TWO_RATES.graph.initializer[int(not fits)])])
    with pytest.raises(rh.HeteroError, match=f"'rate'.*its {other} does not fit"):
        vm["main"](np.array(not fits), x)


def test_branches_that_both_fit_no_static_shape_are_refused():
    with pytest.raises(rh.FrontendError, match="MatMul"):
        rh.from_onnx(TWO_RATES, shapes={"x": [2, 4]})


def test_sequences_of_branches():
    model = parsed("""
        g (bool p, float[n] x) => (float[k] y) {
            s = If(p) <then_branch = t () => (seq(float[a]) t0) {
                           d = Concat<axis = 0>(x, x) t0 = SequenceConstruct(x, d) },
                       else_branch = e () => (seq(float[n]) e0) { m = Neg(x) e0 = SequenceConstruct(m, m) }>
            y = ConcatFromSequence<axis = 0>(s)
        }""")
    check(model, *([p, np.arange(3, dtype="float32")] for p in (False, True)))
    assert any(isinstance(b.value, relax.If) for blk in rh.from_onnx(model)["main"].body.blocks for b in blk.bindings)
