"""Products, recurrent layers, sequences, and ops that are converted through their ONNX function body."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import relax_hetero as rh
from frontend.ops.checking import check, expected, integers, refused, run, uniform

pytestmark = pytest.mark.sampled(3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gemm(dtype):
    a, b, c = uniform(4, 3, dtype=dtype), uniform(5, 4, dtype=dtype), uniform(5, dtype=dtype)
    check("Gemm", a, b, c, transA=1, transB=1, alpha=0.5, beta=0.25)


def test_gemm_in_half_precision_is_accumulated_in_single():
    a, b = uniform(3, 700, dtype="float16"), uniform(700, 4, dtype="float16")
    check("MatMul", a, b, reference="onnx", rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(("a", "b"), [((2, 1, 3, 4), (5, 4, 2)), ((4,), (4, 3)), ((2, 3, 4), (4,))])
def test_matmul(a, b):
    check("MatMul", uniform(*a), uniform(*b))


def test_determinants():
    singular = uniform(2, 3, 4, 4)
    singular[0, 1, 2] = singular[0, 1, 0]
    check("Det", singular, symbolic=[0], opset=11)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernel", "unrolled"])
def test_recurrent_layers(op, gates, direction, has_kernels, monkeypatch):
    monkeypatch.setattr("relax_hetero.frontend.ops.recurrent.has_recurrent_kernels", lambda: has_kernels)
    ways, hidden = 2 if direction == "bidirectional" else 1, 4
    operands = [
        uniform(5, 2, 3), uniform(ways, gates * hidden, 3), uniform(ways, gates * hidden, hidden),
        uniform(ways, 2 * gates * hidden), np.array([5, 3], "int32"), uniform(ways, 2, hidden),
    ]  # fmt: skip
    if op == "LSTM":
        operands += [uniform(ways, 2, hidden), uniform(ways, 3 * hidden)]
    options = {"hidden_size": hidden, "direction": direction, "clip": 1.5}
    check(op, *operands, outputs=3 if op == "LSTM" else 2, constant=[1, 2, 3], **options)


@pytest.mark.parametrize("linear_before_reset", [0, 1])
def test_gru_resets(linear_before_reset):
    operands = [uniform(3, 2, 3), uniform(1, 12, 3), uniform(1, 12, 4), uniform(1, 24)]
    options = {"hidden_size": 4, "linear_before_reset": linear_before_reset}
    check("GRU", *operands, outputs=2, constant=[1, 2, 3], **options)


def test_recurrent_layer_in_half_precision_with_the_batch_first():
    operands = [uniform(2, 3, 3), uniform(1, 16, 3), uniform(1, 16, 4), uniform(1, 32), None, uniform(2, 1, 4)]
    halves = [value if value is None else value.astype("float16") for value in operands]
    check("LSTM", *halves, outputs=3, constant=[1, 2, 3], hidden_size=4, layout=1, reference="onnx", atol=2e-3)


ACTIVATIONS = ["LeakyRelu", "HardSigmoid", "Softsign", "Affine", "Relu"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("has_kernels", [True, False], ids=["kernel", "unrolled"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_recurrent_layer_with_other_activations(activation, has_kernels, monkeypatch):
    """Each direction has its own."""
    monkeypatch.setattr("relax_hetero.frontend.ops.recurrent.has_recurrent_kernels", lambda: has_kernels)
    operands = [uniform(3, 2, 3), uniform(2, 4, 3), uniform(2, 4, 4)]
    options = {"activations": ["Tanh", activation], "activation_alpha": [0.3], "activation_beta": [0.1]}
    if activation == "LeakyRelu":
        del options["activation_beta"]
    check("RNN", *operands, outputs=2, constant=[1, 2], hidden_size=4, direction="bidirectional", **options)


def test_recurrent_layer_with_an_unknown_activation():
    operands = [uniform(3, 2, 3), uniform(1, 4, 3), uniform(1, 4, 4)]
    refused("RNN", *operands, outputs=2, constant=[1, 2], hidden_size=4, activations=["Elu"], match="'Elu'")


def test_attention():
    mask = uniform(3, 5) > 0
    mask[:, 0] = True
    operands = [uniform(1, 4, 3, 8), uniform(1, 2, 5, 8), uniform(1, 2, 5, 8), mask]
    check("Attention", *operands, opset=23, is_causal=0, reference="onnx")


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(interleaved):
    operands = [uniform(2, 3, 4, 8), uniform(2, 4, 4), uniform(2, 4, 4, low=0)]
    check("RotaryEmbedding", *operands, opset=23, interleaved=interleaved, reference="onnx")


@pytest.mark.parametrize("op", ["HannWindow", "HammingWindow", "BlackmanWindow"])
def test_windows(op):
    (got,) = run(window(op), {})
    (want,) = expected(window(op), {}, "onnx")
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def window(op):
    graph = helper.make_graph(
        [helper.make_node(op, ["size"], ["y"], periodic=0, name="the_node")],
        "window",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [9])],
        [numpy_helper.from_array(np.array(9), "size")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def test_negative_log_likelihood():
    operands = [np.log(uniform(3, 5, 2, low=0.1, high=1)), integers(3, 2, low=0, high=5)]
    check("NegativeLogLikelihoodLoss", *operands, reduction="mean", ignore_index=2)


SEQUENCES = """
<ir_version: 8, opset_import: ["": 17]>
sequences (float[2, 3] a, float[2, 3] b) => (float[2, 9] y, int64 n)
  <int64 first = {0}, int64 back = {-1}, int64[2] sizes = {1, 2}>
{
  pair = SequenceConstruct(a, b)
  three = SequenceInsert(pair, a, back)
  reduced = SequenceErase(three, first)
  parts = SplitToSequence <axis = 1> (b, sizes)
  part = SequenceAt(parts, back)
  longer = SequenceInsert(reduced, b)
  joined = ConcatFromSequence <axis = 1> (longer)
  n = SequenceLength(longer)
  y = Identity(joined)
}
"""


def test_sequences_of_known_length():
    model = parser.parse_model(SEQUENCES)
    a, b = uniform(2, 3), uniform(2, 3, low=0)
    joined, number = run(model, {"a": a, "b": b})
    np.testing.assert_array_equal(joined, np.concatenate([a, b, b], axis=1))
    assert number == 3


def test_ops_without_a_converter_are_refused():
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> g (uint8[n] x) => (uint8[a, b, 3] y) { y = ImageDecoder (x) }'
    )
    with pytest.raises(rh.FrontendError, match="ImageDecoder"):
        rh.from_onnx(model)
