"""Transformers as exporters write them, with random weights."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from .graph import Graph
from .sentences import use_sentence_example

Extent = int | str
"""A number, or the name of a dimension."""


def _heads(graph: Graph, x: str, sequence: Extent, heads: int, size: int, perm: list[int], batch: Extent = 1) -> str:
    split = graph.node("Reshape", x, _shape(graph, batch, sequence, heads, size))
    return graph.node("Transpose", split, perm=perm)


def _merged(graph: Graph, x: str, sequence: Extent, width: int, batch: Extent = 1) -> str:
    heads_last = graph.node("Transpose", x, perm=[0, 2, 1, 3])
    return graph.node("Reshape", heads_last, _shape(graph, batch, sequence, width))


def _shape(graph: Graph, *extents: Extent) -> str:
    # A zero keeps the dimension of the input.
    return graph.shape(*(0 if isinstance(extent, str) else extent for extent in extents))


def bert(batch: Extent = 1, sequence: Extent = 128) -> onnx.ModelProto:
    """The encoder of BERT-base: 12 layers of width 768, and embeddings."""
    graph, width, heads = Graph("bert"), 768, 12
    x = graph.input("x", (batch, sequence, width))
    for _ in range(12):
        q = _heads(graph, graph.linear(x, width, width), sequence, heads, 64, [0, 2, 1, 3], batch)
        k = _heads(graph, graph.linear(x, width, width), sequence, heads, 64, [0, 2, 3, 1], batch)
        v = _heads(graph, graph.linear(x, width, width), sequence, heads, 64, [0, 2, 1, 3], batch)
        scores = graph.node("Mul", graph.node("MatMul", q, k), graph.constant(0.125))
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
        out = graph.linear(_merged(graph, context, sequence, width, batch), width, width)
        x = graph.layer_norm(graph.node("Add", out, x), width)
        y = graph.linear(graph.gelu(graph.linear(x, width, 4 * width)), 4 * width, width)
        x = graph.layer_norm(graph.node("Add", y, x), width)
    return graph.model(x)


def distilbert() -> onnx.ModelProto:
    """Six layers in opset 11: layer norms of eight nodes, a mask by Where."""
    graph, sequence, width, heads = Graph("distilbert", opset=11), 128, 768, 12
    ids = graph.input("input_ids", (1, sequence), TensorProto.INT64)
    mask = graph.input("attention_mask", (1, sequence), TensorProto.INT64)
    words = graph.node("Gather", graph.weight(8000, width, deviation=1.0), ids)
    x = graph.node("Add", words, graph.weight(sequence, width, deviation=0.2))
    x = graph.decomposed_layer_norm(x, width)
    empty = graph.node("Equal", mask, graph.constant(0, "int64"))
    masked = graph.node("Reshape", empty, graph.shape(1, 1, 1, sequence))
    masked = graph.node("Expand", masked, graph.shape(1, heads, sequence, sequence))
    for _ in range(6):
        q = _heads(graph, graph.linear(x, width, width), sequence, heads, 64, [0, 2, 1, 3])
        q = graph.node("Div", q, graph.constant(8.0))
        k = _heads(graph, graph.linear(x, width, width), sequence, heads, 64, [0, 2, 1, 3])
        v = _heads(graph, graph.linear(x, width, width), sequence, heads, 64, [0, 2, 1, 3])
        scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 1, 3, 2]))
        scores = graph.node("Where", masked, graph.constant(np.finfo("float32").min), scores)
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=3), v)
        out = graph.linear(_merged(graph, context, sequence, width), width, width)
        x = graph.decomposed_layer_norm(graph.node("Add", out, x), width)
        y = graph.linear(graph.gelu(graph.linear(x, width, 4 * width)), 4 * width, width)
        x = graph.decomposed_layer_norm(graph.node("Add", y, x), width)
    return graph.model(x)


def gpt2() -> onnx.ModelProto:
    """Six causal layers: products as Gemm, one split into query, key and value, GELU by tanh."""
    graph, sequence, width, heads = Graph("gpt2", opset=13), 128, 768, 12
    ids = graph.input("input_ids", (1, sequence), TensorProto.INT64)
    words = graph.node("Gather", graph.weight(8000, width, deviation=0.5), ids)
    x = graph.node("Add", words, graph.weight(sequence, width, deviation=0.2))
    below = graph.constant(np.tril(np.ones((1, 1, sequence, sequence), "bool")), "bool")

    def gemm(value: str, inputs: int, outputs: int) -> str:
        flat = graph.node("Reshape", value, graph.shape(-1, inputs))
        weight, bias = graph.weight(inputs, outputs, deviation=inputs**-0.5), graph.weight(outputs, deviation=0.02)
        return graph.node("Reshape", graph.node("Gemm", flat, weight, bias), graph.shape(1, sequence, outputs))

    def gelu(value: str) -> str:
        cube = graph.node("Mul", graph.node("Pow", value, graph.constant(3.0)), graph.constant(0.044715))
        inner = graph.node("Mul", graph.node("Add", value, cube), graph.constant((2 / np.pi) ** 0.5))
        curve = graph.node("Add", graph.node("Tanh", inner), graph.constant(1.0))
        return graph.node("Mul", graph.node("Mul", value, graph.constant(0.5)), curve)

    def norm(value: str) -> str:
        return graph.decomposed_layer_norm(value, width)

    for _ in range(6):
        parts = graph.shape(width, width, width)
        q, k, v = graph.node("Split", gemm(norm(x), width, 3 * width), parts, outputs=3, axis=2)
        q, v = (_heads(graph, value, sequence, heads, 64, [0, 2, 1, 3]) for value in (q, v))
        k = _heads(graph, k, sequence, heads, 64, [0, 2, 3, 1])
        scores = graph.node("Div", graph.node("MatMul", q, k), graph.constant(8.0))
        scores = graph.node("Where", below, scores, graph.constant(-1e4))
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
        x = graph.node("Add", x, gemm(_merged(graph, context, sequence, width), width, width))
        x = graph.node("Add", x, gemm(gelu(gemm(norm(x), width, 4 * width)), 4 * width, width))
    return graph.model(norm(x))


def vit_small() -> onnx.ModelProto:
    """Patches of 16 pixels, 197 tokens of 384, one product for query, key and value."""
    graph, sequence, width, heads = Graph("vit_small"), 197, 384, 6
    patches = graph.conv(graph.input("image", (1, 3, 224, 224)), width, 16, stride=16, pad=0)
    flat = graph.node("Reshape", patches, graph.shape(1, width, 196))
    tokens = graph.node("Transpose", flat, perm=[0, 2, 1])
    x = graph.node("Concat", graph.weight(1, 1, width, deviation=0.2), tokens, axis=1)
    x = graph.node("Add", x, graph.weight(1, sequence, width, deviation=0.2))
    for _ in range(12):
        joined = graph.linear(graph.layer_norm(x, width), width, 3 * width)
        parts = graph.node("Reshape", joined, graph.shape(1, sequence, 3, heads, 64))
        parts = graph.node("Transpose", parts, perm=[2, 0, 3, 1, 4])
        q, k, v = (graph.node("Gather", parts, graph.constant(index, "int64"), axis=0) for index in range(3))
        q = graph.node("Mul", q, graph.constant(0.125))
        scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 1, 3, 2]))
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
        x = graph.node("Add", x, graph.linear(_merged(graph, context, sequence, width), width, width))
        y = graph.gelu(graph.linear(graph.layer_norm(x, width), width, 4 * width))
        x = graph.node("Add", x, graph.linear(y, 4 * width, width))
    first = graph.node("Gather", graph.layer_norm(x, width), graph.constant(0, "int64"), axis=1)
    return graph.model(graph.linear(first, width, 1000))


def minilm(batch: Extent = 1, sequence: Extent = 128) -> onnx.ModelProto:
    """all-MiniLM-L6-v2 with its weights: the sentence similarity example downloads and builds it."""
    use_sentence_example()
    from minilm import default_cache, onnx_path

    return onnx.load(str(onnx_path(default_cache(), batch, sequence)))


TRANSFORMERS = {make.__name__: make for make in (bert, minilm, distilbert, gpt2, vit_small)}
SYMBOLIC = {make.__name__: lambda make=make: make("batch", "sequence") for make in (bert, minilm)}
"""The same graphs with named dimensions: ``batch`` and ``sequence``."""
