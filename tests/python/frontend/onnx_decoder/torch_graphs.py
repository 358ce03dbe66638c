"""Small random language models, node by node as PyTorch's exporter and Optimum write them: plain ops, no attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from frontend.onnx_decoder.decoder_graphs import Graph, Shape, caches

TOTAL = "past_sequence_length + sequence_length"
_END = 2**63 - 1


@dataclass(frozen=True)
class Torch:
    """Differences between architectures.

    Attributes
    ----------
    rotated : Number of elements of a head that are rotated.
    is_parallel : Whether attention and feed-forward read one norm and are added together, as in Phi and GPT-NeoX.
    joins_heads : Whether one product gives queries, keys and values of every head together, as in GPT-NeoX.
    """

    shape: Shape = Shape()
    rotated: int = 16
    norm: str = "rms"
    activation: str = "silu"
    is_gated: bool = True
    has_bias: bool = False
    scales_embedding: bool = False
    is_parallel: bool = False
    joins_heads: bool = False

    def model(self) -> onnx.ModelProto:
        """The whole model."""
        graph, shape = Graph(), self.shape
        self._constants(graph)
        table = graph.random_weight("model.embed_tokens.weight", shape.vocabulary, shape.hidden)
        state = graph.node("/model/embed_tokens/Gather", table, "input_ids")
        if self.scales_embedding:
            state = graph.node("/model/Mul", state, graph.weight("hidden_root", np.sqrt(shape.hidden)))
        rotation, mask = self._rotation(graph), self._mask(graph)
        for layer in range(shape.layers):
            state = self._layer(graph, layer, state, rotation, mask)
        normal = self._norm(graph, "/model/norm", state)
        head = graph.random_weight("lm_head.weight", shape.hidden, shape.vocabulary, scale=shape.hidden**-0.5)
        graph.node("/lm_head/MatMul", normal, head, outputs=["logits"])
        dims = ["batch_size", "sequence_length"]
        past, present = caches(shape, "past_sequence_length", TOTAL)
        inputs = {name: (7, dims) for name in ("input_ids", "position_ids")} | {"attention_mask": (7, [dims[0], TOTAL])}
        return graph.model(inputs | past, {"logits": (1, [*dims, shape.vocabulary]), **present}, 17)

    def _constants(self, graph: Graph) -> None:
        for value in (0, 1, 2, 3, -1, _END):
            graph.weight(f"int.{value}", [value], "int64")
            graph.weight(f"scalar.{value}", value, "int64")

    def _size(self, graph: Graph, name: str, data: str, axis: int) -> str:
        """A dimension of a tensor, as a vector of one number."""
        size = graph.node(f"{name}/Gather", graph.node(f"{name}/Shape", data), f"scalar.{axis}", axis=0)
        return graph.node(f"{name}/Unsqueeze", size, "int.0")

    def _expanded(self, graph: Graph, name: str, data: str, sizes: list[str]) -> str:
        """Expand, by sizes of which -1 stands for a 1."""
        dims = graph.node(f"{name}/Concat", *sizes, axis=0)
        ones = graph.node(f"{name}/ConstantOfShape", graph.node(f"{name}/Shape", dims),
                          value=onnx.numpy_helper.from_array(np.ones(1, "int64")))  # fmt: skip
        minus = graph.node(f"{name}/Mul", ones, "scalar.-1")
        chosen = graph.node(f"{name}/Where", graph.node(f"{name}/Equal", dims, minus), ones, dims)
        return graph.node(f"{name}/Expand", data, chosen)

    def _rotation(self, graph: Graph) -> tuple[str, str]:
        base = "/model/rotary_emb"
        powers = 100.0 ** (-np.arange(0, self.rotated, 2) / self.rotated)
        frequencies = graph.weight("inv_freq", powers[None, :, None])
        batch = self._size(graph, f"{base}/batch", "position_ids", 0)
        wide = self._expanded(graph, f"{base}/expand", frequencies, [batch, "int.-1", "int.1"])
        places = graph.node(f"{base}/Cast", graph.node(f"{base}/Unsqueeze", "position_ids", "int.1"), to=1)
        angles = graph.node(f"{base}/Transpose", graph.node(f"{base}/MatMul", wide, places), perm=[0, 2, 1])
        both = graph.node(f"{base}/Concat", angles, angles, axis=-1)
        cos, sin = (graph.node(f"{base}/{op}", both) for op in ("Cos", "Sin"))
        return tuple(graph.node(f"{base}/Unsqueeze_{name}", part, "int.1") for name, part in (("1", cos), ("2", sin)))

    def _mask(self, graph: Graph) -> str:
        """(batch, 1, rows, total), 0 or the least number: causal, and without what attention_mask hides."""
        base = "/model/mask"
        past = graph.node(f"{base}/past/Gather", graph.node(f"{base}/past/Shape", "past_key_values.0.key"), "scalar.2")
        rows = graph.node(f"{base}/rows/Gather", graph.node(f"{base}/rows/Shape", "input_ids"), "scalar.1")
        total = graph.node(f"{base}/Add", past, rows)
        queries = graph.node(f"{base}/queries/Range", past, total, "scalar.1")
        keys = graph.node(f"{base}/keys/Range", "scalar.0", total, "scalar.1")
        column = graph.node(f"{base}/Reshape", queries, graph.weight("column", [-1, 1], "int64"))
        later = graph.node(f"{base}/Cast_later", graph.node(f"{base}/Greater", keys, column), to=1)
        least = graph.weight("least", np.finfo("float32").min)
        causal = graph.node(f"{base}/Mul", later, least)
        causal = graph.node(f"{base}/Unsqueeze_1", graph.node(f"{base}/Unsqueeze_0", causal, "int.0"), "int.1")
        batch = self._size(graph, f"{base}/batch", "input_ids", 0)
        causal = self._expanded(graph, f"{base}/expand", causal, [batch, "int.1", "int.-1", "int.-1"])
        mask = graph.node(f"{base}/Unsqueeze_3", graph.node(f"{base}/Unsqueeze_2", "attention_mask", "int.1"), "int.2")
        hidden = graph.node(f"{base}/Equal", graph.node(f"{base}/Cast_given", mask, to=1), graph.weight("zero", 0))
        return graph.node(f"{base}/Where", hidden, least, causal)

    def _norm(self, graph: Graph, name: str, data: str) -> str:
        hidden, weight = self.shape.hidden, f"{name[1:].replace('/', '.')}.weight"
        scale = graph.random_weight(weight, hidden)
        if self.norm == "layer":
            bias = graph.random_weight(f"{weight}.bias", hidden)
            return graph.node(f"{name}/LayerNormalization", data, scale, bias, op="LayerNormalization", axis=-1)
        squares = graph.node(f"{name}/Pow", data, graph.weight("two", 2))
        mean = graph.node(f"{name}/ReduceMean", squares, axes=[-1])
        root = graph.node(f"{name}/Sqrt", graph.node(f"{name}/Add", mean, graph.weight("epsilon", 1e-6)))
        one = graph.weight("one", 1)
        normal = graph.node(f"{name}/Mul", data, graph.node(f"{name}/Div", one, root))
        if self.scales_embedding:  # Gemma's weights are kept less one
            scale = graph.node(f"{name}/Add_1", one, scale)
        return graph.node(f"{name}/Mul_1", normal, scale)

    def _linear(self, graph: Graph, name: str, data: str, depth: int, columns: int, has_bias: bool) -> str:
        weight = name[1:].replace("/", ".")
        matrix = graph.random_weight(f"{weight}.weight", depth, columns, scale=depth**-0.5)
        product = graph.node(f"{name}/MatMul", data, matrix)
        if not has_bias:
            return product
        return graph.node(f"{name}/Add", graph.random_weight(f"{weight}.bias", columns), product)

    def _layer(self, graph: Graph, layer: int, state: str, rotation: tuple[str, str], mask: str) -> str:
        base = f"/model/layers.{layer}"
        normal = self._norm(graph, f"{base}/input_layernorm", state)
        attended = self._attention(graph, layer, f"{base}/self_attn", normal, rotation, mask)
        if self.is_parallel:
            mlp = self._feed_forward(graph, f"{base}/mlp", normal)
            return graph.node(f"{base}/Add_1", graph.node(f"{base}/Add_0", attended, mlp), state)
        state = graph.node(f"{base}/Add_0", state, attended)
        normal = self._norm(graph, f"{base}/post_attention_layernorm", state)
        return graph.node(f"{base}/Add_1", state, self._feed_forward(graph, f"{base}/mlp", normal))

    def _feed_forward(self, graph: Graph, base: str, normal: str) -> str:
        hidden, inner = self.shape.hidden, self.shape.inner
        has_bias = not self.is_gated
        gate = self._linear(graph, f"{base}/gate_proj", normal, hidden, inner, has_bias)
        if self.activation == "silu":
            active = graph.node(f"{base}/act_fn/Mul", gate, graph.node(f"{base}/act_fn/Sigmoid", gate))
        else:  # the approximation of GELU by tanh, op by op
            cube = graph.node(f"{base}/act_fn/Pow", gate, graph.weight("three", 3))
            bent = graph.node(f"{base}/act_fn/Mul_0", cube, graph.weight("gelu.cube", 0.044715))
            inside = graph.node(f"{base}/act_fn/Add_0", gate, bent)
            scaled = graph.node(f"{base}/act_fn/Mul_1", inside, graph.weight("gelu.root", np.sqrt(2 / np.pi)))
            shifted = graph.node(f"{base}/act_fn/Add_1", graph.node(f"{base}/act_fn/Tanh", scaled), "one.gelu")
            half = graph.node(f"{base}/act_fn/Mul_2", gate, graph.weight("half", 0.5))
            graph.weight("one.gelu", 1)
            active = graph.node(f"{base}/act_fn/Mul_3", half, shifted)
        if self.is_gated:
            up = self._linear(graph, f"{base}/up_proj", normal, hidden, inner, False)
            active = graph.node(f"{base}/Mul", active, up)
        return self._linear(graph, f"{base}/down_proj", active, inner, hidden, has_bias)

    def _attention(self, graph: Graph, layer: int, base: str, normal: str, rotation: tuple[str, str], mask: str) -> str:
        shape = self.shape
        sizes = [self._size(graph, f"{base}/{name}", normal, axis) for axis, name in enumerate(("batch", "rows"))]
        query, key, value = self._heads(graph, base, normal, sizes)
        query, key = (
            self._rotated(graph, f"{base}/{name}_rotary", data, rotation) for name, data in (("q", query), ("k", key))
        )
        repeated = []
        for name, data in (("key", key), ("value", value)):
            present = f"present.{layer}.{name}"
            past = f"past_key_values.{layer}.{name}"
            graph.node(f"{base}/Concat_{name}", past, data, outputs=[present], op="Concat", axis=2)
            repeated.append(self._repeated(graph, f"{base}/{name}_repeat", present, sizes[0]))
        turned = graph.node(f"{base}/Transpose_key", repeated[0], op="Transpose", perm=[0, 1, 3, 2])
        root = graph.weight("root_of_scale", shape.size**-0.25)
        scores = graph.node(
            f"{base}/MatMul_0", graph.node(f"{base}/Mul_q", query, root, op="Mul"),
            graph.node(f"{base}/Mul_k", turned, root, op="Mul"),
        )  # fmt: skip
        weights = graph.node(f"{base}/Softmax", graph.node(f"{base}/Add", scores, mask), axis=-1)
        result = graph.node(f"{base}/MatMul_1", weights, repeated[1])
        ordered = graph.node(f"{base}/Transpose_out", result, op="Transpose", perm=[0, 2, 1, 3])
        width = shape.heads * shape.size
        dims = graph.node(f"{base}/Concat_out", *sizes, graph.weight("width", [width], "int64"), op="Concat", axis=0)
        flat = graph.node(f"{base}/Reshape_out", ordered, dims, op="Reshape")
        return self._linear(graph, f"{base}/o_proj", flat, width, shape.hidden, self.is_parallel)

    def _heads(self, graph: Graph, base: str, normal: str, sizes: list[str]) -> list[str]:
        shape, heads = self.shape, []
        size = graph.weight("size", [shape.size], "int64")
        if self.joins_heads:
            joined = self._linear(
                graph, f"{base}/query_key_value", normal, shape.hidden, 3 * shape.heads * shape.size, True
            )
            each = graph.weight("heads.joined", [shape.heads, 3 * shape.size], "int64")
            dims = graph.node(f"{base}/Concat_joined", *sizes, each, op="Concat", axis=0)
            split = graph.node(f"{base}/Reshape_joined", joined, dims, op="Reshape")
            turned = graph.node(f"{base}/Transpose_joined", split, op="Transpose", perm=[0, 2, 1, 3])
            names = [f"{base}/Split/output_{part}" for part in range(3)]
            splits = graph.weight("heads.splits", [shape.size] * 3, "int64")
            graph.node(f"{base}/Split", turned, splits, outputs=names, axis=3)
            return names
        for name, count in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            data = self._linear(graph, f"{base}/{name}_proj", normal, shape.hidden, count * shape.size, self.has_bias)
            dims = graph.node(f"{base}/Concat_{name}", *sizes, "int.-1", size, op="Concat", axis=0)
            split = graph.node(f"{base}/Reshape_{name}", data, dims, op="Reshape")
            heads.append(graph.node(f"{base}/Transpose_{name}", split, op="Transpose", perm=[0, 2, 1, 3]))
        return heads

    def _rotated(self, graph: Graph, name: str, data: str, rotation: tuple[str, str]) -> str:
        """x cos + [-b, a] sin, where a and b are the halves of the rotated elements; later elements stay."""
        full, rest = data, ""
        if self.rotated < self.shape.size:
            middle = graph.weight("rotated", [self.rotated], "int64")
            data = graph.node(f"{name}/Slice_0", full, "int.0", middle, "int.3", "int.1")
            rest = graph.node(f"{name}/Slice_1", full, middle, f"int.{_END}", "int.3", "int.1")
        half = graph.node(f"{name}/Div", self._size(graph, f"{name}/size", data, 3), "int.2")
        first = graph.node(f"{name}/Slice_2", data, "int.0", half, "int.3", "int.1")
        second = graph.node(f"{name}/Slice_3", data, half, f"int.{_END}", "int.3", "int.1")
        turned = graph.node(f"{name}/Concat_0", graph.node(f"{name}/Neg", second), first, axis=-1)
        cos, sin = (
            graph.node(f"{name}/Mul_{index}", part, table)
            for index, (part, table) in enumerate(zip((data, turned), rotation, strict=True))
        )
        result = graph.node(f"{name}/Add", cos, sin)
        return graph.node(f"{name}/Concat_1", result, rest, axis=-1) if rest else result

    def _repeated(self, graph: Graph, name: str, data: str, batch: str) -> str:
        """Heads of keys and values, one for each head of queries."""
        shape = self.shape
        if shape.heads == shape.kv_heads:
            return data
        total = self._size(graph, f"{name}/total", data, 2)
        counts = [graph.weight(f"count.{value}", [value], "int64") for value in (shape.kv_heads, shape.size)]
        group = graph.weight("group", [shape.heads // shape.kv_heads], "int64")
        expanded = graph.node(f"{name}/Unsqueeze", data, "int.2")
        wide = self._expanded(graph, f"{name}/expand", expanded, [batch, counts[0], group, total, counts[1]])
        heads = graph.weight("count.heads", [shape.heads], "int64")
        dims = graph.node(f"{name}/Concat", batch, heads, total, counts[1], axis=0)
        return graph.node(f"{name}/Reshape", wide, dims)
