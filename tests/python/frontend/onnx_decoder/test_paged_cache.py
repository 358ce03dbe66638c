"""Models of onnxruntime-genai's builder with a cache of pages, against ONNX Runtime with its own cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm

import relax_hetero as rh
from frontend.onnx_decoder.decoder_graphs import GenAI, Shape
from frontend.onnx_decoder.steps import zero_caches
from modules import calls_of
from seeds import fresh_rng

CHUNK, SLOTS, CONTEXT = 32, 3, 128
SHAPE = Shape(size=64, positions=CONTEXT)


class Pages:
    """A compiled decoder and the pages of its sequences, which lie in no order."""

    def __init__(self, mod: Any, page_type: str) -> None:
        donated = [str(name) for name in mod["decode_2"].attrs["input_names"] if str(name).startswith("pages_")]
        self.exe = rh.compile(mod, donate={name: donated for name in ("decode_2", f"prefill_{CHUNK}")})
        self.machine = rh.vm.VirtualMachine(self.exe)
        shapes = {value.name: tuple(value.shape) for value in self.exe.signature("decode_2").inputs}
        self.pages = [np.full(shapes[name], 7, page_type) for name in donated]
        self.tables = {}
        for name in shapes:
            if name.startswith("table"):
                order = fresh_rng().permutation(min(page.shape[0] for page in self.pages))
                self.tables[name] = np.resize(order, shapes[name]).astype("int32")
                assert np.unique(order).size >= self.tables[name].size

    def call(self, name: str, rows: int, **arguments: Any) -> np.ndarray:
        values = {"tokens": np.zeros(rows), "positions": np.zeros(rows), "sequences": np.full(rows, -1), "last": [0]}
        for key, value in arguments.items():
            values[key] = np.asarray(values[key])
            values[key][: len(value)] = value
        inputs = {key: np.asarray(value, "int32") for key, value in values.items()} | self.tables
        names = [str(each) for each in self.exe.signature(name).input_names]
        results = self.machine[name](*(inputs[each] for each in names if each in inputs), *self.pages)
        logits, self.pages = results[0], results[-len(self.pages) :]
        return logits.numpy()


def check(model: onnx.ModelProto, page_type: str = "float32", tolerance: float = 1e-3, **options: Any) -> None:
    """Two sequences: their prompts in chunks, then steps of both at once."""
    cache = rh.PagedCache((2,), (CHUNK,), SLOTS, CONTEXT, page_type)
    pages = Pages(rh.from_onnx(model, cache=cache, **options), page_type)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = {info.name for info in session.get_inputs()}
    slots, prompts, steps = [2, 0], [45, 20], 3
    tokens = [fresh_rng().integers(0, SHAPE.vocabulary, count + steps) for count in prompts]
    theirs = []
    for sequence in tokens:
        feeds = {"input_ids": sequence[None], "attention_mask": np.ones((1, sequence.size), "int64")}
        if "position_ids" in names:
            feeds["position_ids"] = np.arange(sequence.size)[None]
        theirs.append(session.run(["logits"], feeds | zero_caches(model, 1, 0))[0][0])
    scale = np.abs(np.concatenate(theirs)).max()
    for slot, sequence, count, want in zip(slots, tokens, prompts, theirs, strict=True):
        for first in range(0, count, CHUNK):
            last = min(first + CHUNK, count)
            logits = pages.call(
                f"prefill_{CHUNK}", CHUNK, tokens=sequence[first:last], positions=np.arange(first, last),
                sequences=[slot] * (last - first), last=[last - first - 1],
            )  # fmt: skip
            np.testing.assert_allclose(logits, want[last - 1 : last], atol=tolerance * scale)
    for step in range(steps):
        places = [count + step for count in prompts]
        new = [sequence[place] for sequence, place in zip(tokens, places, strict=True)]
        logits = pages.call("decode_2", 2, tokens=new, positions=places, sequences=slots)
        np.testing.assert_allclose(logits, [w[p] for w, p in zip(theirs, places, strict=True)], atol=tolerance * scale)


def test_prompts_and_steps():
    check(GenAI(shape=dataclasses.replace(SHAPE, layers=1)).model())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"norms_heads": True, "is_packed": False, "rotates_inside": False},
        {"window": 16, "softcap": 5.0, "bits": 0},
        {"bits": 8, "is_packed": False, "has_bias": True, "block": 32},
        {"floats": "float16", "has_bias": True},
        {"is_tied": True, "experts": 4, "window": 32, "has_sinks": True},  # gpt-oss
    ],
)
def test_other_models(options):
    is_half = options.get("floats") == "float16"
    check(GenAI(shape=SHAPE, **options).model(), *(("float16", 1e-2) if is_half else ()))


@pytest.mark.slow
def test_two_devices_and_pages_of_half_precision():
    devices = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}]
    rules = {"/model/layers.1/*": "llvm:1", "*": "llvm:0"}
    check(GenAI(shape=SHAPE).model(), "float16", 5e-3, vdevices=devices, placement=rules)


def test_weights_are_shared_by_all_functions():
    model = GenAI(shape=SHAPE).model()
    one, many = (
        constant_bytes(rh.from_onnx(model, cache=rh.PagedCache(batches, chunks, context=CONTEXT)))
        for batches, chunks in (((1,), (8,)), ((1, 2, 4), (8, 16)))
    )
    assert one > 40_000
    assert many < 1.1 * one


def constant_bytes(mod: tvm.IRModule) -> int:
    """Bytes of all constant matrices, each counted once."""
    sizes = {}

    def visit(expr: object) -> None:
        if isinstance(expr, tvm.ir.GenericConst) and len(expr.value.shape) > 1:
            sizes[hash(expr.value)] = expr.value.numpy().nbytes

    for func in mod.functions.values():
        if isinstance(func, tvm.relax.Function):
            tvm.relax.analysis.post_order_visit(func, visit)
    return sum(sizes.values())


def without_attention(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.op_type = "MultiHeadAttention"


def with_bias(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    node.input.extend(["", "cos_cache"])


def with_mask(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.name == "/model/embed_tokens/Gather")
    node.input[1] = "attention_mask"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_attention, "has no node of GroupQueryAttention"),
        (with_bias, "attn/GroupQueryAttention' has the input attention_bias"),
        (with_mask, "Gather '/model/embed_tokens/Gather' reads the input 'attention_mask'"),
    ],
)
def test_models_that_have_no_such_cache_are_refused(change, message):
    model = GenAI(shape=SHAPE).model()
    change(model)
    with pytest.raises(rh.FrontendError, match=message):
        rh.from_onnx(model, cache=rh.PagedCache(context=64))


def with_gemm(model: onnx.ModelProto) -> None:
    """The last product is one of matrices, as some exporters write linear layers."""
    (head,) = [node for node in model.graph.node if node.output[0] == "logits"]
    for name, shape in (("gemm.rows", [-1, SHAPE.hidden]), ("gemm.logits", [1, -1, SHAPE.vocabulary])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape), name))
    before = onnx.helper.make_node("Reshape", [head.input[0], "gemm.rows"], ["gemm.x"], "gemm.before")
    head.op_type, head.input[0], head.output[0] = "Gemm", "gemm.x", "gemm.y"
    after = onnx.helper.make_node("Reshape", ["gemm.y", "gemm.logits"], ["logits"], "gemm.after")
    nodes = [*model.graph.node[:-1], before, head, after]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def test_gpus_search_parts_of_the_vocabulary():
    model = GenAI(shape=dataclasses.replace(SHAPE, layers=1, vocabulary=96)).model()
    for device, parts in (("llvm", 1), ({"kind": "cuda", "arch": "sm_90a"}, 32)):
        (top,) = calls_of("relax.topk", rh.from_onnx(model, [device], cache=rh.PagedCache((2,), (CHUNK,), 3, CONTEXT)))
        assert [int(extent) for extent in top.args[0].ty.shape.values] == [2, parts, 96 // parts]


@pytest.mark.slow
def test_a_last_product_of_matrices():
    model = GenAI(shape=dataclasses.replace(SHAPE, layers=1), bits=0).model()
    with_gemm(model)
    check(model)


def test_options_that_do_not_fit_are_refused():
    model = GenAI(shape=SHAPE).model()
    with pytest.raises(rh.FrontendError, match="found rotations of 128 positions, expected those of the cache's 256"):
        rh.from_onnx(model, cache=rh.PagedCache(context=256))
    with pytest.raises(rh.FrontendError, match="shapes is given, which does not go with cache"):
        rh.from_onnx(model, cache=rh.PagedCache(), shapes={"batch_size": 1})
    with pytest.raises(rh.FrontendError, match="slots is 0, expected whole numbers above 0"):
        rh.PagedCache(slots=0)
    with pytest.raises(rh.FrontendError, match="page_type is 'int4'"):
        rh.PagedCache(page_type="int4")
