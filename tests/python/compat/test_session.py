"""Sessions against ONNX Runtime's: results, facts and errors."""

import json
import threading

import numpy as np
import onnx
import onnx.parser
import pytest

import relax_hetero as rh
from relax_hetero import compat

onnxruntime = pytest.importorskip("onnxruntime")

CPU = ["CPUExecutionProvider"]
MODEL = """
    <ir_version: 8, opset_import: ["" : 17], producer_name: "tests", model_version: 3, doc_string: "two outputs",
     metadata_props: ["key": "value"]>
    ranker (float[n, 4] x, float[4, 3] w) => (float[n, 3] y, int64[n] best)
    <float[4, 3] w = {1, 0, 0, 0, 2, 0, 0, 0, 3, 1, 1, 1}> {
        y = MatMul(x, w)
        best = ArgMax <axis = 1, keepdims = 0> (y)
    }"""
X = np.random.default_rng(0).random((5, 4), "float32")


def model_bytes(text=MODEL):
    return onnx.parser.parse_model(text).SerializeToString()


def sessions_of(data):
    return compat.InferenceSession(data, providers=CPU), onnxruntime.InferenceSession(data, providers=CPU)


@pytest.fixture(scope="module")
def sessions():
    return sessions_of(model_bytes())


def assert_same(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(mine, other, rtol=1e-6)


@pytest.mark.parametrize("names", [None, [], ["best", "y"], ["y"]])
def test_results_are_those_of_onnxruntime(sessions, names):
    ours, theirs = (session.run(names, {"x": X}) for session in sessions)
    assert_same(ours, theirs)


def test_arguments_may_be_lists_and_values(sessions):
    want = sessions[1].run(None, {"x": X})
    assert_same(sessions[0].run(None, {"x": X.tolist()}), want)
    assert_same(sessions[0].run(None, {"x": compat.OrtValue.ortvalue_from_numpy(X)}), want)
    values = sessions[0].run_with_ort_values(["best"], {"x": compat.OrtValue.ortvalue_from_numpy(X)})
    assert_same([values[0].numpy()], want[1:])


def test_an_overridden_default_counts_for_one_call(sessions):
    w = np.random.default_rng(1).random((4, 3), "float32")
    for feed in ({"x": X, "w": w}, {"x": X}):
        assert_same(*(session.run(None, feed) for session in sessions))


def test_results_belong_to_the_caller(sessions):
    first = sessions[0].run(["y"], {"x": X})[0]
    kept = first.copy()
    sessions[0].run(["y"], {"x": X + 1})
    np.testing.assert_array_equal(first, kept)
    first[:] = 0  # writable


def test_facts_are_those_of_onnxruntime(sessions):
    for method in ("get_inputs", "get_outputs", "get_overridable_initializers"):
        ours, theirs = ([(a.name, a.type, a.shape) for a in getattr(s, method)()] for s in sessions)
        assert ours == theirs
    ours, theirs = (session.get_modelmeta() for session in sessions)
    for name in vars(ours):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert sessions[0].get_providers() == sessions[1].get_providers()
    assert sessions[0].get_provider_options() == sessions[1].get_provider_options()


@pytest.mark.parametrize(
    ("names", "feed"),
    [
        (None, {}),
        (["z"], {"x": X}),
        (None, {"x": X, "z": X}),
        (None, {"x": X.astype("float64")}),
        (None, {"x": X[0]}),
        (None, {"x": X[:, :3]}),
        (None, {"x": np.array([["a"] * 4])}),
    ],
)
def test_errors_are_those_of_onnxruntime(sessions, names, feed):
    errors = []
    for session in sessions:
        with pytest.raises(Exception) as caught:  # noqa: B017, PT011 - compared below
            session.run(names, feed)
        errors.append(caught.value)
    ours, theirs = errors
    assert isinstance(ours, rh.HeteroError)
    assert type(theirs).__name__ in [cls.__name__ for cls in type(ours).__mro__]
    assert str(ours).startswith(str(theirs).removesuffix("\n"))


@pytest.mark.parametrize(("value", "text"), [(None, "missing"), ([["a"] * 4], "cannot become"), (1.0, "rank")])
def test_values_that_are_not_arrays(sessions, value, text):
    with pytest.raises(compat.errors.InvalidArgument, match=text):
        sessions[0].run(None, {"x": value})


@pytest.mark.parametrize("model", ["nowhere.onnx", b"\xff\xff not a model"])
def test_unreadable_models(model):
    with pytest.raises(Exception) as theirs:  # noqa: B017, PT011 - compared below
        onnxruntime.InferenceSession(model)
    with pytest.raises(rh.HeteroError) as ours:
        compat.InferenceSession(model)
    assert type(ours.value).__name__ == type(theirs.value).__name__


def test_an_unknown_op_is_refused_when_the_session_is_made():
    text = '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[n] x) => (float[n] y) { y = my.Op(x) }'
    with pytest.raises(compat.errors.NotImplemented, match="my"):
        compat.InferenceSession(model_bytes(text))


def test_run_async(sessions):
    done, calls = threading.Event(), []

    def callback(results, data, error):
        calls.append((results, data, error))
        if len(calls) == 2:
            done.set()

    sessions[0].run_async(["y"], {"x": X}, callback, "first")
    sessions[0].run_async(["y"], {"x": X[:, :3]}, callback, "second")
    assert done.wait(60)
    (results, first, error), (none, second, text) = calls
    assert (first, error, none, second) == ("first", "", [], "second")
    assert "INVALID_ARGUMENT" in text
    assert_same(results, sessions[1].run(["y"], {"x": X}))


def test_a_file_and_a_proto(tmp_path, sessions):
    (tmp_path / "m.onnx").write_bytes(model_bytes())
    options = compat.SessionOptions()
    options.intra_op_num_threads = 1
    session = compat.InferenceSession(tmp_path / "m.onnx", options, CPU)
    machine = session._programs.machine_for({"x": X})
    assert (machine.executable.devices[0].num_cores, machine._threads.width, machine._threads.is_fixed) == (1, 1, True)
    assert_same(session.run(None, {"x": X}), sessions[1].run(None, {"x": X}))
    assert session.get_session_options() is options


def test_the_profile_has_runs_and_kernels(tmp_path):
    options = compat.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    session = compat.InferenceSession(onnx.parser.parse_model(MODEL), options, CPU)
    session.run(None, {"x": X})
    with open(session.end_profiling()) as file:
        events = json.load(file)
    assert {"session_initialization", "model_run"} <= {e["name"] for e in events if e["cat"] == "Session"}
    kernels = [event for event in events if event["cat"] == "Node"]
    assert any("matmul" in event["args"]["op_name"] for event in kernels)
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    assert session.end_profiling() == ""


STRINGS = """
    <ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
    encoder (string[n] s) => (int64[n] code, string[n] same) {
        code = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_int64s = [7, 8], default_int64 = -1> (s)
        same = Identity(s)
    }"""


def test_bytes_are_convolved_by_one_program_for_all_sizes():
    data = model_bytes("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (uint8[1, 3, h, w] x) => (uint8[1, 4, i, j] y)
        <float s = {0.02}, uint8 z = {3}, float t = {0.4}, int8 u = {0}> {
            y = QLinearConv <pads = [1, 1, 1, 1], strides = [2, 1]> (x, s, z, k, s, u, t, z)
        }""")
    model = onnx.load_from_string(data)
    kernel = np.random.default_rng(0).integers(-100, 100, (4, 3, 3, 3), "int8")
    model.graph.initializer.append(onnx.numpy_helper.from_array(kernel, "k"))
    ours, theirs = sessions_of(model.SerializeToString())
    for size in ((1, 1), (5, 40), (33, 2)):
        x = np.random.default_rng(1).integers(0, 255, (1, 3, *size), "uint8")
        (mine,), (other,) = (session.run(None, {"x": x}) for session in (ours, theirs))
        assert mine.shape == other.shape and np.abs(mine.astype(int) - other).max() <= 1
    assert ours._programs.symbolic is not None


def test_strings():
    ours, theirs = sessions_of(model_bytes(STRINGS))
    for array in (np.array(["b", "a", "c"]), np.array(["b", "ü"], object)):
        mine, other = (session.run(None, {"s": array}) for session in (ours, theirs))
        for a, b in zip(mine, other, strict=True):
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()


def zipped_model(labels):
    graph = onnx.parser.parse_graph("g (float[n, 2] x) => (float[n, 2] p) { p = Softmax(x) }")
    graph.node.append(onnx.helper.make_node("ZipMap", ["p"], ["scores"], domain="ai.onnx.ml", **labels))
    key = onnx.TensorProto.INT64 if "classlabels_int64s" in labels else onnx.TensorProto.STRING
    value = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    maps = onnx.helper.make_sequence_type_proto(onnx.helper.make_map_type_proto(key, value))
    graph.output[0].CopyFrom(onnx.helper.make_value_info("scores", maps))
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("ai.onnx.ml", 3)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [4, 2]}, {"classlabels_strings": ["no", "yes"]}])
def test_zip_map_gives_dictionaries(labels):
    ours, theirs = sessions_of(zipped_model(labels))
    assert [o.type for o in ours.get_outputs()] == [o.type for o in theirs.get_outputs()]
    mine, other = (session.run(None, {"x": X[:, :2]})[0] for session in (ours, theirs))
    assert [list(row) for row in mine] == [list(row) for row in other]
    np.testing.assert_allclose([list(r.values()) for r in mine], [list(r.values()) for r in other], rtol=1e-6)


SEQUENCES = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (seq(float[n, 2]) xs) => (float[m, 2] y, seq(float[k, 2]) parts) {
        y = ConcatFromSequence <axis = 0> (xs)
        parts = SequenceInsert(xs, y)
    }"""


def test_sequences_compile_for_each_length():
    ours, theirs = sessions_of(model_bytes(SEQUENCES))
    assert ours.get_inputs()[0].type == theirs.get_inputs()[0].type
    for lengths in ([2], [1, 3]):
        feed = {"xs": [X[:length, :2] for length in lengths]}
        mine, other = (session.run(None, feed) for session in (ours, theirs))
        assert_same([mine[0], *mine[1]], [other[0], *other[1]])
    assert len(ours._programs._machines) == 2


@pytest.mark.slow
def test_a_program_for_each_shape_on_request(sessions):
    options = compat.SessionOptions()
    options.add_session_config_entry("relax_hetero.compile_per_shape", "1")
    session = compat.InferenceSession(model_bytes(), options, CPU)
    for rows in (2, 3, 2):
        assert_same(session.run(None, {"x": X[:rows]}), sessions[1].run(None, {"x": X[:rows]}))
    machines = list(session._programs._machines.values())
    assert [machine.executable.signature("main").inputs[0].shape for machine in machines] == [(2, 4), (3, 4)]
