"""The ONNX graph of all-MiniLM-L6-v2: a BERT encoder of six layers, mean pooling and normalization.

Node names follow the model's structure (``/encoder/layer.3/attention/query/MatMul``), so that a placement
pattern such as ``/encoder/layer.[345]/*`` can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
# The additive mask of padding: large enough that exp() of it is exactly zero in float32.
MASKED = -1e9


def build_minilm(
    weights: Mapping[str, np.ndarray], config: Mapping[str, Any], batch: int | str, seq: int | str
) -> onnx.ModelProto:
    """Build the sentence encoder for one batch size and sequence length, or for any.

    Parameters
    ----------
    weights : mapping of str to np.ndarray
        The tensors of the checkpoint, by their Hugging Face names (``encoder.layer.0.attention.self.query.weight`` …).
    config : mapping of str to object
        The checkpoint's ``config.json``.
    batch, seq : int or str
        Sentences per call, and tokens per sentence (padding included, at most ``max_position_embeddings``); a name
        stands for any number.

    Returns
    -------
    onnx.ModelProto
        Inputs ``input_ids`` and ``attention_mask`` (both int64 ``[batch, seq]``), output ``embedding``
        (float32 ``[batch, hidden]``, unit length).
    """
    longest = int(config["max_position_embeddings"])
    if isinstance(seq, int) and not 0 < seq <= longest:
        raise ValueError(f"seq is {seq}; the checkpoint has positions for 1 to {longest} tokens")
    graph = _Graph(weights)
    hidden = _embeddings(graph, seq)
    bias = _attention_bias(graph)
    for layer in range(int(config["num_hidden_layers"])):
        hidden = _encoder_layer(graph, layer, hidden, bias, config)
    _pooling(graph, hidden)
    width = int(config["hidden_size"])
    return graph.finish(
        inputs=[
            helper.make_tensor_value_info(n, TensorProto.INT64, [batch, seq]) for n in ("input_ids", "attention_mask")
        ],
        outputs=[helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [batch, width])],
    )


class _Graph:
    """Nodes and initializers under construction; values are called after the node that makes them."""

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}

    def node(self, name: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        """Append a node; the last part of its name is its op type."""
        result = output or name
        self._nodes.append(helper.make_node(name.rpartition("/")[2], inputs, [result], name=name, **attributes))
        return result

    def weight(self, name: str, transpose: bool = False) -> str:
        """An initializer with a checkpoint tensor; linear layers store theirs as [out, in], to be transposed."""
        array = self._weights[name]
        return self.constant(name, array.T if transpose else array)

    def constant(self, name: str, value: Any) -> str:
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def axis(self, number: int) -> str:
        """An int64 vector of one number."""
        return self.constant(f"axis_{number}", np.array([number], "int64"))

    def scalar(self, name: str, value: float) -> str:
        # A zero-dimensional array: ascontiguousarray would make it one-dimensional.
        self._initializers.setdefault(name, numpy_helper.from_array(np.array(value, "float32"), name))
        return name

    def linear(self, name: str, x: str, weight: str) -> str:
        product = self.node(f"{name}/MatMul", x, self.weight(f"{weight}.weight", transpose=True))
        return self.node(f"{name}/Add", product, self.weight(f"{weight}.bias"))

    def layer_norm(self, name: str, x: str, weight: str) -> str:
        scale, bias = self.weight(f"{weight}.weight"), self.weight(f"{weight}.bias")
        return self.node(f"{name}/LayerNormalization", x, scale, bias, axis=-1, epsilon=1e-12)

    def finish(self, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
        graph = helper.make_graph(self._nodes, "all-MiniLM-L6-v2", inputs, outputs, list(self._initializers.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="relax-hetero")
        model.ir_version = 9
        onnx.checker.check_model(model)
        return model


def _embeddings(graph: _Graph, seq: int | str) -> str:
    name = "embeddings"
    words = graph.node(f"/{name}/word/Gather", graph.weight(f"{name}.word_embeddings.weight"), "input_ids")
    summed = graph.node(f"/{name}/position/Add", words, _positions(graph, f"{name}.position_embeddings.weight", seq))
    # Every token is of the first type: one sentence at a time.
    first_type = graph._weights[f"{name}.token_type_embeddings.weight"][0]
    typed = graph.node(f"/{name}/type/Add", summed, graph.constant(f"{name}.token_type_embeddings.weight", first_type))
    return graph.layer_norm(f"/{name}/norm", typed, f"{name}.LayerNorm")


def _positions(graph: _Graph, weight: str, seq: int | str) -> str:
    """Embeddings of the first positions: a constant, or a slice as long as the input."""
    table = graph._weights[weight]
    if isinstance(seq, int):
        return graph.constant(weight, table[:seq])
    extents = graph.node("/embeddings/position/Shape", "input_ids")
    length = graph.node("/embeddings/position/length/Slice", extents, *(graph.axis(i) for i in (1, 2)))
    return graph.node("/embeddings/position/Slice", graph.weight(weight), graph.axis(0), length, graph.axis(0))


def _attention_bias(graph: _Graph) -> str:
    """[batch, 1, 1, seq]: zero for tokens, a large negative number for padding."""
    mask = graph.node("/mask/Cast", "attention_mask", to=TensorProto.FLOAT)
    wide = graph.node("/mask/Unsqueeze", mask, graph.constant("mask_axes", np.array([1, 2], "int64")))
    padding = graph.node("/mask/Sub", graph.scalar("one", 1.0), wide)
    return graph.node("/mask/Mul", padding, graph.scalar("masked", MASKED))


def _encoder_layer(graph: _Graph, layer: int, x: str, bias: str, config: Mapping[str, Any]) -> str:
    name, weight = f"/encoder/layer.{layer}", f"encoder.layer.{layer}"
    heads = int(config["num_attention_heads"])
    width = int(config["hidden_size"])
    # A zero in a Reshape keeps that dimension: here batch and seq.
    split = graph.constant("split_heads", np.array([0, 0, heads, width // heads], "int64"))
    merge = graph.constant("merge_heads", np.array([0, 0, width], "int64"))

    def head(part: str, perm: list[int]) -> str:
        here = f"{name}/attention/{part}"
        projected = graph.linear(here, x, f"{weight}.attention.self.{part}")
        return graph.node(f"{here}/Transpose", graph.node(f"{here}/Reshape", projected, split), perm=perm)

    query, key, value = head("query", [0, 2, 1, 3]), head("key", [0, 2, 3, 1]), head("value", [0, 2, 1, 3])
    here = f"{name}/attention/scores"
    scores = graph.node(f"{here}/MatMul", query, key)
    scaled = graph.node(f"{here}/Mul", scores, graph.scalar("scale", (width // heads) ** -0.5))
    masked = graph.node(f"{here}/Add", scaled, bias)
    probabilities = graph.node(f"{here}/Softmax", masked, axis=-1)
    here = f"{name}/attention/context"
    context = graph.node(f"{here}/MatMul", probabilities, value)
    merged = graph.node(f"{here}/Reshape", graph.node(f"{here}/Transpose", context, perm=[0, 2, 1, 3]), merge)
    here = f"{name}/attention/output"
    attended = graph.linear(here, merged, f"{weight}.attention.output.dense")
    attended = graph.node(f"{here}/residual/Add", attended, x)
    attended = graph.layer_norm(f"{here}/norm", attended, f"{weight}.attention.output.LayerNorm")
    raised = _gelu(
        graph,
        f"{name}/feed_forward/gelu",
        graph.linear(f"{name}/feed_forward/up", attended, f"{weight}.intermediate.dense"),
    )
    lowered = graph.linear(f"{name}/feed_forward/down", raised, f"{weight}.output.dense")
    lowered = graph.node(f"{name}/feed_forward/residual/Add", lowered, attended)
    return graph.layer_norm(f"{name}/feed_forward/norm", lowered, f"{weight}.output.LayerNorm")


def _gelu(graph: _Graph, name: str, x: str) -> str:
    """x · (1 + erf(x / √2)) / 2, in ops of opset 17."""
    inner = graph.node(f"{name}/Erf", graph.node(f"{name}/Div", x, graph.scalar("sqrt2", 2**0.5)))
    doubled = graph.node(f"{name}/gate/Mul", x, graph.node(f"{name}/Add", inner, graph.scalar("one", 1.0)))
    return graph.node(f"{name}/Mul", doubled, graph.scalar("half", 0.5))


def _pooling(graph: _Graph, hidden: str) -> str:
    """The mean over real tokens, scaled to unit length."""
    tokens = graph.constant("token_axis", np.array([1], "int64"))
    features = graph.constant("feature_axis", np.array([-1], "int64"))
    weights = graph.node("/pooling/mask/Unsqueeze", "/mask/Cast", features)
    total = graph.node("/pooling/total/ReduceSum", graph.node("/pooling/Mul", hidden, weights), tokens, keepdims=0)
    count = graph.node("/pooling/count/ReduceSum", weights, tokens, keepdims=0)
    mean = graph.node("/pooling/mean/Div", total, count)
    squares = graph.node("/normalize/square/Mul", mean, mean)
    length = graph.node("/normalize/Sqrt", graph.node("/normalize/ReduceSum", squares, features, keepdims=1))
    return graph.node("/normalize/Div", mean, length, output="embedding")
