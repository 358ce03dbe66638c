"""A module of the functions ``decode_B`` and ``prefill_C`` of an ONNX decoder, whose cache is one of pages."""

from __future__ import annotations

import tvm

from ...errors import FrontendError
from ..narrow_storage import with_narrow_storage
from ..onnx.functions import function_table
from ..onnx.importer import import_graph
from ..onnx.model import OnnxModel
from ..onnx.name_bindings import build_function, build_loops
from ..onnx.node_names import NodeInfo
from ..onnx.support import check_supported
from ..ops.node import shared_constants
from ..paged_cache import PagedCache
from .cached_importer import CachedImporter, Decoder
from .decoder_plan import DecoderPlan, plan_decoder


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
