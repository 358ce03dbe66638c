"""Rest of a decoder's graph when its cache is one of pages: found on the model, before anything is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx
from onnx import helper

from ...errors import FrontendError
from ..onnx.model import OnnxModel

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
