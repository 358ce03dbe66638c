"""GroupQueryAttention against ONNX Runtime: prompts, steps and chunks, of caches that grow and that are shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.contrib.contrib_nodes import MICROSOFT, Nodes
from seeds import fresh_rng

HEADS, KV_HEADS, SIZE = 4, 2, 16


class Steps(Nodes):
    """Nodes of GroupQueryAttention."""

    def attend(self, rows: int, lengths: list[int], packed: bool = False, size: int = SIZE, **more: Any) -> None:
        """A node over sequences that have `lengths` positions after it, the last `rows` of them new."""
        optional = {name: more.pop(name, None) for name in ("cos", "sin", "positions", "bias", "sink")}
        batch, total = len(lengths), max(lengths)
        if packed:
            new: list[np.ndarray | None] = [self.floats(batch, rows, (HEADS + 2 * KV_HEADS) * size), None, None]
        else:
            new = [self.floats(batch, rows, heads * size) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        past = [self.floats(batch, KV_HEADS, total - rows, size) for _ in range(2)]
        places = np.array(lengths, "int32") - 1, np.array(total, "int32")
        attributes = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **more}
        self.add("GroupQueryAttention", *new, *past, *places, *optional.values(), outputs=3, constant=[6], **attributes)


@pytest.mark.slow
@pytest.mark.parametrize("vdevices", [["llvm"], TWO_DEVICES])
def test_forms(vdevices):
    nodes = Steps()
    tables = {"cos": nodes.floats(16, SIZE // 2), "sin": nodes.floats(16, SIZE // 2), "do_rotary": 1}
    nodes.attend(4, [4, 4])
    nodes.attend(1, [6, 6], packed=True, **tables)
    nodes.attend(3, [8], rotary_interleaved=1, **tables)
    nodes.attend(4, [4], positions=np.array([[3, 4, 5, 6]]), **tables)
    part = {name: nodes.floats(16, SIZE // 2) for name in ("cos", "sin")}
    nodes.attend(2, [7], size=2 * SIZE, positions=np.array([[9, 2]]), do_rotary=1, **part, scale=0.3)
    nodes.attend(4, [4, 4], local_window_size=2, softcap=2.0, size=8)
    nodes.attend(2, [7], local_window_size=3, sink=nodes.floats(HEADS), size=8)
    nodes.attend(1, [6, 6], smooth_softmax=1, bias=nodes.floats(1, HEADS, 1, 6), size=8)
    nodes.check(vdevices)


def decoder(rotates: bool = True) -> onnx.ModelProto:
    """A node of symbolic sizes, whose total length is that of a mask; its present key and value lack shapes."""
    inputs = {
        "query": (1, ["batch", "rows", (HEADS + 2 * KV_HEADS) * SIZE]),
        "past_key": (1, ["batch", KV_HEADS, "past", SIZE]),
        "past_value": (1, ["batch", KV_HEADS, "past", SIZE]),
        "lengths": (6, ["batch"]),
        "mask": (7, ["batch", "total"]),
    }
    names = ["query", "", "", "past_key", "past_value", "lengths", "count", "cos", "sin"]
    nodes = [
        helper.make_node("Shape", ["mask"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["wide_count"]),
        helper.make_node("Cast", ["wide_count"], ["count"], to=onnx.TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention", names, ["y", "key", "value"], "attend", domain=MICROSOFT, num_heads=HEADS,
            kv_num_heads=KV_HEADS, do_rotary=int(rotates),
        ),
    ]  # fmt: skip
    weights = {name: fresh_rng().standard_normal((32, SIZE // 2)).astype("float32") for name in ("cos", "sin")}
    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, 1, None) for name in ("y", "key", "value")],
        [numpy_helper.from_array(value, name) for name, value in (weights | {"one": np.array(1)}).items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds_of(rows: int, lengths: list[int], past: int) -> dict[str, np.ndarray]:
    rng, batch = fresh_rng(), len(lengths)
    floats = {
        "query": (batch, rows, (HEADS + 2 * KV_HEADS) * SIZE),
        "past_key": (batch, KV_HEADS, past, SIZE),
        "past_value": (batch, KV_HEADS, past, SIZE),
    }
    feeds = {name: rng.standard_normal(shape).astype("float32") for name, shape in floats.items()}
    for sequence, length in enumerate(lengths):  # positions after a sequence are ignored
        for name in ("past_key", "past_value"):
            feeds[name][sequence, :, max(length - rows, 0) :] = np.nan
    mask = np.zeros((batch, max(lengths)), "int64")
    return {**feeds, "lengths": np.array(lengths, "int32") - 1, "mask": mask}


def compare(
    main: Any, session: onnxruntime.InferenceSession, rows: int, lengths: list[int], past: int, in_place: bool
) -> None:
    """Compare rows and positions of sequences; those after a sequence may hold anything."""
    feeds = feeds_of(rows, lengths, past)
    expected = session.run(None, feeds)
    results = main(**feeds)
    actual = [value.numpy() for value in results]
    for name, cache in (("past_key", results[1]), ("past_value", results[2])):
        assert (cache.data_ptr() == feeds[name].ctypes.data) == in_place
    for sequence, length in enumerate(lengths):
        count = min(rows, length)
        np.testing.assert_allclose(actual[0][sequence, :count], expected[0][sequence, :count], 1e-4, 1e-5)
        assert np.isfinite(actual[0][sequence]).all()
        for cache, want in zip(actual[1:], expected[1:], strict=True):
            assert cache.shape == want.shape
            np.testing.assert_allclose(cache[sequence, :, :length], want[sequence, :, :length], 1e-4, 1e-5)


@pytest.mark.parametrize("length", [pytest.param(None, marks=pytest.mark.slow), 12])
def test_ragged_sequences_of_a_cache_that_grows_or_has_a_known_length_and_is_donated(length):
    model = decoder()
    session = onnxruntime.InferenceSession(model.SerializeToString())
    mod = rh.from_onnx(model, shapes={"past": length} if length else None)
    main = rh.vm.VirtualMachine(rh.compile(mod, donate=["past_key", "past_value"] if length else None))["main"]
    compare(main, session, 4, [4, 3], length or 0, bool(length))
    compare(main, session, 1, [6, 4], length or 5, bool(length))
    compare(main, session, 3, [8], length or 5, bool(length))
    if length:
        with pytest.raises(rh.HeteroError, match="expected at most the 12 of its cache"):
            main(**feeds_of(1, [13], 12))


def rms(data: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
    return data / np.sqrt((data**2).mean(-1, keepdims=True) + epsilon) * scale


def test_norms_of_heads_and_padded_chunks_as_the_documentation_says():  # ONNX Runtime has them on GPUs only
    rng, rows, length = fresh_rng(), 3, 5
    shapes = [(1, rows, HEADS * SIZE), *[(1, rows, KV_HEADS * SIZE)] * 2, *[(1, KV_HEADS, 8, SIZE)] * 2]
    query, key, value, past_key, past_value = (rng.standard_normal(shape).astype("float32") for shape in shapes)
    norms = [rng.standard_normal(SIZE).astype("float32") for _ in range(2)]
    nodes = Nodes()
    nodes.add(
        "GroupQueryAttention", query, key, value, past_key, past_value, np.array([length - 1], "int32"),
        np.array(8, "int32"), *[None] * 7, *norms, np.array([2], "int32"), constant=[6], outputs=3, num_heads=HEADS,
        kv_num_heads=KV_HEADS, qk_norm_epsilon=1e-3, k_norm_epsilon=1e-2,
    )  # fmt: skip
    model = nodes.model()
    for info in model.graph.output:
        info.type.CopyFrom(helper.make_tensor_type_proto(1, None))
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](**nodes.feeds)

    before = length - 2
    queries = rms(query.astype("float64").reshape(rows, HEADS, SIZE), norms[0], 1e-3)
    keys = np.concatenate([past_key[0, :, :before], rms(_heads(key), norms[1], 1e-2)[:, :2]], 1)
    values = np.concatenate([past_value[0, :, :before], _heads(value)[:, :2]], 1)
    for row in range(2):
        for head in range(HEADS):
            own, visible = head // (HEADS // KV_HEADS), before + row + 1
            scores = keys[own, :visible] @ queries[row, head] / np.sqrt(SIZE)
            powers = np.exp(scores - scores.max())
            expected = powers @ values[own, :visible] / powers.sum()
            part = actual[0].numpy()[0, row, head * SIZE : (head + 1) * SIZE]
            np.testing.assert_allclose(part, expected, 1e-4, 1e-5)
    np.testing.assert_allclose(actual[1].numpy()[0, :, :length], keys, 1e-4, 1e-5)


def _heads(rows: np.ndarray) -> np.ndarray:
    return rows[0].astype("float64").reshape(-1, KV_HEADS, SIZE).transpose(1, 0, 2)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"k_quant_type": "PER_TENSOR"}, "found a quantized cache .k_quant_type='PER_TENSOR'"),
        ({"sliding_window_cache": 1, "local_window_size": 2}, "as long as its window"),
        ({"qk_output": 1}, "asks for its scores"),
        ({"kv_num_heads": 3}, "found num_heads 4 and kv_num_heads 3, expected a multiple"),
    ],
)
def test_refused_forms(attributes, message):
    model = decoder(rotates=False)
    node = model.graph.node[-1]
    for name, value in attributes.items():
        remaining = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*remaining, helper.make_attribute(name, value)])
    with pytest.raises(rh.FrontendError, match=f"GroupQueryAttention node 'attend': .*{message}"):
        rh.from_onnx(model)
