"""A module of the functions ``decode_B`` and ``prefill_C`` of an ONNX decoder, whose cache is one of pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import tvm
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
from .decoder_plan import IDS, POSITIONS, DecoderPlan, plan_decoder, without_cache

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
