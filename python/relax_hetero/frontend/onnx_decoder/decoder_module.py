"""Functions ``decode_B`` and ``prefill_C`` of an ONNX decoder with a paged cache.

`plan_decoder` finds the nodes that compute logits and the attention nodes, whose past_key_values pages replace. A
function is an import of these nodes, with attention converted to `cached_attention`. All other nodes see the tokens as
rows of one sequence, regardless of their sequences: ids and positions have the shape (1, rows).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax

from ...encoding.pages import TABLES, LayerCache
from ...errors import FrontendError
from ...op.cached_attention import cached_attention
from ..greedy_tokens import greedy_tokens
from ..import_devices import default_device
from ..joined_sizes import Bounds
from ..narrow_storage import with_narrow_storage
from ..onnx.functions import function_table
from ..onnx.importer import GraphImporter, ImportedGraph, import_graph
from ..onnx.name_bindings import build_function, build_loops
from ..onnx.node_names import NodeInfo
from ..onnx.onnx_constants import make_const
from ..onnx.onnx_model import OnnxModel
from ..onnx.support import check_supported
from ..ops.elementwise import cast
from ..ops.node import Node, shared_constants
from ..paged_cache import DECODE, PagedCache

ATTENTION = "GroupQueryAttention"
IDS, POSITIONS = "input_ids", "position_ids"

# Inputs of the op that stay with a paged cache: queries, keys, values, rotations, sinks and norms.
_PAGED_INPUTS = (0, 1, 2, 7, 8, 11, 14, 15)
_PAST_KEY, _PAST_VALUE, _SINK = 3, 4, 11
_UNSUPPORTED_INPUTS = {10: "attention_bias", 12: "k_scale", 13: "v_scale", 16: "query_seqlens"}
_PRODUCT_OPS = ("MatMul", "MatMulNBits", "Gemm", "FusedMatMul", "MatMulBnb4")
_AFTER_PRODUCT_OPS = ("Add", "Cast", "Div", "Identity", "Mul", "Reshape", "Sub", "Tanh")
"""Ops that may follow the last product."""


@dataclass(frozen=True)
class DecoderPlan:
    """The part of a graph that computes logits."""

    logits: str  # name of the output
    needed: frozenset[int]  # indices of the nodes that it depends on
    layers: dict[int, int]  # index of an attention node -> its layer
    # Key/value heads and window of every layer; 0: no window.
    kv_heads: tuple[int, ...]
    windows: tuple[int, ...]
    head: int | None  # index of the product that computes logits from hidden states, if any


def plan_decoder(model: OnnxModel) -> DecoderPlan:
    """Find the nodes of a decoder's functions.

    Raises FrontendError if the model lacks such attention, or the logits depend on the cache or a mask in another way.
    """
    graph, source = model.proto.graph, model.source
    producers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    attentions = [index for index, node in enumerate(graph.node) if node.op_type == ATTENTION]
    if not attentions:
        raise FrontendError(
            f"{source} has no node of {ATTENTION}, whose past_key_values a cache of pages takes the place of"
        )
    inputs = {info.name for info in graph.input} - {tensor.name for tensor in graph.initializer}
    if IDS not in inputs:
        raise FrontendError(f"{source} has the inputs {sorted(inputs)}, expected one called {IDS!r}")
    for index in attentions:
        _check_attention(graph.node[index], inputs, source)
    caches = {name for index in attentions for name in graph.node[index].output[1:]}
    logits_outputs = [output.name for output in graph.output if output.name not in caches]
    if len(logits_outputs) != 1:
        raise FrontendError(f"{source} has the outputs {logits_outputs} besides its caches, expected one of logits")
    required = _required(graph, producers, logits_outputs[0], inputs, source)
    layers = {index: layer for layer, index in enumerate(index for index in attentions if index in required)}
    attributes = [_attributes(graph.node[index]) for index in layers]
    return DecoderPlan(
        logits_outputs[0],
        frozenset(required),
        layers,
        tuple(int(values.get("kv_num_heads", 0)) for values in attributes),
        tuple(max(int(values.get("local_window_size", -1)), 0) for values in attributes),
        _logits_product(graph, producers, logits_outputs[0]),
    )


def without_cache(node: onnx.NodeProto) -> onnx.NodeProto:
    """Copy of an attention node without the inputs that a paged cache replaces."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    for index in range(len(bare.input)):
        if index not in _PAGED_INPUTS:
            bare.input[index] = ""
    return bare


def _attributes(node: onnx.NodeProto) -> dict[str, int | float]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _check_attention(node: onnx.NodeProto, inputs: set[str], source: str) -> None:
    """Refuse forms of attention without paged kernels, and caches that are not inputs of the graph."""
    title = f"{source}: {ATTENTION} {node.name!r}"
    for index, name in _UNSUPPORTED_INPUTS.items():
        if len(node.input) > index and node.input[index]:
            raise FrontendError(f"{title} has the input {name}, which a cache of pages does not take")
    attributes = _attributes(node)
    for name, default in (("causal", 1), ("qk_output", 0), ("sliding_window_cache", 0)):
        if attributes.get(name, default) not in (default, -1):
            raise FrontendError(f"{title} has {name}={attributes[name]}, which a cache of pages does not take")
    for index in (_PAST_KEY, _PAST_VALUE):
        name = node.input[index] if len(node.input) > index else ""
        if name not in inputs:
            raise FrontendError(f"{title} reads the cache {name!r}, expected an input of the graph")


def _required(
    graph: onnx.GraphProto, producers: dict[str, int], logits: str, inputs: set[str], source: str
) -> set[int]:
    """Indices of the nodes that logits depend on, without dependencies through masks and past keys and values."""
    required: set[int] = set()
    stack = [logits]
    while stack:
        name = stack.pop()
        index = producers.get(name)
        if index is None or index in required:
            continue
        required.add(index)
        node = graph.node[index]
        if node.op_type == ATTENTION and name != node.output[0]:
            raise FrontendError(
                f"{source}: a node reads {name!r}, which is a cache, expected attention to read it only"
            )
        names = (
            [node.input[i] for i in _PAGED_INPUTS if i < len(node.input)]
            if node.op_type == ATTENTION
            else _inputs_of(node)
        )
        for operand in names:
            if operand in inputs and operand not in (IDS, POSITIONS):
                raise FrontendError(
                    f"{source}: {node.op_type} {node.name!r} reads the input {operand!r}, for which a cache of pages "
                    f"has no value; expected {IDS!r} and {POSITIONS!r} alone outside of attention"
                )
            stack.append(operand)
    return required


def _inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node and its subgraphs read, including names that are defined in the subgraphs."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from (name for inner in attribute.g.node for name in _inputs_of(inner))
            yield from (output.name for output in attribute.g.output)


def _logits_product(graph: onnx.GraphProto, producers: dict[str, int], logits: str) -> int | None:
    """The last product if only row-wise ops with constants follow it."""
    name = logits
    while name in producers:
        node = graph.node[producers[name]]
        if node.op_type in _PRODUCT_OPS:
            return producers[name]
        operands = [
            operand
            for operand in node.input
            if operand in producers and graph.node[producers[operand]].op_type != "Constant"
        ]
        if node.op_type not in _AFTER_PRODUCT_OPS or len(operands) != 1:
            return None
        name = operands[0]
    return None


@dataclass(frozen=True)
class Decoder:
    """State that the imports of a decoder's functions share."""

    model: OnnxModel
    plan: DecoderPlan
    cache: PagedCache
    size: int  # elements of a head
    # Name of a weight -> constant, which functions share.
    constants: dict[str, tvm.ir.GenericConst] = field(default_factory=dict)
    # Builder of all functions, so that kernels have unique names and equal ones are shared.
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)


class CachedImporter(GraphImporter):
    """Importer of one function of a decoder."""

    def __init__(self, decoder: Decoder, rows: int, kind: str) -> None:
        super().__init__(decoder.model)
        self.bb = decoder.builder
        self._decoder, self._rows, self._kind = decoder, rows, kind
        self._parameters: Mapping[str, relax.Var] = {}
        self._indices: dict[NodeInfo, int] = {}
        self._layer_pages: dict[int, relax.Expr] = {}
        self._rotations: dict[tuple[str, str], relax.Expr] = {}

    def run(self, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var], bounds: Bounds) -> ImportedGraph:
        """Convert the nodes that logits depend on; `inputs` are the function's parameters."""
        self._parameters, params = inputs, list(inputs.values())
        self._indices = {info: index for index, info in enumerate(nodes)}
        self._add_initializers(self._graph)
        self.bb.begin_scope(params)
        try:
            with self._collect_bindings() as bindings:
                self._nodes[IDS] = self._row_tensor("ids_of_rows", "tokens")
                self._nodes[POSITIONS] = self._row_tensor("positions_of_rows", "positions")
                self._convert_graph(self._graph.node, nodes)
                outputs = self._logits() + [self._layer_pages[layer] for layer in sorted(self._layer_pages)]
        finally:
            self.bb.end_scope()
        upper_bounds = {size.name: bound for size, bound in bounds.items()}
        return ImportedGraph(
            self.bb.get(),
            list(inputs),
            params,
            bindings,
            outputs,
            self._owners,
            self._results,
            upper_bounds,
            self.loops,
        )

    def _add_initializers(self, graph: onnx.GraphProto) -> None:
        """Add initializers; functions share the constants of the main graph."""
        if graph is not self._graph:
            super()._add_initializers(graph)
            return
        constants = self._decoder.constants
        if not constants:
            constants.update((name, make_const(array)) for name, array in self._tensors.initializers(graph))
        self._nodes.update(constants)

    def _convert_graph(self, protos: Iterable[onnx.NodeProto], nodes: list[NodeInfo]) -> None:
        required = self._decoder.plan.needed
        selected = [
            (proto, info) for index, (proto, info) in enumerate(zip(protos, nodes, strict=True)) if index in required
        ]
        self._convert_nodes([proto for proto, _ in selected], [info for _, info in selected])

    def _convert_node(self, node: onnx.NodeProto, info: NodeInfo) -> None:
        if self._indices.get(info) in self._decoder.plan.layers:
            node = without_cache(node)
        is_head = info in self._indices and self._indices[info] == self._decoder.plan.head
        if not is_head or "last" not in self._parameters:
            super()._convert_node(node, info)
            return
        hidden = self._nodes[node.input[0]]
        rank = int(hidden.ty.ndim)  # rows are the second last axis
        row = relax.op.take(hidden, self._parameters["last"], axis=rank - 2, mode="clip")
        self._nodes[node.input[0]] = self.bb.emit(row)
        try:
            super()._convert_node(node, info)
        finally:
            self._nodes[node.input[0]] = hidden

    def _convert(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> Any:
        layer = self._decoder.plan.layers.get(self._indices.get(info, -1))
        if layer is None:
            return super()._convert(node, info, operands)
        attributes = self._parse_attr(node.attribute)
        as_read = Node(node.op_type, info.name, self.opset, self.bb, operands, attributes, 1, domain=node.domain)
        out, pages = self._attention(as_read, node, layer)
        self._layer_pages[layer] = pages
        return relax.Tuple([out, *[pages] * (len(node.output) - 1)])

    def _attention(self, node: Node, proto: onnx.NodeProto, layer: int) -> tuple[relax.Expr, relax.Expr]:
        """The result, (1, rows, heads * size), and the pages of a layer."""
        heads, kv_heads, size = (*self._heads(node), self._decoder.size)
        widths = [heads * size, kv_heads * size, kv_heads * size] if node.has(1) else [(heads + 2 * kv_heads) * size]
        projections = [
            node.emit(relax.op.reshape(node.tensor(index), [self._rows, width])) for index, width in enumerate(widths)
        ]
        qkv = node.emit(relax.op.concat(projections, axis=1)) if len(projections) > 1 else projections[0]
        rotary = "" if not node.attribute("do_rotary", 0) else self._rotary(node)
        operands = [self._rotation_rows(node, proto)] if rotary else []
        norms = "qk" if node.has(14) else ""
        operands += [cast(node, node.tensor(index), "float32") for index in (14, 15) if node.has(index)]
        sinks = self._sinks(node, heads)
        window = self._decoder.plan.windows[layer]
        params = self._parameters
        call = cached_attention(
            qkv,
            params[f"pages_{layer}"],
            params[TABLES[bool(window)]],
            params["sequences"],
            params["positions"],
            *operands,
            *sinks,
            heads=heads,
            kv_heads=kv_heads,
            size=size,
            scale=node.attribute("scale", 0.0) or 1 / math.sqrt(size),
            window=window,
            softcap=max(node.attribute("softcap", 0.0), 0.0),
            rotary=rotary,
            norms=norms,
            eps=self._epsilon(node),
            rows=self._kind,
            sinks=bool(sinks),
        )
        result = node.emit(call)
        out, pages = (node.emit(relax.TupleGetItem(result, index)) for index in range(2))
        return node.emit(relax.op.reshape(out, [1, self._rows, heads * size])), pages

    @staticmethod
    def _sinks(node: Node, heads: int) -> list[relax.Expr]:
        """The sinks of heads, if there are any; those of a smooth softmax are zeros."""
        if node.has(_SINK):
            return [cast(node, node.tensor(_SINK), "float32")]
        return [relax.const(np.zeros(heads, "float32"))] if node.attribute("smooth_softmax", 0) == 1 else []

    def _heads(self, node: Node) -> tuple[int, int]:
        return int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))

    def _rotary(self, node: Node) -> str:
        return "pairs" if node.attribute("rotary_interleaved", 0) else "halves"

    def _epsilon(self, node: Node) -> float:
        default = node.attribute("qk_norm_epsilon", 1e-6)
        epsilons = [float(node.attribute(f"{part}_norm_epsilon", default)) for part in "qk"]
        if epsilons[0] != epsilons[1]:
            raise node.refusal(f"found norms of queries and keys with epsilons {epsilons}, expected one")
        return epsilons[0]

    def _rotation_rows(self, node: Node, proto: onnx.NodeProto) -> relax.Expr:
        """Cosines and sines of each row's position, (rows, rotated) of float32; shared by all layers."""
        key = (proto.input[7], proto.input[8])
        if key not in self._rotations:
            tables = [node.tensor(index) for index in (7, 8)]
            context, length = self._decoder.cache.context, node.shape(tables[0])[0]
            if isinstance(length, int) and length < context:
                raise node.refusal(f"found rotations of {length} positions, expected those of the cache's {context}")
            positions = self._parameters["positions"]
            rows = [
                cast(node, node.emit(relax.op.take(table, positions, axis=0, mode="clip")), "float32")
                for table in tables
            ]
            self._rotations[key] = node.emit(relax.op.concat(rows, axis=1))
        return self._rotations[key]

    def _row_tensor(self, name: str, parameter: str) -> relax.Expr:
        """A parameter, (rows,) of int32, as (1, rows) of int64."""
        with self._collect_bindings() as bindings:
            wide = self.bb.emit(relax.op.astype(self._parameters[parameter], "int64"))
            column = self.bb.emit(relax.op.reshape(wide, [1, self._rows]))
        self.adopt(bindings, NodeInfo(name, (), "Reshape", "", ""))
        return column

    def _logits(self) -> list[relax.Expr]:
        """The logits, (rows or 1, vocabulary) of float32, and the greedy tokens of a decode step."""
        value = self._value(self._decoder.plan.logits)
        count = self._rows if self._decoder.plan.head is None or "last" not in self._parameters else 1
        shape = [int(dim) if isinstance(dim, tvm.tirx.IntImm) else str(dim) for dim in value.ty.shape.values]
        if len(shape) != 3 or shape[:2] != [1, count]:
            raise FrontendError(
                f"{self._decoder.model.source} has logits of shape {shape} for {self._rows} tokens, expected "
                f"[1, {count}, vocabulary]: logits of every token"
            )
        with self._collect_bindings() as bindings:
            rows = self.bb.emit(relax.op.reshape(value, shape[1:]))
            if "last" in self._parameters and self._decoder.plan.head is None:
                rows = self.bb.emit(relax.op.take(rows, self._parameters["last"], axis=0, mode="clip"))
            results = [rows if str(rows.ty.dtype) == "float32" else self.bb.emit(relax.op.astype(rows, "float32"))]
            if self._kind == DECODE:
                tokens = greedy_tokens(self.bb, results[0], lambda value, _: self.bb.emit(value), default_device())
                results.append(self.bb.emit(tokens))
        self.adopt(bindings, NodeInfo("logits_of_rows", (), "Reshape", "", ""))
        return results


def decoder_module(model: OnnxModel, nodes: list[NodeInfo], cache: PagedCache) -> tvm.IRModule:
    """Build all functions of a decoder, without placement.

    Raises FrontendError if the model is not a decoder with a cache that pages can replace, or a node cannot be
    imported.
    """
    check_supported(nodes, model, function_table(model.proto))
    plan = plan_decoder(model)
    decoder = Decoder(model, plan, cache, _head_size(model, plan))
    mod = tvm.IRModule()
    with shared_constants():
        for name, rows, kind in cache.functions:
            _add_function(mod, decoder, nodes, name, rows, kind)
    return mod


def _head_size(model: OnnxModel, plan: DecoderPlan) -> int:
    """Elements of a head: the last dimension of all cache inputs."""
    cache_names = {model.proto.graph.node[node_index].input[index] for node_index in plan.layers for index in (3, 4)}
    dims = [info.type.tensor_type.shape.dim for info in model.proto.graph.input if info.name in cache_names]
    sizes = {shape[3].dim_value if len(shape) == 4 else 0 for shape in dims}
    if len(sizes) != 1 or 0 in sizes:
        raise FrontendError(
            f"{model.source} has caches of heads of {sorted(sizes)} numbers (0: unknown), expected inputs of 4 axes, "
            "the last one equal in all layers"
        )
    return sizes.pop()


def _add_function(mod: tvm.IRModule, decoder: Decoder, nodes: list[NodeInfo], name: str, rows: int, kind: str) -> None:
    """Import one function into a module."""
    plan = decoder.plan
    sizes = zip(plan.kv_heads, plan.windows, strict=True)
    layers = [LayerCache(heads, decoder.size, window) for heads, window in sizes]
    params = decoder.cache.parameters(rows, kind, layers)
    imported = import_graph(decoder.model, nodes, params, lambda _: CachedImporter(decoder, rows, kind))
    graph = with_narrow_storage(imported)
    func = build_function(graph)
    attributes: dict[str, object] = {
        "global_symbol": name,
        "num_input": len(params),
        "input_names": list(params),
        "output_names": [
            "logits",
            *(["greedy_tokens"] if kind == DECODE else []),
            *(param for param in params if param.startswith("pages_")),
        ],
        "decoder": {
            "kv_heads": list(decoder.plan.kv_heads),
            "windows": list(decoder.plan.windows),
            "size": decoder.size,
        },
    }
    for gvar, kernel in graph.module.functions.items():
        mod[gvar] = kernel
    for gvar, loop in build_loops(graph).items():
        mod[gvar] = loop
    if graph.bounds:
        attributes["tir_var_upper_bound"] = graph.bounds
    mod[tvm.ir.GlobalVar(name)] = func.with_attrs(attributes)
