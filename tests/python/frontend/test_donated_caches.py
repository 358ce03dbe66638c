"""Caches of ONNX models, as exporters write their updates, are updated in place where they are donated."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import relax_hetero as rh
from seeds import fresh_rng

CACHE, NEW = (2, 3, 8, 4), (2, 3, 1, 4)


def scatter_nd():
    """Rows found by (batch, head, position)."""
    rng = fresh_rng()
    places = np.stack(np.meshgrid(range(2), range(3), [5], indexing="ij"), -1).astype("int64")
    node = helper.make_node("ScatterND", ["past.0", "places", "new"], ["present.0"])
    return node, {"places": places}, rng, lambda cache, new: _with_row(cache, new, [5, 5])


def scatter_elements():
    rng = fresh_rng()
    node = helper.make_node("ScatterElements", ["past.0", "places", "new"], ["present.0"], axis=2)
    return node, {"places": np.full(NEW, -3, "int64")}, rng, lambda cache, new: _with_row(cache, new, [5, 5])


def tensor_scatter():
    """A position of its own for each sequence of the batch."""
    rng = fresh_rng()
    node = helper.make_node("TensorScatter", ["past.0", "new", "starts"], ["present.0"], axis=2)
    return node, {"starts": np.array([6, 1])}, rng, lambda cache, new: _with_row(cache, new, [6, 1])


def _with_row(cache, new, positions):
    result = cache.copy()
    for b, position in enumerate(positions):
        result[b, :, position] = new[b, :, 0]
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [scatter_nd, scatter_elements, tensor_scatter])
@pytest.mark.parametrize("extent", [8, "length"])
def test_caches(make, extent):
    node, places, rng, expected = make()
    twice = helper.make_node("Add", ["fresh", "fresh"], ["new"])  # what is written is computed by the model
    inputs = {"past.0": (TensorProto.FLOAT, (*CACHE[:2], extent, CACHE[3])), "fresh": (TensorProto.FLOAT, NEW)}
    inputs |= {name: (TensorProto.INT64, value.shape) for name, value in places.items()}
    graph = helper.make_graph(
        [twice, node],
        "decoder",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info("present.0", TensorProto.FLOAT, inputs["past.0"][1])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    onnx.checker.check_model(model)
    mod = rh.from_onnx(model)
    cache, fresh = (rng.standard_normal(shape).astype("float32") for shape in (CACHE, NEW))
    want = expected(cache, 2 * fresh)
    for donate in (None, ["past.0"]):
        past = cache.copy()
        values = {"past.0": past, "fresh": fresh, **places}
        result = rh.vm.VirtualMachine(rh.compile(mod, donate=donate))["main"](**values)
        np.testing.assert_array_equal(result.numpy(), want)
        np.testing.assert_array_equal(past, want if donate else cache)
        assert (result.data_ptr() == past.ctypes.data) == bool(donate)
