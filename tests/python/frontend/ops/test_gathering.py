"""Gather, Scatter and their kin: negative indices, every axis, indices that are constants or inputs."""

import numpy as np
import onnx.parser
import pytest

import relax_hetero as rh
from frontend.ops.checking import check, integers, node_model, refused, run, uniform


@pytest.mark.parametrize("constant", [[], [1]])
@pytest.mark.parametrize("axis", [0, -1])
def test_gather(axis, constant):
    data = uniform(4, 3, 5)
    check("Gather", data, integers(2, 3, low=-data.shape[axis], high=data.shape[axis]), axis=axis, constant=constant)


def test_gather_of_a_scalar_index():
    check("Gather", uniform(4, 3), np.array(-2), axis=1)


def test_gather_of_one_slice_has_no_axis_for_it():
    check("Gather", uniform(4, 3), np.array(-2), axis=1, constant=[1])


def test_gather_with_an_index_out_of_range():
    refused("Gather", uniform(3, 2), np.array([0, 3]), constant=[1], match=r"out of an axis of \[3\]")
    for index in (3, -4, 2**63 - 1, -(2**63)):
        with pytest.raises(rh.HeteroError, match=f"index {index} is out of range, expected -3 to 2"):
            run(*node_model("Gather", [np.arange(3, dtype="float32"), np.array([1, index])], 18))


def test_compress_by_a_condition_longer_than_the_axis():
    check("Compress", uniform(3, 2), np.array([True, False, True, True, True]), axis=0)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_elements(axis):
    data = uniform(3, 4, 2)
    check("GatherElements", data, integers(3, 4, 2, low=-2, high=2, dtype="int32"), axis=axis)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_gather_nd(batch_dims):
    check("GatherND", uniform(2, 3, 4), integers(2, 5, 1, low=-2, high=2), batch_dims=batch_dims)


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_scatter_elements(reduction):
    indices = np.array([[0, -1, 2], [1, 0, -3]])
    indices = indices if reduction != "none" else np.array([[0, 1, 2], [2, 0, 1]])
    check("ScatterElements", uniform(2, 5), indices, uniform(2, 3, low=-1), axis=1, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_scatter_nd(reduction):
    indices = np.array([[0, 1], [-1, 2], [1, 0]])
    check("ScatterND", uniform(3, 4, 2), indices, uniform(3, 2), reduction=reduction)


def test_scatter_at_a_number_of_places_that_updates_tell():
    """`x[:, :3] = y` of torch's exporter: as many places as three and the axis have, and three updates."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2] x, int64[m, 1] places, float[3, 2] updates) => (float[n, 2] y, float[n, 2] z) {
            y = ScatterND (x, places, updates)
            two = Constant <value = int64[2] {1, 2}> ()
            columns = Expand (places, two)
            z = ScatterElements (x, columns, updates)
        }""")
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    x, places, updates = uniform(5, 2), np.array([[4], [0], [2]]), uniform(3, 2)
    expected = x.copy()
    expected[places[:, 0]] = updates
    for got in main(x, places, updates):
        np.testing.assert_array_equal(got.numpy(), expected)
    with pytest.raises(rh.HeteroError, match="expected m == 3"):
        main(x, places[:2], updates)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_one_hot_leaves_out_of_range_off(axis):
    indices = np.array([[0, 4, -1], [5, -5, -6]])
    check("OneHot", indices, np.array(5), np.array([2, 7], "float32"), axis=axis, constant=[1])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
@pytest.mark.parametrize("largest", [0, 1])
def test_top_k(dtype, largest):
    data = np.random.default_rng(0).permutation(60).reshape(3, 4, 5).astype(dtype)
    check("TopK", data, np.array([3]), outputs=2, constant=[1], axis=1, largest=largest, reference="onnx")


def test_top_k_that_is_computed():
    check("TopK", uniform(3, 4), np.array([2]), outputs=2)


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumulate(op, exclusive, reverse):
    opset = 18 if op == "CumSum" else 26
    options = {"exclusive": exclusive, "reverse": reverse, "reference": "onnx", "opset": opset}
    check(op, uniform(3, 4, 2), np.array(1), constant=[1], **options)


@pytest.mark.parametrize("time_axis", [0, 1])
def test_reverse_sequence(time_axis):
    lengths = np.array([1, 3, 2, 4])[: 4 if time_axis else 3]
    check("ReverseSequence", uniform(4, 3 + time_axis, 2), lengths, time_axis=time_axis, batch_axis=1 - time_axis)


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(mode):
    operands = [uniform(2, 3, 6, 4), uniform(2, 3, 2, 4), np.array([1, 4 if mode == "linear" else 5])]
    check("TensorScatter", *operands, opset=24, reference="onnx", mode=mode)


@pytest.mark.parametrize("values", [(4, 6), (-1, 2)], ids=str)
@pytest.mark.parametrize("op", ["ReverseSequence", "LSTM", "TensorScatter", "circular"])
def test_lengths_and_places_beyond_the_axis_are_refused(op, values):
    numbers = np.array(values)
    operands = {
        "ReverseSequence": [uniform(5, 2), numbers],
        "LSTM": [uniform(5, 2, 1), uniform(1, 4, 1), uniform(1, 4, 1), None, numbers.astype("int32")],
    }.get(op, [uniform(2, 1, 5, 3), uniform(2, 1, 2, 3), numbers])
    options = {"LSTM": {"hidden_size": 1}, "circular": {"mode": "circular"}}.get(op, {})
    model, feeds = node_model("TensorScatter" if op == "circular" else op, operands, 24, **options)
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    if op == "circular" and min(values) >= 0:  # around the end
        main(*feeds.values())
        return
    wrong = -1 if min(values) < 0 else 6
    with pytest.raises(rh.HeteroError, match=f"variable 'the_node.*: value {wrong} is out of range, expected 0 to"):
        main(*feeds.values())


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_compress(axis):
    options = {} if axis is None else {"axis": axis}
    check("Compress", uniform(3, 4), np.array([True, False, True]), opset=11, **options)


@pytest.mark.parametrize("k", [-2, 0, 1])
def test_eye_like(k):
    check("EyeLike", integers(3, 5, dtype="int32"), k=k, dtype=1)


def test_non_zero():
    check("NonZero", np.array([[1, 0, 2], [0, 0, 3]], "float32"))


@pytest.mark.parametrize("axis", [0, -1])
def test_one_hot_of_a_computed_depth(axis):
    check("OneHot", np.array([[0, 4, -1], [5, -5, -6]]), np.array(5), np.array([2, 7], "float32"), axis=axis)


@pytest.mark.parametrize("k", [0, -1, 2])
def test_eye_of_symbolic_sizes(k):
    check("EyeLike", uniform(3, 4), symbolic=[0], k=k)


def test_more_of_the_largest_than_there_are_is_refused_by_the_call():
    model, feeds = node_model("TopK", [uniform(3), np.array([4])], 18, outputs=2)
    with pytest.raises(
        rh.HeteroError, match=r"TopK node 'the_node': k is k_0, but the axis has 3 elements \(k_0 = 4\)"
    ):
        run(model, feeds)


def test_top_k_orders_unsigned_numbers_beyond_the_signed_ones():
    data = np.array([1, 2**64 - 1, 2**63, 5, 2**63 - 1, 0], "uint64")
    model, feeds = node_model("TopK", [data, np.array([6])], 24, outputs=2, constant=[1])
    values, indices = run(model, feeds)
    assert values.dtype == np.uint64
    assert values.tolist() == sorted(data.tolist(), reverse=True)
    assert indices.tolist() == [1, 2, 4, 3, 0, 5]
