"""Conversion of an ONNX model to Relax bindings, node by node; each binding remembers its node."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend as stock

from ...errors import FrontendError
from ...op.quantized_matmul import DEQUANTIZE_BLOCKS
from ...target.element_types import bytes_for, numpy_dtype
from ...transform.ir.reasons import reason
from ..import_limits import MAX_RANK, Budget, budget, spending
from ..joined_sizes import Bounds, JoinedSizes, SizeIsBounded, joining_sizes
from ..ops.custom import CustomOp, custom_op
from ..ops.node import STANDARD_DOMAINS, Node, array_of, as_dim, dtype_of, onnx_dtype
from ..ops.required_sizes import computed_sizes
from ..ops.table import expansion_with_graphs, takes_size
from .control_flow.branches import convert_if
from .control_flow.loop_nodes import convert_loop, convert_scan
from .control_flow.open_sequences import convert_sequence_map, is_sequence
from .control_flow.recurrent_loop import RECURRENT_OPS, convert_recurrent
from .control_flow.subgraphs import ImportedLoop, readers_of, sizes_in
from .functions import body_of_call, function_of, function_table
from .inputs import Shapes, graph_inputs
from .node_names import NodeInfo, inner_names, name_nodes
from .onnx_constants import FOLDED_OPS, fold_node, make_const
from .onnx_model import ModelSource, OnnxModel, load_model, opset_in
from .owned_bindings import OwnedBindings
from .support import SEQUENCE_OPS, check_supported, find_converter

_FIRST_IR_VERSION = 4  # earlier IR versions required every weight to be an input, too


def default_inputs(model: OnnxModel) -> list[str]:
    """The inputs that a caller may omit: their defaults are initializers of the same names.

    An initializer that nodes read only as sizes or axes is not a default, because kernels are compiled for it.
    """
    if model.proto.ir_version < _FIRST_IR_VERSION:
        return []
    graph = model.proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    initialized = [weights[info.name] for info in graph.input if info.name in weights]
    if not initialized:
        return []
    readers = readers_of(graph, model.proto.functions)
    return [tensor.name for tensor in initialized if not _is_read_as_sizes(tensor, readers.get(tensor.name, []))]


def _is_read_as_sizes(tensor: onnx.TensorProto, readers: list[onnx.NodeProto]) -> bool:
    uses = [(node, index) for node in readers for index, name in enumerate(node.input) if name == tensor.name]
    is_short = len(tensor.dims) <= 1 and all(size <= 2 * MAX_RANK for size in tensor.dims)
    return is_short and bool(uses) and all(takes_size(node.op_type, index) for node, index in uses)


_log = logging.getLogger("relax_hetero")

# Maximum number of times that an import restarts because it found a (tighter) upper bound of a symbolic size.
_MAX_BOUNDS = 64


@dataclass(frozen=True)
class ImportedGraph:
    """An imported graph, before names and devices are written into it."""

    module: tvm.IRModule  # PrimFuncs that converters created
    input_names: list[str]
    params: list[relax.Var]  # one per graph input, with its name as far as TVMScript can parse it
    bindings: list[relax.Binding]  # in program order, all variables plain `Var`; branches of an `If` contain their own
    outputs: list[relax.Expr]  # one per graph output: a variable, a constant or a tuple of them
    owners: dict[relax.Var, NodeInfo]  # variable of a binding -> its node, in branches too
    # Node -> the variables of its outputs; the first one takes the node's name.
    results: dict[NodeInfo, list[relax.Var]]
    bounds: dict[str, int]  # upper bounds of symbolic sizes; the model works only up to these
    loops: list[ImportedLoop] = field(default_factory=list)  # the functions of loops
    # Optional input -> default value; these inputs come last.
    defaults: dict[str, tvm.runtime.Tensor] = field(default_factory=dict)


def import_onnx(source: ModelSource) -> ImportedGraph:
    """Import an ONNX model without names and devices of bindings."""
    model = load_model(source, None)
    return import_nodes(model, name_nodes(model.proto), None)


def import_nodes(model: OnnxModel, nodes: list[NodeInfo], shapes: Shapes | None) -> ImportedGraph:
    """Import a loaded model whose nodes are named; see `from_onnx` for `shapes`."""
    check_supported(nodes, model, function_table(model.proto))
    defaults = default_inputs(model)
    inputs = graph_inputs(model.proto.graph, shapes, defaults)
    try:
        graph = import_graph(model, nodes, inputs)
    except FrontendError as error:
        if not defaults:
            raise
        graph = import_graph(model, nodes, graph_inputs(model.proto.graph, shapes))
        _log.warning("%s: inputs with defaults stay constants, as they have to be known: %s", model.source, error)
        return graph
    if defaults:
        _log.warning(
            "%s: %d inputs have defaults, and nothing is computed from these before a call: rh.compile(mod, "
            "params=mod['main'].attrs['defaults']) makes them constants",
            model.source, len(defaults),
        )  # fmt: skip
    return graph


def import_graph(
    model: OnnxModel,
    nodes: list[NodeInfo],
    inputs: Mapping[str, relax.Var],
    make_importer: Callable[[OnnxModel], GraphImporter] | None = None,
) -> ImportedGraph:
    """Import a model's graph with stock TVM's converters and this library's own.

    `nodes`: the names of its nodes, in order; `inputs`: ONNX name -> parameter; `make_importer`: factory, called for
    each restart, default `GraphImporter`. Raises FrontendError if a node cannot be converted; the text has its name,
    its op and the reason.
    """
    bounds: dict[tvm.tirx.Var, int] = {}
    sizes = sizes_in(param.ty for param in inputs.values())
    for _ in range(_MAX_BOUNDS):
        try:
            with joining_sizes(JoinedSizes(bounds, sizes)), spending(Budget(model.limits, model.nbytes)):
                return (make_importer or GraphImporter)(model).run(nodes, inputs, bounds)
        except SizeIsBounded as error:  # values that depend on the size are computed again
            bounds[error.size] = error.bound
    raise FrontendError(f"{model.source} bounds its symbolic sizes more than {_MAX_BOUNDS} times; give them in shapes=")


def require_outputs(node: onnx.NodeProto, info: NodeInfo, count: int) -> None:
    """Raise FrontendError if a node has more outputs than its converter computes."""
    if len(node.output) > count:
        raise FrontendError(f"node {info} has {len(node.output)} outputs, but makes {count}")


def _check_declared(value: Any, declared: onnx.TypeProto, what: str) -> None:
    """Raise FrontendError if a tensor contradicts the type that the model declares for it."""
    ty = value.ty if isinstance(value, relax.Expr) else None
    if not isinstance(ty, relax.TensorType) or not declared.HasField("tensor_type"):
        return
    tensor = declared.tensor_type
    dtype = onnx_dtype(tensor.elem_type) if tensor.elem_type else ""
    if dtype and dtype_of(value) != dtype:
        raise FrontendError(f"{what} is {dtype_of(value)}, but the model declares {dtype}")
    if not tensor.HasField("shape") or ty.ndim < 0:
        return
    expected = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim]
    shape = list(map(as_dim, ty.shape.values)) if isinstance(ty.shape, relax.ShapeExpr) else expected
    is_other = (isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(shape, expected, strict=False))
    if ty.ndim != len(expected) or any(is_other):
        raise FrontendError(f"{what} has the shape {shape}, but the model declares {expected}")


def _variables_in(value: Any) -> list[relax.Var]:
    return list(relax.analysis.free_vars(value)) if isinstance(value, relax.Expr) else []


def static_bytes(ty: tvm.ir.Type) -> int:
    """Bytes of a value of this type; tensors of symbolic or unknown shape count as 0."""
    if isinstance(ty, tvm.ir.TupleType):
        return sum(map(static_bytes, ty.fields))
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return 0
    dims = [int(dim) for dim in ty.shape.values if isinstance(dim, tvm.tirx.IntImm)]
    return bytes_for(tuple(dims), str(ty.dtype)) if str(ty.dtype) and len(dims) == len(ty.shape.values) else 0


class GraphImporter(OwnedBindings, stock.ONNXGraphImporter):  # type: ignore[misc]
    """Stock TVM's importer with another walk over the nodes; its conversion of single ops is unchanged.

    The stock walk leaves values unbound, forgets the node of a binding, computes both branches of an `If`, and prints.
    """

    def __init__(self, model: OnnxModel) -> None:
        super().__init__(None, None)
        self.opset = model.opset
        self._nodes: dict[str, Any] = {}
        self._graph = model.proto.graph
        self._imports = self._imports_of_model = model.proto.opset_import
        self._tensors = model.tensors
        self._functions = function_table(model.proto)
        self._producers: dict[str, NodeInfo] = {}
        self.constant_bindings: dict[relax.Var, relax.Binding] = {}
        self._packed_weights: set[relax.Var] = set()  # constants that products read as 4-bit weights
        self._owners: dict[relax.Var, NodeInfo] = {}
        self._results: dict[NodeInfo, list[relax.Var]] = {}
        self._readers: dict[str, list[onnx.NodeProto]] | None = None
        self.loops: list[ImportedLoop] = []
        self._has_dead_bindings = False  # True if the current node emitted bindings that nothing reads

    def run(self, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var], bounds: Bounds) -> ImportedGraph:
        """Convert the whole graph. Call it once per importer."""
        graph, params = self._graph, list(inputs.values())
        self._add_initializers(graph)
        defaults = {name: self._nodes[name].value for name in inputs if name in self._nodes}
        self._nodes.update(inputs)
        self._nodes.update(
            (info.name, stock._EmptyOptional(info.type.optional_type.elem_type))
            for info in graph.input
            if info.type.HasField("optional_type") and info.name not in inputs
        )
        # Inference forgets shapes whose symbolic variables are not in scope.
        self.bb.begin_scope(params)
        try:
            with self._collect_bindings() as bindings:
                self._convert_graph(graph.node, nodes)
                outputs = [self._graph_output(output.name) for output in graph.output]
        finally:
            self.bb.end_scope()
        upper_bounds = {size.name: bound for size, bound in bounds.items()}
        return ImportedGraph(
            self.bb.get(), list(inputs), params, bindings, outputs, self._owners, self._results, upper_bounds,
            self.loops, defaults,
        )  # fmt: skip

    def _add_initializers(self, graph: onnx.GraphProto) -> None:
        for name, array in self._tensors.initializers(graph):
            self._nodes[name] = make_const(array)

    def _convert_graph(self, protos: Iterable[onnx.NodeProto], nodes: list[NodeInfo]) -> None:
        """Convert the nodes of the main graph. A survey overrides this to continue after refused nodes."""
        self._convert_nodes(protos, nodes)

    def _convert_nodes(self, protos: Iterable[onnx.NodeProto], nodes: list[NodeInfo]) -> None:
        for node, info in zip(protos, nodes, strict=True):
            try:
                with self._collect_bindings() as bindings, warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    self._convert_node(node, info)
            except FrontendError:
                raise
            except Exception as error:
                raise FrontendError(
                    f"node {info} of opset {self.opset} cannot be imported: {type(error).__name__}: {reason(error)}"
                ) from error
            self.adopt(self._needed(bindings, node) if self._has_dead_bindings else bindings, info)
            self._has_dead_bindings = False

    def _needed(self, bindings: list[relax.Binding], node: onnx.NodeProto) -> list[relax.Binding]:
        """The bindings that a node's outputs depend on, and all that check requirements of calls."""
        read = {var for name in filter(None, node.output) for var in _variables_in(self._nodes.get(name))}
        needed = []
        for binding in reversed(bindings):
            if isinstance(binding, relax.MatchCast) or binding.var in read:
                needed.append(binding)
                read.update(relax.analysis.free_vars(binding.value))
        return needed[::-1]

    def _record_owned(self, binding: relax.Binding, info: NodeInfo) -> None:
        """Charge the budget for a binding; the compiler evaluates those computed from constants only."""
        budget().take_op(f"node {info}")
        if isinstance(binding.var.ty, relax.TensorType) and binding.var.ty.ndim > MAX_RANK:
            raise FrontendError(f"node {info} makes {binding.var.ty.ndim} dimensions, expected at most {MAX_RANK}")
        if isinstance(binding, relax.VarBinding) and self._is_constant(binding.value):
            self.constant_bindings[binding.var] = binding
            if self._stays_packed(binding.value):
                self._packed_weights.add(binding.var)
            else:
                budget().take_bytes(static_bytes(binding.var.ty), f"node {info}")

    def _stays_packed(self, value: relax.Expr) -> bool:
        """Return whether a constant value is never expanded: 4-bit weights, transposed or reshaped or not."""
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.Op):
            return False
        return value.op.name == DEQUANTIZE_BLOCKS or (
            value.op.name in ("relax.permute_dims", "relax.reshape") and value.args[0] in self._packed_weights
        )

    def _is_constant(self, value: Any) -> bool:
        if isinstance(value, relax.Call):
            is_op = isinstance(value.op, tvm.ir.Op) and not tvm.ir.is_prim_expr(value)
            return is_op and all(map(self._is_constant, value.args))
        if isinstance(value, relax.Var):
            return value in self.constant_bindings
        if isinstance(value, relax.Tuple):
            return all(map(self._is_constant, value.fields))
        if isinstance(value, relax.TupleGetItem):
            return self._is_constant(value.tuple_value)
        if isinstance(value, relax.ShapeExpr):
            return all(isinstance(dim, tvm.tirx.IntImm) for dim in value.values)
        return isinstance(value, (tvm.ir.GenericConst, tvm.ir.GlobalVar, tvm.tirx.IntImm, tvm.tirx.FloatImm))

    def _convert_node(self, node: onnx.NodeProto, info: NodeInfo) -> None:
        self._producers.update(dict.fromkeys(node.output, info))
        operands = stock.onnx_input(self._read(name, info) for name in node.input)
        custom = custom_op(node.domain, node.op_type, self._version_of(node.domain), f"node {info}")
        if custom is not None:
            self._convert_custom(custom, node, info, operands)
            return
        folded = self._fold(node, info, operands)
        if folded is not None:
            self._nodes.update(zip(node.output, folded, strict=False))
            return
        if function_of(node, self._functions) is not None:
            self._nodes.update(self._call_function(node, info, operands))
            return
        has_control = node.domain in STANDARD_DOMAINS or node.op_type in RECURRENT_OPS
        control = self._control_flow(node, info, list(operands)) if has_control else None
        if control is not None:
            require_outputs(node, info, len(control))
            values = {name: self._bind(result) for name, result in zip(node.output, control, strict=False) if name}
            self._set_results(info, values)
            return
        expanded = self._expanded(node, info, operands) if node.domain in STANDARD_DOMAINS else None
        value = self._convert(node, info, operands) if expanded is None else expanded
        self._set_results(info, self._results_of(node, info, value, operands))

    def _set_results(self, info: NodeInfo, results: dict[str, Any]) -> None:
        self._results[info] = [result for result in results.values() if isinstance(result, relax.Var)]
        self._nodes.update(results)

    def _version_of(self, domain: str) -> int | None:
        """Version of a domain that the graph, or the function of the model, imports; None if it does not."""
        if domain in STANDARD_DOMAINS:
            return self.opset
        return next((int(entry.version) for entry in self._imports if entry.domain == domain), None)

    def _convert_custom(self, op: CustomOp, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> None:
        """Convert a node of a registered op."""
        attributes, outputs = self._parse_attr(node.attribute), len(node.output)
        as_read = Node(
            node.op_type, info.name, self.opset, self.bb, list(operands), attributes, outputs, domain=node.domain
        )
        results = self._results_of(node, info, op.convert(as_read), operands)
        if self._imports is self._imports_of_model:  # names in functions of the model are others
            declared = {value.name: value.type for value in (*self._graph.value_info, *self._graph.output)}
            for name in results.keys() & declared.keys():
                _check_declared(results[name], declared[name], f"{as_read.title}: output {name!r}")
        self._set_results(info, results)

    def _read(self, name: str, info: NodeInfo) -> Any:
        if name == "":
            return None
        if name not in self._nodes:
            raise FrontendError(f"node {info} reads {name!r}, which no input, initializer or node before it makes")
        return self._nodes[name]

    def _fold(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> list[relax.Expr] | None:
        if node.domain not in STANDARD_DOMAINS:
            return None
        if node.op_type == "Constant":
            array = self._tensors.constant(node)
            budget().take_bytes(array.nbytes, f"Constant node {info}")  # charged for each call of a function
            return [make_const(array)]
        as_read = Node(node.op_type, info.name, self.opset, self.bb, operands, {}, len(node.output))
        sizes = computed_sizes(as_read, node)
        if sizes is not None:
            return [sizes]
        has_constants = all(operand is None or isinstance(operand, tvm.ir.GenericConst) for operand in operands)
        if node.op_type not in FOLDED_OPS or not has_constants:
            return None
        arrays = [None if operand is None else array_of(operand.value) for operand in operands]
        return fold_node(node, arrays, self.opset) if any(array is not None for array in arrays) else None

    def _call_function(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> dict[str, Any]:
        """Inline the body of a function of the model; only its arguments are in scope."""
        function = self._functions[(node.domain, node.op_type, node.overload)]
        outer = self._nodes, self.opset, self._imports
        self._nodes = {name: operands[index] for index, name in enumerate(function.input)}
        self.opset, self._imports = opset_in(function.opset_import), function.opset_import
        try:
            self._convert_nodes(body_of_call(function, node), info.subgraphs["body"])
            results = [self._nodes[name] for name in function.output]
        except KeyError as error:
            raise FrontendError(f"function {info}: nothing in its body makes its output {error.args[0]!r}") from error
        finally:
            self._nodes, self.opset, self._imports = outer
        return {name: result for name, result in zip(node.output, results, strict=False) if name}

    def _expanded(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> relax.Expr | None:
        """The outputs of an op that ONNX defines by nodes with subgraphs, or None. It stays one node for placement."""
        attributes = self._parse_attr(node.attribute)
        outer_node = Node(node.op_type, info.name, self.opset, self.bb, operands, attributes, len(node.output))
        expansion = expansion_with_graphs(outer_node)
        if expansion is None:
            return None
        body, call = expansion
        nodes = body_of_call(body, call)
        outer, owners = (self._nodes, self.opset, self._imports), len(self._owners)
        self._nodes = dict(zip(body.input, (*operands, *[None] * len(body.input)), strict=False))
        self.opset, self._imports = opset_in(body.opset_import), body.opset_import
        try:
            self._convert_nodes(nodes, inner_names(nodes, f"{info.name}/"))
            values = [self.as_tensor(self._nodes[name]) for name in body.output[: len(node.output)]]
        finally:
            self._nodes, self.opset, self._imports = outer
        for var in list(self._owners)[owners:]:
            self._owners[var] = info
        return relax.Tuple(values) if len(values) > 1 else values[0]

    def _convert(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> Any:
        converter = find_converter(node.domain, node.op_type)
        assert converter is not None, info  # check_supported refuses such models
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": info.name, "num_outputs": len(node.output)}
        convert = converter.get_converter(self.opset)
        value = convert(self.bb, operands, attributes, [self._nodes, self._params])
        return self.bb.normalize(value) if isinstance(value, relax.Expr) else value

    def _parse_attr(self, attr_proto: Any) -> dict[str, Any]:
        """Parse attributes, lists as tuples. The stock method refuses empty lists."""
        values = ((attribute.name, helper.get_attribute_value(attribute)) for attribute in attr_proto)
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values}

    def _results_of(self, node: onnx.NodeProto, info: NodeInfo, value: Any, operands: list[Any]) -> dict[str, Any]:
        """ONNX output name -> value, bound to a variable unless it is a constant or shape."""
        if isinstance(value, (list, tuple)):
            value = relax.Tuple(list(value))
        if not isinstance(value, relax.Expr):
            return {node.output[0]: value}  # stock TVM's marker of an empty optional
        is_sequence = node.op_type in SEQUENCE_OPS
        if is_sequence or not isinstance(value.ty, tvm.ir.TupleType):
            fields = [value]
        elif isinstance(value, relax.Tuple):
            fields = list(value.fields)
        else:
            value = self._bind(value)
            fields = [relax.TupleGetItem(value, index) for index in range(len(value.ty.fields))]
        if not is_sequence:
            fields = [self._without_kernel(field, operands) for field in fields]
        if len(node.output) > len(fields):
            raise FrontendError(f"node {info} has {len(node.output)} outputs, but TVM's converter makes {len(fields)}")
        return {name: self._bind(field) for name, field in zip(node.output, fields, strict=False) if name}

    def _without_kernel(self, value: relax.Expr, operands: list[Any]) -> relax.Expr:
        """Replace a result without elements by a broadcast constant, because many kernels divide by sizes."""
        if isinstance(value, relax.TupleGetItem):
            value = self.bb.normalize(value)
        is_new = isinstance(value, (relax.Call, relax.Var, relax.TupleGetItem))
        is_new = is_new and not any(value.same_as(var) for var in operands if isinstance(var, relax.Var))
        if not is_new or not isinstance(value.ty, relax.TensorType) or not isinstance(value.ty.shape, relax.ShapeExpr):
            return value
        if not any(isinstance(dim, tvm.tirx.IntImm) and dim.value == 0 for dim in value.ty.shape.values):
            return value
        self._has_dead_bindings = True
        zero = relax.const(tvm.runtime.tensor(np.zeros((), numpy_dtype(str(value.ty.dtype)))))
        return relax.op.broadcast_to(zero, value.ty.shape)

    def _bind(self, value: Any) -> Any:
        if not isinstance(value, relax.Expr):
            return value  # an empty optional, or a sequence of dynamic length
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._bind(field) for field in value.fields])
        if isinstance(value, relax.ShapeExpr):
            static = [int(dim) for dim in value.values if isinstance(dim, tvm.tirx.IntImm)]
            # Static shapes become constants, so that arithmetic on them is folded.
            return make_const(np.array(static, np.int64)) if len(static) == len(value.values) else value
        if isinstance(value, (relax.Var, tvm.ir.GenericConst)) or tvm.ir.is_prim_expr(value):
            return value
        return self.bb.emit(value)

    def _control_flow(self, node: onnx.NodeProto, info: NodeInfo, operands: list[Any]) -> list[Any] | None:
        """The outputs of a node with subgraphs or a recurrent node; None for any other node."""
        if node.op_type in RECURRENT_OPS:
            attributes = self._parse_attr(node.attribute)
            as_read = Node(node.op_type, info.name, self.opset, self.bb, operands, attributes, len(node.output))
            return convert_recurrent(self, as_read, info)
        if node.op_type == "If":
            return convert_if(self, node, info, operands[0] if operands else None)
        if node.op_type == "Loop":
            return convert_loop(self, node, info, operands)
        if node.op_type == "SequenceMap":
            return convert_sequence_map(self, node, info, operands)
        return convert_scan(self, node, info, operands, self.opset) if node.op_type == "Scan" else None

    def graph_values(self, graph: onnx.GraphProto, nodes: list[NodeInfo], arguments: Mapping[str, Any]) -> list[Any]:
        """Convert a subgraph at the builder's position, with the outer values in scope; return its outputs."""
        outer = dict(self._nodes)
        try:
            self._add_initializers(graph)
            self._nodes.update(arguments)
            self._convert_nodes(graph.node, nodes)
            return [self._value(output.name) for output in graph.output]
        finally:
            self._nodes = outer

    def _value(self, name: str) -> Any:
        value = self._nodes.get(name)
        if value is None:
            raise FrontendError(f"the graph output {name!r} is made by no node, input or initializer")
        return value

    def _graph_output(self, name: str) -> relax.Expr:
        value = self._value(name)
        if not isinstance(value, relax.Expr):
            kind = "a sequence of dynamic length" if is_sequence(value) else "an empty optional"
            raise FrontendError(f"the graph output {name!r} is {kind}, which Relax has no value for")
        with self._collect_bindings() as bindings:
            tensor = self.as_tensor(value)
        if bindings:
            self.adopt(bindings, self._producers[name])
        return tensor

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes of the model that read a value; an empty list if it is also an output of a graph."""
        if self._readers is None:
            self._readers = readers_of(self._graph, self._functions.values())
        return self._readers.get(name, [])

    def value(self, name: str) -> Any:
        """The value of a name in the current scope, or None."""
        return self._nodes.get(name)

    def as_tensor(self, value: Any) -> Any:
        """Convert a shape or symbolic number to the int64 tensor that it is in ONNX; other values are unchanged."""
        if not isinstance(value, relax.Expr):
            return value  # stock TVM's marker of an empty optional
        if isinstance(value.ty, relax.ShapeType):
            return self.bb.emit(relax.op.shape_to_tensor(value))
        if tvm.ir.is_prim_expr(value):
            if isinstance(value, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
                return relax.const(value.value, str(value.ty.dtype))
            vector = self.bb.emit(relax.op.shape_to_tensor(relax.ShapeExpr([value])))
            return self.bb.emit(relax.op.reshape(vector, ()))
        return value
