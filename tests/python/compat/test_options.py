"""Options: honoured, said, or refused."""

import warnings

import numpy as np
import onnx
import onnx.parser
import pytest

from relax_hetero import compat
from relax_hetero.compat import options as options_module
from relax_hetero.compat.graph import read_graph
from relax_hetero.compat.options import UNSUPPORTED

MODEL = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n, m] x) => (float[n, m] y) <float[1] w = {2}> { y = Mul(x, w) }"""


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(options_module, "_warned", set())


def model():
    return onnx.parser.parse_model(MODEL)


def test_defaults_are_those_of_onnxruntime():
    onnxruntime = pytest.importorskip("onnxruntime")
    theirs = onnxruntime.SessionOptions()
    for name, value in options_module.DEFAULTS.items():
        default = getattr(theirs, name)
        assert getattr(default, "name", default) == getattr(value, "name", value), name


OTHER_VALUES = {
    "execution_mode": compat.ExecutionMode.ORT_PARALLEL,
    "execution_order": compat.ExecutionOrder.PRIORITY_BASED,
    "graph_optimization_level": compat.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "log_verbosity_level": 1,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_options_without_effect_are_said_once(name):
    options = compat.SessionOptions()
    setattr(options, name, OTHER_VALUES.get(name, False))
    with pytest.warns(UserWarning, match=f"{name}.*has no effect"):
        options.say_unsupported()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options.say_unsupported()


def test_the_log_level_hides_warnings():
    options = compat.SessionOptions()
    options.enable_mem_reuse, options.log_severity_level = False, 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options.say_unsupported()


def test_entries():
    options = compat.SessionOptions()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options._threads() == {"threads": None, "spin": False}
    options.add_session_config_entry("session.dynamic_block_base", "4")
    with pytest.warns(UserWarning, match="dynamic_block_base") as warned:
        options.say_unsupported()
    assert not any("allow_spinning" in str(each.message) for each in warned)
    with pytest.raises(compat.errors.InvalidArgument, match="denormal"):
        options.add_session_config_entry("session.set_denormal_as_zero", "1")


def test_refused():
    options = compat.SessionOptions()
    with pytest.raises(AttributeError, match="intra_op_threads"):
        options.intra_op_threads = 1
    with pytest.raises(
        compat.errors.NotImplemented, match=r"custom ops .* @rh.frontend.register_op\(domain, op_type\)"
    ):
        options.register_custom_ops_library("ops.so")
    run = compat.RunOptions()
    run.terminate = True
    with pytest.raises(compat.errors.Fail, match="terminate"):
        run.check()


def test_dimensions_by_name():
    options = compat.SessionOptions()
    options.add_free_dimension_override_by_name("m", 3)
    options.add_free_dimension_override_by_name("absent", 3)
    graph = read_graph(model(), options)
    assert graph.inputs[0].shape == graph.outputs[0].shape == ["n", 3]


def test_dimensions_by_denotation():
    options, proto = compat.SessionOptions(), model()
    proto.graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    options.add_free_dimension_override_by_denotation("DATA_BATCH", 2)
    assert read_graph(proto, options).inputs[0].shape == [2, "m"]


def test_initializers_and_the_optimized_model(tmp_path):
    options = compat.SessionOptions()
    options.add_initializer("w", compat.OrtValue(np.array([5], "float32")))
    options.optimized_model_filepath = tmp_path / "optimized.onnx"
    with pytest.warns(UserWarning, match="as it was given"):
        session = compat.InferenceSession(model(), options, ["CPUExecutionProvider"])
    assert session.run(None, {"x": np.ones((1, 2), "float32")})[0].tolist() == [[5, 5]]
    written = onnx.load(tmp_path / "optimized.onnx")
    assert onnx.numpy_helper.to_array(written.graph.initializer[0]) == [5]


@pytest.mark.parametrize(("name", "size"), [("v", 1), ("w", 2)])
def test_initializers_that_do_not_fit(name, size):
    options = compat.SessionOptions()
    options.add_initializer(name, compat.OrtValue(np.zeros(size, "float32")))
    with pytest.raises(compat.errors.InvalidArgument, match=f"'{name}' is"):
        read_graph(model(), options)
