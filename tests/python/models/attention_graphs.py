"""ONNX graphs of attention as exporters write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = list[Any]


class Graph:
    """A model under construction: nodes by op, weights random."""

    def __init__(self, seed: int = 0, opset: int = 17) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def const(self, value: Any, dtype: str = "float32") -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const(self.rng.standard_normal(shape) / np.sqrt(shape[0]))

    def op(self, kind: str, *operands: str, outputs: int = 1, **attributes: Any) -> Any:
        number = len(self.nodes)
        names = [f"{kind.lower()}_{number}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, operands, names, name=f"{kind}_{number}", **attributes))
        return names[0] if outputs == 1 else names

    def linear(self, x: str, rows: int, columns: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(rows, columns)), self.weight(columns))

    def reshape(self, x: str, *shape: int) -> str:
        return self.op("Reshape", x, self.const(shape, "int64"))

    def swap(self, x: str, *axes: int) -> str:
        return self.op("Transpose", x, perm=list(axes))

    def model(self, *results: str) -> onnx.ModelProto:
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results]
        graph = helper.make_graph(self.nodes, "attention", self.inputs, outputs, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)])
        model.ir_version = 10
        return onnx.shape_inference.infer_shapes(model)


def bert(tokens: Any = 21, batch: Any = 1, heads: int = 4, width: int = 8) -> onnx.ModelProto:
    """Heads of one hidden state, an additive mask of keys, scores divided."""
    graph, hidden = Graph(), heads * width
    x = graph.input("x", [batch, tokens, hidden])
    mask = graph.input("mask", [batch, 1, 1, tokens])
    q, k, v = (graph.reshape(graph.linear(x, hidden, hidden), 0, -1, heads, width) for _ in range(3))
    scores = graph.op("MatMul", graph.swap(q, 0, 2, 1, 3), graph.swap(k, 0, 2, 3, 1))
    scores = graph.op("Div", scores, graph.const(np.sqrt(width)))
    probabilities = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
    y = graph.swap(graph.op("MatMul", probabilities, graph.swap(v, 0, 2, 1, 3)), 0, 2, 1, 3)
    return graph.model(graph.linear(graph.reshape(y, 0, -1, hidden), hidden, hidden))


def gpt2(past: int = 5, tokens: int = 3, heads: int = 2, width: int = 16) -> onnx.ModelProto:
    """One product for q, k and v that is split; keys and values of the past; a triangle of conditions."""
    graph, hidden, keys = Graph(1), heads * width, past + tokens
    x = graph.input("x", [1, tokens, hidden])
    past_k, past_v = (graph.input(name, [1, heads, past, width]) for name in ("past_k", "past_v"))
    qkv = graph.linear(x, hidden, 3 * hidden)
    parts = graph.op("Split", qkv, graph.const([hidden] * 3, "int64"), outputs=3, axis=2)
    q, k, v = (graph.swap(graph.reshape(part, 1, tokens, heads, width), 0, 2, 1, 3) for part in parts)
    k, v = graph.op("Concat", past_k, k, axis=2), graph.op("Concat", past_v, v, axis=2)
    scores = graph.op("Div", graph.op("MatMul", q, graph.swap(k, 0, 1, 3, 2)), graph.const(np.sqrt(width)))
    triangle = np.tril(np.ones((keys, keys), bool))[None, None, past:]
    scores = graph.op("Where", graph.const(triangle, "bool"), scores, graph.const(np.finfo("float32").min))
    y = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v)
    y = graph.linear(graph.reshape(graph.swap(y, 0, 2, 1, 3), 1, tokens, hidden), hidden, hidden)
    return graph.model(y, k, v)


def vit(tokens: int = 197, heads: int = 3, width: int = 32) -> onnx.ModelProto:
    """q, k and v gathered from a dimension of three; queries scaled."""
    graph, hidden = Graph(2), heads * width
    x = graph.input("x", [1, tokens, hidden])
    qkv = graph.reshape(graph.linear(x, hidden, 3 * hidden), 1, tokens, 3, heads, width)
    qkv = graph.swap(qkv, 2, 0, 3, 1, 4)
    q, k, v = (graph.op("Gather", qkv, graph.const(i, "int64"), axis=0) for i in range(3))
    q = graph.op("Mul", q, graph.const(width**-0.5))
    probabilities = graph.op("Softmax", graph.op("MatMul", q, graph.swap(k, 0, 1, 3, 2)), axis=-1)
    y = graph.swap(graph.op("MatMul", probabilities, v), 0, 2, 1, 3)
    return graph.model(graph.linear(graph.reshape(y, 1, tokens, hidden), hidden, hidden))


def scaled_dot_product(tokens: int = 19, heads: int = 2, width: int = 12) -> onnx.ModelProto:
    """Graph that PyTorch exports for its op: queries and keys times the root of the scale, zeros for NaN of softmax."""
    graph, hidden = Graph(3, 18), heads * width
    x = graph.input("x", [2, tokens, hidden])
    mask = graph.input("mask", [2, 1, tokens, tokens], TensorProto.BOOL)
    q, k, v = (
        graph.swap(graph.reshape(graph.linear(x, hidden, hidden), 2, tokens, heads, width), 0, 2, 1, 3)
        for _ in range(3)
    )
    root = graph.const(width**-0.25)
    q, k = graph.op("Mul", q, root), graph.op("Mul", graph.swap(k, 0, 1, 3, 2), root)
    added = graph.op("Where", mask, graph.const(0.0), graph.const(-np.inf))
    softmax = graph.op("Softmax", graph.op("Add", graph.op("MatMul", q, k), added), axis=-1)
    softmax = graph.op("Where", graph.op("IsNaN", softmax), graph.const(0.0), softmax)
    y = graph.swap(graph.op("MatMul", softmax, v), 0, 2, 1, 3)
    return graph.model(graph.reshape(y, 2, tokens, hidden))


def shared_heads(tokens: int = 11, heads: int = 6, groups: int = 2, width: int = 16) -> onnx.ModelProto:
    """Groups of heads share keys and values, which are repeated for them."""
    graph, hidden = Graph(4), heads * width
    x = graph.input("x", [1, tokens, hidden])
    q = graph.swap(graph.reshape(graph.linear(x, hidden, hidden), 1, tokens, heads, width), 0, 2, 1, 3)

    def repeated() -> str:
        few = graph.reshape(graph.linear(x, hidden, groups * width), 1, tokens, groups, width)
        few = graph.op("Unsqueeze", graph.swap(few, 0, 2, 1, 3), graph.const([2], "int64"))
        many = graph.op("Expand", few, graph.const([1, groups, heads // groups, tokens, width], "int64"))
        return graph.reshape(many, 1, heads, tokens, width)

    scores = graph.op("MatMul", q, graph.swap(repeated(), 0, 1, 3, 2))
    softmax = graph.op("Softmax", graph.op("Mul", scores, graph.const(0.25)), axis=-1)
    y = graph.swap(graph.op("MatMul", softmax, repeated()), 0, 2, 1, 3)
    return graph.model(graph.reshape(y, 1, tokens, hidden))


def t5(tokens: int = 14, heads: int = 4, width: int = 8) -> onnx.ModelProto:
    """No scale; a bias of positions for every head."""
    graph, hidden = Graph(5), heads * width
    x = graph.input("x", [1, tokens, hidden])
    y = graph.input("y", [1, tokens + 3, hidden])
    q = graph.op("MatMul", x, graph.weight(hidden, hidden))
    k, v = (graph.op("MatMul", y, graph.weight(hidden, hidden)) for _ in range(2))
    heads_of = [graph.swap(graph.reshape(z, 1, -1, heads, width), 0, 2, 1, 3) for z in (q, k, v)]
    scores = graph.op("MatMul", heads_of[0], graph.swap(heads_of[1], 0, 1, 3, 2))
    scores = graph.op("Add", scores, graph.weight(1, heads, tokens, tokens + 3))
    z = graph.swap(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), heads_of[2]), 0, 2, 1, 3)
    return graph.model(graph.linear(graph.reshape(z, 1, tokens, hidden), hidden, hidden))


def batches_of_heads(tokens: int = 14, heads: int = 4, width: int = 8) -> onnx.ModelProto:
    """Batch and heads as one dimension of three."""
    graph, hidden = Graph(6), heads * width
    x = graph.input("x", [2, tokens, hidden])

    def split() -> str:
        one = graph.swap(graph.reshape(graph.linear(x, hidden, hidden), 2, tokens, heads, width), 0, 2, 1, 3)
        return graph.reshape(one, 2 * heads, tokens, width)

    q, k, v = (split() for _ in range(3))
    softmax = graph.op("Softmax", graph.op("MatMul", q, graph.swap(k, 0, 2, 1)), axis=-1)
    y = graph.reshape(graph.op("MatMul", softmax, v), 2, heads, tokens, width)
    return graph.model(graph.reshape(graph.swap(y, 0, 2, 1, 3), 2, tokens, hidden))


def single_head(tokens: int = 40, width: int = 24) -> onnx.ModelProto:
    """Attention over an image's places: two dimensions of one head, transposed operands."""
    graph = Graph(7)
    x = graph.input("x", [1, tokens, width])
    q, k, v = (graph.linear(x, width, width) for _ in range(3))
    softmax = graph.op("Softmax", graph.op("MatMul", q, graph.swap(k, 0, 2, 1)), axis=2)
    return graph.model(graph.op("Add", graph.op("MatMul", softmax, v), x))


def onnx_op(past: int = 5, tokens: int = 9, heads: int = 4, groups: int = 2, width: int = 16) -> onnx.ModelProto:
    """ONNX's own op, shared heads, causal, with a past."""
    graph = Graph(8, 23)
    q = graph.input("q", [1, heads, tokens, width])
    k, v = (graph.input(name, [1, groups, tokens, width]) for name in "kv")
    past_k, past_v = (graph.input(name, [1, groups, past, width]) for name in ("past_k", "past_v"))
    return graph.model(*graph.op("Attention", q, k, v, "", past_k, past_v, outputs=3, is_causal=1))


FORMS: dict[str, Callable[[], onnx.ModelProto]] = {
    form.__name__: form
    for form in (bert, gpt2, vit, scaled_dot_product, shared_heads, t5, batches_of_heads, single_head, onnx_op)
}
