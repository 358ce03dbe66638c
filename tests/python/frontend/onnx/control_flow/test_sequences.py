"""Sequences and optionals: as inputs and outputs, mapped, and with positions that only a call knows."""

import itertools

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import relax_hetero as rh
from frontend.onnx.control_flow.against_onnxruntime import check, compare, parsed

MAP = """
    g (seq(float[n]) s, float[k] x) => (seq(float[m]) y, seq(int64[r]) shapes) {
        y, shapes = SequenceMap(s, x) <body = b (float[n] e, float[k] u) => (float[m] o, int64[r] d) {
            o = Concat<axis = 0>(e, u) d = Shape(e) }>
    }"""


def test_sequences_come_in_and_go_out():
    """Sequences are lists of tensors of different sizes; `shapes` gives their number."""
    mod = rh.from_onnx(parsed(MAP), shapes={"s": [[2], ["a"]]})
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    s, x = [np.ones(2, "float32"), np.zeros(3, "float32")], np.full(1, 7, "float32")
    y, shapes = vm["main"](s, x)
    compare([*y, *shapes], [np.append(e, x) for e in s] + [np.array([e.size]) for e in s])


@pytest.mark.parametrize("shapes", [None, {"s": 2}, {"s": [2]}, {"s": [[2, 2]]}])
def test_a_length_must_be_known(shapes):
    with pytest.raises(rh.FrontendError, match="'s"):
        rh.from_onnx(parsed(MAP), shapes=shapes)


def optional_model():
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    given = helper.make_value_info("given", helper.make_optional_type_proto(tensor))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    has, element = helper.make_graph, helper.make_tensor_value_info
    then = has([helper.make_node("OptionalGetElement", ["given"], ["t"])], "t", [], [element("t", 1, [2])])
    other = has([helper.make_node("Neg", ["x"], ["e"])], "e", [], [element("e", 1, [2])])
    nodes = [
        helper.make_node("OptionalHasElement", ["given"], ["has"]),
        helper.make_node("If", ["has"], ["y"], then_branch=then, else_branch=other),
    ]
    return helper.make_model(
        helper.make_graph(nodes, "g", [given, x], [y]), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )


def test_optionals_are_there_unless_shapes_says_no():
    """An empty optional is not a parameter."""
    x, optional = np.float32([1, 2]), np.float32([5, 6])
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(optional_model())))
    np.testing.assert_array_equal(vm["main"](optional, x).numpy(), optional)
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(optional_model(), shapes={"given": None})))
    np.testing.assert_array_equal(vm["main"](x).numpy(), -x)


def test_positions_that_only_a_call_knows():
    """Also negative ones; those outside are errors, as in ONNX Runtime."""
    model = parsed("""
        g (float[2] a, float[3] b, float[1] c, int64 p, int64 q, int64 r) => (float[k] y) {
            two = SequenceConstruct(a, b)
            three = SequenceInsert(two, c, p)
            rest = SequenceErase(three, q)
            y = SequenceAt(rest, r)
        }""")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    reference = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model), cache=False))
    tensors = [np.full(size, size, "float32") for size in (2, 3, 1)]
    for places in itertools.product((-3, -2, 0, 1, 2, 3), (-4, -3, 2, 3), (-3, -1, 1, 2)):
        args = [*tensors, *map(np.int64, places)]
        try:
            expected = reference.run(None, dict(zip("abcpqr", map(np.asarray, args), strict=True)))
        except Exception:
            with pytest.raises(rh.HeteroError, match="Sequence"):
                vm["main"](*args)
        else:
            compare(vm["main"](*args), expected)


def test_sequences_in_loops_of_known_trips():
    """Unrolled, a loop may do anything with a sequence: the elements of different sizes stay a tuple."""
    model = parsed("""
        g (float[n] x) => (float[k] y) <int64 m = {3}> {
            begun = SequenceConstruct(x)
            list = Loop(m, , begun) <body = b (int64 i, bool c, seq(float[a]) l) => (bool go, seq(float[d]) l2) {
                go = Identity(c)
                last = SequenceAt(l, i)
                more = Concat<axis = 0>(last, x)
                l2 = SequenceInsert(l, more)
            }>
            y = ConcatFromSequence<axis = 0>(list)
        }""")
    check(model, [np.arange(2, dtype="float32")])


def test_splits_of_symbolic_sizes():
    model = parsed("""
        g (float[n, 2] x, int64 p) => (float[2] row, int64 count, float[2, n] turned) {
            rows = SplitToSequence<axis = 0, keepdims = 0>(x)
            row = SequenceAt(rows, p)
            count = SequenceLength(rows)
            turned = ConcatFromSequence<axis = 1, new_axis = 1>(rows)
        }""")
    check(model, [np.arange(6, dtype="float32").reshape(3, 2), -1], devices=(1,))


def test_loops_that_do_more_than_append_are_refused():
    model = parsed("""
        g (int64 m, float[n] x) => (float[k] y) {
            begun = SequenceConstruct(x)
            [loop] list = Loop(m, , begun) <body = b (int64 i, bool c, seq(float[n]) l) => (bool go, seq(float[n]) l2) {
                go = Identity(c) [at] last = SequenceAt(l, i) l2 = SequenceInsert(l, last) }>
            y = ConcatFromSequence<axis = 0>(list)
        }""")
    with pytest.raises(rh.FrontendError, match="SequenceAt node 'at'.*of dynamic length"):
        rh.from_onnx(model)


REPEATED = """
    g (float[n,2] x, int64[n] d, float[m,3] z) => (float[p,2] y, float[r] w, float[2,q] v)
    <int64 zero = {0}, int64[1] two = {2}, int64[1] minus = {-1}, int64[2] pairs = {-1, 2}, bool yes = {1}> {
        trips = Shape(d)
        ones = ConstantOfShape<value = int64[1] {1}>(trips)
        xs = SplitToSequence<axis = 0>(x, ones)
        ds = SplitToSequence<axis = 0>(d, ones)
        none = SequenceEmpty()
        rows = SequenceEmpty()
        wide = SequenceEmpty()
        some, all, turned = Loop(trips, yes, none, rows, wide) <
            body = b (int64 i, bool c, s, t, u) => (bool g, e, f, h) {
            g = Identity(c)
            row = SequenceAt(xs, i)
            times = SequenceAt(ds, i)
            shape = Concat<axis = 0>(times, two)
            expanded = Expand(row, shape)
            many = Reshape(expanded, pairs)
            e = SequenceInsert(s, many)
            f = SequenceInsert(t, row)
            more = Transpose<perm = [1, 0]>(many)
            h0 = SequenceInsert(u, more)
            back = Transpose<perm = [1, 0]>(row)
            h = SequenceInsert(h0, back) }>
        y = ConcatFromSequence<axis = 0>(some)
        flat = ConcatFromSequence<axis = -2>(all)
        w = Reshape(flat, minus)
        v = ConcatFromSequence<axis = 1>(turned)
    }"""


def test_trips_that_append_tensors_of_different_sizes():
    """Exported form of `repeat_interleave` with computed counts; some rows are repeated zero times."""
    rng = np.random.default_rng(0)
    calls = [
        (rng.random((n, 2), "float32"), np.array(d), np.ones((1, 3), "float32"))
        for n, d in ((4, [1, 0, 3, 2]), (1, [2]), (2, [0, 0]))
    ]
    check(parsed(REPEATED), *calls, devices=(1, 2))


def test_parts_of_a_symbolic_axis_are_as_many_as_it_is_long():
    model = parsed("""
        g (float[n,2] x, float[m] z) => (float[n] y) {
            parts = Shape(z)
            ones = ConstantOfShape<value = int64[1] {1}>(parts)
            s = SplitToSequence<axis = 0>(x, ones)
            y = ConcatFromSequence<axis = 0>(s)
        }""")
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    x = np.ones((3, 2), "float32")
    np.testing.assert_array_equal(main(x, x[:, 0]).numpy(), x)
    with pytest.raises(rh.HeteroError, match="SplitToSequence.*splits an axis of n into m parts of one element"):
        main(x, x[:2, 0])


def test_tensors_of_different_sizes_are_not_stacked():
    """Other uses than joining them along the axis in which they differ are refused, by the sizes that trips find."""
    model = parsed(REPEATED.replace("y = ConcatFromSequence<axis = 0>(some)", "y = SequenceAt(some, zero)"))
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    with pytest.raises(rh.HeteroError, match="expected one shape"):
        main(np.ones((2, 2), "float32"), np.array([1, 2]), np.ones((1, 3), "float32"))
