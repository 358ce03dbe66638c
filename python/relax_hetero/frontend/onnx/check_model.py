"""Checks of a model before anything is computed from it: its form, its nesting, its tensors and the sizes it grows to.

ONNX's checker checks the form of a copy without weights: it would copy them twice, and look for external files in the
working directory. Missing shapes of outputs are filled in, since the checker stops at the first one.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Set

import onnx

from ...errors import FrontendError
from ..import_limits import MAX_LIST, MAX_NESTING, MAX_RANK, Budget
from ..ops.node import STANDARD_DOMAINS
from ..ops.table import CLASSICAL
from .functions import FunctionTable, function_of, function_table

# Converters take ops that an opset deprecates; the checker refuses them with this message.
_DEPRECATED = re.compile(r"Op registered for (\w+) is deprecated")
_UNCHECKED = frozenset({"SimplifiedLayerNormalization"})  # ops of the standard domain that only ONNX Runtime defines
_EARLY_OPS = {"LayerNormalization": 17, "MeanVarianceNormalization": 9, "ThresholdedRelu": 10}
"""Ops that ONNX Runtime also has in opsets before the one that defines them."""
_UNCHECKED_DOMAIN = "relax_hetero.unchecked"

_LONG_LIST_OPS = ("Constant", "TfIdfVectorizer")
"""Ops whose attributes may be as long as the file, besides those of classical models, such as trees."""

_MAX_BYTES = 2**63 - 1
_GRAPHS = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
_TENSORS = (
    onnx.AttributeProto.TENSOR,
    onnx.AttributeProto.TENSORS,
    onnx.AttributeProto.SPARSE_TENSOR,
    onnx.AttributeProto.SPARSE_TENSORS,
)


def check_form(proto: onnx.ModelProto, source: str) -> None:
    """Refuse a model whose form is not ONNX's, or is one that no exporter writes.

    Raises FrontendError, naming `source`, and what was found and expected.
    """
    if not proto.HasField("graph"):
        raise FrontendError(f"{source} has no graph")
    if proto.ir_version < 3:
        raise FrontendError(f"{source} has IR version {proto.ir_version}; expected 3 (ONNX 1.1) or later")
    if not proto.opset_import:
        raise FrontendError(f"{source} imports no operator set; a model of IR version {proto.ir_version} has to")
    newest = onnx.defs.onnx_opset_version()
    for entry in proto.opset_import:
        if entry.domain in STANDARD_DOMAINS and entry.version > newest:
            raise FrontendError(f"{source} is of opset {entry.version}; the installed onnx knows those up to {newest}")
    for what, name in _names(proto):
        if not isinstance(name, str) or "\0" in name:  # protobuf gives bytes where text is not UTF-8
            raise FrontendError(f"{source} has {what} {str(name)[:100]!r}, which is not UTF-8 text")
    for nodes in _node_lists(proto, source):
        for node in nodes:
            _check_attributes(node, source)
    for what, tensor in all_tensors(proto):
        _check_dims(tensor.dims, f"{source}: {what}")


def check_by_onnx(
    proto: onnx.ModelProto,  # a model that `check_form` has passed, with its nodes in order
    source: str,
) -> None:
    """Refuse a model that ONNX's checker refuses, except for forms that ONNX Runtime takes.

    Raises FrontendError, naming `source`, and the checker's finding.
    """
    newest = onnx.defs.onnx_opset_version()
    bare = _without_data(proto)
    version = max((entry.version for entry in proto.opset_import if entry.domain in STANDARD_DOMAINS), default=newest)
    _import_all(bare)
    _hide(_UNCHECKED | {op_type for op_type, opset in _EARLY_OPS.items() if version < opset}, bare)
    while True:
        try:
            onnx.checker.check_model(bare)
            return
        except Exception as error:  # the checker's own errors, and those of protobuf and C++
            unchecked = _DEPRECATED.search(str(error))
            if unchecked is None or not _hide({unchecked[1]}, bare):
                raise FrontendError(f"{source} is not a valid ONNX model: {_checker_message(error)}") from error


def _import_all(bare: onnx.ModelProto) -> None:
    """Import the domains of all nodes: ONNX Runtime needs no import of its own, and unknown ops are refused later."""
    import_lists = (bare.opset_import, *(function.opset_import for function in bare.functions))
    for node in itertools.chain(*_node_lists(bare, "the model"), *import_lists):
        node.domain = "" if node.domain in STANDARD_DOMAINS else node.domain
    used = {node.domain for nodes in _node_lists(bare, "the model") for node in nodes}
    for imports in import_lists:
        imported = {entry.domain for entry in imports}
        if "" not in imported:
            imports.append(onnx.OperatorSetIdProto(version=onnx.defs.onnx_opset_version()))
        for domain in sorted(used - imported - {""}):
            newest = max((s.since_version for s in onnx.defs.get_all_schemas() if s.domain == domain), default=1)
            imports.append(onnx.OperatorSetIdProto(domain=domain, version=newest))


def _hide(op_types: Set[str], bare: onnx.ModelProto) -> bool:
    """Move the nodes of some ops to a domain that the checker does not know; return True if there are any."""
    lists = _node_lists(bare, "the model")
    hidden = [node for nodes in lists for node in nodes if node.op_type in op_types and node.domain in STANDARD_DOMAINS]
    if not hidden:
        return False
    for imports in (bare.opset_import, *(function.opset_import for function in bare.functions)):
        if not any(entry.domain == _UNCHECKED_DOMAIN for entry in imports):
            imports.append(onnx.OperatorSetIdProto(domain=_UNCHECKED_DOMAIN, version=1))
    for node in hidden:
        node.domain = _UNCHECKED_DOMAIN
    return True


def check_size(proto: onnx.ModelProto, source: str, budget: Budget) -> None:
    """Refuse a model with too many nodes or too deep a nesting, after its function calls are inlined.

    Each function is counted once, so that time is linear in the size of the file. Raises FrontendError also
    where functions call each other in a circle.
    """
    nodes, _ = _Counter(function_table(proto), source).count(proto.graph.node, 0)
    budget.check_nodes(nodes, source)


def _names(proto: onnx.ModelProto) -> Iterator[tuple[str, object]]:
    """Every name in a model, with a description of the named object."""
    for nodes in _node_lists(proto, "the model"):
        for node in nodes:
            yield "a node named", node.name
            yield "an op named", node.op_type
            yield "a domain named", node.domain
            yield "an overload named", node.overload
            yield from (("a value named", name) for name in (*node.input, *node.output))
            yield from (("an attribute named", attribute.name) for attribute in node.attribute)
            yield from (("an attribute named", attribute.ref_attr_name) for attribute in node.attribute)
    for graph in _graphs(proto):
        for value in (*graph.input, *graph.output):
            yield "a value named", value.name
            for dim in value.type.tensor_type.shape.dim:
                yield "a dimension named", dim.dim_param
    for _, tensor in all_tensors(proto):
        yield "a tensor named", tensor.name
        for entry in tensor.external_data:
            yield "external data with the entry", entry.key
            yield "external data with the entry", entry.value
    for function in proto.functions:
        yield "a function named", function.name
        yield from (("a value named", name) for name in (*function.input, *function.output))


class _Counter:
    """Counts the nodes of functions, and how deep calls and graphs are nested in them."""

    def __init__(self, functions: FunctionTable, source: str) -> None:
        self._functions = functions
        self._source = source
        self._counts: dict[tuple[str, str, str], tuple[int, int]] = {}

    def count(self, nodes: Iterable[onnx.NodeProto], depth: int) -> tuple[int, int]:
        """Number of nodes with all nested ones, and levels of graphs and bodies including this one."""
        self._check_depth(depth)
        total, height = 0, 0
        for node in nodes:
            total += 1
            function = function_of(node, self._functions)
            if function is not None:
                inner = [self._count_function(function, depth + 1)]
            else:
                inner = [self.count(graph.node, depth + 1) for graph in _graphs_in(node)]
            for more, levels in inner:
                total, height = total + more, max(height, levels)
        return total, height + 1

    def _count_function(self, function: onnx.FunctionProto, depth: int) -> tuple[int, int]:
        key = (function.domain, function.name, function.overload)
        if key not in self._counts:
            self._counts[key] = self.count(function.node, depth)
        self._check_depth(depth + self._counts[key][1] - 1)
        return self._counts[key]

    def _check_depth(self, depth: int) -> None:
        if depth > MAX_NESTING:
            raise FrontendError(
                f"{self._source} nests graphs, or calls of its functions, more than {MAX_NESTING} deep; "
                "a function that calls itself has no end"
            )


def all_tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor of a model with its description for messages; function bodies and training graphs are included."""
    for graph in _graphs(proto):
        for tensor in graph.initializer:
            yield f"initializer {tensor.name!r}", tensor
        for sparse in graph.sparse_initializer:
            yield from _sparse_tensors(f"sparse initializer {sparse.values.name!r}", sparse)
    for nodes in _node_lists(proto, "the model"):
        for node in nodes:
            for attribute in node.attribute:
                yield from _tensors_in(f"attribute {attribute.name!r} of {node.op_type} {node.name!r}", attribute)
    for function in proto.functions:
        for attribute in function.attribute_proto:
            yield from _tensors_in(f"attribute {attribute.name!r} of function {function.name!r}", attribute)


def _tensors_in(what: str, attribute: onnx.AttributeProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    if attribute.HasField("t"):
        yield what, attribute.t
    for tensor in attribute.tensors:
        yield what, tensor
    if attribute.HasField("sparse_tensor"):
        yield from _sparse_tensors(what, attribute.sparse_tensor)
    for sparse in attribute.sparse_tensors:
        yield from _sparse_tensors(what, sparse)


def _sparse_tensors(what: str, sparse: onnx.SparseTensorProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    yield f"the values of {what}", sparse.values
    yield f"the indices of {what}", sparse.indices


def _graphs_in(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def _roots(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    yield proto.graph
    for info in proto.training_info:
        yield info.initialization
        yield info.algorithm


def _graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Every graph of a model, including graphs inside nodes and function bodies."""
    stack = list(_roots(proto))
    stack.extend(graph for function in proto.functions for node in function.node for graph in _graphs_in(node))
    while stack:
        graph = stack.pop()
        yield graph
        for node in graph.node:
            stack.extend(_graphs_in(node))


def _node_lists(proto: onnx.ModelProto, source: str) -> Iterator[Iterable[onnx.NodeProto]]:
    """The nodes of every graph and function body; FrontendError where graphs are nested too deep."""
    level: list[Iterable[onnx.NodeProto]] = [graph.node for graph in _roots(proto)]
    level.extend(function.node for function in proto.functions)
    for _ in range(MAX_NESTING + 1):
        yield from level
        level = [graph.node for nodes in level for node in nodes for graph in _graphs_in(node)]
        if not level:
            return
    raise FrontendError(f"{source} nests graphs more than {MAX_NESTING} deep")


def _check_attributes(node: onnx.NodeProto, source: str) -> None:
    for attribute in node.attribute:
        longest = max(len(attribute.ints), len(attribute.floats), len(attribute.strings), len(attribute.tensors))
        if longest > MAX_LIST and node.op_type not in _LONG_LIST_OPS and node.domain != CLASSICAL:
            raise FrontendError(
                f"{source}: attribute {attribute.name!r} of {node.op_type} {node.name!r} is a list of {longest:,} "
                f"entries, expected at most {MAX_LIST:,}"
            )


def _check_dims(dims: Iterable[int], what: str) -> None:
    sizes = list(dims)
    if len(sizes) > MAX_RANK:
        raise FrontendError(f"{what} has {len(sizes):,} dimensions, expected at most {MAX_RANK}")
    if any(size < 0 for size in sizes):
        raise FrontendError(f"{what} has the shape {sizes}; expected sizes >= 0")
    if math.prod(max(size, 1) for size in sizes) > _MAX_BYTES:
        raise FrontendError(f"{what} has the shape {sizes}, of more elements than 64 bits can count")


def _without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy of the model for the checker: every tensor is empty, every type and shape is present."""
    bare = onnx.ModelProto(ir_version=proto.ir_version)
    bare.opset_import.extend(proto.opset_import)
    _copy_graph(proto.graph, bare.graph)
    for values in (bare.graph.input, bare.graph.output):
        for value in values:
            kind = value.type.WhichOneof("value")
            if kind in ("tensor_type", "sparse_tensor_type"):
                getattr(value.type, kind).shape.SetInParent()
    for function in proto.functions:
        copy = bare.functions.add()
        copy.name, copy.domain, copy.overload = function.name, function.domain, function.overload
        copy.input.extend(function.input)
        copy.output.extend(function.output)
        copy.attribute.extend(function.attribute)
        copy.opset_import.extend(function.opset_import)
        _copy_attributes(function.attribute_proto, copy.attribute_proto)
        _copy_nodes(function.node, copy.node)
    return bare


def _copy_graph(graph: onnx.GraphProto, copy: onnx.GraphProto) -> None:
    copy.name = graph.name
    for field in ("input", "output", "value_info"):
        values = getattr(copy, field)
        values.extend(getattr(graph, field))
        for value in values:
            if value.type.WhichOneof("value") is None:
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for tensor in {tensor.name: tensor for tensor in graph.initializer}.values():  # the last one of a name counts
        _copy_tensor(tensor, copy.initializer.add())
    # Sparse tensors are checked when they are read: the checker would allocate their dense size.
    for sparse in graph.sparse_initializer:
        _copy_tensor(onnx.TensorProto(name=sparse.values.name, data_type=1), copy.initializer.add())
    _copy_nodes(graph.node, copy.node)


def _copy_nodes(nodes: Iterable[onnx.NodeProto], copies: object) -> None:
    for node in nodes:
        copy = copies.add()  # type: ignore[attr-defined]
        if not any(attribute.type in _GRAPHS or attribute.type in _TENSORS for attribute in node.attribute):
            copy.CopyFrom(node)
            continue
        copy.op_type, copy.domain, copy.name, copy.overload = node.op_type, node.domain, node.name, node.overload
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        _copy_attributes(node.attribute, copy.attribute)


def _copy_attributes(attributes: Iterable[onnx.AttributeProto], copies: object) -> None:
    for attribute in attributes:
        copy = copies.add()  # type: ignore[attr-defined]
        if attribute.type not in _GRAPHS and attribute.type not in _TENSORS:
            copy.CopyFrom(attribute)
            continue
        copy.name, copy.type = attribute.name, attribute.type
        if attribute.ref_attr_name:  # the checker takes an empty one for a reference
            copy.ref_attr_name = attribute.ref_attr_name
        if attribute.HasField("sparse_tensor"):  # checked when it is read
            copy.sparse_tensor.dims.append(1)
            _copy_tensor(onnx.TensorProto(data_type=onnx.TensorProto.FLOAT), copy.sparse_tensor.values)
            _copy_tensor(onnx.TensorProto(data_type=onnx.TensorProto.INT64), copy.sparse_tensor.indices)
        if attribute.HasField("t"):
            _copy_tensor(attribute.t, copy.t)
        for tensor in attribute.tensors:
            _copy_tensor(tensor, copy.tensors.add())
        if attribute.HasField("g"):
            _copy_graph(attribute.g, copy.g)
        for graph in attribute.graphs:
            _copy_graph(graph, copy.graphs.add())


def _copy_tensor(tensor: onnx.TensorProto, copy: onnx.TensorProto) -> None:
    copy.name, copy.data_type = tensor.name, tensor.data_type
    copy.dims.append(0)


def _checker_message(error: Exception) -> str:
    """The checker's finding without the dump of the node that follows it."""
    text = str(error).strip()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==>")]
    context = next((line.removeprefix("==> Context: ") for line in text.splitlines() if line.startswith("==>")), "")
    return "; ".join(filter(None, [" ".join(lines[:2]), context]))[:500]
