"""Small random language models, node by node as exporters write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    hidden: int = 32
    inner: int = 48
    vocabulary: int = 50
    positions: int = 64


@dataclass
class Graph:
    """Nodes and weights that become a model; every node has one output, named after it, unless it says others."""

    seed: int = 0
    floats: str = "float32"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def node(self, name: str, *inputs: str, op: str = "", domain: str = "", outputs: Any = None, **more: Any) -> str:
        """Add a node; its op is the last part of its name by default. Its first output."""
        results = [f"{name}/output_0"] if outputs is None else list(outputs)
        kind = op or name.rsplit("/", 1)[-1].rsplit("_", 1)[0]
        self.nodes.append(helper.make_node(kind, list(inputs), results, name, domain=domain, **more))
        return results[0]

    def weight(self, name: str, value: Any, dtype: str = "") -> str:
        """Add a weight, by default of `floats`; its name."""
        self.weights[name] = np.asarray(value, dtype or self.floats)
        return name

    def random_weight(self, name: str, *shape: int, scale: float = 1.0) -> str:
        """Add a weight of random numbers; its name."""
        return self.weight(name, self.random.standard_normal(shape) * scale)

    def model(self, inputs: dict[str, Any], outputs: dict[str, Any], opset: int) -> onnx.ModelProto:
        """The model; types of inputs and outputs are (element type, dimensions)."""
        infos = [
            [helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in values.items()]
            for values in (inputs, outputs)
        ]
        weights = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        graph = helper.make_graph(self.nodes, "main_graph", *infos, weights)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def caches(shape: Shape, past: str, present: str, kind: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and outputs of caches, with the names that both kinds of exporters give them."""
    dims = ["batch_size", shape.kv_heads, past, shape.size], ["batch_size", shape.kv_heads, present, shape.size]
    specs: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    for layer in range(shape.layers):
        for part in ("key", "value"):
            specs[0][f"past_key_values.{layer}.{part}"] = (kind, dims[0])
            specs[1][f"present.{layer}.{part}"] = (kind, dims[1])
    return specs


@dataclass(frozen=True)
class GenAI:
    """Differences between models that onnxruntime-genai's builder writes.

    Attributes
    ----------
    bits : Bits of weights; 0 for products of floats.
    is_packed : Whether one product gives queries, keys and values.
    norms_heads : Whether queries and keys are normalized before they are rotated, by a node of its own, as in Qwen 3.
    window : 0 for none.
    rotates_inside : Whether attention rotates, or a node before it.
    floats : Type of all numbers between nodes, of caches and of logits.
    is_tied : Whether tokens are rows of the last product's weights, which the graph lays out anew.
    experts : Of feed-forward layers; 0 for layers without.
    has_sinks : Whether each head's softmax has a score without a key.
    """

    shape: Shape = Shape()
    bits: int = 4
    block: int = 16
    is_packed: bool = True
    norms_heads: bool = False
    has_bias: bool = False
    window: int = -1
    softcap: float = 0.0
    rotates_inside: bool = True
    floats: str = "float32"
    is_tied: bool = False
    experts: int = 0
    has_sinks: bool = False

    def model(self) -> onnx.ModelProto:
        """The whole model, as `builder.py` names its nodes."""
        graph, shape = Graph(floats=self.floats), self.shape
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.floats))
        places = self._places(graph)
        skip = self._embedding(graph)
        for name in ("cos", "sin"):
            angles = np.arange(shape.positions)[:, None] / 100 ** (np.arange(shape.size // 2) * 2 / shape.size)
            graph.weight(f"{name}_cache", getattr(np, name)(angles))
        state = ""
        for layer in range(shape.layers):
            state, skip = self._layer(graph, layer, state, skip, places)
        normal, _ = self._norm(graph, f"/model/layers.{shape.layers}/final_norm_layernorm", state, skip)
        self._product(graph, "/lm_head", normal, shape.hidden, shape.vocabulary, output="logits")
        dims = ["batch_size", "sequence_length"]
        past, present = caches(shape, "past_sequence_length", "total_sequence_length", kind)
        inputs = {"input_ids": (7, dims), "attention_mask": (7, ["batch_size", "total_sequence_length"])}
        if not self.rotates_inside:
            inputs["position_ids"] = (7, dims)
        return graph.model(inputs | past, {"logits": (kind, [*dims, shape.vocabulary]), **present}, 21)

    def _embedding(self, graph: Graph) -> str:
        shape = self.shape
        if not self.is_tied:
            table = graph.random_weight("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
            return graph.node("/model/embed_tokens/Gather", table, "input_ids")
        flat = graph.weight("tied", [shape.vocabulary, shape.hidden * self.bits // 8], "int64")
        codes = graph.node("/model/embed_tokens/Reshape", "lm_head.qweight", flat)
        return graph.node(
            "/model/embed_tokens/GatherBlockQuantized", codes, "input_ids", "lm_head.scales", "lm_head.qzeros",
            op="GatherBlockQuantized", domain=MICROSOFT, bits=self.bits, block_size=self.block, gather_axis=0,
            quantize_axis=1,
        )  # fmt: skip

    def _experts(self, graph: Graph, base: str, normal: str) -> str:
        shape = self.shape
        router = self._product(graph, f"{base}/router", normal, shape.hidden, self.experts)
        rows = graph.weight("routed", [-1, self.experts], "int64")
        inputs = [normal, graph.node(f"{base}/router/Reshape", router, rows)]
        for name, columns, depth in (("fc1", 2 * shape.inner, shape.hidden), ("fc2", shape.hidden, shape.inner)):
            blocks = depth // self.block
            codes = graph.random.integers(0, 256, (self.experts, columns, depth * 4 // 8))
            scales = graph.random.uniform(0.5, 1, (self.experts, columns, blocks)) * 0.25 * depth**-0.5
            inputs += [
                graph.weight(f"{base}.{name}.qweight", codes, "uint8"),
                graph.weight(f"{base}.{name}.scales", scales),
                graph.random_weight(f"{base}.{name}.bias", self.experts, columns, scale=0.1),
            ]
        return graph.node(
            f"{base}/QMoE", *inputs, op="QMoE", domain=MICROSOFT, k=2, activation_type="swiglu", swiglu_fusion=1,
            activation_alpha=1.702, activation_beta=1.0, swiglu_limit=7.0, normalize_routing_weights=1,
            expert_weight_bits=4, block_size=self.block,
        )  # fmt: skip

    def _places(self, graph: Graph) -> tuple[str, str]:
        base = "/model/attn_mask_reformat/attn_mask_subgraph"
        one = graph.weight("/model/constants/INT64/[1]", [1], "int64")
        axis = graph.weight("/model/constants/INT64/1", 1, "int64")
        counts = graph.node(f"{base}/ReduceSum", "attention_mask", one)
        lengths = graph.node(f"{base}/Sub/Cast", graph.node(f"{base}/Sub", counts, one), to=6)
        sizes = graph.node(f"{base}/Shape", "attention_mask")
        total = graph.node(f"{base}/Gather", sizes, axis, axis=0)
        return lengths, graph.node(f"{base}/Gather/Cast", total, to=6)

    def _norm(self, graph: Graph, name: str, state: str, skip: str) -> tuple[str, str]:
        """A norm, of the sum with a skip except at the beginning; its result and the sum."""
        scale = graph.random_weight(f"{name[1:].replace('/', '.')}.weight", self.shape.hidden)
        if not state:
            return graph.node(f"{name}/LayerNorm", skip, scale, op="SimplifiedLayerNormalization", axis=-1,
                              epsilon=1e-5, stash_type=1), skip  # fmt: skip
        base = f"{name}/SkipLayerNorm"
        outputs = [f"{base}/output_0", "", "", f"{base}/output_3"]
        normal = graph.node(base, skip, state, scale, op="SkipSimplifiedLayerNormalization", domain=MICROSOFT,
                            outputs=outputs, epsilon=1e-5)  # fmt: skip
        return normal, outputs[-1]

    def _product(self, graph: Graph, name: str, data: str, depth: int, columns: int, output: str = "") -> str:
        weight, outputs = name[1:].replace("/", "."), [output] if output else None
        if not self.bits:
            matrix = graph.random_weight(f"{weight}.weight", depth, columns, scale=depth**-0.5)
            return graph.node(f"{name}/MatMul", data, matrix, outputs=outputs)
        blocks = -(-depth // self.block)
        codes = graph.random.integers(0, 256, (columns, blocks, self.block * self.bits // 8))
        scales = graph.random.uniform(0.5, 1, (columns, blocks)) * 2 ** (2 - self.bits) * depth**-0.5
        operands = [
            graph.weight(f"{weight}.qweight", codes, "uint8"),
            graph.weight(f"{weight}.scales", scales),
            graph.weight(f"{weight}.qzeros", np.full((columns, -(-blocks * self.bits // 8)), 0x87), "uint8"),
        ]
        return graph.node(
            f"{name}/MatMulNBits", data, *operands, op="MatMulNBits", domain=MICROSOFT, outputs=outputs, K=depth,
            N=columns, bits=self.bits, block_size=self.block,
        )  # fmt: skip

    def _layer(self, graph: Graph, layer: int, state: str, skip: str, places: tuple[str, str]) -> tuple[str, str]:
        base, shape = f"/model/layers.{layer}", self.shape
        normal, skip = self._norm(graph, f"{base}/input_layernorm", state, skip)
        attended = self._attention(graph, layer, f"{base}/attn", normal, places)
        state = self._product(graph, f"{base}/attn/o_proj", attended, shape.heads * shape.size, shape.hidden)
        normal, skip = self._norm(graph, f"{base}/post_attention_layernorm", state, skip)
        if self.experts:
            return self._experts(graph, f"{base}/moe", normal), skip
        gate, up = (
            self._product(graph, f"{base}/mlp/{name}_proj", normal, shape.hidden, shape.inner)
            for name in ("gate", "up")
        )
        active = graph.node(f"{base}/mlp/act_fn/Mul", gate, graph.node(f"{base}/mlp/act_fn/Sigmoid", gate))
        inner = graph.node(f"{base}/mlp/Mul", active, up)
        return self._product(graph, f"{base}/mlp/down_proj", inner, shape.inner, shape.hidden), skip

    def _attention(self, graph: Graph, layer: int, base: str, normal: str, places: tuple[str, str]) -> str:
        shape, counts = self.shape, {"q": self.shape.heads, "k": self.shape.kv_heads, "v": self.shape.kv_heads}
        if self.is_packed:
            columns = (shape.heads + 2 * shape.kv_heads) * shape.size
            parts = [self._product(graph, f"{base}/qkv_proj", normal, shape.hidden, columns), "", ""]
        else:
            parts = [
                self._product(graph, f"{base}/{name}_proj", normal, shape.hidden, count * shape.size)
                for name, count in counts.items()
            ]
        if self.has_bias:
            for index, (name, part) in enumerate(zip(counts, parts, strict=True)):
                width = counts[name] * shape.size if not self.is_packed else columns
                bias = graph.random_weight(f"{base[1:].replace('/', '.')}.{name}_proj.bias", width)
                parts[index] = graph.node(f"{base}/{name}_proj/Add", part, bias) if part else ""
        if self.norms_heads:
            for index, name in enumerate(("q", "k")):
                parts[index] = self._norm_of_heads(graph, f"{base}/{name}_norm", parts[index], counts[name])
        if not self.rotates_inside:
            for index, name in enumerate(("q", "k")):
                parts[index] = graph.node(
                    f"{base}/{name}_rotary/RotaryEmbedding", parts[index], "position_ids", "cos_cache", "sin_cache",
                    op="RotaryEmbedding", domain=MICROSOFT,
                )  # fmt: skip
        past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        tables = ["cos_cache", "sin_cache"] if self.rotates_inside else []
        sinks = []
        if self.has_sinks:
            sinks = [*[""] * (4 - len(tables)), graph.random_weight(f"{base[1:].replace('/', '.')}.sinks", shape.heads)]
        attributes = {"softcap": self.softcap} if self.softcap else {}
        return graph.node(
            f"{base}/GroupQueryAttention", *parts, *past, *places, *tables, *sinks, domain=MICROSOFT,
            op="GroupQueryAttention",
            outputs=[f"{base}/GroupQueryAttention/output_0", *(f"present.{layer}.{part}" for part in ("key", "value"))],
            num_heads=shape.heads, kv_num_heads=shape.kv_heads, scale=shape.size**-0.5, do_rotary=len(tables) // 2,
            rotary_interleaved=0, local_window_size=self.window, **attributes,
        )  # fmt: skip

    def _norm_of_heads(self, graph: Graph, name: str, data: str, count: int) -> str:
        scale = graph.random_weight(f"{name[1:].replace('/', '.')}.layernorm.weight", self.shape.size)
        dims = graph.weight(f"{name}/apart", [0, -1, self.shape.size], "int64")
        joined = graph.weight(f"{name}/joined", [0, -1, count * self.shape.size], "int64")
        heads = graph.node(f"{name}/Reshape_1", data, dims)
        normal = graph.node(f"{name}/SimplifiedLayerNormalization", heads, scale, axis=-1, epsilon=1e-6)
        return graph.node(f"{name}/Reshape_2", normal, joined)
