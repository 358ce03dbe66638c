"""A module of the functions ``decode_B`` and ``prefill_C`` of an ONNX decoder, whose cache is one of pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import tvm
from onnx import helper
from tvm import relax

from ...encoding.pages import TABLES
from ...errors import FrontendError
from ...op.cached_attention import cached_attention
from ..joined_sizes import Bounds
from ..narrow_storage import with_narrow_storage
from ..onnx.constants import make_const
from ..onnx.functions import function_table
from ..onnx.importer import GraphImporter, ImportedGraph, import_graph
from ..onnx.model import OnnxModel
from ..onnx.name_bindings import build_function, build_loops
from ..onnx.node_names import NodeInfo
from ..onnx.support import check_supported
from ..ops.elementwise import cast
from ..ops.node import Node, shared_constants
from ..paged_cache import PagedCache

# Rest of a decoder's graph when its cache is one of pages: found on the model, before anything is imported.

ATTENTION = "GroupQueryAttention"
IDS, POSITIONS = "input_ids", "position_ids"

# Inputs of the op that a cache of pages reads, too: queries, keys, values, rotations and norms.
_READ = (0, 1, 2, 7, 8, 14, 15)
_PAST_KEY, _PAST_VALUE = 3, 4
_REFUSED = {10: "attention_bias", 11: "head_sink", 12: "k_scale", 13: "v_scale", 16: "query_seqlens"}
_PRODUCTS = ("MatMul", "MatMulNBits", "Gemm", "FusedMatMul", "MatMulBnb4")
_BEHIND_PRODUCT = ("Add", "Cast", "Div", "Identity", "Mul", "Reshape", "Sub", "Tanh")
"""Work between the last product and the logits."""


@dataclass(frozen=True)
class DecoderPlan:
    """The part of a graph that computes logits.

    Attributes
    ----------
    logits : str
        The output.
    needed : frozenset of int
        Places of the nodes that it needs.
    layers : dict of int to int
        Place of a node of attention -> its layer.
    kv_heads, windows : tuple of int
        Heads of keys and values of every layer, and windows; 0 sees all positions.
    head : int or None
        Place of the product that makes logits of hidden states, where there is one.
    """

    logits: str
    needed: frozenset[int]
    layers: dict[int, int]
    kv_heads: tuple[int, ...]
    windows: tuple[int, ...]
    head: int | None


def plan_decoder(model: OnnxModel) -> DecoderPlan:
    """Plan of a decoder's functions.

    Raises
    ------
    FrontendError
        If the model has no such attention, or the logits depend on the cache or a mask in another way.
    """
    graph, source = model.proto.graph, model.source
    makers = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
    attentions = [place for place, node in enumerate(graph.node) if node.op_type == ATTENTION]
    if not attentions:
        raise FrontendError(
            f"{source} has no node of {ATTENTION}, whose past_key_values a cache of pages takes the place of"
        )
    inputs = {info.name for info in graph.input} - {tensor.name for tensor in graph.initializer}
    if IDS not in inputs:
        raise FrontendError(f"{source} has the inputs {sorted(inputs)}, expected one called {IDS!r}")
    for place in attentions:
        _check_attention(graph.node[place], inputs, source)
    caches = {name for place in attentions for name in graph.node[place].output[1:]}
    others = [output.name for output in graph.output if output.name not in caches]
    if len(others) != 1:
        raise FrontendError(f"{source} has the outputs {others} beside its caches, expected one of logits")
    needed = _needed(graph, makers, others[0], inputs, source)
    layers = {place: layer for layer, place in enumerate(place for place in attentions if place in needed)}
    attributes = [_attributes(graph.node[place]) for place in layers]
    return DecoderPlan(
        others[0],
        frozenset(needed),
        layers,
        tuple(int(values.get("kv_num_heads", 0)) for values in attributes),
        tuple(max(int(values.get("local_window_size", -1)), 0) for values in attributes),
        _head(graph, makers, others[0]),
    )


def without_cache(node: onnx.NodeProto) -> onnx.NodeProto:
    """A node of attention without the inputs that pages take the place of."""
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    for place in range(len(bare.input)):
        if place not in _READ:
            bare.input[place] = ""
    return bare


def _attributes(node: onnx.NodeProto) -> dict[str, int | float]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _check_attention(node: onnx.NodeProto, inputs: set[str], source: str) -> None:
    """Refuse forms of attention that pages do not have, and caches that are no inputs of the graph."""
    where = f"{source}: {ATTENTION} {node.name!r}"
    for place, name in _REFUSED.items():
        if len(node.input) > place and node.input[place]:
            raise FrontendError(f"{where} has the input {name}, which a cache of pages does not take")
    attributes = _attributes(node)
    for name, plain in (("smooth_softmax", 0), ("causal", 1), ("qk_output", 0), ("sliding_window_cache", 0)):
        if attributes.get(name, plain) not in (plain, -1):
            raise FrontendError(f"{where} has {name}={attributes[name]}, which a cache of pages does not take")
    for place in (_PAST_KEY, _PAST_VALUE):
        name = node.input[place] if len(node.input) > place else ""
        if name not in inputs:
            raise FrontendError(f"{where} reads the cache {name!r}, expected an input of the graph")


def _needed(graph: onnx.GraphProto, makers: dict[str, int], logits: str, inputs: set[str], source: str) -> set[int]:
    """Places of the nodes that logits need, but for what attention needs of a mask and of a past."""
    needed: set[int] = set()
    waiting = [logits]
    while waiting:
        name = waiting.pop()
        place = makers.get(name)
        if place is None or place in needed:
            continue
        needed.add(place)
        node = graph.node[place]
        if node.op_type == ATTENTION and name != node.output[0]:
            raise FrontendError(
                f"{source}: a node reads {name!r}, which is a cache, expected attention to read it only"
            )
        read = [node.input[i] for i in _READ if i < len(node.input)] if node.op_type == ATTENTION else _inputs_of(node)
        for other in read:
            if other in inputs and other not in (IDS, POSITIONS):
                raise FrontendError(
                    f"{source}: {node.op_type} {node.name!r} reads the input {other!r}, for which a cache of pages has "
                    f"no value; expected {IDS!r} and {POSITIONS!r} alone outside of attention"
                )
            waiting.append(other)
    return needed


def _inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node and the graphs in it read; those of the graphs' own values do no harm."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield from _names_in(attribute.g.node)
            yield from (output.name for output in attribute.g.output)


def _names_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    for node in nodes:
        yield from _inputs_of(node)


def _head(graph: onnx.GraphProto, makers: dict[str, int], logits: str) -> int | None:
    """The last product, behind which every row is by itself and only constants join it."""
    name = logits
    while name in makers:
        node = graph.node[makers[name]]
        if node.op_type in _PRODUCTS:
            return makers[name]
        computed = [
            other for other in node.input if other in makers and graph.node[makers[other]].op_type != "Constant"
        ]
        if node.op_type not in _BEHIND_PRODUCT or len(computed) != 1:
            return None
        name = computed[0]
    return None


# One function of a decoder whose cache is one of pages: the import of its graph with attention replaced.
#
# For all nodes but attention the rows are the tokens of one sequence, whether they are or not: ids and positions have
# the shape (1, rows), and products are of one matrix.


@dataclass(frozen=True)
class Decoder:
    """A decoder and what is to become of it.

    Attributes
    ----------
    size : Numbers of a head.
    constants : The weights that functions share, by their names.
    builder : Where all functions are written, so that kernels have names of their own, and equal ones are one.
    """

    model: OnnxModel
    plan: DecoderPlan
    cache: PagedCache
    size: int
    constants: dict[str, tvm.ir.GenericConst] = field(default_factory=dict)
    builder: relax.BlockBuilder = field(default_factory=relax.BlockBuilder)


class CachedImporter(GraphImporter):
    """Imports what a function needs of a decoder's graph."""

    def __init__(self, decoder: Decoder, rows: int, kind: str) -> None:
        super().__init__(decoder.model)
        self.bb = decoder.builder
        self._decoder, self._rows, self._kind = decoder, rows, kind
        self._parameters: Mapping[str, relax.Var] = {}
        self._places: dict[NodeInfo, int] = {}
        self._written: dict[int, relax.Expr] = {}
        self._rotations: dict[tuple[str, str], relax.Expr] = {}

    def run(self, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var], bounds: Bounds) -> ImportedGraph:
        """Convert the part of the graph that logits need; `inputs` are `parameters`."""
        self._parameters, params = inputs, list(inputs.values())
        self._places = {info: place for place, info in enumerate(nodes)}
        self._add_initializers(self._graph)
        self.bb.begin_scope(params)
        try:
            with self._collected() as bindings:
                self._nodes[IDS] = self._row_of("ids_of_rows", "tokens")
                self._nodes[POSITIONS] = self._row_of("positions_of_rows", "positions")
                self._convert_graph(self._graph.node, nodes)
                outputs = [self._logits(), *(self._written[layer] for layer in sorted(self._written))]
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
        """As for any graph, but the weights of the model itself are the same constants in every function."""
        if graph is not self._graph:
            super()._add_initializers(graph)
            return
        constants = self._decoder.constants
        if not constants:
            constants.update((name, make_const(array)) for name, array in self._tensors.initializers(graph))
        self._nodes.update(constants)

    def _convert_graph(self, protos: Iterable[onnx.NodeProto], nodes: list[NodeInfo]) -> None:
        needed = self._decoder.plan.needed
        kept = [(proto, info) for place, (proto, info) in enumerate(zip(protos, nodes, strict=True)) if place in needed]
        self._convert_nodes([proto for proto, _ in kept], [info for _, info in kept])

    def _convert_node(self, node: onnx.NodeProto, info: NodeInfo) -> None:
        if self._places.get(info) in self._decoder.plan.layers:
            node = without_cache(node)
        is_head = info in self._places and self._places[info] == self._decoder.plan.head
        if not is_head or "last" not in self._parameters:
            super()._convert_node(node, info)
            return
        whole = self._nodes[node.input[0]]
        rank = int(whole.ty.ndim)  # rows are the axis before the last, of matrices, too
        row = relax.op.take(whole, self._parameters["last"], axis=rank - 2, mode="clip")
        self._nodes[node.input[0]] = self.bb.emit(row)
        try:
            super()._convert_node(node, info)
        finally:
            self._nodes[node.input[0]] = whole

    def _convert(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> Any:
        layer = self._decoder.plan.layers.get(self._places.get(info, -1))
        if layer is None:
            return super()._convert(node, info, operands)
        attributes = self._parse_attr(node.attribute)
        as_read = Node(node.op_type, info.name, self.opset, self.bb, operands, attributes, 1, domain=node.domain)
        out, pages = self._attention(as_read, node, layer)
        self._written[layer] = pages
        return relax.Tuple([out, *[pages] * (len(node.output) - 1)])

    def _attention(self, node: Node, proto: onnx.NodeProto, layer: int) -> tuple[relax.Expr, relax.Expr]:
        """The result, (1, rows, heads * size), and the pages of a layer."""
        heads, kv_heads, size = (*self._heads(node), self._decoder.size)
        widths = [heads * size, kv_heads * size, kv_heads * size] if node.has(1) else [(heads + 2 * kv_heads) * size]
        parts = [
            node.emit(relax.op.reshape(node.tensor(index), [self._rows, width])) for index, width in enumerate(widths)
        ]
        joined = node.emit(relax.op.concat(parts, axis=1)) if len(parts) > 1 else parts[0]
        rotary = "" if not node.attribute("do_rotary", 0) else self._rotary(node)
        others = [self._rotation(node, proto)] if rotary else []
        norms = "qk" if node.has(14) else ""
        others += [cast(node, node.tensor(index), "float32") for index in (14, 15) if node.has(index)]
        window = self._decoder.plan.windows[layer]
        given = self._parameters
        call = cached_attention(
            joined,
            given[f"pages_{layer}"],
            given[TABLES[bool(window)]],
            given["sequences"],
            given["positions"],
            *others,
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
        )
        both = node.emit(call)
        out, pages = (node.emit(relax.TupleGetItem(both, index)) for index in range(2))
        return node.emit(relax.op.reshape(out, [1, self._rows, heads * size])), pages

    def _heads(self, node: Node) -> tuple[int, int]:
        return int(node.attribute("num_heads", 0)), int(node.attribute("kv_num_heads", 0))

    def _rotary(self, node: Node) -> str:
        return "pairs" if node.attribute("rotary_interleaved", 0) else "halves"

    def _epsilon(self, node: Node) -> float:
        both = node.attribute("qk_norm_epsilon", 1e-6)
        found = [float(node.attribute(f"{part}_norm_epsilon", both)) for part in "qk"]
        if found[0] != found[1]:
            raise node.refusal(f"found norms of queries and keys with epsilons {found}, expected one")
        return found[0]

    def _rotation(self, node: Node, proto: onnx.NodeProto) -> relax.Expr:
        """Cosines and sines of each row's position, (rows, rotated numbers) of float32; once for all layers."""
        key = (proto.input[7], proto.input[8])
        if key not in self._rotations:
            tables = [node.tensor(index) for index in (7, 8)]
            context, known = self._decoder.cache.context, node.shape(tables[0])[0]
            if isinstance(known, int) and known < context:
                raise node.refusal(f"found rotations of {known} positions, expected those of the cache's {context}")
            positions = self._parameters["positions"]
            rows = [
                cast(node, node.emit(relax.op.take(table, positions, axis=0, mode="clip")), "float32")
                for table in tables
            ]
            self._rotations[key] = node.emit(relax.op.concat(rows, axis=1))
        return self._rotations[key]

    def _row_of(self, name: str, parameter: str) -> relax.Expr:
        """A parameter, (rows,) of int32, as exporters want it: (1, rows) of int64."""
        with self._collected() as bindings:
            wide = self.bb.emit(relax.op.astype(self._parameters[parameter], "int64"))
            column = self.bb.emit(relax.op.reshape(wide, [1, self._rows]))
        self.adopt(bindings, NodeInfo(name, (), "Reshape", "", ""))
        return column

    def _logits(self) -> relax.Expr:
        """(rows or 1, vocabulary) of float32."""
        value = self._value(self._decoder.plan.logits)
        count = self._rows if self._decoder.plan.head is None or "last" not in self._parameters else 1
        shape = [int(dim) if isinstance(dim, tvm.tirx.IntImm) else str(dim) for dim in value.ty.shape.values]
        if len(shape) != 3 or shape[:2] != [1, count]:
            raise FrontendError(
                f"{self._decoder.model.source} has logits of shape {shape} for {self._rows} tokens, expected "
                f"[1, {count}, vocabulary]: those of every token"
            )
        with self._collected() as bindings:
            rows = self.bb.emit(relax.op.reshape(value, shape[1:]))
            if "last" in self._parameters and self._decoder.plan.head is None:
                rows = self.bb.emit(relax.op.take(rows, self._parameters["last"], axis=0, mode="clip"))
            result = rows if str(rows.ty.dtype) == "float32" else self.bb.emit(relax.op.astype(rows, "float32"))
        self.adopt(bindings, NodeInfo("logits_of_rows", (), "Reshape", "", ""))
        return result


def decoder_module(model: OnnxModel, nodes: list[NodeInfo], cache: PagedCache) -> tvm.IRModule:
    """All functions of a decoder; nothing is placed.

    Raises
    ------
    FrontendError
        If the model is no decoder whose cache pages can take the place of, or a node cannot be imported.
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
    """Numbers of a head: the last dimension of all caches that come in."""
    read = {model.proto.graph.node[place].input[index] for place in plan.layers for index in (3, 4)}
    dims = [info.type.tensor_type.shape.dim for info in model.proto.graph.input if info.name in read]
    sizes = {shape[3].dim_value if len(shape) == 4 else 0 for shape in dims}
    if len(sizes) != 1 or 0 in sizes:
        raise FrontendError(
            f"{model.source} has caches of heads of {sorted(sizes)} numbers (0: unknown), expected inputs of 4 axes, "
            "the last a number that all layers share"
        )
    return sizes.pop()


def _add_function(mod: tvm.IRModule, decoder: Decoder, nodes: list[NodeInfo], name: str, rows: int, kind: str) -> None:
    """Import one function into a module."""
    plan = decoder.plan
    params = decoder.cache.parameters(rows, kind, plan.windows, plan.kv_heads, decoder.size)
    imported = import_graph(decoder.model, nodes, params, lambda _: CachedImporter(decoder, rows, kind))
    graph = with_narrow_storage(imported)
    func = build_function(graph)
    attributes: dict[str, object] = {
        "global_symbol": name,
        "num_input": len(params),
        "input_names": list(params),
        "output_names": ["logits", *(each for each in params if each.startswith("pages_"))],
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
