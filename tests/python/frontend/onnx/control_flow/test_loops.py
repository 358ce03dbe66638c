"""`Loop` and `Scan`: unrolled if short, else functions that the executable repeats; values as ONNX Runtime's."""

import gc
import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

import relax_hetero as rh
from frontend.onnx.control_flow.against_onnxruntime import check, parsed
from relax_hetero.transform.ir.rewriting import op_name, relax_functions, walk_bindings

LOOP = """
g (int64 m, float[n] x) => (float[n] y, float[t] rows) {
    y, rows = Loop(m, , x) <body = b (int64 i, bool c, float[n] v) => (bool go, float[n] v2, float row) {
        go = Identity(c)
        f = Cast<to = 1>(i)
        half = Constant<value = float {0.5}>()
        w = Mul(v, half)
        v2 = Add(w, f)
        row = ReduceSum<keepdims = 0>(v2)
    }>
}"""


def functions(model, **options):
    """The names of the functions that a model becomes, "main" left out."""
    return [gv.name_hint for gv, _ in relax_functions(rh.from_onnx(model, **options)) if gv.name_hint != "main"]


def test_a_loop_of_computed_trips():
    """None, fewer than none, one, and many of them; symbolic sizes; calls in flight."""
    model = parsed(LOOP)
    assert functions(model) == ["loop_Loop_0"]
    x = np.arange(3, dtype="float32")
    calls = [[trips, x] for trips in (0, -2, 1, 40)]
    one, _ = check(model, *calls, [7, np.ones(2, "float32")], devices=(1, 2))
    assert one.submit("main", 5, x).result()[1].shape == (5,)
    assert "main" in str(one.executable.memory_plan)


def test_a_million_trips_take_bounded_stack_and_memory():
    model = parsed("""
        g (int64 m, float[64] x) => (float[64] y) {
            y = Loop(m, , x) <body = b (int64 i, bool c, float[64] v) => (bool go, float[64] v2) {
                go = Identity(c) v2 = Neg(v) }>
        }""")
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    x = np.arange(64, dtype="float32")
    vm["main"](1000, x)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    np.testing.assert_array_equal(vm["main"](300_001, x).numpy(), -x)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (16 << 10)


def test_the_condition_of_a_body():
    """It ends the loop before its limit; only the call knows the number of rows, which may exceed their capacity."""
    model = parsed("""
        g (float[n] x, float most, bool start) => (float[n] y, float[t, n] rows, int64[t] steps) {
            y, rows, steps = Loop( , start, x) <
                body = b (int64 i, bool c, float[n] v) => (bool go, float[n] v2, float[n] v, int64 j) {
                    one = Constant<value = float {1.0}>()
                    v2 = Add(v, one)
                    top = ReduceMax<keepdims = 0>(v2)
                    go = Less(top, most)
                    j = Identity(i)
                }>
        }""")
    x = np.zeros(2, "float32")
    check(model, [x, 3.0, True], [x, 3.0, False], [x, -1.0, True], [x, 700.0, True])


def test_values_that_grow():
    """Each trip concatenates; the size is symbolic in the loop's function and after it."""
    model = parsed("""
        g (int64 m, float[n, 3] x) => (float[k, 3] y, float[k, 3] z) {
            y = Loop(m, , x) <body = b (int64 i, bool c, float[a, 3] v) => (bool go, float[d, 3] v2) {
                go = Identity(c) v2 = Concat<axis = 0>(v, x) }>
            z = Relu(y)
        }""")
    check(model, *([trips, np.random.default_rng(trips).standard_normal((2, 3), "float32")] for trips in (0, 1, 9)))


def test_loops_and_branches_in_loops():
    model = parsed("""
        g (int64 m, float[n] x) => (float[n] y, float[t] rows) {
            y, rows = Loop(m, , x) <body = b (int64 i, bool c, float[n] v) => (bool go, float[n] v4, float row) {
                go = Identity(c)
                two = Constant<value = int64 {2}>()
                rest = Mod(i, two)
                odd = Cast<to = 9>(rest)
                v2, inner = Loop(i, , v) <
                    body = ib (int64 j, bool c2, float[n] u) => (bool go2, float[n] u2, float[n] u) {
                    go2 = Identity(c2) sum = Add(u, x) u2 = Tanh(sum) }>
                v4 = If(odd) <then_branch = t () => (float[n] p) { p = Neg(v2) },
                              else_branch = e () => (float[n] q) { q = Identity(v2) }>
                row = ReduceSum<keepdims = 0>(inner)
            }>
        }""")
    assert sorted(functions(model)) == ["loop_Loop_0", "loop_Loop_0/body/Loop_4"]
    check(model, *([trips, np.linspace(-1, 1, 3, dtype="float32")] for trips in (0, 1, 6)))


def test_results_that_nothing_reads():
    """A value of the loop is handed on and not an output: it is freed, and the memory plan knows."""
    model = parsed("""
        g (int64 m, float[n] x) => (float[n] z) {
            y, rest, rows = Loop(m, , x, x) <
                body = b (int64 i, bool c, float[n] v, float[n] u) => (bool go, float[n] v2, float[n] u2, float[n] v) {
                    go = Identity(c) v2 = Add(v, u) u2 = Neg(u) }>
            z = Relu(y)
        }""")
    (vm,) = check(model, [3, np.ones(2, "float32")])
    assert vm.executable.memory_plan.at("main", n=4).transient > 0


def test_scans():
    """Axes, directions, several states; a recurrent layer with weights that are computed from constants."""
    model = parsed("""
        g (float[b, 4] s, float[b, t, 4] x, float[b, 4, t] z) => (float[b, 4] y, float[b, t, 4] p, float[b, 4, t] q)
        <float[4, 4] w = {0.1, 0.2, 0.3, 0.4, -0.1, -0.2, -0.3, -0.4, 0.5, 0.6, 0.7, 0.8, 0.0, 0.1, 0.0, 0.1}> {
            turned = Transpose<perm = [1, 0]>(w)
            large = Exp(turned)
            y, p, q = Scan<num_scan_inputs = 2, scan_input_axes = [1, -1], scan_input_directions = [0, 1],
                           scan_output_axes = [1, -1], scan_output_directions = [1, 0],
                           body = body (float[b, 4] h, float[b, 4] xt, float[b, 4] zt)
                               => (float[b, 4] h2, float[b, 4] r1, float[b, 4] r2) {
                product = MatMul(h, large)
                sum = Add(product, xt)
                h2 = Tanh(sum)
                r1 = Mul(h2, zt)
                r2 = Sub(xt, zt)
            }>(s, x, z)
        }""")
    rng = np.random.default_rng(0)

    def call(batch, steps):
        shapes = (batch, 4), (batch, steps, 4), (batch, 4, steps)
        return [rng.standard_normal(shape, "float32") for shape in shapes]

    check(model, call(1, 1), call(3, 20))


def test_products_of_slices_are_computed_in_front_of_a_scan():
    """One product for all trips; products of the state stay, and so do weights that a body reads in other ways."""
    model = parsed("""
        g (float[b, 3] s, float[b, t, 2] x) => (float[b, 3] y, float[b, t, 3] p)
        <float[2, 3] w = {1.0, 2.0, 3.0, -1.0, -2.0, -3.0}, float[3, 3] u = {0.1, 0, 0, 0.2, 0, 0.1, 0, 0, 0.3}> {
            y, p = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [1],
                        body = body (float[b, 3] h, float[b, 2] xt) => (float[b, 3] h2, float[b, 3] row) {
                [inputs] from_x = MatMul(xt, w)
                [state] from_h = MatMul(h, u)
                sum = Add(from_x, from_h)
                h2 = Tanh(sum)
                row = Identity(h2)
            }>(s, x)
        }""")
    mod = rh.from_onnx(model)
    where = {
        binding.var.name: gv.name_hint
        for gv, func in relax_functions(mod)
        for binding in walk_bindings(func)
        if op_name(binding.value) == "relax.matmul"
    }
    assert where == {"inputs": "main", "state": "loop_Scan_0"}
    rng = np.random.default_rng(0)
    check(model, *([rng.standard_normal((2, 3), "float32"), rng.standard_normal((2, t, 2), "float32")] for t in (1, 9)))


def test_scans_of_opset_8_have_a_batch():
    text = """
        g (float[2, 3] s, float[2, 4, 3] x) => (float[2, 3] y, float[2, 4, 3] p) {
            y, p = Scan<num_scan_inputs = 1, directions = [1],
                        body = b (float[3] h, float[3] xt) => (float[3] h2, float[3] row) {
                h2 = Add(h, xt) row = Identity(h2) }>( , s, x)
        }"""
    rng = np.random.default_rng(0)
    s, x = rng.standard_normal((2, 3), "float32"), rng.standard_normal((2, 4, 3), "float32")
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(parsed(text, opset=8)), cache=False))
    rows = s[:, None] + np.cumsum(x[:, ::-1], axis=1)
    for actual, expected in zip(vm["main"](s, x), (rows[:, -1], rows), strict=True):
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5)
    with pytest.raises(rh.FrontendError, match="sequence_lens"):
        rh.from_onnx(parsed(text.replace("( , s, x)", "(n, s, x)").replace("g (", "g (int64[2] n, "), opset=8))


def test_known_trips():
    """Few are unrolled; many are a loop, with rows of a known shape."""
    text = LOOP.replace("(int64 m, ", "(").replace("Loop(m,", "Loop(m,").replace("[t]", "[3]")
    short = text.replace("{\n    y,", "<int64 m = {3}> {\n    y,", 1)
    assert functions(parsed(short)) == []
    check(parsed(short), [np.ones(2, "float32")])
    long = short.replace("m = {3}", "m = {300}").replace("[3]", "[300]")
    mod = rh.from_onnx(parsed(long))
    assert [int(dim) for dim in mod["main"].ret_ty.fields[1].shape.values] == [300]
    check(parsed(long), [np.ones(2, "float32")], devices=(1,))


def test_the_number_of_trips_names_the_rows():
    """A symbolic size that is the number of trips is the number of rows."""
    mod = rh.from_onnx(
        parsed("""
        g (float[t, 3] x) => (float[t] y) {
            s = Constant<value = float {0.0}>()
            last, y = Scan<num_scan_inputs = 1, body = b (float h, float[3] xt) => (float h2, float row) {
                sum = ReduceSum<keepdims = 0>(xt) h2 = Add(h, sum) row = Identity(h2) }>(s, x)
        }""")
    )
    assert str(mod["main"].ret_ty.shape.values[0]) == "t"


def test_lists_that_loops_append_to():
    """TorchScript's form of loop results: sequences of a length that only a call knows, joined after the loop."""
    model = parsed("""
        g (float[t, n] x) => (float[k] flat, float[t, n] stacked, float[n] first, int64 count) {
            axis = Constant<value = int64 {0}>()
            shape = Shape(x)
            trips = Gather(shape, axis)
            begun = SequenceEmpty()
            list = Loop(trips, , begun) <body = b (int64 i, bool c, seq(float[n]) l) => (bool go, seq(float[n]) l2) {
                go = Identity(c) row = Gather<axis = 0>(x, i) twice = Add(row, row) l2 = SequenceInsert(l, twice) }>
            flat = ConcatFromSequence<axis = 0>(list)
            stacked = ConcatFromSequence<axis = 0, new_axis = 1>(list)
            first = SequenceAt(list, axis)
            count = SequenceLength(list)
        }""")
    check(model, [np.arange(6, dtype="float32").reshape(3, 2)], [np.arange(4, dtype="float32").reshape(1, 4)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("go = Identity(c) v2 = Unsqueeze(v, zero)", "has 1 dimensions, but its body gives 2"),
        ("go = Identity(c) v2 = Cast<to = 7>(v)", "is of float32, but its body gives int64"),
        ("go = Identity(v) v2 = Relu(v)", "the condition of its body is of float32, expected bool"),
    ],
)
def test_values_that_trips_cannot_pass_on_are_refused(body, message):
    model = parsed(f"""
        g (int64 m, float[n] x) => (float[n] y) <int64[1] zero = {{0}}> {{
            [loop] y = Loop(m, , x) <body = b (int64 i, bool c, float[n] v) => (bool go, float[n] v2) {{ {body} }}>
        }}""")
    with pytest.raises(rh.FrontendError, match="'loop'") as error:
        rh.from_onnx(model)
    assert message in str(error.value)


def test_rows_of_different_shapes_are_refused_when_the_model_runs():
    model = parsed("""
        g (int64 m, float[n] x) => (float[k] y, float[t, k] rows) {
            y, rows = Loop(m, , x) <body = b (int64 i, bool c, float[a] v) => (bool go, float[d] v2, float[d] v2) {
                go = Identity(c) v2 = Concat<axis = 0>(v, x) }>
        }""")
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    with pytest.raises(rh.HeteroError, match=r"trip 1 of a loop collects a tensor of shape \[6\].* \[4\]"):
        vm["main"](3, np.ones(2, "float32"))


def test_weights_of_a_body_are_constants_of_its_function():
    """Values computed from constants around a loop are computed again in its body, and so fold at compile time."""
    mod = rh.from_onnx(
        parsed("""
        g (int64 m, float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1.0, 2.0, 3.0, 4.0}> {
            large = Exp(w)
            y = Loop(m, , x) <body = b (int64 i, bool c, float[n, 2] v) => (bool go, float[n, 2] v2) {
                go = Identity(c) v2 = MatMul(v, large) }>
        }""")
    )
    (loop,) = (func for gv, func in relax_functions(mod) if gv.name_hint != "main")
    assert [param.name for param in loop.params] == ["trip", "trips", "value0"]
    assert isinstance(loop, relax.Function)


OPS = ["Add(v, u)", "Mul(v, u)", "Tanh(v)", "Neg(u)", "Max(v, x)", "Sub(u, x)"]


@pytest.mark.slow
@given(st.lists(st.sampled_from(OPS), min_size=2, max_size=4), st.booleans(), st.sampled_from(["m", ""]))
def test_random_loops(ops, ends_early, limit):
    """Two values that trips hand on, computed by some ops in turn, and both of them as rows."""
    ends_early = ends_early or not limit
    lines = []
    for number, op in enumerate(ops):
        lines += [f"a{number} = {op}", f"v{number} = Clip(a{number}, low, high)"]
    condition = "go = Less(i, end)" if ends_early else "go = Identity(c)"
    model = parsed(f"""
        g (int64 m, float[n] x, int64 end) => (float[n] p, float[n] q, float[t, n] r, float[t, n] s)
        <float low = {{-2.0}}, float high = {{2.0}}> {{
            p, q, r, s = Loop({limit}, , x, x) <
                body = b (int64 i, bool c, float[n] v, float[n] u)
                    => (bool go, float[n] v{len(ops) - 1}, float[n] w, float[n] v, float[n] v0) {{
                    {condition}
                    {" ".join(lines)}
                    w = Sub(v0, u)
                }}>
        }}""")
    x = np.linspace(-1.5, 1.5, 4, dtype="float32")
    check(model, *([trips, x, end] for trips, end in ((0, 0), (3, 9), (9, 3))), tolerance=1e-4)
